"""
What a pipeline's run last said about itself: one small file, replaced whole, beside its checkpoints.

Reading it needs no Spark, so the command line and the server can.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virta.spark.pipeline import Pipeline

STATUS = "status.json"


def write_status(pipeline: Pipeline, status: dict[str, Any]) -> None:
    """Replace the status; checkpoints on remote storage have none."""
    directory = pipeline.checkpoint_path()
    if "://" in directory:
        return
    path = Path(directory) / STATUS
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{STATUS}.{os.getpid()}")
    draft.write_text(json.dumps(status))
    draft.replace(path)


def read_status(pipeline: Pipeline) -> dict[str, Any]:
    """The last status of a pipeline; one that says running while its process is gone is `lost`."""
    path = Path(pipeline.checkpoint_path()) / STATUS
    try:
        status: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"pipeline": pipeline.name, "state": "never run", "queries": {}}
    if status["state"] == "running" and not Path(f"/proc/{status['pid']}").exists():
        status["state"] = "lost"
    return status
