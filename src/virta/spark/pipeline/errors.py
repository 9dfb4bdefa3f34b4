"""Explain errors of Spark in one sentence."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from virta.spark.connectors import COORDINATES, missing_connector
from virta.spark.pipeline.model import PipelineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.spark.pipeline.model import Pipeline

JVM_ERRORS = (Py4JError, OSError)  # raised when the JVM has ended, but not only then: `explain`
JVM_ENDED = (
    "Spark's JVM has ended: it was killed, or had no memory left; a new run goes on from here"
)
DRIVER = (
    "no JDBC driver for the url: give its jar (spark.jars or spark.jars.packages, by --conf or [spark]"
    ' conf), and the sink options = { driver = "the driver\'s class" }'
)
KNOWN = (
    *(
        (
            re.compile(
                rf"(?:Failed to find .{{0,30}}data source|DATA_SOURCE_NOT_FOUND).{{0,60}}{name}",
                re.DOTALL,
            ),
            missing_connector(name),
        )
        for name in COORDINATES
    ),
    (re.compile(r"No suitable driver|ClassNotFoundException: \S*[Dd]river"), DRIVER),
)
_PYTHON_ERROR = re.compile(r"^(?:: )?(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


def explain(error: BaseException | None) -> str:
    """Return the essential sentence of a Spark error: that of its Python part, if there is one."""
    # A Py4JJavaError comes from a JVM that runs.
    if isinstance(error, Py4JError | ConnectionError) and not isinstance(error, Py4JJavaError):
        return f"{JVM_ENDED} ({type(error).__name__})"
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
def quiet_callbacks() -> Iterator[None]:
    """
    Leave the traceback of a failed micro-batch out of the log.

    Py4J logs it where Spark's thread called Python, and raises it to the query as well: a run reports it from there, in one
    sentence. A query that is stopped in the middle of a micro-batch fails in the same way, and that is no error at all.
    """
    logger = logging.getLogger("py4j.clientserver")
    logger.addFilter(is_no_callback)
    try:
        yield
    finally:
        logger.removeFilter(is_no_callback)


def is_no_callback(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("There was an exception while executing the Python")


@contextmanager
def located(pipeline: Pipeline, *place: str | int) -> Iterator[None]:
    """Raise errors of Spark's analyser as PipelineError with the line of the SQL in the pipeline file."""
    try:
        yield
    except PySparkException as error:
        raise PipelineError([f"{pipeline.location(*place)}{explain(error)}"]) from error
