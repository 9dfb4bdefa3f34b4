"""`virta match` and `virta filter`: output, exit codes, bad input, and that every flag is documented."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from virta.cli import main
from virta.cli.filter import filter_group
from virta.cli.input_lines import LINE_BYTES_MAX
from virta.cli.match import match
from virta.filters import parse

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "vectors"
VIRTA = Path(sys.executable).with_name("virta")


def run(*arguments, stdin=""):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)


def answers(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def file(tmp_path):
    def write(name, *lines):
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


EVENTS = ['{"type":"a","data":{"x":1}}', '{"type":"b","data":{"x":2}}', '{"type":"c"}']


@pytest.mark.parametrize(
    ("dialect", "filters"),
    [
        ("query-string", ["x=1", "x=>0", "../type=b"]),
        (
            "koncorde",
            ['{"equals":{"data.x":1}}', '{"range":{"data.x":{"gt":0}}}', '{"equals":{"type":"b"}}'],
        ),
        ("cesql", ["type = 'a'", "type IN ('a', 'b')", "type = 'b'"]),
        (
            "cloudevents",
            [
                '{"exact":{"type":"a"}}',
                '{"any":[{"exact":{"type":"a"}},{"prefix":{"type":"b"}}]}',
                '{"suffix":{"type":"b"}}',
            ],
        ),
    ],
)
def test_matches(file, dialect, filters):
    """Each document line gives its number and the numbers of the filters it matches."""
    filters_file = file("filters", *filters)

    result = run("match", "--dialect", dialect, "--filters", filters_file, file("docs", *EVENTS))

    assert result.exit_code == 0
    assert result.stdout == (
        '{"document": 0, "matches": [0, 1]}\n'
        '{"document": 1, "matches": [1, 2]}\n'
        '{"document": 2, "matches": []}\n'
    )


def test_standard_input_and_several_files(file):
    """No DOCS and - are standard input; documents are numbered through all files, blank lines count."""
    filters = file("filters", "../type=a")
    docs = file("docs", EVENTS[1], "", EVENTS[0])

    implicit = run("match", "--filters", filters, stdin=EVENTS[0])
    mixed = run("match", "--filters", filters, docs, "-", stdin=EVENTS[0] + "\r\n\n")

    assert answers(implicit) == [{"document": 0, "matches": [0]}]
    assert answers(mixed) == [
        {"document": 0, "matches": []},
        {"document": 2, "matches": [0]},
        {"document": 3, "matches": [0]},
    ]


def test_equal_filters_are_all_named(file):
    """Filters with one meaning share an id in the index; every line of them is reported."""
    filters = file("filters", "x=1", "../data/x=1.0", "x=2", "/x=1")

    assert answers(run("match", "--filters", filters, stdin=EVENTS[0])) == [
        {"document": 0, "matches": [0, 1, 3]}
    ]


def test_exit_codes(file):
    """0 when some document matched, 1 when none did, 2 on an error, as grep has it."""
    filters = file("filters", "x=1")

    assert run("match", "--filters", filters, stdin="\n".join(EVENTS)).exit_code == 0
    assert run("match", "--filters", filters, stdin=EVENTS[1]).exit_code == 1
    assert run("match", "--filters", filters, stdin="").exit_code == 1
    assert run("match", "--filters", file("none"), stdin=EVENTS[1]).exit_code == 1
    assert run("match", "--filters", filters, stdin="{").exit_code == 2
    assert run("match", stdin=EVENTS[0]).exit_code == 2
    assert run("match", "--filters", filters, "--dialect", "sql").exit_code == 2
    assert run("match", "--filters", filters / "missing").exit_code == 2
    assert run("match", "--filters", filters.parent).exit_code == 2
    assert run("match", "--filters", "-", stdin="x=1").exit_code == 2
    assert run("match", "--filters", filters, "--explain", "--documents").exit_code == 2


@pytest.mark.parametrize(
    ("dialect", "lines", "parts"),
    [
        ("query-string", ["x=1", "x=~5"], ["line 2 (filter 1)", "[non-string-for-starts-with]"]),
        ("koncorde", ["{}", "", '{"foo":{}}'], ["line 3 (filter 2)", "foo"]),
        ("koncorde", ["{"], ["line 1 (filter 0)"]),
        ("cesql", ["TRUE", "type ="], ["line 2 (filter 1)", "character 7"]),
        ("cloudevents", ['{"exact":{"type":""}}'], ["line 1 (filter 0)", "(at exact.type)"]),
    ],
)
def test_an_invalid_filter_stops_everything(file, dialect, lines, parts):
    """The first invalid filter ends the command with its line and its error, before any document."""
    filters = file("filters", *lines)

    result = run("match", "--dialect", dialect, "--filters", filters, stdin=EVENTS[0])

    assert result.exit_code == 2
    assert result.stdout == ""
    for part in (str(filters), *parts):
        assert part in result.stderr


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("NaN", "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":1} {}', "not JSON"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 7"),
    ],
)
def test_a_bad_document_is_named(file, line, problem):
    """Documents before the bad one are answered; the bad one ends the command with its line."""
    raw = line if isinstance(line, bytes) else line.encode()

    result = run("match", "--filters", file("filters", "x=1"), stdin=b"{}\n" + raw)

    assert result.exit_code == 2
    assert answers(result) == [{"document": 0, "matches": []}]
    assert "standard input, line 2" in result.stderr
    assert problem in result.stderr


def test_a_line_too_long_is_refused(file):
    """A line over the limit is an error, not a gigabyte of memory."""
    result = run("match", "--filters", file("filters", "x=1"), stdin=b" " * (LINE_BYTES_MAX + 1))

    assert result.exit_code == 2
    assert str(LINE_BYTES_MAX) in result.stderr


def test_odd_documents_are_answered(file):
    """Any JSON value is a document: scalars, huge numbers, lone surrogates, a byte order mark."""
    filters = file("filters", "x=1e999", "x=%22%5Cud800%22", "x=!1")
    lines = ["5", '{"data":{"x":' + "9" * 5000 + "}}", '{"data":{"x":"\\ud800"}}']

    result = run("match", "--filters", filters, stdin="\ufeff" + "\n".join(lines))

    assert [a["matches"] for a in answers(result)] == [[2], [0, 2], [1, 2]]


def test_blank_lines_among_filters(file):
    """A blank line is no filter, except for query strings, where the empty one matches everything."""
    cesql = file("cesql", "", "type = 'a'", "  ")
    queries = file("queries", "", "x=7")

    assert answers(run("match", "--dialect", "cesql", "--filters", cesql, stdin=EVENTS[0])) == [
        {"document": 0, "matches": [1]}
    ]
    assert answers(run("match", "--filters", queries, stdin=EVENTS[0])) == [
        {"document": 0, "matches": [0]}
    ]


def test_documents_prints_what_matches(file):
    """--documents makes it a grep: the lines as they came."""
    odd = '{ "data" : {"x": 1.0},\t"é":"\\u00e9"}'

    result = run(
        "match", "--filters", file("filters", "x=1"), "--documents", stdin=f"{odd}\n{{}}\n"
    )

    assert (result.exit_code, result.stdout) == (0, odd + "\n")


def test_quiet_stops_at_the_first_match(file):
    """-q prints nothing and does not read on: the bad document behind the match is never seen."""
    filters = file("filters", "x=1")

    assert run("match", "-q", "--filters", filters, stdin=EVENTS[0] + "\n{\n").exit_code == 0
    result = run("match", "--quiet", "--filters", filters, stdin=EVENTS[1])

    assert (result.exit_code, result.stdout) == (1, "")


def test_explain(file):
    """--explain gives for every filter the deciding conditions."""
    filters = file("filters", "x=1", "x=>5&y=2")

    (answer,) = answers(run("match", "--filters", filters, "--explain", stdin=EVENTS[0]))

    assert answer["matches"] == [0]
    assert [(e["filter"], e["matches"]) for e in answer["explain"]] == [(0, True), (1, False)]
    reasons = " ".join(answer["explain"][1]["reasons"])
    assert "data.x" in reasons
    assert "data.y" in reasons


def test_line_buffered(file):
    """With --line-buffered an answer is there before the next document comes."""
    filters = file("filters", "x=1")
    command = [VIRTA, "match", "--line-buffered", "--filters", filters]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(EVENTS[0].encode() + b"\n")
        process.stdin.flush()

        assert process.stdout.readline() == b'{"document": 0, "matches": [0]}\n'

        process.stdin.close()
        assert process.wait(timeout=30) == 0


def test_vectors_through_the_command(file):
    """Thorium's valid vectors in one run: the command's answers equal the filters'."""
    vectors = [
        json.loads(line) for line in (VECTORS / "thorium-vectors.jsonl").read_text().splitlines()
    ]
    valid = [v for v in vectors if isinstance(v["expect"], str)]
    filters = file("filters", *(v["query"] for v in valid))
    docs = file("docs", *(json.dumps(v["event"]) for v in valid))

    found = answers(run("match", "--filters", filters, docs))

    assert len(found) == len(valid) > 400
    for vector, answer in zip(valid, found, strict=True):
        assert (answer["document"] in answer["matches"]) is (vector["expect"] == "match")
    parsed = [parse(v["query"]) for v in valid]
    for answer in found[::20]:
        event = valid[answer["document"]]["event"]
        assert answer["matches"] == [i for i, f in enumerate(parsed) if f.matches(event)]


