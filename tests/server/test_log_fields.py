"""Log lines for programs: every line of a server is JSON, with fields as members."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from server_harness import STRUCTURED, event

import virta
from virta.server.log_fields import read_line

ROOT = Path(virta.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
PAIR = re.compile(r"\b[a-z_]+=")


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("append_failed code=%s: %s", ("full", "no space"), {"code": "full", "reason": "no space"}),
        ("log_gap_skipped from=%d to=%d", (1, 9), {"from": 1, "to": 9}),
        ("worker_waits seconds=%.1f %s", (1.25, "x"), {"seconds": 1.2, "reason": "x"}),
        ("job_failed uri=%s %r", ("u", "a b"), {"uri": "u", "reason": "'a b'"}),
        ("journal_connection_refused: there are %d", (7,), {"reason": "there are 7"}),
        ("disk_used share=%d%%", (7,), {"share": 7, "reason": "%"}),
        ("answer_failed", (), {}),
    ],
)
def test_lines_are_split_into_fields(template, arguments, expected):
    """The event's name is the message; named values are fields; the rest is the reason."""
    name, fields = read_line(template, arguments)

    assert name == template.split(maxsplit=1)[0].rstrip(":")
    assert fields == expected


@pytest.mark.parametrize("template", ["Invalid HTTP request received.", "no image at %s", ""])
def test_other_lines_are_unchanged(template):
    """A sentence has no fields."""
    assert read_line(template, ("x",)) is None


def templates():
    """Every text that a module of the server's side gives to a logger of the standard library."""
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in {"spark", "client", "cli"}:
            continue
        tree = ast.parse(path.read_text())
        for call in ast.walk(tree):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in LEVELS
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id in {"logger", "log"}
                and call.args
                and isinstance(call.args[0], ast.Constant)
                and not any(isinstance(argument, ast.Starred) for argument in call.args)
            ):
                yield f"{path.relative_to(ROOT)}:{call.lineno}", call.args[0].value, len(call.args)


def test_every_template_has_the_shape():
    """No library's line keeps a field inside its text."""
    found = list(templates())
    assert len(found) > 20
    for place, template, count in found:
        if template.split(maxsplit=1)[0].rstrip(":").count("_") == 0:
            continue  # a sentence
        values = tuple(range(count - 1))
        line = read_line(template.replace("%r", "%s"), values)
        assert line is not None, place
        assert not PAIR.search(str(line[1].get("reason", ""))), (place, line)


def test_all_lines_of_a_server(start, tmp_path):
    """Started, used and stopped with a refused connection in between: all lines parse, none hides a field."""
    data = tmp_path / "data"
    server = start("--log-level", "debug", data_dir=data)
    server.publish("c", event("2"))
    server.request("POST", "/channels/c", "no", {"Content-Type": STRUCTURED})
    server.stop()
    lines = [json.loads(line) for line in "".join(server.said).splitlines()]

    assert {"listening", "journal_listening", "stopped"} <= {line["message"] for line in lines}
    for line in lines:
        assert line.keys() >= {"level", "timestamp", "message"}
        assert not PAIR.search(line["message"]), line
    (journal,) = [line for line in lines if line["message"] == "journal_listening"]
    assert (journal["host"], journal["port"]) == ("127.0.0.1", server.journal_port)
