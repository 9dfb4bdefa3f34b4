"""
Pipelines that run beside the server: each is a child process, restarted when it fails.

Invariants: a pipeline has one process at a time; one that fails `failures_max` times within the window is
shown as failed with its last output, and not started until it is ordered to; an order given after a state was
shown finds that state; no process outlives the server. To stop they get SIGTERM, and after the deadline
SIGKILL with everything they started. If the server is killed, their standard input ends, and
`virta pipeline run --until-eof` ends with it.

The server reads the files and the status of pipelines; it never imports Spark.
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
TAIL_BYTES = 4096
COPY_S_MAX = 10.0  # a grandchild that left the group may keep the pipe open for a while
COPY_POLL_MS = 500  # how often copying checks whether it should stop, while nothing arrives
EXIT_NOT_STARTED = 1  # no process at all: memory or processes may be short for a while
EXIT_USAGE = 2  # the file is wrong: a restart would not help


@dataclass(frozen=True)
class RestartLimits:
    """How often a failing pipeline is restarted, and how long it may take to stop."""

    failures_max: int
    window_ms: int
    backoff_ms: int
    stop_ms: int


class SupervisedPipeline:
    """One pipeline and the thread that restarts its process."""

    noun = "pipeline"  # in log lines

    def __init__(
        self,
        pipeline: Pipeline,
        command: Sequence[str],
        log: Path,
        limits: RestartLimits,
        logger: Any,
    ) -> None:
        self.pipeline = pipeline
        self.log = log
        self._command = list(command)
        self._limits = limits
        self._logger = logger.bind(**{self.noun: pipeline.name})
        self._environment: dict[str, str] | None = None  # that of the server
        self._failures: deque[float] = deque(maxlen=limits.failures_max)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of _process and _closed
        self._orders = threading.Lock()  # one order at a time
        self._closed = False  # the server stops: no process is started any more
        self._stopping = threading.Event()
        self._restarting = True  # False when the thread will start no more processes
        self._thread = self._make_thread()
        self._restarts = 0
        self._last_error: str | None = None
        self._facts = self._facts_in("starting")

    def start(self) -> None:
        self._thread.start()

    def start_again(self) -> None:
        """Start it and forget its failures, unless it is running."""
        with self._orders:
            if self._restarting and not self._stopping.is_set():
                return
            self._thread.join()
            with self._lock:
                if self._closed:
                    return
                self._failures.clear()
                self._stopping.clear()
                self._restarting = True
                self._publish("starting")
                self._thread = self._make_thread()
                self._thread.start()

    def end(self) -> None:
        """Stop it and wait for its end; it is not restarted until `start_again`."""
        with self._orders:
            self.stop_soon(for_good=False)
            self.stop(time.monotonic() + self._limits.stop_ms / 1000)
            self._publish("stopped")

    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=f"{self.noun}-{self.pipeline.name}")

    def facts(self) -> dict[str, Any]:
        """Return the supervisor's last state; the run's own status has the rest."""
        return self._facts

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
        """Send SIGTERM; `stop` waits for the end."""
        with self._lock:
            self._closed |= for_good
            self._stopping.set()
            if self._process is not None:
                self._publish("stopping")
                # Popen.send_signal would reap a process that has just ended, for which our thread waits.
                os.kill(self._process.pid, signal.SIGTERM)

    def stop(self, deadline: float) -> None:
        """Wait until a time of the monotonic clock, then kill it and all it started."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._logger.warning(self._event("killed"), after_ms=self._limits.stop_ms)
            with self._lock:
                self._kill_all()
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            code = self._run_once()
            if self._stopping.is_set():
                break
            if code == 0:
                self._restarting = (
                    False  # before the state is shown: a start may be ordered after it
                )
                self._publish("finished")
                self._logger.info(self._event("finished"))
                return
            delay = self._failed(code)
            if delay is None:
                return
            self._stopping.wait(delay)
            self._restarts += not self._stopping.is_set()
        self._publish("stopped")

    def _run_once(self) -> int:
        """Run the process to its end and return its exit code."""
        with self._lock:
            if self._stopping.is_set():
                return 0
            try:
                process = self._process = subprocess.Popen(  # noqa: S603 - our own command
                    self._command,
                    stdin=subprocess.PIPE,  # open until this server ends
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._environment,
                )
            except OSError as error:
                self._last_error = f"its process cannot be started: {error}"
                return EXIT_NOT_STARTED
            self._publish("running")
        self._logger.info(self._event("started"), pid=process.pid)
        assert process.stdout is not None
        assert process.stdin is not None
        output = OutputFile(self.log)
        copying = threading.Thread(target=output.copy, args=(process.stdout,), daemon=True)
        copying.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._kill_all()  # its Java may outlive it for a while, and would continue to write
            code = process.wait()
            self._process = None
        process.stdin.close()
        copying.join(COPY_S_MAX)
        output.stop()
        copying.join()
        if code != 0 and not self._stopping.is_set():
            self._last_error = self._reason(process.pid, code, output.last_line())
        return code

    def _kill_all(self) -> None:
        """Kill the process group; its leader is not reaped yet, so the number is still its own."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _failed(self, code: int) -> float | None:
        """Return the seconds until the next start, or None if there is none."""
        now = time.monotonic()
        window = self._limits.window_ms / 1000
        self._failures.append(now)
        recent = [failed for failed in self._failures if failed > now - window]
        if code == EXIT_USAGE or len(recent) >= self._limits.failures_max:
            self._restarting = False  # before the state is shown, as above
            self._publish("failed")
            self._logger.error(
                self._event("gave_up"), failures=len(recent), within_ms=self._limits.window_ms,
                error=self._last_error,
            )  # fmt: skip
            return None
        first = min(self._limits.backoff_ms, BACKOFF_MS_MAX)
        wait_ms = int(backoff(len(recent) - 1, first, BACKOFF_MS_MAX))
        self._publish("waiting")
        self._logger.warning(self._event("failed"), again_in_ms=wait_ms, error=self._last_error)
        return wait_ms / 1000

    def _reason(self, pid: int, code: int, last_line: str) -> str:
        """Return why the process ended: the reason in its status, else its last line, else its exit code."""
        status = self._run_status()
        if status.get("pid") == pid and status.get("reason"):
            return str(status["reason"])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return last_line if last_line and code > 0 else how

    def _event(self, what: str) -> str:
        """Return the name of a log line, such as pipeline_started."""
        return f"{self.noun}_{what}"

    def _run_status(self) -> dict[str, Any]:
        """Return the last status that the process wrote."""
        with contextlib.suppress(OSError):  # such as too many open files
            return read_json(self.pipeline, "status.json")
        return {}

    def _publish(self, state: str) -> None:
        # The file first: a client that gets a state from the server finds the same there.
        facts = self._facts_in(state)
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            write_supervised(self.pipeline, facts)
        self._facts = facts


class OutputFile:
    """The output of a process in a file of bounded size with one predecessor; the last line in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = b""
        self._stopped = threading.Event()

    def copy(self, stream: IO[bytes]) -> None:
        """
        Copy the stream until it ends or `stop` is called, and close it.

        Output that cannot be written is discarded, so that the process does not block.
        """
        with stream:
            ready = select.poll()
            ready.register(stream, select.POLLIN)
            while not self._stopped.is_set():
                if not ready.poll(COPY_POLL_MS):
                    continue
                chunk = os.read(stream.fileno(), CHUNK_BYTES)
                if not chunk:
                    return
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                with contextlib.suppress(OSError):
                    self._write(chunk)

    def stop(self) -> None:
        """End `copy`, also if a process still has the other end open."""
        self._stopped.set()

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


