"""The package as it is installed: public names, extras, native parts, and the two stages of `make`."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import virta
from virta import native
from virta.cli import doctor

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTENSIONS = re.findall(r'Extension\(\s*"([\w.]+)"', (ROOT / "setup.py").read_text())
# The largest, the matcher, has about half a megabyte; with symbols it had nine.
NATIVE_BYTES_MAX = 2 * 1024 * 1024


def test_public_names_are_shown():
    """`dir(virta)` and completion show everything public, before it is used."""
    code = "import virta; print(*dir(virta))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    shown = set(out.stdout.split())
    assert set(virta.__all__) <= shown
    packages = "access client errors event filters journal log match outbox spark tier views"
    assert set(packages.split()) <= shown
    assert not {"Any", "TYPE_CHECKING", "annotations", "import_module"} & shown
    for name in shown - {"spark"}:
        assert hasattr(virta, name), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = virta.nothing


def test_extras_are_what_exists():
    """An extra comes with the code that needs it; `all` is all of them, and the doctor checks each."""
    extras = PROJECT["optional-dependencies"]
    single = set(extras) - {"all"}

    (all_,) = extras["all"]
    assert set(re.fullmatch(r"virta\[(.*)\]", all_)[1].split(",")) == single
    assert set(doctor.EXTRAS) == single
    for extra, packages in doctor.EXTRAS.items():
        wanted = {re.split(r"[\[<>=;]", need)[0] for need in extras[extra]}
        assert set(packages) <= wanted, extra


def test_the_doctor_shows_every_native_part():
    """All that setup.py builds, each with its state."""
    assert len(EXTENSIONS) == 8
    assert sorted(native.MODULES) == sorted(EXTENSIONS)

    out = CliRunner().invoke(doctor.doctor, ["--json"])
    shown = {finding["check"]: finding["state"] for finding in json.loads(out.stdout)}
    for name in EXTENSIONS:
        assert shown[name] in {doctor.OK, doctor.MISSING}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_native_parts_are_stripped(name):
    """What users install has no debug information."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        pytest.skip("not built here")
    raw = Path(module.__file__).read_bytes()
    if b"__asan_init" in raw:
        pytest.skip("built for the fuzzers, which keep symbols")

    assert b".debug_info" not in raw
    assert len(raw) < NATIVE_BYTES_MAX


def planned(directory, *targets):
    """Return the commands that `make` would run, whatever `make` runs these tests."""
    inherited = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PYTHON"}
    out = subprocess.run(
        ["make", "-n", *targets],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if name not in inherited},
        capture_output=True,
        text=True,
        check=True,
    )
    return out.stdout


@pytest.fixture
def clone(tmp_path):
    """Copy the files that `make` reads, as in a fresh clone."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "native").mkdir()
    return tmp_path


def test_serving_installs_only_what_it_needs(clone):
    """`make run` asks for no Spark and no tools; `make test` adds them, and builds nothing twice."""
    run, test = planned(clone, "run"), planned(clone, "test")
    assert '--editable ".[cli,match,server]"' in run
    assert "spark" not in run
    assert "--group dev" not in run
    assert test.count("--editable") == 1
    assert '"virta[cli,match,server,spark,delta,iceberg,tier,zstd,cdc,otel]" --group dev' in test

    stamps = clone / ".venv"
    stamps.mkdir()
    (stamps / ".python-3.11").touch()
    (stamps / ".serve").touch()
    assert "pip" not in planned(clone, "run")
    assert "--editable" not in planned(clone, "test")
    assert "--group dev" in planned(clone, "test")

    (stamps / ".installed").touch()
    for target in ("run", "test", "setup", "lint"):
        assert "pip" not in planned(clone, target), target


def test_another_python_makes_another_environment(clone):
    """An environment of one Python is not used when `make` is asked for another one."""
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamps = clone / ".venv"
    stamps.mkdir()
    for name in (".python-3.0", ".serve", ".installed"):
        (stamps / name).touch()

    assert "pip" not in planned(clone, "test")
    assert "rm -rf .venv" in planned(clone, "test", f"PYTHON={sys.executable}")

    (stamps / ".python-3.0").rename(stamps / f".python-{mine}")
    assert "pip" not in planned(clone, "test", f"PYTHON={sys.executable}")
