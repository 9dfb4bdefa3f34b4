"""Changes as events: the shape of Debezium, keys, two records for a changed key, limits with sentences."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.cdc.events import CapturedTable, ChangeEvents, Origin
from virta.errors import CaptureError
from virta.event import Event
from virta.log.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX

COLUMNS = [{"name": "id"}, {"name": "status"}]
ORIGIN = Origin(id="lsn:12;txId:3;n:1", ts_ms=1_700_000_000_000, tx_id=3, lsn=12, transaction="3:12", order=1)  # fmt: skip
EVENTS = ChangeEvents("postgresql", "shop", "bank")


def table(key=("id",), name="orders"):
    return CapturedTable("shop", "public", name, COLUMNS, list(key))


def read(record):
    topic, key, value = record
    return topic, json.loads(key) if key else None, Event.from_json(value)


@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        ("c", None, {"id": 1, "status": "new"}),
        ("r", None, {"id": 1, "status": "new"}),
        ("u", {"id": 1}, {"id": 1, "status": "paid"}),
        ("u", None, {"id": 1, "status": "paid"}),
        ("d", {"id": 1}, None),
    ],
)
def test_a_change_is_one_record_with_the_key_of_its_row(op, before, after):
    ((topic, key, event),) = map(read, EVENTS.change(table(), op, before, after, ORIGIN))

    assert (topic, key) == ("shop.public.orders", {"id": 1})
    assert (event.data["op"], event.data["before"], event.data["after"]) == (op, before, after)
    assert event.extensions["iodebeziumop"] == op
    assert event.extensions["partitionkey"] == '{"id":1}'
    assert event.data["transaction"] == {"id": "3:12", "total_order": 1}


def test_attributes_are_those_of_debezium():
    _, _, event = read(EVENTS.change(table(), "c", None, {"id": 1}, ORIGIN)[0])

    assert event.id == "name:shop;lsn:12;txId:3;n:1"
    assert event.source == "/debezium/postgresql/shop"
    assert event.type == "io.debezium.postgresql.datachangeevent"
    assert event.time.startswith("2023-11-14T22:13:20")
    wanted = {
        "iodebeziumconnector": "postgresql", "iodebeziumname": "shop", "iodebeziumdb": "bank",
        "iodebeziumschema": "public", "iodebeziumtable": "orders", "iodebeziumsnapshot": "false",
        "iodebeziumtxid": "3", "iodebeziumlsn": "12", "iodebeziumtsms": "1700000000000",
    }  # fmt: skip
    assert wanted.items() <= event.extensions.items()
    assert event.data["source"]["lsn"] == 12


def test_a_truncation_has_no_key():
    """Compaction must not take it for a row."""
    ((_, key, event),) = map(read, EVENTS.change(table(), "t", None, None, ORIGIN))

    assert key is None
    assert event.partition_key == ""


def test_a_changed_key_is_a_delete_and_an_insert():
    """One record never touches two keys."""
    first, second = map(read, EVENTS.change(table(), "u", {"id": 1}, {"id": 2, "status": "x"}, ORIGIN))  # fmt: skip

    assert (first[1], first[2].data["op"]) == ({"id": 1}, "d")
    assert (second[1], second[2].data["op"]) == ({"id": 2}, "c")
    assert first[2].id != second[2].id
    assert second[2].data["before"] is None


def test_a_key_has_its_columns_in_the_order_of_the_index():
    row = {"id": 7, "status": "a", "more": 1}
    assert table(("status", "id")).key_of(row) == b'{"status":"a","id":7}'


def test_what_was_not_sent_is_listed():
    (record,) = EVENTS.change(table(), "u", None, {"id": 1, "status": "__unchanged"}, ORIGIN, unchanged=["status"])  # fmt: skip

    assert read(record)[2].data["unchanged"] == ["status"]


@pytest.mark.parametrize("text", ["\x7f", "\x85", "\n", "\ufdd0", "\U0001ffff", "\u00e4\U0001f600"])
def test_characters_that_no_attribute_may_have_are_escaped(text):
    """In keys and in names of tables: the event is valid, and the key is the same JSON."""
    one = table(name=f"t{text}")
    ((_, key, event),) = map(read, EVENTS.change(one, "c", None, {"id": text}, ORIGIN))

    assert key == {"id": text}
    assert json.loads(event.extensions["partitionkey"]) == {"id": text}
    assert event.data["source"]["table"] == f"t{text}"
    assert read(EVENTS.schema_change(one, "CREATE", ORIGIN))[1]["table"] == f"t{text}"


class TestLimits:
    """What the log cannot store is a sentence with the table."""

    def test_a_key(self):
        fits = "k" * (KEY_BYTES_MAX - len('{"id":""}'))
        assert len(table().key_of({"id": fits})) == KEY_BYTES_MAX
        with pytest.raises(CaptureError, match=r"key of public\.orders takes 1025 bytes") as error:
            table().key_of({"id": fits + "k"})
        assert error.value.code == "capture_key_too_large"

    def test_a_row(self):
        row = {"id": 1, "status": "x" * VALUE_BYTES_MAX}
        with pytest.raises(CaptureError, match=r'row of public\.orders with key {"id":1} makes an event') as error:  # fmt: skip
            EVENTS.change(table(), "c", None, row, ORIGIN)
        assert error.value.code == "capture_row_too_large"

    @pytest.mark.parametrize("name", ["t" * 1100, "nul\0"])
    def test_the_name_of_a_channel(self, name):
        with pytest.raises(CaptureError, match="cannot be captured") as error:
            table(name=name)
        assert error.value.code == "capture_table_invalid"

    def test_a_key_that_was_not_sent(self):
        one = table(("id", "status"))
        assert one.key_is_sent(["body"])
        assert not one.key_is_sent(["body", "status"])
        assert "REPLICA IDENTITY FULL" in one.unsent_key().message


class TestSchemaEvents:
    """Tables that appear, change and vanish."""

    @pytest.mark.parametrize("kind", ["CREATE", "ALTER", "DROP"])
    def test_a_schema_change(self, kind):
        topic, key, event = read(EVENTS.schema_change(table(), kind, ORIGIN))
        (change,) = event.data["tableChanges"]

        assert topic == "shop.schema-changes"
        assert key == {"schema": "public", "table": "orders"}
        assert event.type == "io.debezium.postgresql.schemachangeevent"
        assert (change["type"], change["id"]) == (kind, '"public"."orders"')
        if kind == "DROP":
            assert change["table"] is None
        else:
            assert change["table"]["primaryKeyColumnNames"] == ["id"]
            assert [(c["position"], c["name"]) for c in change["table"]["columns"]] == [
                (1, "id"),
                (2, "status"),
            ]

    def test_the_end_of_a_transaction(self):
        topic, key, event = read(EVENTS.transaction_end(ORIGIN, 12_000))

        assert (topic, key) == ("shop.transaction", None)
        assert (event.data["status"], event.data["id"], event.data["event_count"]) == ("END", "3:12", 12_000)  # fmt: skip


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=20))


@given(
    st.sampled_from(["c", "u", "d", "r"]),
    st.fixed_dictionaries({"id": VALUES, "status": VALUES}),
    st.fixed_dictionaries({"id": VALUES, "status": VALUES}),
    st.integers(0, 2**63),
)
def test_any_row_is_a_valid_event_and_survives(op, before, after, lsn):
    """Strict CloudEvents, unique ids, and the values as they were."""
    origin = Origin(id=f"lsn:{lsn}", ts_ms=lsn % 10**12, lsn=lsn)
    old = before if op in "ud" else None
    new = None if op == "d" else after
    records = [read(one) for one in EVENTS.change(table(), op, old, new, origin)]

    assert len({event.id for _, _, event in records}) == len(records)
    moved = json.dumps(before["id"]) != json.dumps(after["id"])
    assert (len(records) == 2) == (op == "u" and moved)
    for _, key, event in records:
        row = event.data["before"] if event.data["op"] == "d" else event.data["after"]
        assert key == {"id": row["id"]}
    assert records[-1][2].data["after"] == new
