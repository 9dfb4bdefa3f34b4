"""
`virta doctor`: check that everything Virta needs is installed and works.

Each line is one check: ok, missing (an extra that is not installed), warning or wrong, with what to do. The exit
code is 1 if something is wrong, else 0: extras are optional.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from virta import files
from virta.errors import VirtaError
from virta.native import MODULES, PLAIN
from virta.server.settings import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

OK, MISSING, WARNING, WRONG = "ok", "missing", "warning", "wrong"
DATA_DIR_DEFAULT = str(BY_NAME["data_dir"].default)
EXTRAS = {
    "server": ("uvicorn", "starlette"),
    "match": ("google-re2",),
    "spark": ("pyspark", "pyarrow", "pandas"),
    "delta": ("deltalake",),
    "iceberg": ("pyiceberg",),
    "tier": ("obstore",),
    "zstd": ("backports.zstd",),
    "cdc": ("psycopg2-binary",),
    "cli": ("rich",),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
# Packages whose module is in the standard library of newer Pythons.
STANDARD = {"backports.zstd": "compression.zstd"}


@dataclass(frozen=True)
class Finding:
    """One check's outcome."""

    check: str
    state: str
    detail: str


@click.command()
@click.option("--spark-job", is_flag=True, help="Also start Spark and run a one-row job.")
@click.option(
    "--data-dir",
    help="Also check who can read this data directory (or log); the default one if it exists.",
)
@click.option(
    "--config", "config_file", type=click.Path(), help="TOML file instead of ./virta.toml."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON array.")
def doctor(
    *, spark_job: bool, data_dir: str | None, config_file: str | None, as_json: bool
) -> None:
    """Check Python, native modules, extras, Java and the set-up of a server; say what to do about what is wrong."""
    checks: list[Callable[[], list[Finding]]] = [
        check_python,
        check_native,
        check_extras,
        check_java,
        lambda: check_directory(data_dir or DATA_DIR_DEFAULT),
        lambda: check_setup(config_file, data_dir),
    ]
    if spark_job:
        checks.append(check_spark)
    findings = [finding for check in checks for finding in check()]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            click.echo(f"{finding.state:8}{finding.check:{width}}  {finding.detail}")
    sys.exit(any(finding.state == WRONG for finding in findings))


def check_python() -> list[Finding]:
    good = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} at {sys.executable}"
    return [
        Finding("python", OK if good else WRONG, detail if good else f"{detail}: 3.11 is needed")
    ]


def check_native() -> list[Finding]:
    findings = []
    for name in MODULES:
        if find_spec(name.rpartition(".")[0]) is None:
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            detail = "not built: plain Python is used, which is slower; reinstall with a C compiler"
            if isinstance(error, ModuleNotFoundError) and error.name != name:
                detail = f"not checked: {error.name} is missing"
            findings.append(Finding(name, MISSING, detail))
        else:
            findings.append(Finding(name, OK, "not used: VIRTA_PLAIN=1" if PLAIN else "native"))
    return findings


def check_extras() -> list[Finding]:
    findings = []
    for extra, packages in EXTRAS.items():
        found, absent = [], []
        for package in packages:
            standard = STANDARD.get(package)
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                if standard is not None and _is_importable(standard):
                    found.append(f"{standard} of Python {platform.python_version()}")
                else:
                    absent.append(package)
        if absent:
            detail = f"no {', '.join(absent)}: pip install virta[{extra}]"
            findings.append(Finding(f"extra {extra}", MISSING, detail))
        else:
            findings.append(Finding(f"extra {extra}", OK, ", ".join(found)))
    return findings


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def check_java() -> list[Finding]:
    from virta.spark.launch.java import JavaError, ensure_java, find_java

    try:
        java = find_java()
        home = ensure_java()
    except JavaError as error:
        state = WRONG if find_spec("pyspark") else MISSING
        return [Finding("java", state, error.message)]
    shim = "" if java.complete else f", through {home}"
    return [Finding("java", OK, f"{java.version} from {java.origin} ({java.home}){shim}")]


def check_directory(data_dir: str) -> list[Finding]:
    if not os.path.isdir(data_dir):
        return []
    exposed = files.open_to_others(data_dir)
    state, detail = (WARNING, exposed) if exposed else (OK, f"{data_dir} is closed to other users")
    return [Finding("data directory", state, detail)]


def check_setup(config_file: str | None, data_dir: str | None) -> list[Finding]:
    """Check the settings of a server, its ports, disk, tokens, certificate and log."""
    from virta.cli.operating.setup_checks import setup_findings

    given = None if data_dir is None else {"data_dir": data_dir}
    return [Finding(*found) for found in setup_findings(config_file, given)]


def check_spark() -> list[Finding]:
    from virta.spark.launch.session import session

    try:
        spark = session("virta-doctor", "local[1]")
    except VirtaError as error:
        return [Finding("spark", WRONG, error.message)]
    from pyspark.errors import PySparkException

    from virta.spark.pipeline.errors import explain

    try:
        # Through a Python worker, which is where a wrong interpreter or a missing package shows.
        count = spark.range(1).mapInArrow(lambda batches: batches, "id long").count()
        return [Finding("spark", OK, f"{spark.version} ran a job of {count} row in Python")]
    except PySparkException as error:
        return [Finding("spark", WRONG, explain(error))]
    finally:
        spark.stop()
