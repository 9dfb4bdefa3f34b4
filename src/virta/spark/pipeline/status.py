"""
The state of a pipeline's run and of its supervisor: small files beside its checkpoints.

    status.json      written by the run whenever a query has made progress
    supervised.json  written by the server that supervises the run
    run.lock         locked by the run: a checkpoint has one run at a time

Reading them needs no Spark, so the command line and the server show the same state.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import VirtaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.spark.pipeline.model import Pipeline

STATUS = "status.json"
SUPERVISED = "supervised.json"
LOCK = "run.lock"
QUERY = "query"  # the name of a run's query, of its totals and of the directory of its checkpoint
COUNTED = ("rows", "rows_per_second", "late", "repeats")


class CheckpointError(VirtaError):
    """A checkpoint that cannot be continued."""

    default_code = "checkpoint_old"


class BusyError(VirtaError):
    """The pipeline runs already."""

    default_code = "pipeline_busy"


def is_remote(pipeline: Pipeline) -> bool:
    """Return whether the checkpoint is on remote storage, which has none of these files."""
    return "://" in pipeline.checkpoint_path()


@contextmanager
def claimed(pipeline: Pipeline) -> Iterator[None]:
    """
    Lock the pipeline: two runs on one checkpoint would break each other's micro-batches.

    Raises:
        BusyError: another process holds it.
    """
    if is_remote(pipeline):
        yield
        return
    path = Path(pipeline.checkpoint_path()) / LOCK
    files.make_directory(path.parent)
    try:
        lock = files.lock_file(path)
    except BlockingIOError as error:
        running = read_json(pipeline, STATUS).get("pid", "unknown")
        raise BusyError(
            f"pipeline {pipeline.name} runs already (process {running}): stop that run first,"
            " or give this one another checkpoint"
        ) from error
    try:
        yield
    finally:
        files.unlock_file(lock)


def write_status(pipeline: Pipeline, status: dict[str, Any]) -> None:
    write_json(pipeline, STATUS, status)


def write_starting(pipeline: Pipeline) -> None:
    """Replace the status of the run before: this process starts, and Spark takes seconds to."""
    write_status(pipeline, run_status(pipeline, "starting", None, {}))


def run_status(
    pipeline: Pipeline,
    state: str,
    reason: str | None,
    queries: dict[str, Any],
    sinks: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the status of a run in this process."""
    return {
        "pipeline": pipeline.name,
        "state": state,
        "pid": os.getpid(),
        "began": began(os.getpid()),
        "updated": round(time.time(), 3),
        "reason": reason,
        "queries": queries,
        "sinks": sinks or {},
    }


def check_checkpoint(pipeline: Pipeline) -> None:
    """
    Refuse the checkpoint of a version that ran a query per sink: a new query would read everything again.

    Raises:
        CheckpointError: its message has the offset to start from with a new checkpoint.
    """
    place = Path(pipeline.checkpoint_path())
    if is_remote(pipeline) or (place / QUERY / "offsets").is_dir():
        return
    old = [name for name in pipeline.sink_names() if (place / name / "offsets").is_dir()]
    if old:
        queries = read_json(pipeline, STATUS).get("queries", {}).values()
        offsets = [query["offset"] for query in queries if query.get("offset") is not None]
        start = f"start = {min(offsets)}" if offsets else "start at the offset it has reached"
        raise CheckpointError(
            f"the checkpoint {place} is of an older version, with a query per sink ({', '.join(old)}):"
            f" give the pipeline a new checkpoint and its source {start}"
        )


def write_supervised(pipeline: Pipeline, supervised: dict[str, Any]) -> None:
    write_json(pipeline, SUPERVISED, supervised)


def write_json(pipeline: Pipeline, name: str, value: dict[str, Any]) -> None:
    if is_remote(pipeline):
        return
    path = Path(pipeline.checkpoint_path()) / name
    files.make_directory(path.parent)
    draft = path.with_name(f"{name}.{os.getpid()}")
    files.write_text(draft, json.dumps(value))
    draft.replace(path)


def read_json(pipeline: Pipeline, name: str) -> dict[str, Any]:
    """Return the content of a file, {} if it is missing or was emptied by a power loss."""
    try:
        value: dict[str, Any] = json.loads((Path(pipeline.checkpoint_path()) / name).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value


def began(pid: int) -> int | None:
    """Return when a process began, in ticks, to detect a reused process id; None if it has ended."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if facts[0] == "Z" else int(facts[19])


def is_alive(pid: int | None, since: int | None) -> bool:
    return pid is not None and since is not None and began(pid) == since


def read_status(pipeline: Pipeline, supervised: dict[str, Any] | None = None) -> dict[str, Any]:
    """
    Return the state of a pipeline: `never run`, `running`, `finished`, `stopped`, `failed`, or `lost` when its
    process ended without a final report; under a running server also `starting`, `waiting`, `stopping`.

    `supervised` is the supervisor's own knowledge, else its file is read.
    """
    status = read_json(pipeline, STATUS) or {"state": "never run", "queries": {}}
    if status["state"] in {"starting", "running"} and not is_alive(
        status["pid"], status.get("began")
    ):
        status["state"] = "lost"
    if supervised is None:
        supervised = read_json(pipeline, SUPERVISED)
        if not is_alive(supervised.get("server"), supervised.get("began")):
            supervised = {}
    if supervised:
        status["state"] = combined_state(status, supervised)
        status["pid"] = supervised["pid"]
    queries = list(status["queries"].values())
    # A second query, for dead letters, reads the same input: the first one counts it.
    first = queries[0] if queries else {}
    return {
        "pipeline": pipeline.name,
        "description": pipeline.description,
        "state": status["state"],
        "pid": status.get("pid"),
        "updated": status.get("updated"),
        "reason": supervised.get("last_error") or status.get("reason"),
        "restarts": supervised.get("restarts", 0),
        "log": supervised.get("log"),
        **{name: first.get(name, 0) for name in COUNTED},
        "dead": sum(query.get("dead", 0) for query in queries),
        "lag": max((query["lag"] for query in queries if query["lag"] is not None), default=None),
        "batch": first.get("batches", 0) - 1,
        "watermark": first.get("watermark"),
        "queries": status["queries"],
        "sinks": status.get("sinks", {}),
    }


def combined_state(status: dict[str, Any], supervised: dict[str, Any]) -> str:
    """
    Return the state of a supervised run: that of its process while it runs and has reported one.

    After its last report it is `stopping` until the supervisor has seen its end: only then can it be started again.
    """
    state: str = supervised["state"]
    if state != "running":
        return state
    if status.get("pid") != supervised["pid"]:
        return "starting"
    return status["state"] if status["state"] in {"starting", "running"} else "stopping"
