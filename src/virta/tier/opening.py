"""
Open a log wherever it is: a directory, a directory whose older segments are in object storage, or object storage.

    virta.open("data/log")            a directory; if it is shipped, readers continue into the store
    virta.open("s3://bucket/orders")  the shipped log, read-only
"""

from __future__ import annotations

import json
import tempfile
import uuid
import weakref
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import LogReadOnlyError
from virta.log.disk_errors import translate_disk_errors
from virta.log.format.directory import META, SHIPPED
from virta.log.opening import open_log
from virta.tier.store import CACHE, CACHE_BYTES_MAX, COPY, is_store_url

if TYPE_CHECKING:
    import os

    from virta.log.log import Log


@translate_disk_errors("opening")
def open(  # noqa: A001
    path: str | os.PathLike[str],
    *,
    tier_cache: str | os.PathLike[str] | None = None,
    tier_cache_bytes_max: int = CACHE_BYTES_MAX,
    **options: Any,
) -> Log:
    """
    Open a log directory (see `virta.log.open`), or the URL of a shipped log.

    Args:
        tier_cache: a directory for segments fetched from the store: `cache` in the log's directory by default, for
            a URL a temporary directory that is removed with the log.
        tier_cache_bytes_max: size of that cache; the segments used least recently are removed.
    """
    if is_store_url(path):
        return _open_url(str(path), tier_cache, tier_cache_bytes_max, options)
    url = _shipped_to(Path(path))
    log = open_log(path, **options)
    if url is not None:
        from virta.tier.history import TierHistory  # noqa: PLC0415  # most logs are not shipped

        cache = log.path / CACHE if tier_cache is None else Path(tier_cache)
        copy = log.path / COPY
        log.history = TierHistory(url, cache, bytes_max=tier_cache_bytes_max, copy=copy)
    return log


def _open_url(
    url: str, cache: str | os.PathLike[str] | None, bytes_max: int, options: dict[str, Any]
) -> Log:
    if options.pop("read_only", True) is not True:
        raise LogReadOnlyError(f"{url} is a shipped log, which can only be read")
    from virta.tier.history import TierHistory  # noqa: PLC0415  # most logs are not shipped

    name = f"virta-tier-{uuid.uuid4().hex}"
    directory = Path(tempfile.gettempdir(), name) if cache is None else Path(cache)
    files.make_directory(directory)
    history = TierHistory(url, directory / CACHE, bytes_max=bytes_max)
    files.write_whole(directory / META, history.manifest().meta.encode())
    log = open_log(directory, read_only=True, **options)
    log.history = history
    if cache is None:
        weakref.finalize(log, rmtree, directory, ignore_errors=True)
    return log


def _shipped_to(directory: Path) -> str | None:
    try:
        if not (directory / COPY).exists():
            return None
        url = json.loads((directory / SHIPPED).read_bytes())["url"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None
