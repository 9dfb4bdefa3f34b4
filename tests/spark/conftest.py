"""One Spark session for all tests of this directory: starting one takes ten seconds."""

from __future__ import annotations

import os
import warnings

import pytest


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    pytest.importorskip("pyspark")
    from virta.spark.launch.session import session

    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = session(
            "virta-tests",
            "local[2]",
            **{
                "spark.driver.memory": "1500m",
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.python.filterPushdown.enabled": True,
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
    yield spark
    spark.stop()
