"""
Captures of databases beside the server (`--cdc`): each is a child process that is restarted when it fails.

A capture is `virta cdc … --until-eof`; supervision is that of pipelines. Its DSN is in the environment of the
process, not among its arguments, which every user of the machine can read.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from virta.cdc import status_file
from virta.cdc.sources import SOURCES_MAX, CaptureSource, parse_source
from virta.errors import CaptureError, ConfigError
from virta.server.pipeline_supervisor import SupervisedPipeline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virta.server.pipeline_supervisor import RestartLimits

DSN_VARIABLE = "VIRTA_CDC_DSN"


class SupervisedCapture(SupervisedPipeline):
    """One capture and the thread that restarts its process."""

    noun = "capture"

    def __init__(
        self, source: CaptureSource, data_dir: Path, limits: RestartLimits, logger: Any
    ) -> None:
        self.source = source
        self._data_dir = data_dir
        where = source.where if source.kind == "sqlite" else "-"
        command = [sys.executable, "-m", "virta", "cdc", source.kind, where]
        command += ["--data-dir", str(data_dir), "--name", source.name, "--until-eof"]
        log = data_dir / "cdc" / f"{source.name}.log"
        super().__init__(source, command, log, limits, logger)  # type: ignore[arg-type]  # its name is used, no more
        if source.kind != "sqlite":
            self._environment = os.environ | {DSN_VARIABLE: source.where}

    def overview(self) -> dict[str, Any]:
        """Return the state of the process and the last figures that it wrote."""
        facts = self.facts()
        return {
            "name": self.source.name,
            "kind": self.source.kind,
            "state": facts["state"],
            "restarts": facts["restarts"],
            "reason": facts["last_error"],
            **status_file.read(self._data_dir, self.source.name),
        }

    def _run_status(self) -> dict[str, Any]:
        return {}

    def _publish(self, state: str) -> None:
        self._facts = self._facts_in(state)


class Captures:
    """All captures listed for a server."""

    def __init__(
        self, texts: Sequence[str], data_dir: Path, limits: RestartLimits, logger: Any
    ) -> None:
        """
        Raises:
            ConfigError: a text is no source, or two have one name.
        """
        try:
            sources = [parse_source(text) for text in texts]
        except CaptureError as error:
            raise ConfigError(error.message, setting="cdc") from error
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"two sources of cdc have the name {twice[0]!r}: write NAME=… before one of them",
                setting="cdc",
            )
        if len(sources) > SOURCES_MAX:
            raise ConfigError(f"cdc lists {len(sources)} databases, the limit is {SOURCES_MAX}")
        self._limits = limits
        self.supervised = [SupervisedCapture(one, data_dir, limits, logger) for one in sources]

    def start(self) -> None:
        for one in self.supervised:
            one.start()

    def stop_soon(self) -> None:
        for one in self.supervised:
            one.stop_soon()

    def stop(self) -> None:
        """Stop all of them at once, with one deadline."""
        self.stop_soon()
        deadline = time.monotonic() + self._limits.stop_ms / 1000
        for one in self.supervised:
            one.stop(deadline)

    def overview(self, name: str) -> dict[str, Any] | None:
        """Return the state of one capture; None if there is none of this name."""
        return next((one.overview() for one in self.supervised if one.source.name == name), None)

    def overviews(self) -> list[dict[str, Any]]:
        return [one.overview() for one in self.supervised]
