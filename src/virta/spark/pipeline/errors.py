"""Explain errors of Spark in one sentence."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyspark
from pyspark.errors import PySparkException

from virta.spark.pipeline.model import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.spark.pipeline.model import Pipeline

KAFKA = (
    "Spark's Kafka connector is missing: give its jars by spark.jars or"
    f" spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}, by --conf"
    " or [spark] conf; Maven Central has it for Spark 4.1 and 4.2"
)
DRIVER = (
    "no JDBC driver for the url: give its jar (spark.jars or spark.jars.packages, by --conf or [spark]"
    ' conf), and the sink options = { driver = "the driver\'s class" }'
)
KNOWN = (
    (
        re.compile(r"(?:Failed to find data source|DATA_SOURCE_NOT_FOUND).{0,40}kafka", re.DOTALL),
        KAFKA,
    ),
    (re.compile(r"No suitable driver|ClassNotFoundException: \S*[Dd]river"), DRIVER),
)
_PYTHON_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


def explain(error: BaseException | None) -> str:
    """Return the essential sentence of a Spark error: that of its Python part, if there is one."""
    text = str(error)
    for pattern, sentence in KNOWN:
        if pattern.search(text):
            return sentence
    found = _PYTHON_ERROR.findall(text)
    wanted = [m for m in found if not m[0].startswith(("Py4J", "StreamingQuery", "PySpark"))]
    if wanted:
        name, message = wanted[-1]
        return f"{name}: {message}"
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


@contextmanager
def located(pipeline: Pipeline, *place: str | int) -> Iterator[None]:
    """Raise errors of Spark's analyser as PipelineError with the line of the SQL in the pipeline file."""
    try:
        yield
    except PySparkException as error:
        raise PipelineError([f"{pipeline.location(*place)}{explain(error)}"]) from error
