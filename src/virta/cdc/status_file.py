"""The last status of a capture, for metrics and the console: `<data-dir>/cdc/<name>.status`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from virta import clock, files
from virta.cdc.state import DIRECTORY


def write(data_dir: str | Path, name: str, **figures: Any) -> None:
    """Replace the status; it is not worth a sync."""
    path = Path(data_dir) / DIRECTORY / f"{name}.status"
    temporary = path.with_suffix(".status.tmp")
    with open(temporary, "wb", opener=files.open_file) as file:
        file.truncate(0)
        file.write(msgspec.json.encode({"time": clock.time_text(clock.now_us()), **figures}))
    temporary.rename(path)


def read(data_dir: str | Path, name: str) -> dict[str, Any]:
    """Return the last status, empty if there is none."""
    try:
        status: dict[str, Any] = msgspec.json.decode(
            (Path(data_dir) / DIRECTORY / f"{name}.status").read_bytes()
        )
    except (OSError, msgspec.MsgspecError):
        return {}
    return status
