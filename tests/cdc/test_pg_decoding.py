"""Rows of pgoutput by relation, and which changes of columns need a table to be read again."""

from __future__ import annotations

import pytest

from virta.cdc.postgres import catalog, connections, pgoutput, slot
from virta.cdc.postgres.catalog import CatalogTable, SlotStatus
from virta.cdc.postgres.decoding import DecodedTable, needs_reading, relation_columns
from virta.cdc.postgres.values import TypeTable
from virta.errors import CaptureError

psycopg2 = pytest.importorskip("psycopg2", reason="pip install virta[cdc]")

DSN = "host=127.0.0.1 port=7 dbname=shop password=secret"


def column(name, type_oid=23, *, attnum=None, default=None, type_name="integer"):
    return {
        "name": name, "typeOid": type_oid, "typeName": type_name, "optional": True,
        "attnum": attnum, "defaultValueExpression": default,
    }  # fmt: skip


def decoded(*columns, key=("id",)):
    return DecodedTable("s", "public", "t", list(columns), list(key), TypeTable())


class TestRows:
    """Values by type; what was not sent is marked or filled in."""

    TABLE = decoded(column("id"), column("n", 20), column("body", 25))

    def test_values_are_converted(self):
        assert self.TABLE.row(["7", None, "text"]) == ({"id": 7, "n": None, "body": "text"}, [])

    def test_an_unchanged_value_is_marked(self):
        row, unchanged = self.TABLE.row(["7", "1", pgoutput.UNCHANGED])
        assert (row["body"], unchanged) == ("__unchanged", ["body"])

    def test_an_unchanged_value_is_filled_from_the_old_row(self):
        before = self.TABLE.old_row(["7", "1", "long"], is_key=False)
        assert self.TABLE.row(["7", "2", pgoutput.UNCHANGED], before) == (
            {"id": 7, "n": 2, "body": "long"},
            [],
        )

    def test_an_old_row_that_was_not_sent_either_fills_nothing(self):
        before = self.TABLE.old_row(["7", "1", pgoutput.UNCHANGED], is_key=False)
        assert self.TABLE.row(["7", "2", pgoutput.UNCHANGED], before)[1] == ["body"]

    def test_with_the_default_identity_the_old_row_is_the_key(self):
        assert self.TABLE.old_row(["7", None, None], is_key=True) == {"id": 7}

    def test_a_row_of_another_length_is_no_row(self):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            self.TABLE.row(["7"])


class TestColumns:
    """PostgreSQL does not replicate what ALTER TABLE does to existing rows."""

    OLD = (column("id", attnum=1), column("a", 25, attnum=2))

    @pytest.mark.parametrize(
        ("new", "reads"),
        [
            (OLD, False),
            ((*OLD, column("b", attnum=3)), False),  # NULL in every row
            ((*OLD, column("b", attnum=3, default="7")), True),
            (OLD[:1], False),  # a dropped column
            ((OLD[0], column("renamed", 25, attnum=2)), True),
            ((OLD[0], column("a", 23, attnum=2)), True),
            ((OLD[0], column("a", 25, attnum=2, type_name="varchar(9)")), True),
            ((OLD[0], column("a", 25, attnum=3)), True),  # dropped and created again
            ((*OLD, column("b")), True),  # not known by the catalog any more
        ],
    )
    def test_what_needs_reading(self, new, reads):
        assert needs_reading(list(self.OLD), list(new)) == reads

    def test_a_relation_has_what_the_catalog_says_where_it_fits(self):
        """The stream may be behind the catalog: a column that has another type there is another column."""
        relation = pgoutput.decode(
            b"R\x00\x00\x00\x07public\x00t\x00d\x00\x03"
            b"\x01id\x00\x00\x00\x00\x17\xff\xff\xff\xff"
            b"\x00a\x00\x00\x00\x00\x17\xff\xff\xff\xff"
            b"\x00gone\x00\x00\x00\x00\x19\xff\xff\xff\xff"
        )
        found = relation_columns(relation, list(self.OLD))

        assert found[0] is self.OLD[0]
        assert [(c["name"], c["typeOid"], c.get("attnum")) for c in found[1:]] == [
            ("a", 23, None),
            ("gone", 25, None),
        ]


def table(name, *, schema="public", identity="d", key=("id",), generated=False, version=15_00_00):
    return CatalogTable(1, schema, name, identity, list(key) or None, generated, version)


