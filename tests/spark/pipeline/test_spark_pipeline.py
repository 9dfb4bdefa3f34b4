"""Pipeline files: read, checked, refused with the line of every problem. No Spark is started."""

from __future__ import annotations

import textwrap

import pytest

from virta.spark.pipeline.builder import source_schema
from virta.spark.pipeline.file import load, loads
from virta.spark.pipeline.model import (
    Aggregate,
    Dedupe,
    Pipeline,
    PipelineError,
    Sink,
    Source,
)
from virta.spark.pipeline.toml_lines import find_lines, line_of
from virta.spark.schemas import EVENT, RECORD

GOOD = textwrap.dedent(
    """
    [pipeline]
    name = "orders"
    trigger = "10 seconds"

    [source]
    log = "data/log"
    topics = ["orders"]
    start = 5

    [dedupe]
    within = "5 minutes"

    [[filter]]
    dialect = "cesql"
    match = "type = 'order'"

    [columns]
    amount = "try_variant_get(data, '$.amount', 'double')"

    [aggregate]
    window = "1 minute"
    by = ["type"]
    aggregates = { orders = "count(*)", total = "sum(amount)" }

    [[sink]]
    kind = "channel"
    topic = "orders.per-minute"

    [[sink]]
    kind = "parquet"
    path = "lake"
    partition_by = ["type"]

    [dead_letter]
    kind = "channel"
    topic = "dead"
    """
)


def problems(text):
    with pytest.raises(PipelineError) as caught:
        loads(text, "p.toml")
    return caught.value.problems


def test_a_whole_pipeline_is_read():
    """Every table arrives in the dataclasses; relative paths start at the file's directory."""
    pipeline = loads(GOOD, directory="/pipelines")

    assert pipeline.name == "orders"
    assert pipeline.source == Source(log="data/log", topics=("orders",), start="5")
    assert pipeline.dedupe.within == "5 minutes"
    assert pipeline.filters[0].parsed().matches({"type": "order"})
    assert pipeline.columns == {"amount": "try_variant_get(data, '$.amount', 'double')"}
    assert pipeline.aggregate.aggregates == {"orders": "count(*)", "total": "sum(amount)"}
    assert [sink.kind for sink in pipeline.sinks] == ["channel", "parquet"]
    assert pipeline.dead_letter == Sink(kind="channel", topic="dead")
    assert pipeline.path("lake") == "/pipelines/lake"
    assert pipeline.checkpoint_path() == "/pipelines/.virta/pipelines/orders"
    assert pipeline.path("s3a://bucket/x") == "s3a://bucket/x"


CHANNEL = Sink(kind="channel", topic="out", log="other")
COUNT = Aggregate(window="1 minute", aggregates={"n": "count(*)"})


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"aggregate": COUNT}, ["timestamp", "invalid"]),
        (
            {"aggregate": Aggregate(window="1 minute", by=("type",), time="time", aggregates={"n": "sum(Data:p * 2)"})},
            ["type", "time", "data", "invalid"],
        ),
        ({"aggregate": COUNT, "columns": {"n": "upper(Subject)"}}, ["timestamp", "subject", "invalid"]),
        ({"aggregate": COUNT, "dedupe": Dedupe()}, ["timestamp", "id", "source", "invalid"]),
        ({}, ["key", "value", "invalid"]),
        ({"dedupe": Dedupe(by=("subject",), time="time")}, ["key", "value", "subject", "time", "invalid"]),
        ({"sinks": (Sink(kind="channel", topic="out", log="other", key="id"),)}, ["key", "value", "id", "invalid"]),
        ({"aggregate": COUNT, "dead_letter": CHANNEL}, [*RECORD.names, "invalid"]),
        ({"source": Source(log="log"), "aggregate": COUNT}, ["topic", "timestamp", "invalid"]),
        # Every column may be used.
        ({"columns": {"n": "upper(subject)"}}, EVENT.names),
        ({"sinks": (Sink(kind="parquet", path="lake"),)}, EVENT.names),
        ({"aggregate": Aggregate(window="1 minute", aggregates={"n": "max(struct( *))"})}, EVENT.names),
    ],
)  # fmt: skip
def test_only_columns_that_are_used_are_read(parts, names):
    """A pipeline reads the columns in its expressions, and what its sinks and dead letters need."""
    given = {"source": Source(log="log", topics=("orders",)), "sinks": (CHANNEL,), **parts}

    assert source_schema(Pipeline(name="p", **given)).names == names


