"""What the crash tests share: seeds, directory images, forked children and the fault-injecting shim."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import traceback
from contextlib import contextmanager
from enum import IntEnum, IntFlag
from pathlib import Path

HERE = Path(__file__).parent


def seed_of(name: str) -> random.Random:
    """A random generator whose seed is printed; VIRTA_SEED replays it."""
    seed = os.environ.get("VIRTA_SEED") or str(random.SystemRandom().getrandbits(32))
    print(f"{name}: replay with VIRTA_SEED={seed}")
    return random.Random(f"{name}:{seed}")


def rounds_of(default: int) -> int:
    """How much to do; VIRTA_ROUNDS overrides."""
    return int(os.environ.get("VIRTA_ROUNDS") or default)


# --- directories as values -------------------------------------------------------------------------

Image = dict[str, bytes]


def image_of(directory: Path) -> Image:
    """Every file of a log directory by name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def restore(image: Image, directory: Path) -> Path:
    """Make the directory contain exactly the image."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, data in image.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return directory


# --- children --------------------------------------------------------------------------------------


def fork(work, *args) -> int:
    """Run `work` in a forked child that never returns into the test; its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(120)  # whatever happens, nothing is left running
        work(*args)
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def join(pid: int) -> int:
    """The child's exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def children():
    """A list of pids; whatever is still alive at the end is killed."""
    pids: list[int] = []
    try:
        yield pids
    finally:
        for pid in pids:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            except (ChildProcessError, ProcessLookupError):
                continue


# --- the shim --------------------------------------------------------------------------------------


class Kind(IntFlag):
    OPEN = 1
    WRITE = 2
    SYNC = 4
    TRUNCATE = 8
    RENAME = 16
    UNLINK = 32


ALL_KINDS = Kind.OPEN | Kind.WRITE | Kind.SYNC | Kind.TRUNCATE | Kind.RENAME | Kind.UNLINK
# Crashing before an open is crashing after the call before it.
CHANGES = ALL_KINDS & ~Kind.OPEN


class Action(IntEnum):
    KILL_BEFORE = 1
    KILL_AFTER = 2
    FAIL_ONCE = 3
    FAIL_ON = 4
    SHORT_ONCE = 5
    FULL_DISK = 6
    SLOW_FAIL = 7


def compile_shim(folder: Path) -> Path | None:
    """The shim as a shared library; None without a compiler that can make it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / f"faulty_io-{sysconfig.get_platform()}.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "faulty_io.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr)
    return library if done.returncode == 0 else None


class Faults:
    """The shim of this process, which must have been started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.fault_seen.restype = ctypes.c_long

    def arm(self, where: Path, kinds: Kind, nth: int, action: Action, error: int = 0) -> None:
        self._library.fault_arm(
            os.fsencode(where), int(kinds), ctypes.c_long(nth), int(action), error
        )

    def disarm(self) -> int:
        """Calls counted since it was armed."""
        self._library.fault_disarm()
        return int(self._library.fault_seen())


def run_scenario(script: Path, name: str, shim: Path | None, folder: Path, **env: str) -> str:
    """Run one scenario of a script in a process under the shim; its output."""
    environment = {**os.environ, **env, "PYTHONFAULTHANDLER": "1"}
    if shim is not None:
        preload = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = f"{preload}:{shim}".strip(":")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), name, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
