"""`virta doctor`: what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from virta import native
from virta.cli import doctor, main


@pytest.fixture
def findings(tmp_path, monkeypatch):
    """Run the command in an empty directory; return the state and detail of each check."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
        return result.exit_code, {f["check"]: f for f in json.loads(result.stdout)}

    return run


def test_every_part_is_named(findings):
    """Python, each native module, each extra and Java have a line."""
    _, found = findings()

    assert found["python"]["state"] == "ok"
    assert {f"extra {name}" for name in doctor.EXTRAS} <= set(found)
    assert {name for name in native.MODULES if name in found}
    assert "java" in found


def test_the_text_has_a_line_for_each_finding(findings, tmp_path):
    """State first, then the check, then the detail."""
    _, found = findings()
    lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()

    assert {line.split(None, 1)[1].split("  ")[0] for line in lines} == set(found)
    assert {line.split()[0] for line in lines} <= {"ok", "missing", "warning", "wrong"}


def test_a_missing_extra_is_no_error(findings, monkeypatch):
    """It says which package is missing and how to install it; the exit code stays."""
    before, _ = findings()
    monkeypatch.setitem(doctor.EXTRAS, "match", ("no-such-package",))
    after, found = findings()

    assert after == before
    assert found["extra match"]["state"] == "missing"
    assert "no no-such-package: pip install virta[match]" in found["extra match"]["detail"]


@pytest.mark.parametrize(("module", "state"), [("json.decoder", "ok"), ("no_such.module", "missing")])  # fmt: skip
def test_a_package_that_python_replaces(findings, monkeypatch, module, state):
    """What the standard library of a newer Python has needs no package, as zstd from 3.14 on."""
    monkeypatch.setitem(doctor.EXTRAS, "zstd", ("no-such-package",))
    monkeypatch.setitem(doctor.STANDARD, "no-such-package", module)
    _, found = findings()

    assert found["extra zstd"]["state"] == state


def test_a_native_module_that_is_not_built(monkeypatch):
    """It is missing, not wrong: the plain engine works."""
    monkeypatch.setattr(doctor, "MODULES", ("virta.log._missing",))
    (finding,) = doctor.check_native()

    assert finding.state == "missing"
    assert "plain Python is used" in finding.detail


def test_a_native_module_that_is_not_used(monkeypatch):
    """With VIRTA_PLAIN the line says so."""
    monkeypatch.setattr(doctor, "PLAIN", True)

    assert all("VIRTA_PLAIN" in f.detail for f in doctor.check_native() if f.state == "ok")


@pytest.mark.parametrize(("mode", "state"), [(0o700, "ok"), (0o755, "warning")])
def test_a_data_directory(findings, tmp_path, mode, state):
    """A directory that others can read is a warning, and no failure."""
    directory = tmp_path / "data"
    directory.mkdir()
    directory.chmod(mode)
    _, found = findings("--data-dir", str(directory))

    assert found["data directory"]["state"] == state
    assert str(directory) in found["data directory"]["detail"]


def test_an_old_python_is_wrong(monkeypatch):
    """The version is named and what is needed."""
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 1))
    (finding,) = doctor.check_python()

    assert finding.state == "wrong"
    assert "3.11 is needed" in finding.detail


def test_wrong_findings_are_the_exit_code(findings, monkeypatch):
    """Something that is wrong makes it 1."""
    wrong = doctor.Finding("java", "wrong", "broken")
    monkeypatch.setattr(doctor, "check_java", lambda: [wrong])
    code, found = findings()

    assert code == 1
    assert found["java"]["detail"] == "broken"


def test_no_directory_no_line(findings):
    """The default data directory is checked only where there is one."""
    assert not os.path.exists(doctor.DATA_DIR_DEFAULT)
    _, found = findings()

    assert "data directory" not in found