# virta filter.


def test_validate():
    """Each filter's verdict, from arguments or lines; exit code 1 when some are invalid."""
    good = run("filter", "validate", "x=1", "x=2;y=3")
    bad = run("filter", "validate", "--dialect", "cesql", stdin="TRUE\n\nx =\n")

    assert good.exit_code == 0
    assert answers(good) == [{"filter": 0, "valid": True}, {"filter": 1, "valid": True}]
    assert bad.exit_code == 1
    assert [(a["filter"], a["valid"]) for a in answers(bad)] == [(0, True), (2, False)]
    assert answers(bad)[1]["code"] == "parse"


def test_validate_gives_keyword_and_path(file):
    """An invalid filter's answer has every field of the error."""
    filters = file("filters", '{"all":[{"exact":{"type":5}}]}')

    result = run("filter", "validate", "--dialect", "cloudevents", "--filters", filters)

    (answer,) = answers(result)
    assert (answer["keyword"], answer["path"]) == ("exact", "all[0].exact.type")
    assert run("filter", "validate", "--filters", "/nowhere").exit_code == 2


def test_canonical():
    """Same meaning, same id and form; an invalid filter is exit code 2."""
    one, two = answers(run("filter", "canonical", "a=1&b=2", "b=2&/a=1.0"))

    assert one["id"] == two["id"] == parse("a=1&b=2").id
    assert one["canonical"] == two["canonical"] == json.loads(parse("a=1&b=2").canonical())
    failed = run("filter", "canonical", "a=1", "a=~5")
    assert failed.exit_code == 2
    assert "filter 1: Starts-with" in failed.stderr


