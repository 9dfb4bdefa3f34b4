"""
A filter set shared by the processes of a machine: the native index as a file that each process maps.

Invariant: an image is used only by the build that wrote it, for the filters it was made of, if it is intact and
no other user can have written it. In any other case (another build, a damaged file, no free address range, a
directory that others may write to, a full disk) the programs are added to an index on the heap: slower, same
answers.

The first process that needs an image builds it while the others wait. A damaged image is rebuilt. Files are
replaced, never modified: a process that has mapped one keeps its content.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from virta import files
from virta.match.engine import NativeEngine
from virta.match.matcher import Matcher
from virta.native import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from virta.filters.tree import Condition

logger = logging.getLogger("virta.match")

SHARED_WRITE = 0o022  # of a file's mode: others may write
IMAGES_MAX = 8  # in a directory; the least recently opened goes first


class Programs(NamedTuple):
    """Different filters, compiled: filter i of `programs[ends[i]:ends[i+1]]` gets the number i + 1."""

    digests: Any  # buffers: 32 bytes each
    ends: Any  # int64, one more than filters
    programs: Any
    opaques: Mapping[int, tuple[Condition, ...]]

    def conditions(self) -> tuple[Condition, ...]:
        """Return the opaque conditions in the order in which an index numbers them."""
        return tuple(dict.fromkeys(one for many in self.opaques.values() for one in many))


def heap_matcher(programs: Programs) -> Matcher:
    """Return a matcher of these filters in this process's memory."""
    engine = NativeEngine()
    engine.add_programs(programs)
    return Matcher(engine=engine)


def shared_matcher(path: Path, load: Callable[[], Programs]) -> Matcher:
    """
    Return a matcher of the filters that `load` returns, from the image at `path`; build the image if needed.

    `path` is extended by the identity of the native code, so each build has its own images.
    """
    programs = load()
    code = code_mark()
    if code is None:
        return heap_matcher(programs)
    target = path.with_name(f"{path.name}-{code.hex()[:16]}.index")
    mark = set_mark(code, target, programs)
    try:
        matcher = opened(target, mark, programs)
        if matcher is None and is_ours(target.parent):
            lock = files.lock_file(target.parent / "images.lock", wait=True)
            try:
                if not target.exists():
                    tidy(target.parent)
                    write(target, mark, programs)
            finally:
                files.unlock_file(lock)
            matcher = opened(target, mark, programs)
    except (OSError, MemoryError) as exc:
        logger.warning("no image of the filter set at %s, it is built here: %s", target, exc)
        matcher = None
    return matcher or heap_matcher(programs)


@cache
def code_mark() -> bytes | None:
    """Return a hash of the loaded native code, None where it cannot be read."""
    core = load("virta.match._core")
    assert core is not None, "images are of the native index"
    # Of the loaded code, not the file: an upgrade may have replaced the file.
    code = core.code()
    return hashlib.sha256(code).digest() if code else None


def set_mark(code: bytes, target: Path, programs: Programs) -> bytes:
    """Return the mark of an image: a hash of the code, the file name and the filters."""
    mark = hashlib.sha256(code + target.name.encode())
    mark.update(programs.digests)
    return mark.digest()


def is_ours(file: Path | int) -> bool:
    """Return whether only this user or root can have written a file or directory."""
    about = os.stat(file)
    return about.st_uid in {os.geteuid(), 0} and not about.st_mode & SHARED_WRITE


def opened(target: Path, mark: bytes, programs: Programs) -> Matcher | None:
    """Return the matcher of an image, None if it is missing or unusable; remove a damaged image."""
    if not is_ours(target.parent):
        return None
    try:
        file = target.open("rb")
    except FileNotFoundError:
        return None
    with file:
        if not is_ours(file.fileno()):
            return None
        engine = NativeEngine()
        mapped = engine.open_image(file, mark, programs.conditions())
        with suppress(OSError):
            if mapped is None:
                target.unlink()
            else:
                os.utime(file.fileno())
    return Matcher(engine=engine) if mapped else None


def tidy(directory: Path) -> None:
    """Remove the oldest images over the limit and leftover drafts. The caller has the lock."""
    for draft in directory.glob("*.draft"):
        draft.unlink(missing_ok=True)
    images = sorted(directory.glob("*.index"), key=lambda image: image.stat().st_mtime)
    for image in images[: max(0, len(images) + 1 - IMAGES_MAX)]:
        image.unlink(missing_ok=True)


def write(target: Path, mark: bytes, programs: Programs) -> None:
    """Write an image, unless no address range is free for it. The caller has the lock."""
    engine = NativeEngine()
    # Any number works; one made of the name puts different sets at different addresses.
    number = int.from_bytes(hashlib.sha256(target.name.encode()).digest()[:4], "little")
    if not engine.begin_image(number):
        return
    engine.add_programs(programs)
    if engine.conditions() != programs.conditions():
        return  # a condition was dropped: its numbers would not match
    draft = target.with_suffix(".draft")
    try:
        with open(draft, "xb", opener=files.open_file) as file:
            engine.save_image(file, mark)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
