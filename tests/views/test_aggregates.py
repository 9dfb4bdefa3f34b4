"""Aggregates over rows: exact sums, smallest and largest values, groups that come and go."""

from __future__ import annotations

import json
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.errors import ViewError
from virta.views.aggregates import (
    NUMBER_CHARS_MAX,
    TERMS_MAX,
    AggregateFold,
    Selection,
    exact_number,
)
from virta.views.frames import EMPTY_ID, NO_ID, ROW, SNAPSHOT, ViewFrame
from virta.views.tables.index import ENTER, LEAVE, UPDATE

ALL = "count,sum(/data/n),min(/data/n),max(/data/n)"


def frame(kind, key, **data):
    event = json.dumps({"id": "1", "source": "/", "data": data}).encode()
    return ViewFrame(kind, NO_ID, key, 0, event)


def leave(key):
    return ViewFrame(LEAVE, NO_ID, key, 0, None, "deleted")


def plain(groups):
    """Return groups as a client reads them."""
    return json.loads(msgspec.json.encode(groups))


def fold_of(select=ALL, group="", *frames):
    fold = AggregateFold(Selection(select, group))
    fold.fold(frames)
    return fold


class TestSelection:
    """What `$select` may say."""

    @pytest.mark.parametrize(
        ("select", "names"),
        [
            ("count", ["count"]),
            ("count,sum(/data/n)", ["count", "sum"]),
            (" min(/a) , max(/a) ", ["min", "max"]),
            ("sum(/a),sum(/b),count", ["sum(/a)", "sum(/b)", "count"]),
            ("sum(/a,b),count", ["sum", "count"]),  # a pointer may contain a comma
        ],
    )
    def test_members_are_named_by_their_function_where_that_is_enough(self, select, names):
        assert [term.name for term in Selection(select).terms] == names

    @pytest.mark.parametrize(
        "select", ["avg(/a)", "count(/a)", "sum", "sum()", "sum(a)", "count,", ",", "sum(/a)x"]
    )
    def test_anything_else_is_a_sentence(self, select):
        with pytest.raises(ViewError) as error:
            Selection(select)
        assert error.value.code in {"invalid-select", "invalid-pointer"}
        assert len(error.value.message.split()) > 6

    def test_the_number_of_terms_is_limited(self):
        many = [f"sum(/data/{n})" for n in range(TERMS_MAX)]
        assert len(Selection(",".join(many)).terms) == TERMS_MAX
        with pytest.raises(ViewError, match=f"up to {TERMS_MAX}"):
            Selection(",".join([*many, "count"]))

    def test_a_group_is_a_pointer(self):
        with pytest.raises(ViewError, match=r"\$group is 'country'"):
            Selection("count", "country")

    def test_positions_tell_selections_apart(self):
        """The text is part of a position's tag."""
        texts = {Selection(*given).text for given in [("count",), ("count", "/a"), ("sum(/a)",)]}
        assert len(texts) == 3


class TestNumbers:
    """What counts as a number, and what it is worth."""

    @pytest.mark.parametrize(
        ("raw", "value"),
        [
            (b"0", Fraction(0)), (b"-12", Fraction(-12)), (b"0.1", Fraction(1, 10)),
            (b"1.50", Fraction(3, 2)), (b"1e3", Fraction(1000)), (b"-2.5E-1", Fraction(-1, 4)),
            (b'"1"', None), (b"true", None), (b"null", None), (b"[1]", None), (b"{}", None), (b"", None),
            (b"1e999", None), (b"-1e999", None),
        ],
    )  # fmt: skip
    def test_json_numbers_are_exact(self, raw, value):
        assert exact_number(raw) == value

    def test_a_huge_exponent_costs_nothing(self):
        """An exact fraction of 1e-999999 would fill the memory."""
        assert exact_number(b"1e-999999") == 0
        long = b"1" + b"0" * NUMBER_CHARS_MAX
        assert exact_number(long) is None  # beyond a double

    @given(st.integers(-(10**30), 10**30), st.integers(0, 20))
    def test_decimals_keep_every_digit(self, digits, places):
        text = f"{digits // 10**places}.{digits % 10**places:0{places or 1}d}" if digits >= 0 else str(digits)  # fmt: skip
        assert exact_number(text.encode()) == Fraction(text)

    def test_what_is_shown_is_a_double(self):
        """A sum beyond the integers of a double is rounded once, not in every step."""
        frames = [frame(ENTER, str(n), n=0.1) for n in range(3)]
        assert plain(fold_of("sum(/data/n)", "", *frames).all_groups())["groups"] == [
            {"group": None, "sum": 0.3}
        ]
        big = [frame(ENTER, str(n), n=2**53) for n in range(2)]
        assert plain(fold_of("sum(/data/n)", "", *big).all_groups())["groups"][0]["sum"] == 2.0**54
        large = fold_of("sum(/data/n)", "", *[frame(ENTER, str(n), n=1.7e308) for n in range(2)])
        assert plain(large.all_groups())["groups"][0]["sum"] is None  # no double has it


