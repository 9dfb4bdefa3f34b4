"""
Pipelines that run beside the server: each a child process, started again when it fails.

Invariants: a pipeline has one process at a time; one that fails `failures_max` times within the window is
left alone, visibly, with its last words, until it is ordered to start; an order given after a state was
shown finds that state; no process outlives the server. On a stop they get SIGTERM, and after the deadline
SIGKILL with everything they started. When the server itself is killed, their standard input ends, and
`virta pipeline run --until-eof` ends with it.

The server knows pipelines by their files and their status; it never imports Spark.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta import files
from virta.backoff import backoff
from virta.spark.pipeline.file import load, nameless
from virta.spark.pipeline.model import PipelineError
from virta.spark.pipeline.status import began, read_json, read_status, write_supervised

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

    from virta.spark.pipeline.model import Pipeline

PIPELINES_MAX = 64
ORDERS = ("start", "stop", "restart")
BACKOFF_MS_MAX = 60_000
LOG_BYTES_MAX = 1024 * 1024  # of one file; the one before it is kept as .1
CHUNK_BYTES = 64 * 1024
LAST_WORDS_BYTES = 4096
PUMP_S_MAX = 10.0  # a grandchild that left the group may hold the pipe for a moment
PUMP_POLL_MS = 500  # how soon a copying that is over is seen to be, while nothing comes
EXIT_NOT_STARTED = 1  # no process at all: memory or processes may be short for a while
EXIT_USAGE = 2  # the file is wrong: trying again would not help


@dataclass(frozen=True)
class Limits:
    """How patiently a failing pipeline is started again, and how long it may take to stop."""

    failures_max: int
    window_ms: int
    backoff_ms: int
    stop_ms: int


class Supervised:
    """One pipeline and the thread that keeps its process going."""

    def __init__(
        self, pipeline: Pipeline, command: Sequence[str], log: Path, limits: Limits, logger: Any
    ) -> None:
        self.pipeline = pipeline
        self.log = log
        self._command = list(command)
        self._limits = limits
        self._logger = logger.bind(pipeline=pipeline.name)
        self._failures: deque[float] = deque(maxlen=limits.failures_max)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # between starting a process and being told to stop
        self._orders = threading.Lock()  # one after the other: start, stop
        self._closed = False  # the server ends: nothing is started any more
        self._stopping = threading.Event()
        self._kept = True  # False from the moment the thread has nothing left to start
        self._thread = self._make_thread()
        self._restarts = 0
        self._last_error: str | None = None
        self._shown = self._facts_in("starting")

    def start(self) -> None:
        self._thread.start()

    def start_again(self) -> None:
        """Begin anew, failures forgotten, unless it is being kept going."""
        with self._orders:
            if self._kept and not self._stopping.is_set():
                return
            self._thread.join()
            with self._lock:
                if self._closed:
                    return
                self._failures.clear()
                self._stopping.clear()
                self._kept = True
                self._say("starting")
                self._thread = self._make_thread()
                self._thread.start()

    def end(self) -> None:
        """Stop it and wait for that; it is not started again until somebody says so."""
        with self._orders:
            self.stop_soon(for_good=False)
            self.stop(time.monotonic() + self._limits.stop_ms / 1000)
            self._say("stopped")

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._keep, name=f"pipeline-{self.pipeline.name}")

    def facts(self) -> dict[str, Any]:
        """What the supervisor said last, all of it of one moment; the run's own status has the rest."""
        return self._shown

    def _facts_in(self, state: str) -> dict[str, Any]:
        process = self._process
        return {
            "server": os.getpid(),
            "began": began(os.getpid()),
            "state": state,
            "pid": process.pid if process is not None else None,
            "restarts": self._restarts,
            "last_error": self._last_error,
            "log": str(self.log),
        }

    def overview(self) -> dict[str, Any]:
        return read_status(self.pipeline, self.facts())

    def stop_soon(self, *, for_good: bool = True) -> None:
        """Tell it to stop; `stop` waits for that."""
        with self._lock:
            self._closed |= for_good
            self._stopping.set()
            if self._process is not None:
                self._say("stopping")
                # Popen's own way to send it reaps a process that has just ended, while our thread waits for it.
                os.kill(self._process.pid, signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """Wait until a moment of the monotonic clock, then kill it and all it started."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._logger.warning("pipeline_killed", after_ms=self._limits.stop_ms)
            with self._lock:
                self._kill_all()
            self._thread.join()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            code = self._run_once()
            if self._stopping.is_set():
                break
            if code == 0:
                self._kept = False  # before it is shown: whoever reads it may order a start
                self._say("finished")
                self._logger.info("pipeline_finished")
                return
            delay = self._failed(code)
            if delay is None:
                return
            self._stopping.wait(delay)
            self._restarts += not self._stopping.is_set()
        self._say("stopped")

    def _run_once(self) -> int:
        """Run the process to its end; its exit code."""
        with self._lock:
            if self._stopping.is_set():
                return 0
            try:
                process = self._process = subprocess.Popen(  # noqa: S603 - our own command
                    self._command,
                    stdin=subprocess.PIPE,  # open for as long as this server lives
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._last_error = f"its process cannot be started: {error}"
                return EXIT_NOT_STARTED
            self._say("running")
        self._logger.info("pipeline_started", pid=process.pid)
        assert process.stdout is not None
        assert process.stdin is not None
        output = Output(self.log)
        pump = threading.Thread(target=output.copy, args=(process.stdout,), daemon=True)
        pump.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._kill_all()  # its Java may outlive it for a while, and would write on
            code = process.wait()
            self._process = None
        process.stdin.close()
        pump.join(PUMP_S_MAX)
        output.enough()
        pump.join()
        if code != 0 and not self._stopping.is_set():
            self._last_error = self._reason(process.pid, code, output.last_line())
        return code

    def _kill_all(self) -> None:
        """The process leads a group of its own, and is not reaped yet: the number is still its."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _failed(self, code: int) -> float | None:
        """Seconds until the next start, or None when there is none."""
        now = time.monotonic()
        window = self._limits.window_ms / 1000
        self._failures.append(now)
        recent = [moment for moment in self._failures if moment > now - window]
        if code == EXIT_USAGE or len(recent) >= self._limits.failures_max:
            self._kept = False  # before it is shown, as above
            self._say("failed")
            self._logger.error(
                "pipeline_gave_up", failures=len(recent), within_ms=self._limits.window_ms,
                error=self._last_error,
            )  # fmt: skip
            return None
        first = min(self._limits.backoff_ms, BACKOFF_MS_MAX)
        wait_ms = int(backoff(len(recent) - 1, first, BACKOFF_MS_MAX))
        self._say("waiting")
        self._logger.warning("pipeline_failed", again_in_ms=wait_ms, error=self._last_error)
        return wait_ms / 1000

    def _reason(self, pid: int, code: int, last_line: str) -> str:
        """Why the process ended: the sentence in its status, else its last words, else how."""
        status: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # too many open files: then how it ended has to do
            status = read_json(self.pipeline, "status.json")
        if status.get("pid") == pid and status.get("reason"):
            return str(status["reason"])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return last_line if last_line and code > 0 else how

    def _say(self, state: str) -> None:
        # The file first: whoever has heard it from the server finds the same there.
        facts = self._facts_in(state)
        with contextlib.suppress(OSError):  # a full disk is the run's to report
            write_supervised(self.pipeline, facts)
        self._shown = facts


class Output:
    """What a process prints, in a file of bounded size with one predecessor; the last line in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = b""
        self._over = threading.Event()

    def copy(self, stream: IO[bytes]) -> None:
        """
        Until the stream ends or it is `enough`; the stream is closed here, where nobody else reads it.

        What cannot be written is read all the same, so that nobody blocks.
        """
        with stream:
            ready = select.poll()
            ready.register(stream, select.POLLIN)
            while not self._over.is_set():
                if not ready.poll(PUMP_POLL_MS):
                    continue
                chunk = os.read(stream.fileno(), CHUNK_BYTES)
                if not chunk:
                    return
                self._tail = (self._tail + chunk)[-LAST_WORDS_BYTES:]
                with contextlib.suppress(OSError):
                    self._write(chunk)

    def enough(self) -> None:
        """Whoever still holds the other end is not waited for."""
        self._over.set()

    def _write(self, chunk: bytes) -> None:
        files.make_inside(self._path.parent)
        with open(self._path, "ab", opener=files.open_file) as file:
            file.write(chunk)
            full = file.tell() >= LOG_BYTES_MAX
        if full:
            self._path.replace(self._path.with_name(self._path.name + ".1"))

    def last_line(self) -> str:
        lines = self._tail.decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Invalid:
    """A listed file that is no pipeline: shown, not run."""

    def __init__(self, file: Path, problems: Sequence[str]) -> None:
        self.name = file.stem
        self._problems = list(problems)

    def overview(self) -> dict[str, Any]:
        return {
            "pipeline": self.name,
            "description": "",
            "state": "invalid",
            "reason": "; ".join(self._problems),
            "queries": {},
        }


class Pipelines:
    """All pipelines listed for a server."""

    def __init__(self, patterns: Sequence[str], logs: Path, limits: Limits, logger: Any) -> None:
        self._limits = limits
        self._logger = logger
        self.supervised: dict[str, Supervised] = {}
        self.invalid: dict[str, Invalid] = {}
        for file in listed(patterns, logger):
            if len(self.supervised) + len(self.invalid) == PIPELINES_MAX:
                logger.error("pipelines_left_out", limit=PIPELINES_MAX, first=str(file))
                break
            self._add(file, logs)

    def _add(self, file: Path, logs: Path) -> None:
        try:
            pipeline = load(file)
        except PipelineError as error:
            self._refuse(file, error.problems)
            return
        if pipeline.name in self.supervised:
            self._refuse(file, [f"{file}: another file has the pipeline {pipeline.name} too"])
            return
        command = [sys.executable, "-m", "virta", "pipeline", "run", str(file), "--until-eof"]
        self.supervised[pipeline.name] = Supervised(
            pipeline, command, logs / f"{pipeline.name}.log", self._limits, self._logger
        )

    def _refuse(self, file: Path, problems: Sequence[str]) -> None:
        self.invalid[file.stem] = Invalid(file, problems)
        self._logger.error("pipeline_invalid", file=str(file), problems=list(problems))

    def start(self) -> None:
        for one in self.supervised.values():
            one.start()

    def stop_soon(self) -> None:
        for one in self.supervised.values():
            one.stop_soon()

    def stop(self) -> None:
        """End them all, at once, within one deadline."""
        self.stop_soon()
        deadline = time.monotonic() + self._limits.stop_ms / 1000
        for one in self.supervised.values():
            one.stop(deadline)

    def overviews(self) -> list[dict[str, Any]]:
        running = [one.overview() for one in self.supervised.values()]
        return running + [one.overview() for one in self.invalid.values()]

    def overview(self, name: str) -> dict[str, Any] | None:
        if name in self.supervised:
            return self.supervised[name].overview()
        return self.invalid[name].overview() if name in self.invalid else None

    def order(self, name: str, order: str) -> dict[str, Any] | None:
        """Carry out one of ORDERS and show what came of it; None when there is no such pipeline."""
        one = self.supervised.get(name)
        if one is None:
            return None
        if order != "start":
            one.end()
        if order != "stop":
            one.start_again()
        return one.overview()

    def __len__(self) -> int:
        return len(self.supervised) + len(self.invalid)


def listed(patterns: Sequence[str], logger: Any) -> list[Path]:
    """The files that paths and patterns name, each once; of a pattern's files only the pipelines."""
    files: dict[Path, None] = {}
    for pattern in patterns:
        if not glob.has_magic(pattern):
            files[Path(pattern)] = None
            continue
        found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        if not found:
            logger.warning("pipelines_none_found", pattern=pattern)
        files.update(dict.fromkeys(file for file in found if not nameless(file)))
    return list(files)