def test_python_and_toml_give_the_same_value():
    """A pipeline made in Python equals the one read from TOML."""
    text = '[pipeline]\nname = "p"\n[source]\nlog = "l"\n[[sink]]\nkind = "console"\n'

    assert loads(text) == Pipeline(name="p", source=Source(log="l"), sinks=(Sink(kind="console"),))


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('name = "orders"', 'name = "or ders"', 3, "name 'or ders'"),
        ('trigger = "10 seconds"', 'trigger = "sometimes"', 4, "trigger 'sometimes'"),
        ('log = "data/log"', "log = 7", 7, "log is 7: expected a string"),
        ('log = "data/log"', 'lag = "data/log"', 7, "unknown key 'lag'"),
        ('topics = ["orders"]', 'topics = "orders"', 8, "expected a list of strings"),
        ("start = 5", 'start = "soon"', 9, "start 'soon'"),
        ('within = "5 minutes"', 'within = "long"', 12, "within 'long'"),
        ('dialect = "cesql"', 'dialect = "sql"', 15, "dialect 'sql'"),
        ("type = 'order'", "type = = 'order'", 16, "filter"),
        ('window = "1 minute"', 'slide = "1 minute"', 21, "either window or session"),
        ('kind = "parquet"', 'kind = "parkett"', 31, "kind 'parkett'"),
        ('path = "lake"', 'topic = "lake"', 30, "a parquet sink needs path"),
        ('path = "lake"', 'path = "lake"\nurl = "x"', 33, "url does not go with a parquet sink"),
        ('orders = "count(*)"', 'batch = "count(*)"', 30, "a parquet sink has directories batch="),
        (
            'path = "lake"',
            'path = "lake"\n[[sink]]\nkind = "parquet"\npath = "./lake"',
            35,
            "two sinks write to the path './lake'",
        ),
        ("[dead_letter]", "[dead_leter]", 35, "unknown table 'dead_leter'"),
        ("[[filter]]", "[filter]", 14, "two brackets"),
        ("[source]", "[[source]]", 6, "one bracket"),
        ('name = "orders"', 'nam = "orders"', 3, "unknown key 'nam'"),
        ("start = 5", 'start_time = "soon"', 9, "start_time 'soon': expected ISO 8601"),
        ('within = "5 minutes"', "within = 300", 12, 'expected a string such as "10 minutes"'),
        ('window = "1 minute"', 'window = "0 minutes"', 22, "window '0 minutes'"),
        (
            'window = "1 minute"',
            'window = "1 minute"\nslide = "1 hour"',
            23,
            "longer than the window",
        ),
        ("count(*)", "count(*", 24, "its quotes and brackets closed"),
        ("[dead_letter]", "[spark]\nmaster = 5\n[dead_letter]", 36, "master is 5"),
        ('partition_by = ["type"]', 'partition_by = ["day"]', 33, "partition_by names 'day'"),
        ('kind = "parquet"', 'kind = "jdbc"\nkeys = ["begin"]', 32, "keys names 'begin'"),
        ("orders = ", "end = ", 24, "end names two columns"),
        ("start = 5", 'options = { startOffset = "5" }', 9, "option 'startOffset': expected end"),
        ('"orders.per-minute"', '"orders"', 28, "would read what it writes"),
        ('topic = "dead"', 'topic = "orders"', 37, "would read what it writes"),
    ],
)
def test_problems_name_the_line(old, new, line, message):
    """A wrong value is reported with the line it stands on and what would be right."""
    found = problems(GOOD.replace(old, new))

    assert any(p.startswith(f"p.toml:{line}: ") and message in p for p in found), found


def test_all_problems_come_at_once():
    """One run shows everything that is wrong, in the order of lines."""
    text = GOOD.replace("10 seconds", "x").replace("1 minute", "y").replace('"lake"', '""')

    found = problems(text)

    assert [int(p.split(":")[1]) for p in found] == [4, 22, 32]