class TestFold:
    """What the frames of a view do to groups."""

    def test_a_row_that_changes_its_group_leaves_the_other(self):
        fold = fold_of(ALL, "/data/c", frame(ENTER, "a", n=1, c="FI"), frame(ENTER, "b", n=5, c="FI"))  # fmt: skip
        fold.take_changes()
        fold.fold([frame(UPDATE, "b", n=7, c="SE")])

        changes = plain(fold.take_changes())
        assert sorted(changes["groups"], key=lambda g: g["group"]) == [
            {"group": "FI", "count": 1, "sum": 1, "min": 1, "max": 1},
            {"group": "SE", "count": 1, "sum": 7, "min": 7, "max": 7},
        ]
        assert changes["gone"] == []

    def test_the_last_row_of_a_group_takes_it_with_it(self):
        fold = fold_of("count", "/data/c", frame(ENTER, "a", c="FI"), frame(ENTER, "b", c="SE"))
        fold.take_changes()
        fold.fold([leave("a"), leave("never was here")])

        assert plain(fold.take_changes()) == {"groups": [], "gone": ["FI"]}
        assert not fold.changed

    def test_only_what_changed_is_told_and_only_once(self):
        fold = fold_of("count", "/data/c", frame(ENTER, "a", c="FI"), frame(ENTER, "b", c="SE"))
        assert len(fold.take_changes()["groups"]) == 2
        assert fold.take_changes() == {"groups": [], "gone": []}
        fold.fold([frame(UPDATE, "a", c="FI")])
        assert [group["group"] for group in plain(fold.take_changes())["groups"]] == ["FI"]

    def test_a_group_that_comes_back_before_it_is_told_is_not_gone(self):
        fold = fold_of("count", "/data/c", frame(ENTER, "a", c="FI"))
        fold.take_changes()
        fold.fold([leave("a"), frame(ENTER, "a", c="FI")])

        assert plain(fold.take_changes()) == {"groups": [{"group": "FI", "count": 1}], "gone": []}

    def test_a_snapshot_starts_again(self):
        """After a reset, groups that are not in the snapshot are gone."""
        fold = fold_of("count", "/data/c", frame(ENTER, "a", c="FI"), frame(ENTER, "b", c="SE"))
        fold.take_changes()
        fold.fold([ViewFrame(SNAPSHOT, EMPTY_ID, data={"rows": 1}), frame(ROW, "b", c="SE")])

        changes = plain(fold.take_changes())
        assert changes == {"groups": [{"group": "SE", "count": 1}], "gone": ["FI"]}

    @pytest.mark.parametrize(
        ("value", "group"),
        [("FI", "FI"), (1.50, 1.5), (True, True), (None, None), ([1], None), ({"a": 1}, None)],
    )
    def test_groups_are_scalars(self, value, group):
        """Anything else is the group null."""
        fold = fold_of("count", "/data/c", frame(ENTER, "a", c=value))

        assert plain(fold.all_groups())["groups"] == [{"group": group, "count": 1}]

    def test_what_is_no_number_counts_in_count_only(self):
        fold = fold_of(ALL, "", frame(ENTER, "a", n="x"), frame(ENTER, "b"), frame(ENTER, "c", n=2))

        assert plain(fold.all_groups())["groups"] == [
            {"group": None, "count": 3, "sum": 2, "min": 2, "max": 2}
        ]
        fold.check_numbers()  # one row has a number

    def test_an_aggregate_over_text_is_a_sentence(self):
        fold = fold_of("count,sum(/data/n)", "", frame(ENTER, "a", n="x"), frame(ENTER, "b", n="y"))
        with pytest.raises(ViewError, match=r"sum\(/data/n\) needs numbers: 2 rows") as error:
            fold.check_numbers()
        assert error.value.code == "aggregate-not-a-number"
        fold_of("sum(/data/n)", "", frame(ENTER, "a")).check_numbers()  # nothing there is no text

    def test_values_that_went_are_cleaned_from_the_heaps(self):
        """A row that changes for ever must not fill the memory."""
        fold = AggregateFold(Selection("min(/data/n),max(/data/n)"))
        for n in range(2000):
            fold.fold([frame(UPDATE, "a", n=n)])
        extremes = fold._groups[b"null"].extremes[0]

        assert len(extremes._low) < 200
        assert len(extremes._high) < 200
        assert plain(fold.all_groups())["groups"] == [{"group": None, "min": 1999, "max": 1999}]


NUMBERS = st.one_of(st.integers(-50, 50), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))
STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.one_of(st.none(), st.tuples(st.sampled_from(["FI", "SE", None]), NUMBERS)),
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(STEPS)
def test_groups_equal_those_computed_from_the_rows(steps):
    """Any order of enters, updates and leaves: the same groups as from the rows alone, and as from the changes."""
    fold, rows, seen = AggregateFold(Selection(ALL, "/data/c")), {}, {}
    for key, value in steps:
        if value is None:
            rows.pop(key, None)
            fold.fold([leave(key)])
        else:
            fold.fold([frame(UPDATE if key in rows else ENTER, key, c=value[0], n=value[1])])
            rows[key] = value
        changes = plain(fold.take_changes())
        seen |= {group["group"]: group for group in changes["groups"]}
        for gone in changes["gone"]:
            del seen[gone]
    wanted = {}
    for name in {name for name, _ in rows.values()}:
        numbers = [n for found, n in rows.values() if found == name]
        exact = sum(Fraction(json.dumps(n)) for n in numbers)
        wanted[name] = {
            "group": name, "count": len(numbers), "sum": float(exact), "min": min(numbers), "max": max(numbers),
        }  # fmt: skip

    assert seen == wanted
    assert {group["group"]: group for group in plain(fold.all_groups())["groups"]} == wanted
