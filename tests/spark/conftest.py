"""One Spark session for all tests of this directory: starting one takes ten seconds."""

from __future__ import annotations

import os
import warnings

import pytest

# pyspark 4.1 leaves the socket of `collect` to the garbage collector.
OPEN_SOCKETS = (
    "ignore:unclosed <socket.socket:ResourceWarning",
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items):
    try:
        import pyspark
    except ImportError:
        return
    if not pyspark.__version__.startswith("4.1."):
        return
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            for text in OPEN_SOCKETS:
                item.add_marker(pytest.mark.filterwarnings(text))


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