def test_explain_command(file):
    """Each document's verdict with reasons, as text or JSON, and grep's exit codes."""
    docs = file("docs", *EVENTS)

    text = run("filter", "explain", "x=1", docs)
    structured = run("filter", "explain", "--json", "x=7", stdin=EVENTS[0])

    assert text.exit_code == 0
    assert text.stdout.startswith("document 0 matches\n")
    assert "document 1 does not match\n" in text.stdout
    assert structured.exit_code == 1
    (answer,) = answers(structured)
    assert (answer["document"], answer["matches"], answer["op"]) == (0, False, "eq")
    assert run("filter", "explain", "x=~5", docs).exit_code == 2


def test_explain_tells_the_problem_of_an_expression():
    """For CESQL the value and the problem are shown, which a tree does not know."""
    result = run("filter", "explain", "--dialect", "cesql", "LENGTH(subject) > 1", stdin=EVENTS[0])

    assert "= false, missingAttribute: the event has no attribute 'subject'" in result.stdout


def test_odd_names_are_shown():
    """A name the terminal cannot show is escaped, not a crash."""
    result = run("filter", "explain", "--dialect", "koncorde", '{"exists":"\\ud800"}', stdin="{}")

    assert result.exit_code == 1
    assert "\\ud800" in result.stdout


