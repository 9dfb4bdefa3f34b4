"""
One tree of coded errors.

    VirtaError
    ├── LogError
    │   ├── LogClosedError          the handle was closed
    │   ├── LogNotFoundError        no log in that directory (and it may not be made)
    │   ├── LogReadOnlyError        the directory or the handle does not allow writing
    │   ├── LogFormatError          a newer format, a foreign directory, a file system we refuse
    │   ├── LogLimitError           a topic, key, value or batch over its limit
    │   ├── LogTypeError            an argument of the wrong type (also a TypeError)
    │   ├── LogLockTimeoutError     another writer kept the lock for too long
    │   ├── LogWriteError           the write failed (disk full, file size limit); nothing was added
    │   ├── LogSyncError            fsync failed: this writer is poisoned
    │   ├── LogGapError             offsets asked for are no longer there
    │   ├── LogCorruptionError      bytes that fail their checksum, with file and ranges
    │   ├── TierError               object storage cannot be used, or another shipper has taken over
    │   └── ConsumerError           a position, a lease or a group that does not allow the call
    ├── EventError                  not a valid CloudEvent
    ├── FilterError                 a filter that cannot be parsed or is not allowed
    ├── JournalError                the journal refused a request
    ├── StreamIdError               not a stream id
    ├── ConfigError                 a setting that cannot be used
    ├── CaptureError                changes of a database cannot be captured
    ├── AccessError                 a credential or a right that is not accepted
    ├── HubError                    the hub cannot accept this event or subscription
    ├── ViewError                   a live view that cannot be opened or cannot go on
    ├── RequestError                an HTTP request that is refused, with its status
    └── ClientError                 the server refused or could not be reached

Every error has a stable `code` for programs and a `message` for people: what was wrong, the value,
what would be right. Context that a program may want is an attribute, never only text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class VirtaError(Exception):
    """The root: catch this to catch everything Virta raises on purpose."""

    default_code: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code


class LogError(VirtaError):
    default_code = "log_error"


class LogClosedError(LogError):
    default_code = "log_closed"


class LogNotFoundError(LogError):
    default_code = "log_not_found"


class LogReadOnlyError(LogError):
    default_code = "log_read_only"


class LogFormatError(LogError):
    default_code = "log_format"


class LogLimitError(LogError):
    default_code = "log_limit"


class LogTypeError(LogError, TypeError):
    default_code = "log_type"


class LogLockTimeoutError(LogError):
    default_code = "log_lock_timeout"


class LogWriteError(LogError):
    default_code = "log_write_failed"


class LogSyncError(LogError):
    default_code = "log_sync_failed"


class LogGapError(LogError):
    """Offsets `first` up to, not including, `next` are not in the log any more."""

    default_code = "log_gap"

    def __init__(self, message: str, *, first: int, next: int) -> None:  # noqa: A002
        super().__init__(message)
        self.first = first
        self.next = next


class LogCorruptionError(LogError):
    """
    Bytes that are not what was written.

    `segment` is the file's path, `byte_from`/`byte_to` the damaged range in it, `offset_from`/`offset_to`
    its offsets as far as they are known (`offset_to` is None when nothing valid follows),
    `reason` one of short, bad-header, bad-payload, bad-record, chain, zero, missing.
    """

    default_code = "log_corrupt"

    def __init__(
        self,
        message: str,
        *,
        segment: str,
        byte_from: int,
        byte_to: int,
        offset_from: int,
        offset_to: int | None,
        reason: str,
    ) -> None:
        super().__init__(message)
        self.segment = segment
        self.byte_from = byte_from
        self.byte_to = byte_to
        self.offset_from = offset_from
        self.offset_to = offset_to
        self.reason = reason


class ConsumerError(LogError):
    default_code = "consumer_error"


class TierError(LogError):
    """Object storage cannot be reached or used, or another process ships the same log."""

    default_code = "tier_error"


class EventError(VirtaError):
    """`attribute` names the CloudEvents attribute at fault, `index` the event's place in a batch."""

    default_code = "event_invalid"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        attribute: str | None = None,
        index: int | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.attribute = attribute
        self.index = index


class FilterError(VirtaError):
    """
    `keyword` and `path` say where in the filter; `code` is the dialect's own.

    `members` are further facts a program may want, under the names the dialect's error answer gives them.
    """

    default_code = "filter_invalid"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        keyword: str | None = None,
        path: str | None = None,
        members: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.keyword = keyword
        self.path = path
        self.members = dict(members or {})


class JournalError(VirtaError):
    default_code = "journal_error"


class StreamIdError(VirtaError):
    default_code = "stream_id_invalid"


class ConfigError(VirtaError):
    """`setting` names the setting at fault and `origin` where its value came from."""

    default_code = "config_invalid"

    def __init__(
        self, message: str, *, setting: str | None = None, origin: str | None = None
    ) -> None:
        super().__init__(message)
        self.setting = setting
        self.origin = origin


class CaptureError(VirtaError):
    """`retry` says that the cause may pass by itself, such as a database that is restarting."""

    default_code = "capture_failed"

    def __init__(self, message: str, *, code: str | None = None, retry: bool = False) -> None:
        super().__init__(message, code=code)
        self.retry = retry


class AccessError(VirtaError):
    """A credential or a right that is not accepted; `code` says which check failed."""

    default_code = "access_refused"


class HubError(VirtaError):
    default_code = "hub_error"


class ViewError(VirtaError):
    default_code = "view_error"


class RequestError(VirtaError):
    """`status` is the HTTP status, `members` what the JSON body says beside `code`."""

    default_code = "invalid-request"

    def __init__(self, status: int, code: str, message: str = "", **members: object) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.members = members


class ClientError(VirtaError):
    """`status` is the HTTP status, when the server answered; `code` is then the server's own."""

    default_code = "client_error"

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None) -> None:
        super().__init__(message, code=code)
        self.status = status
