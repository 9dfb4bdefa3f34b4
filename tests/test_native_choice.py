"""`virta.native`: one choice between native and plain code for all extensions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from virta import native

REPORT = """
import importlib.util, sys
from virta import native
for name in native.MODULES:
    print(name, native.load(name) is None)
import virta.hub.idempotency, virta.journal, virta.log.engine.kernel, virta.match
virta.match.Matcher()
print(*sorted(set(native.MODULES) & set(sys.modules)))
"""


def run(code, **environ):
    environment = {k: v for k, v in os.environ.items() if k != "VIRTA_PLAIN"} | environ
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.splitlines()


def test_plain_applies_to_every_extension():
    """With VIRTA_PLAIN=1 no extension is loaded, not even by the packages themselves."""
    *asked, loaded = run(REPORT, VIRTA_PLAIN="1")

    assert asked == [f"{name} True" for name in native.MODULES]
    assert loaded == ""


@pytest.mark.parametrize("value", ["", "0"])
def test_other_values_mean_native(value):
    """Only "1" asks for plain code."""
    lines = run("from virta import native; print(native.PLAIN)", VIRTA_PLAIN=value)

    assert lines == ["False"]


def test_a_module_that_is_not_built_is_none(monkeypatch):
    """`load` returns None instead of raising ImportError."""
    monkeypatch.setattr(native, "MODULES", (*native.MODULES, "virta.log._absent"))

    assert native.load("virta.log._absent") is None


def test_only_known_modules_are_loaded():
    """A name that is not in the list is a mistake of the caller."""
    with pytest.raises(AssertionError):
        native.load("json")