# The house.


def flags():
    commands = {"match": match, **filter_group.commands}
    for name, command in commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                for option in parameter.opts:
                    yield pytest.param(name, option, id=f"{name} {option}")


@pytest.mark.parametrize(("command", "option"), list(flags()))
def test_every_flag_is_documented(command, option):
    """docs/cli-match.md names each flag under its command."""
    text = (ROOT / "docs" / "cli-match.md").read_text()
    name = "match" if command == "match" else f"filter {command}"
    section = text.split(f"## `virta {name}`")[1].split("\n## ")[0]

    assert f"`{option}" in section


def test_help_is_quick():
    """`virta --help` imports no filters and takes under 150 ms, of a core that nobody else has."""
    code = (
        "import sys; from virta.cli import main; main(['--help'], standalone_mode=False); "
        "assert not [m for m in sys.modules if m.startswith(('virta.filters', 'virta.match'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

    def used():
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    def seconds():
        before = used()
        subprocess.run([VIRTA, "--help"], check=True, capture_output=True)
        return used() - before

    assert min(seconds() for _ in range(7)) < 0.15


# Filters of another dialect.


def test_filters_of_another_dialect_are_named(file):
    """The error of the first refused filter names the likely dialect, and how many after it look the same."""
    koncorde = ['{"equals":{"a":1}}', '{"range":{"a":{"gt":1}}}']
    filters = file("filters", "a=1", *koncorde, "b=2")

    result = run("match", "--filters", filters, file("docs", *EVENTS))

    assert result.exit_code == 2
    assert "line 2 (filter 1)" in result.stderr
    assert "2 of the 3 filters from here on do: try --dialect koncorde" in result.stderr


def test_filters_that_are_probably_wrong_are_counted(file):
    """Legal filters that look like another language are matched, with a warning on standard error."""
    filters = file("filters", "../type=a", "../type=='a'", "../type='a' and x=1")

    result = run("match", "--filters", filters, file("docs", *EVENTS))

    assert answers(result)[0] == {"document": 0, "matches": [0]}
    assert "warning: 2 of 3 filters" in result.stderr
    assert "`../type=a`" in result.stderr
    assert (
        "warning" not in run("match", "--filters", file("fine", "x=1"), file("d", *EVENTS)).stderr
    )


def test_validate_and_canonical_doubt():
    """`virta filter` warns of a filter that is valid and hardly meant."""
    first, second = answers(run("filter", "validate", "type='x'", "a>5"))

    assert first == {"filter": 0, "valid": True, "warning": "looks like cesql"}
    assert (second["valid"], second["code"]) == (False, "invalid-key")
    assert "did you mean `a=>5`?" in second["message"]
    assert "warning: filter 0: looks like cesql" in run("filter", "canonical", "type='x'").stderr


@pytest.mark.parametrize(
    ("dialect", "text", "first"),
    [
        ("query-string", "status=paid", "indexed: "),
        ("query-string", "status=paid&total=>5", "verified: "),
        ("koncorde", '{"not": {"equals": {"a": 1}}}', "scanned: "),
        ("cesql", "LENGTH(subject) > 5", "indexed: "),
    ],
)
def test_explain_cost(dialect, text, first):
    """--cost prices a filter without reading a document."""
    from click.testing import CliRunner

    from virta.cli import main

    arguments = ["filter", "explain", "--cost", "--dialect", dialect, text]
    result = CliRunner().invoke(main, arguments)
    as_json = CliRunner().invoke(main, [*arguments, "--json"])

    assert result.exit_code == as_json.exit_code == 0, result.output
    assert result.output.startswith(first)
    assert json.loads(as_json.output)["kind"] == first.removesuffix(": ")