class TestTables:
    """Which tables are captured, and a sentence for each that is not."""

    def test_all_but_those_with_a_problem(self):
        tables = [
            table("a"),
            table("b", key=()),
            table("c", identity="n"),
            table("d", identity="f", generated=True),
            table("e", identity="f", generated=True, version=18_00_00),
        ]
        chosen, notes = slot.choose_tables(tables, None)
        assert list(chosen) == ["public.a", "public.d"]
        assert ["no primary key" in notes[0], "NOTHING" in notes[1], "generated" in notes[2]] == [True] * 3  # fmt: skip

    @pytest.mark.parametrize(
        ("wanted", "chosen", "missing"),
        [
            (["a"], ["public.a"], []),
            (["public.a", "x.a"], ["public.a", "x.a"], []),
            (["x.a"], ["x.a"], []),
            (["nowhere"], [], ["there is no table 'nowhere'"]),
        ],
    )
    def test_only_those_asked_for(self, wanted, chosen, missing):
        """A name without a schema is of `public`."""
        found, notes = slot.choose_tables([table("a"), table("a", schema="x")], frozenset(wanted))
        assert (list(found), notes) == (chosen, missing)

    @pytest.mark.parametrize(("name", "own"), [("shop", "virta_shop"), ("My-Shop", "virta_my_shop")])  # fmt: skip
    def test_slot_and_publication_have_one_name(self, name, own):
        assert slot.slot_name(name) == own


def status(**given):
    usual = {
        "plugin": "pgoutput", "database": "shop", "active": False, "pid": None, "wal_status": "reserved",
        "confirmed_lsn": 100, "restart_lsn": 60, "current_lsn": 150,
    }  # fmt: skip
    return SlotStatus(**(usual | given))


class TestSlot:
    """A slot from which changes cannot be read without a gap is refused, never silently used."""

    def test_bytes(self):
        assert (status().retained_bytes, status().lag_bytes) == (90, 50)
        lost = status(restart_lsn=None, confirmed_lsn=None)
        assert (lost.retained_bytes, lost.lag_bytes) == (0, 0)
        assert status(current_lsn=None).lag_bytes == 0  # a standby

    @pytest.mark.parametrize(
        ("found", "code", "words"),
        [
            (None, "capture_slot_missing", "does not exist any more"),
            (status(wal_status="lost"), "capture_slot_invalid", "max_slot_wal_keep_size"),
            (
                status(wal_status="lost", reason="wal_removed"),
                "capture_slot_invalid",
                "max_slot_wal_keep_size",
            ),
            (
                status(wal_status="lost", reason="idle_timeout"),
                "capture_slot_invalid",
                "idle_replication_slot",
            ),
            (
                status(wal_status="lost", reason="wal_level"),
                "capture_slot_invalid",
                "says by wal_level",
            ),
            (status(plugin="wal2json"), "capture_slot_foreign", "for wal2json in database shop"),
            (status(database="other"), "capture_slot_foreign", "choose another --name"),
        ],
    )
    def test_refusals(self, found, code, words):
        with pytest.raises(CaptureError) as error:
            slot.check_slot(found, "virta_shop", DSN, "shop")
        assert error.value.code == code
        assert words in error.value.message
        assert "secret" not in error.value.message

    def test_a_slot_that_is_in_use_is_fine(self):
        slot.check_slot(status(active=True), "virta_shop", DSN, "shop")


class FakeServer:
    """What `check_server` asks a connection for."""

    def __init__(self, version, level):
        self.server_version = version
        self._level = level

    def cursor(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def execute(self, statement, values):
        assert values == ("wal_level",)

    def fetchall(self):
        return [(self._level,)]


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        (12_00_05, "logical", "is PostgreSQL 12: at least 13 is needed"),
        (15_00_00, "replica", "wal_level is replica, it must be logical"),
    ],
)
def test_a_server_that_cannot_replicate_is_a_sentence(version, level, words):
    with pytest.raises(CaptureError, match=words):
        slot.check_server(FakeServer(version, level), DSN)
    slot.check_server(FakeServer(13_00_00, "logical"), DSN)


class TestErrors:
    """The driver's errors as ours: what to change, or that it is tried again."""

    @pytest.mark.parametrize(
        ("error", "code", "retry"),
        [
            (psycopg2.OperationalError("connection refused"), "capture_database_failed", True),
            (psycopg2.OperationalError("password authentication failed"), "capture_database_failed", False),
            (psycopg2.InterfaceError("connection already closed"), "capture_database_failed", True),
            (psycopg2.OperationalError("permission denied for table t"), "capture_database_failed", False),
            (psycopg2.errors.ObjectNotInPrerequisiteState("slot lost"), "capture_slot_invalid", False),
        ],
    )  # fmt: skip
    def test_translation(self, error, code, retry):
        with pytest.raises(CaptureError) as caught, connections.translate_errors(DSN):
            raise error
        assert (caught.value.code, caught.value.retry) == (code, retry)
        assert "127.0.0.1:7/shop" in caught.value.message
        assert "secret" not in caught.value.message

    @pytest.mark.parametrize(
        ("dsn", "name"),
        [
            ("postgresql://u@h/bank", "bank"),
            ("user=app", "app"),
            ("host=h", "postgres"),
            ("dbname='my db'", "my_db"),
        ],
    )
    def test_the_name_is_that_of_the_database(self, dsn, name):
        assert connections.database_name(dsn) == name

    def test_a_dsn_that_is_none(self):
        assert connections.address("nonsense") == "the database"
        with pytest.raises(CaptureError, match="a DSN is"):
            connections.database_name("nonsense")

    def test_the_limit_of_tables(self):
        assert catalog.TABLES_MAX >= 1000
