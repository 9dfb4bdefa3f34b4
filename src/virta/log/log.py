"""
Log: one handle on one log directory, for writing and reading.

Handles are cheap, safe to share between threads, and independent of each other: any number of processes may have
any number of them on one directory. After a fork the child's handle reopens everything.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from virta.errors import LogClosedError, LogReadOnlyError, LogSyncError
from virta.log import seek
from virta.log.consumers.consumer import Consumer, ConsumerInfo, list_consumers
from virta.log.engine import kernel
from virta.log.engine.source import History, LogSource, all_bases
from virta.log.engine.writer import DURABILITIES, Writer
from virta.log.format.checkpoints import Checkpoints
from virta.log.format.codec import Encoded
from virta.log.format.compression import COMPRESSIONS
from virta.log.format.directory import Meta, boot_id, change_compression, open_locks
from virta.log.format.topic_lookup import TopicLookup
from virta.log.limits import LEASE_S_DEFAULT, PARTITIONS_DEFAULT, POLL_S, TOPICS_MAX
from virta.log.open_logs import open_handles
from virta.log.reader import FOREVER, Reader
from virta.log.topics import TopicCounts, TopicInfo
from virta.log.upkeep import compaction, retention
from virta.log.upkeep.verify import RepairReport, VerifyReport, repair_log, verify_log
from virta.log.validation import check_option, check_producer, encode_records, topic_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime, timedelta
    from pathlib import Path

    from virta.log.format.damage import Problem
    from virta.log.record import Appended

    Durability = Literal["none", "interval", "group", "fsync"]
    Visibility = Literal["committed", "durable"]
    Compression = Literal["none", "zstd"]
    Start = int | str | datetime
    Topics = str | bytes | Iterable[str | bytes] | None


class Log:
    """A durable, ordered event log that is just a directory. Made by `virta.open`."""

    def __init__(
        self,
        path: Path,
        meta: Meta,
        *,
        read_only: bool,
        durability: Durability,
        visibility: Visibility,
        lock_timeout: float,
    ) -> None:
        self.path = path
        self.stream = meta.stream
        self.id = str(meta.stream)
        self.durability = durability
        self.visibility = visibility
        self.read_only = read_only
        self.history: History | None = None  # older segments, kept elsewhere
        self._meta = meta
        self._lock_timeout = lock_timeout
        self._core: Any = None
        self._writer: Writer | None = None
        self._closed = self._forked = False
        self._start_empty()
        self._connect()
        open_handles.add(self)

    def _connect(self) -> None:
        if self.read_only:
            self._core = kernel.open_read_only(self.path)
        else:
            lock_fd, sync_fd, control_fd = open_locks(self.path)
            try:
                core = kernel.Kernel(lock_fd, sync_fd, control_fd, boot_id(), True)
            finally:
                os.close(control_fd)
            try:
                self._writer = Writer(
                    self.path,
                    core,
                    stream=self._meta.stream,
                    segment_bytes=self._meta.segment_bytes,
                    lock_timeout=self._lock_timeout,
                    compression=self._meta.compression,
                )
            except BaseException:
                core.close()
                raise
            self._core = core

    def compress_with(self, compression: str) -> None:
        """Compress what is appended from now on ("zstd"), or no longer ("none"); all writers of the log follow."""
        check_option("compression", compression, COMPRESSIONS)
        writer = self._writable()

        def change() -> Meta:
            self._meta = change_compression(self.path, compression)
            return self._meta

        writer.set_compression(change)

    @property
    def compression(self) -> str:
        """How this log compresses, as it was when it was opened: "none" or "zstd"."""
        return self._meta.compression

    # --- writing ---

    def append(
        self,
        topic: str | bytes,
        key: str | bytes = b"",
        value: bytes | bytearray | memoryview | dict[str, Any] | list[Any] = b"",
        *,
        durability: Durability | None = None,
    ) -> Appended:
        """
        Append one record, a dict or a list as JSON; return its offset, with the durability that was met.

        Raises:
            LogTypeError, LogLimitError: an argument is not acceptable; nothing was written.
            LogWriteError: the disk refused; nothing was appended.
            LogSyncError: fsync failed; the handle is of no more use.
        """
        writer = self._writer
        level = self.durability if durability is None else durability
        if writer is not None and not self._closed and level in DURABILITIES:
            try:
                buf = kernel.encode(((topic, key, value),))
            except (IndexError, OverflowError):
                pass  # append_many raises the error
            else:
                return writer.append(buf, 1, level)
        return self.append_many(((topic, key, value),), durability=durability)

    def append_many(
        self,
        records: Iterable[Sequence[Any]] | Encoded,
        *,
        durability: Durability | None = None,
        producer: tuple[int, int] | None = None,
        lock_timeout: float | None = None,
    ) -> Appended:
        """
        Append (topic, key, value) records as one batch: all of them or none; dicts and lists as JSON.

        Args:
            producer: (id, sequence) makes the append idempotent: a batch of that producer whose sequence is
                not higher than its last is not appended again. Ids are 2 to 2^64-1, sequences 0 to 2^32-1.
            lock_timeout: seconds to wait for other writers, instead of the log's own.
        """
        writer = self._writable()
        level = self.durability if durability is None else durability
        if level not in DURABILITIES:
            check_option("durability", level, DURABILITIES)
        if producer is not None:
            check_producer(producer)
        if isinstance(records, Encoded):
            return writer.append(records.batch, records.records, level, producer, lock_timeout)
        if type(records) is not list and type(records) is not tuple:
            records = list(records)
        batch = encode_records(records)
        return writer.append(batch, len(records), level, producer, lock_timeout)

    def flush(self) -> None:
        """Make everything appended so far, by any process, durable."""
        self._writable().flush()

    # --- reading ---

    def read(
        self,
        topics: Topics = None,
        start: Start = "earliest",
        end: Start | None = None,
        *,
        follow: bool = False,
        timeout: float | None = None,
        visibility: Visibility | None = None,
        on_gap: Literal["raise", "skip"] = "raise",
        on_corruption: Literal["raise", "skip"] = "raise",
    ) -> Reader:
        """
        Return the records from `start` up to, not including, `end`, in order.

        Args:
            start, end: "earliest", "latest", an offset, a datetime, or a consumer's name (its position).
            follow: wait for more at the end; without it iteration ends at the present end.
            timeout: with follow, end after that many seconds without a record.
            visibility: "committed" or "durable"; the log's own by default.
            on_gap, on_corruption: "raise", or "skip" and log a warning (`reader.problems` has the damage).
        """
        self._open_or_raise()
        check_option("on_gap", on_gap, ("raise", "skip"))
        check_option("on_corruption", on_corruption, ("raise", "skip"))
        seen = visibility or self.visibility
        check_option("visibility", seen, ("committed", "durable"))
        first = seek.resolve(self, start)
        stop = FOREVER if end is None else seek.resolve(self, end)
        snapshot = self._snapshot()
        if not follow and end is None and snapshot is not None and snapshot.current:
            stop = max(snapshot.next, first)  # records that arrive meanwhile are for the next read
        return Reader(
            self.source,
            start=first,
            stop=stop,
            topics=topic_set(topics),
            follow=follow,
            timeout=timeout,
            durable=seen == "durable",
            skip_gaps=on_gap == "skip",
            skip_damage=on_corruption == "skip",
        )

    def consumer(
        self,
        name: str,
        *,
        topics: Topics = None,
        start: Start = "earliest",
        partitions: int = PARTITIONS_DEFAULT,
        lease: float = LEASE_S_DEFAULT,
        on_gap: Literal["raise", "skip"] = "raise",
    ) -> Consumer:
        """
        Join a named consumer, which has a durable position; all members of one name share the work.

        Args:
            start: where a new consumer begins.
            partitions: keys are spread over so many; fixed when the consumer is created.
            lease: seconds between two reads or commits; after a third more a member is hung and loses its partitions.
            on_gap: what to do when retention removed records before they were read.
        """
        self._writable()
        check_option("on_gap", on_gap, ("raise", "skip"))
        return Consumer(
            self,
            name,
            topics=topic_set(topics),
            start=seek.resolve(self, start),
            partitions=partitions,
            lease=lease,
            on_gap=on_gap,
        )

    # --- what is in the log ---

    def topics(
        self, *, after: str | bytes | None = None, limit: int = TOPICS_MAX
    ) -> list[TopicInfo]:
        """
        Count the records of each topic: up to `limit` topics in order of their names, after the name `after`.

        Sealed segments are read once per handle. If there are `limit` topics, call again with `after`.
        """
        self._open_or_raise()
        return self._topics.find(self, after, limit)

    @property
    def first_offset(self) -> int:
        self._open_or_raise()
        return next(iter(all_bases(self.path, self.history)), 0)

    @property
    def next_offset(self) -> int:
        """The offset the next record will get."""
        snapshot = self._snapshot()
        if snapshot is not None and snapshot.current:
            return snapshot.next
        return max(seek.valid_end(self.path), self.history.next if self.history else 0)

    @property
    def durable_offset(self) -> int:
        """Everything below it survives a power failure."""
        self._open_or_raise()
        snapshot = self._snapshot()
        if snapshot is None or not snapshot.current:
            return 0
        own = self._writer.synced_next if self._writer is not None else 0
        return max(snapshot.durable_offset, min(own, snapshot.next))

    @property
    def epoch(self) -> int:
        """A number that grows whenever recovery drops published offsets."""
        self._open_or_raise()
        return seek.epoch(self.path)

    @property
    def clock_ahead(self) -> float:
        """Return the seconds by which the newest record is ahead of this machine's clock, or 0.0."""
        self._open_or_raise()
        return seek.clock_ahead(self)

    @property
    def bytes(self) -> int:
        """Size of all segments, without headroom for the next records."""
        self._open_or_raise()
        return seek.total_bytes(self)

    def segments(self) -> list[seek.SegmentInfo]:
        self._open_or_raise()
        return seek.describe(self)

    def consumers(self) -> list[ConsumerInfo]:
        self._open_or_raise()
        return list_consumers(self)

    # --- upkeep ---

    def retain(
        self,
        *,
        max_age: timedelta | float | None = None,
        max_bytes: int | None = None,
        consumed: bool = False,
        keep_unread: bool = False,
        unshipped: bool = False,
        keep_from: int | None = None,
        dry_run: bool = False,
    ) -> retention.RetentionReport:
        """
        Remove whole sealed segments, oldest first, while any given rule says so.

        Args:
            max_age, max_bytes: its last record is older, the log is larger than that.
            consumed: every named consumer has read past it.
            keep_unread, keep_from: but never what a named consumer has not read yet, nor from this offset on.
            unshipped: also what is not in object storage yet, if the log is shipped there.
        """
        self._writable()
        return retention.retain(
            self,
            max_age=max_age,
            max_bytes=max_bytes,
            consumed=consumed,
            keep_unread=keep_unread,
            unshipped=unshipped,
            keep_from=keep_from,
            dry_run=dry_run,
        )

    def pin(self, offset: int) -> retention.Pin:
        """Keep retention and compaction away from `offset` and above until the pin is closed."""
        self._writable()
        return retention.Pin(self.path, offset)

    def compact(
        self, *, topics: Topics = None, progress: Callable[[int, int], None] | None = None
    ) -> compaction.CompactionReport:
        """In sealed segments, keep only the newest record of each (topic, key); records without a key stay."""
        self._writable()
        return compaction.compact(self, topic_set(topics), progress)

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Check every checksum, chain and offset of the log."""
        self._open_or_raise()
        return verify_log(self, progress)

    def repair(self, *, progress: Callable[[int, int], None] | None = None) -> RepairReport:
        """Move damaged bytes to quarantine/ and mark their offsets as lost."""
        return repair_log(self, self._writable(), progress)

    @property
    def recovered(self) -> list[Problem]:
        """What this handle had to repair when it attached to the log."""
        return [problem for found in self._writable().recovered for problem in found.problems]

    def close(self) -> None:
        """Close the files; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._wake()  # followers in other threads
        if self._writer is not None:
            self._writer.close()
        if self._core is not None:
            self._core.close()
        self._topic_lookup.close()
        open_handles.discard(self)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<virta.Log {str(self.path)!r}{' closed' if self._closed else ''}>"

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # --- for the package's own modules ---

    @property
    def source(self) -> LogSource:
        # Not cached: without a reference cycle a dropped log is closed at once.
        return LogSource(
            self.path,
            snapshot=self._snapshot,
            sync=self._sync_to,
            notified=self._notified,
            wait=self._wait,
            wake=self._wake,
            closed=lambda: self._closed,
            checkpoints=self._checkpoints,
            history=self.history,
            topic_lookup=self._topic_lookup,
        )

    def _open_or_raise(self) -> None:
        if self._closed:
            raise LogClosedError(f"the log at {self.path} is closed")
        if self._forked:  # in a child: open everything again
            with self._connecting:
                if self._forked:
                    self._connect()
                    self._forked = False

    def _writable(self) -> Writer:
        self._open_or_raise()
        if self._writer is None:
            raise LogReadOnlyError(f"the log at {self.path} was opened with read_only=True")
        return self._writer

    def _snapshot(self) -> kernel.Snapshot | None:
        self._open_or_raise()
        if self._core is None:
            return None
        return kernel.Snapshot(*self._unless_closed(self._core.snapshot))

    def _sync_to(self, fd: int, base: int, end: int) -> None:
        """Make durable what a reader is about to return."""
        try:
            if self._writer is None or not self._core.sync(base, end, True):
                os.fdatasync(fd)
        except ValueError as exc:
            raise LogClosedError(f"the log at {self.path} is closed") from exc
        except OSError as exc:
            raise LogSyncError(
                f"fsync of {self.path} failed ({exc.strerror}): its newest records may not be on disk; "
                "read them with visibility='committed' if that is good enough"
            ) from exc

    def _notified(self) -> int:
        self._open_or_raise()
        return 0 if self._core is None else int(self._unless_closed(self._core.notified))

    def _wait(self, seen: int, timeout: float) -> None:
        if self._core is None:
            time.sleep(min(timeout, POLL_S))
            self._core = kernel.open_read_only(self.path)  # a writer may have created the page
            return
        self._unless_closed(self._core.wait, seen, timeout)

    def _unless_closed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the kernel, which raises ValueError after another thread closed it."""
        try:
            return call(*arguments)
        except ValueError as exc:
            raise LogClosedError(f"the log at {self.path} is closed") from exc

    def _wake(self) -> None:
        if self._core is not None:
            with suppress(ValueError):  # closed
                self._core.wake()

    def after_fork(self) -> None:
        if self._closed:
            return
        if self._core is not None:
            # A child that keeps the descriptors keeps the parent's locks, too.
            self._core.abandon()
        self._core = self._writer = None
        self._start_empty()
        self._forked = True

    def _start_empty(self) -> None:
        self._connecting = threading.Lock()
        self._checkpoints = Checkpoints()
        self._topic_lookup = TopicLookup(self.path)
        self._topics = TopicCounts()