class InvalidPipeline:
    """A listed file that is no pipeline: it is shown, not run."""

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

    def __init__(
        self, patterns: Sequence[str], logs: Path, limits: RestartLimits, logger: Any
    ) -> None:
        self._limits = limits
        self._logger = logger
        self.supervised: dict[str, SupervisedPipeline] = {}
        self.invalid: dict[str, InvalidPipeline] = {}
        for file in listed(patterns, logger):
            if len(self.supervised) + len(self.invalid) == PIPELINES_MAX:
                logger.error("pipelines_left_out", limit=PIPELINES_MAX, first=str(file))
                break
            self._add_pipeline(file, logs)

    def _add_pipeline(self, file: Path, logs: Path) -> None:
        try:
            pipeline = load(file)
        except PipelineError as error:
            self._refuse(file, error.problems)
            return
        if pipeline.name in self.supervised:
            self._refuse(file, [f"{file}: another file has the pipeline {pipeline.name} too"])
            return
        command = [sys.executable, "-m", "virta", "pipeline", "run", str(file), "--until-eof"]
        self.supervised[pipeline.name] = SupervisedPipeline(
            pipeline, command, logs / f"{pipeline.name}.log", self._limits, self._logger
        )

    def _refuse(self, file: Path, problems: Sequence[str]) -> None:
        self.invalid[file.stem] = InvalidPipeline(file, problems)
        self._logger.error("pipeline_invalid", file=str(file), problems=list(problems))

    def start(self) -> None:
        for one in self.supervised.values():
            one.start()

    def stop_soon(self) -> None:
        for one in self.supervised.values():
            one.stop_soon()

    def stop(self) -> None:
        """Stop all of them at once, with one deadline."""
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
        """Execute one of ORDERS and return the status after it; None if there is no such pipeline."""
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
