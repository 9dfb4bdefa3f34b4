"""
Compression of batches with zstd: Python 3.14 has it, earlier versions use `backports.zstd` (the extra `zstd`).

The library is loaded when a log needs it. This module knows nothing of batches: the codec wraps what it returns.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from virta.errors import LogFormatError

if TYPE_CHECKING:
    from types import ModuleType

COMPRESSIONS: Final = ("none", "zstd")
# zstd's own default: a higher level costs an append more than it saves.
ZSTD_LEVEL: Final = 3

_MODULE: Final = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_library: ModuleType | None = None
_contexts = threading.local()


class CompressionError(ValueError):
    """Bytes that are no frame of the size that was promised."""


def load_library() -> Any:
    """
    Return the zstd module.

    Raises:
        LogFormatError: it is not installed.
    """
    global _library  # noqa: PLW0603
    if _library is None:
        try:
            _library = import_module(_MODULE)
        except ImportError as exc:
            raise LogFormatError(
                "this log is compressed with zstd, and Python before 3.14 needs a package for it: "
                "pip install 'virta[zstd]'",
                code="log_compression_missing",
            ) from exc
    return _library


def compress(data: bytes | bytearray | memoryview) -> bytes:
    """Return `data` as one zstd frame."""
    context = getattr(_contexts, "compressor", None)
    if context is None:
        # A context is costly to make and not for several threads at once.
        context = _contexts.compressor = load_library().ZstdCompressor(level=ZSTD_LEVEL)
    frame: bytes = context.compress(data, mode=context.FLUSH_FRAME)
    return frame


def decompress(frame: bytes | bytearray | memoryview, size: int) -> bytes:
    """
    Return the content of a frame, which must have exactly `size` bytes; no more than that is ever allocated.

    Raises:
        CompressionError: it is damaged or has another size.
    """
    zstd = load_library()
    context = zstd.ZstdDecompressor()
    try:
        data: bytes = context.decompress(frame, max_length=size)
        complete = context.eof or not context.decompress(b"", max_length=1)
    except zstd.ZstdError as exc:
        raise CompressionError(str(exc)) from exc
    if len(data) != size or not complete or not context.eof or context.unused_data:
        raise CompressionError(f"the frame has not the {size} bytes it should have")
    return data
