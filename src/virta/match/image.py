"""
A filter set shared by the processes of a machine: the native index as a file that each maps into memory.

Invariant: an image is used only by the very build that wrote it, for the very filters it was made of, as long
as it is whole, and only where nobody else could have written it. Whatever stands in the way (another build, a
damaged file, no address to map it to, a directory that others may write to, a full disk) costs time, never an
answer: the programs are added to an index on the heap.

The first process that needs an image makes it, the others wait for it: one build a machine, not one a process.
A damaged image is made anew. Files are replaced, never written to: whoever maps one keeps what it mapped.
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
        """The opaque conditions in the order in which an index numbers them."""
        return tuple(dict.fromkeys(one for many in self.opaques.values() for one in many))


def heap_matcher(programs: Programs) -> Matcher:
    """A matcher of these filters in this process's own memory."""
    engine = NativeEngine()
    engine.add_programs(programs)
    return Matcher(engine=engine)


def shared_matcher(path: Path, load: Callable[[], Programs]) -> Matcher:
    """
    A matcher of the filters that `load` gives, from the image at `path`, which is made when there is none.

    A build's images have names of their own: `path` is extended by the identity of the code.
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
    """What tells one build of the native index from another; None where builds cannot be told apart."""
    core = load("virta.match._core")
    assert core is not None, "images are of the native index"
    # What is loaded counts: an upgrade may have replaced the file since.
    code = core.code()
    return hashlib.sha256(code).digest() if code else None


def set_mark(code: bytes, target: Path, programs: Programs) -> bytes:
    """What tells an image of these filters from any other, whatever it may have been renamed to."""
    mark = hashlib.sha256(code + target.name.encode())
    mark.update(programs.digests)
    return mark.digest()


def is_ours(file: Path | int) -> bool:
    """Whether only this user, or root, can have written what is there."""
    about = os.stat(file)
    return about.st_uid in {os.geteuid(), 0} and not about.st_mode & SHARED_WRITE


def opened(target: Path, mark: bytes, programs: Programs) -> Matcher | None:
    """The matcher in an image, if it is there and can be used; what is damaged is removed."""
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
    """Make room for another image; remove what builds that died have left. The lock is held."""
    for draft in directory.glob("*.draft"):
        draft.unlink(missing_ok=True)
    images = sorted(directory.glob("*.index"), key=lambda image: image.stat().st_mtime)
    for image in images[: max(0, len(images) + 1 - IMAGES_MAX)]:
        image.unlink(missing_ok=True)


def write(target: Path, mark: bytes, programs: Programs) -> None:
    """Make an image, unless this machine has no room for one. The lock is held."""
    engine = NativeEngine()
    # Any number will do; that of the name puts different sets at different addresses.
    number = int.from_bytes(hashlib.sha256(target.name.encode()).digest()[:4], "little")
    if not engine.begin_image(number):
        return
    engine.add_programs(programs)
    if engine.conditions() != programs.conditions():
        return  # a condition was dropped on the way: numbers would not fit
    draft = target.with_suffix(".draft")
    try:
        with open(draft, "xb", opener=files.open_file) as file:
            engine.save_image(file, mark)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
