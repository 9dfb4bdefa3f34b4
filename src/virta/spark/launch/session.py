"""
A Spark session with the settings that Virta's source, sink and transforms need.

Everything can be overridden: a keyword is a Spark setting with dots or double underscores
(`session(**{"spark.driver.memory": "4g"})` or `session(spark__driver__memory="4g")`). Settings of the JVM itself
apply only to the first session of a process, as in any Spark program.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import VirtaError
from virta.spark.launch.java import ensure_java
from virta.spark.launch.plan_rule import PUSHDOWN_SETTING, plan_each_query
from virta.spark.launch.python_shim import worker_python

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from pyspark.sql import SparkSession

CHECKPOINT_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
JAVA_END_SECONDS_MAX = 10.0
EXECUTOR_PATH = "spark.executorEnv.PYTHONPATH"
PY_FILES = "spark.submit.pyFiles"
ZIPS = (".zip", ".egg")
LOCAL = re.compile(r"local(?:\[(\*|\d+)(?:,\d+)?\])?")
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def base_conf(master: str) -> dict[str, str]:
    """Return the settings of a session on `master`, before the caller's own."""
    cores = local_cores(master)
    return {
        # On one machine a shuffle has as many parts as there are cores: micro-batches are small. A checkpoint keeps
        # the number for ever, and the driver's cores say nothing about a cluster: there it is Spark's default.
        **({} if cores is None else {"spark.sql.shuffle.partitions": str(cores)}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "2g",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
        # The default manager forks `readlink` and `chmod` for every checkpoint file: 80 ms a batch.
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_MANAGER,
        # Python sources cannot fix the end of such a run in Spark 4.1: without it a run is one micro-batch, after a
        # crash only the repeated one.
        "spark.sql.streaming.triggerAvailableNowWrapper.enabled": "true",
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
    }


def local_cores(master: str) -> int | None:
    """Return the cores of a local master, None for a cluster."""
    matched = LOCAL.fullmatch(master)
    if matched is None:
        return None
    cores = matched[1] or "1"
    return os.cpu_count() or 1 if cores == "*" else int(cores)


def session(app: str = "virta", master: str | None = None, **conf: object) -> SparkSession:
    """
    Return the process's Spark session, making it (and finding Java for it) when there is none.

    Args:
        app: the application's name in Spark's views.
        master: where to run; `local[*]` unless given here or by `spark.master`.
        conf: Spark settings; `spark__driver__memory` means `spark.driver.memory`. None leaves a
            default of ours unset.

    Raises:
        JavaError: no suitable Java runtime.
        VirtaError: pyspark is not installed.
    """
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415
    except ImportError as exc:
        raise VirtaError(
            "pyspark is not installed: run `pip install virta[spark]`", code="spark_missing"
        ) from exc
    own = {name.replace("__", "."): value for name, value in conf.items()}
    master = master or str(own.get("spark.master") or "local[*]")
    python = own.get("spark.pyspark.python")
    prepare_environment(master, None if python is None else str(python))

    builder = SparkSession.builder.appName(app).master(master)
    for name, value in {**base_conf(master), **own, **search_path(own)}.items():
        if value is not None and name != "spark.master":
            builder = builder.config(name, setting_text(value))
    spark = builder.getOrCreate()
    if setting_text(own.get(PUSHDOWN_SETTING)) == "true":
        plan_each_query(spark)
    spark.sparkContext.setLogLevel(str(own.get("spark.log.level") or "ERROR"))
    return spark


def search_path(conf: Mapping[str, object]) -> dict[str, str]:
    """
    Return the setting by which executors import from the zips of `spark.submit.pyFiles`, in their own directories.

    Spark adds these to the path of functions, but not to that of a Python source that it finds by name.
    """
    given = str(conf.get(PY_FILES) or "").split(",")
    zips = [f"./{name.rpartition('/')[2]}" for name in given if name.endswith(ZIPS)]
    own = conf.get(EXECUTOR_PATH)
    parts = [*([str(own)] if own else []), *zips]
    return {EXECUTOR_PATH: os.pathsep.join(parts)} if zips else {}


def outlive_java(spark: SparkSession) -> None:
    """
    Let this process exit after its JVM, which removes temporary files at its end.

    A supervisor may kill the processes that this one leaves behind, and tens of megabytes per run would stay.
    """
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - no API for its process
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if process is not None and process.stdin is not None:
        atexit.register(end_java, gateway, process, process.stdin)


def end_java(gateway: Any, process: subprocess.Popen[bytes], stdin: IO[bytes]) -> None:
    # Python's side first: a connection or a collected Java object that finds no JVM logs a traceback.
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError, subprocess.TimeoutExpired):
        stdin.close()  # the JVM exits then
        process.wait(JAVA_END_SECONDS_MAX)


def prepare_environment(master: str, python: str | None = None) -> None:
    """
    Set what Spark's launcher and Python workers read from the environment, unless it is set.

    `python` is the setting `spark.pyspark.python`. PYSPARK_PYTHON alone is used for both variables: Spark starts the
    workers of a Python source, also on executors, by PYSPARK_DRIVER_PYTHON.
    """
    os.environ["JAVA_HOME"] = str(ensure_java())
    # Workers must run this interpreter: another one may lack pyarrow or Virta.
    shim = worker_python()
    # Other machines do not have the shim.
    own = shim if master.startswith("local") else sys.executable
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        given = os.environ.get(variable)
        if given in {None, shim, sys.executable}:  # unset, or set here for an earlier session
            os.environ[variable] = python or own
        else:
            own = given
    if master.startswith(("local", "spark://127.", "spark://localhost")):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def use_packed_python(name: str) -> None:
    """
    Let executors run the Python of an archive that they unpack as `name`.

    Spark starts workers of a Python source by the same relative path on executors and on the driver, so the driver
    gets a link of that name to its own Python until it exits. Drivers in one directory share the link; the last one
    removes it.
    """
    link = Path(name).absolute()
    lock = shared_lock(link.with_name(f"{name}.lock"))
    if not link.exists():  # or it is a dangling link of a killed process
        draft = link.with_name(f"{name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(sys.prefix)
        draft.replace(link)
    atexit.register(leave_packed_python, link, lock)
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ[variable] = f"./{name}/bin/python"


def shared_lock(path: Path) -> int:
    """Take a shared lock on a file and return it; its only owner may remove the file."""
    while True:
        fd = files.open_file(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(fd)):
                return fd
        os.close(fd)  # the last user just removed it


def leave_packed_python(link: Path, lock: int) -> None:
    """Remove the link unless another process uses it."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        link.unlink(missing_ok=True)
        link.with_name(f"{link.name}.lock").unlink(missing_ok=True)
    os.close(lock)


def package_root() -> Path:
    """Return the directory that holds the `virta` package: what an executor needs on its PYTHONPATH."""
    return Path(__file__).resolve().parents[3]


def setting_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