def test_wrong_shapes_do_not_hide_wrong_values():
    """A value of the wrong type and an unknown key are reported with everything else, and nothing twice."""
    text = GOOD.replace("10 seconds", "x").replace('topic = "dead"', "topic = 5\ncolour = 1")
    text = text.replace('log = "data/log"', "log = 7").replace('"lake"', '""')

    found = problems(text)

    assert [int(p.split(":")[1]) for p in found] == [4, 7, 32, 37, 38], found
    assert "a parquet sink needs path" in found[2]


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (  # a wrong shape of the columns or of the aggregate
            {"[columns]\namount": "[x]\namount", "10 seconds": "x", "= 'order'": "= = 1"},
            ["trigger 'x'", "filter", "unknown table 'x'"],
        ),
        (
            {'amount = "try': 'amount = [1]\nb = "try', "10 seconds": "x"},
            ["trigger 'x'", "amount is [1]: expected a string"],
        ),
        (
            {'{ orders = "count(*)", total = "sum(amount)" }': "5", '"5 minutes"': '"x"'},
            ["within 'x'", "aggregates is 5: expected a table of strings"],
        ),
        (  # a table that lacks a key has others
            {"match = \"type = 'order'\"": "", '"cesql"': '"sql"', '"1 minute"': '"x"'},
            ["filter has no match", "dialect 'sql'", "window 'x'"],
        ),
        (
            {"aggregates = {": "more = {", '"1 minute"': '"x"'},
            ["aggregate has no aggregates", "window 'x'", "unknown key 'more'"],
        ),
        (  # an unknown key beside one that is missing, and a missing table beside an unknown one
            {'path = "lake"': 'pth = "lake"'},
            ["a parquet sink needs path", "unknown key 'pth'"],
        ),
        (
            {'kind = "parquet"': 'kind = "parkett"', '"type"]': '"nothing"]'},
            ["by names 'nothing'", "kind 'parkett'"],
        ),
        (  # an unknown table beside [columns] is not the columns
            {"[dead_letter]": "[dead_leter]", 'amount = "': 'amount = "(', '"type"]': '"nothing"]'},
            ["unknown table 'dead_leter'", "expected a SQL expression", "by names 'nothing'"],
        ),
        (  # a slide is compared with its window whatever else is wrong
            {'"1 minute"': '"1 minute"\nslide = "1 hour"\nlate = "x"'},
            ["slide '1 hour' is longer", "late 'x'"],
        ),
    ],
)
def test_no_problem_hides_another(changes, messages):
    """What is wrong in one table says nothing about the others, nor about its own other keys."""
    text = GOOD
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)

    found = problems(text)

    assert len(found) == len(messages), found
    for message in messages:
        assert any(message in problem for problem in found), found


def test_times_may_be_of_tomls_own_type():
    """A date or a time of TOML is as good as its text."""
    text = GOOD.replace("start = 5", "start_time = 2026-01-31T12:00:00Z\nend_time = 2026-02-01")

    source = loads(text).source

    assert (source.start_time, source.end_time) == ("2026-01-31T12:00:00+00:00", "2026-02-01")


def test_what_a_pipeline_writes_to_its_log_is_no_input():
    """Channels of the log that is read are its own, under any spelling of the path."""
    pipeline = Pipeline(
        name="p",
        source=Source(log="l"),
        sinks=(
            Sink(kind="channel", topic="a"),
            Sink(kind="channel", topic="b", log="./x/../l"),
            Sink(kind="channel", topic="c", log="other"),
            Sink(kind="console"),
        ),
        dead_letter=Sink(kind="channel", topic="d"),
    )

    assert pipeline.own_topics() == ["a", "b", "d"]


def test_syntax_errors_name_the_line():
    """What is no TOML at all is reported with tomllib's line."""
    assert problems("[pipeline]\nname = ")[0].startswith("p.toml:2: ")


def test_a_missing_file_is_a_clear_error(tmp_path):
    """The message has the path and the reason."""
    with pytest.raises(PipelineError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml")


def test_a_pipeline_in_python_is_checked_too():
    """The dataclass refuses what the file would."""
    with pytest.raises(PipelineError, match="either window or session"):
        Pipeline(
            name="p",
            source=Source(log="l"),
            sinks=(Sink(kind="console"),),
            aggregate=Aggregate(aggregates={"n": "count(*)"}),
        )


def test_lines_survive_multi_line_values():
    """Keys after arrays, inline tables and long strings keep their lines."""
    text = 'a = [\n  "x = 1",\n  "y",\n]\nb = """\nc = 1\n"""\n[[t]]\nd = 1\n[[t]]\nd = { e = [1,\n2] }\nf = 2\n'

    lines = find_lines(text)

    assert lines == {
        ("a",): 1,
        ("b",): 5,
        ("t", 0): 8,
        ("t", 0, "d"): 9,
        ("t", 1): 10,
        ("t", 1, "d"): 11,
        ("t", 1, "f"): 13,
    }
    assert line_of(lines, ("t", 1, "missing", "deeper")) == 10
