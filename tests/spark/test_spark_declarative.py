"""The example of Spark Declarative Pipelines: Virta as source and as sink, run by Spark's own command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark.pipelines")
pytest.importorskip("grpc_status", reason="spark-pipelines needs grpcio-status")
pytest.importorskip("zstandard", reason="spark-pipelines needs zstandard")

import pyarrow.dataset as ds
import pyspark
from spark_logs import read_log

import virta
from virta.spark.launch.java import ensure_java
from virta.spark.versions import HAS_READ_LIMITS

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_pipelines"
ORDERS = 20


def fill(path):
    with virta.open(path) as log:
        for number in range(ORDERS):
            data = {"city": ("Oslo", "Rome")[number % 2], "total": number * 10.5}
            event = {"specversion": "1.0", "id": str(number), "source": "/s", "type": "order"}
            log.append("orders", "", json.dumps(event | {"data": data}).encode())
        log.append("orders", "", b"not an event")


def test_the_example_project(tmp_path):
    """A streaming table, a view in SQL and a sink, each with what the log has; the log knows the stream's position."""
    project = shutil.copytree(EXAMPLE, tmp_path / "project")
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/virta-orders", str(tmp_path)))
    fill(tmp_path / "log")
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "JAVA_HOME": str(ensure_java()),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(virta.__file__).parents[1]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [home / "bin" / "spark-pipelines", "run", "--conf", "spark.ui.enabled=false"]

    done = subprocess.run(
        command,
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    large = [json.loads(record.value) for record in read_log(tmp_path / "log", "orders.large")]
    wanted = {str(n): n * 10.5 for n in range(ORDERS) if n * 10.5 >= 100}
    assert {one["id"]: one["data"]["total"] for one in large} == wanted
    assert len(large) == len(wanted)
    revenue = ds.dataset(project / "spark-warehouse" / "revenue").to_table().to_pylist()
    assert sorted((row["city"], row["orders"], row["total"]) for row in revenue) == [
        ("Oslo", 10, sum(n * 10.5 for n in range(0, ORDERS, 2))),
        ("Rome", 10, sum(n * 10.5 for n in range(1, ORDERS, 2))),
    ]
    with virta.open(tmp_path / "log", read_only=True) as log:
        (consumer,) = log.consumers()
    # Spark 4.1 does not tell a source of its last micro-batch; the next run stores it.
    lag = 0 if HAS_READ_LIMITS else ORDERS + 1
    assert (consumer.name, consumer.lag) == ("spark-pipelines.orders", lag)
