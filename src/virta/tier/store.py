"""
Object storage behind a few verbs: create once, write, read, list, delete.

A store is an S3, Google or Azure bucket, or a directory; `obstore` talks to it and repeats requests that failed on the
way. Credentials come from the store's own environment variables (`AWS_ACCESS_KEY_ID`, …), never from the URL.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from virta.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file", "memory")
# In a log's directory: segments that were fetched, and the shipper's copy of the newest manifest with all segments.
CACHE: Final = "cache"
COPY: Final = "cache/manifest.json"
# Segments that were fetched from the store, on this machine's disk.
CACHE_BYTES_MAX: Final = 2 * 1024 * 1024 * 1024
# Ranges of an object that are closer than this are read by one request: a request costs some milliseconds.
COALESCE_BYTES: Final = 64 * 1024
# One request with all its repetitions; after that the caller decides.
RETRY_S: Final = 60.0
REQUEST_TIMEOUT: Final = "30s"
CONNECT_TIMEOUT: Final = "5s"


class StoredObject(NamedTuple):
    name: str
    bytes: int
    modified: datetime


def is_store_url(path: object) -> bool:
    """Return whether `path` is the URL of a store, not a directory of this machine."""
    return isinstance(path, str) and path.partition("://")[0] in SCHEMES and "://" in path


class TierStore:
    """The objects below one URL; names are relative to it."""

    def __init__(self, url: str, *, retry_s: float = RETRY_S) -> None:
        self.url = url.rstrip("/")
        self._obstore, self._store = _open(url, retry_s)

    def create(self, name: str, data: bytes) -> bool:
        """Write a new object; return False if one with that name exists. Of two callers one succeeds."""
        with self._errors("creating", name):
            try:
                self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except (
                self._obstore.exceptions.AlreadyExistsError,
                self._obstore.exceptions.PreconditionError,
            ):
                return False
        return True

    def write(self, name: str, data: bytes | IO[bytes]) -> None:
        """Write an object, or replace it."""
        with self._errors("writing", name):
            self._obstore.put(self._store, name, data)

    def read(self, name: str) -> bytes:
        """
        Return a whole object.

        Raises:
            TierError: with code `tier_object_missing` if there is none.
        """
        with self._errors("reading", name):
            return bytes(self._obstore.get(self._store, name).bytes())

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to, not including, `end`."""
        with self._errors("reading", name):
            return bytes(self._obstore.get_range(self._store, name, start=start, end=end))

    def read_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range; ranges near each other are one request."""
        with self._errors("reading", name):
            starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
            found = self._obstore.get_ranges(
                self._store, name, starts=starts, ends=ends, coalesce=COALESCE_BYTES
            )
            return [bytes(data) for data in found]

    def stream(self, name: str) -> Iterator[bytes]:
        """Yield an object in pieces, for objects that should not be in memory whole."""
        with self._errors("reading", name):
            for piece in self._obstore.get(self._store, name).stream():
                yield bytes(piece)

    def list(self, prefix: str, *, after: str | None = None) -> list[StoredObject]:
        """Return the objects below `prefix` (a folder) in order of their names, those after `after` only."""
        with self._errors("listing", prefix):
            found = [
                StoredObject(meta["path"], meta["size"], meta["last_modified"])
                for page in self._obstore.list(self._store, prefix, offset=after)
                for meta in page
            ]
        return sorted(found)

    def delete(self, name: str) -> None:
        """Remove an object; one that does not exist is no error."""
        with self._errors("deleting", name):
            try:
                self._obstore.delete(self._store, name)
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return

    @contextmanager
    def _errors(self, action: str, name: str) -> Iterator[None]:
        exceptions = self._obstore.exceptions
        try:
            yield
        except (exceptions.NotFoundError, FileNotFoundError) as exc:
            raise TierError(f"{self.url} has no object {name}", code="tier_object_missing") from exc
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as exc:
            raise TierError(
                f"{action} {name} at {self.url} is not allowed; check the store's credentials in the"
                f" environment ({_first_line(exc)})",
                code="tier_access_denied",
            ) from exc
        except (exceptions.BaseError, OSError) as exc:
            raise TierError(
                f"{action} {name} at {self.url} failed: {_first_line(exc)}", code="tier_unreachable"
            ) from exc


def _open(url: str, retry_s: float) -> tuple[Any, Any]:
    from urllib.parse import urlsplit  # noqa: PLC0415  # not needed to open a directory

    try:
        import obstore  # noqa: PLC0415  # an extra
        import obstore.exceptions  # noqa: PLC0415
        from obstore.store import LocalStore, from_url  # noqa: PLC0415
    except ImportError as exc:
        raise TierError(
            "object storage needs the package obstore: pip install 'virta[tier]'",
            code="tier_not_installed",
        ) from exc
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise TierError(
            f"{url!r} is not the URL of a store; give s3://, gs://, az:// or file:// with a prefix",
            code="tier_url",
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise TierError(
            f"the URL of a store has a bucket and a prefix only, got {parts.scheme}://… with credentials"
            " or options; credentials come from the environment (docs/tier.md)",
            code="tier_url",
        )
    if parts.scheme == "file":
        return obstore, LocalStore(Path(parts.path), mkdir=True)
    options: dict[str, Any] = {}
    if parts.scheme != "memory":
        options["retry_config"] = {"retry_timeout": timedelta(seconds=retry_s)}
        options["client_options"] = {
            "timeout": REQUEST_TIMEOUT,
            "connect_timeout": CONNECT_TIMEOUT,
            # Given options replace those of the environment, so this one is passed on.
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"},
        }
    try:
        return obstore, from_url(url, **options)
    except (obstore.exceptions.BaseError, ValueError) as exc:
        raise TierError(f"{url!r} cannot be used: {_first_line(exc)}", code="tier_url") from exc


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0][:300] if lines else type(exc).__name__
