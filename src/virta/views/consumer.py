"""
One consumer of a view: its snapshot, its waiting map, and the frames it gets.

    SNAPSHOT   rows are sent by number; a change ahead of the cursor needs nothing, one behind it waits in the map
    CATCHING   the map is sent, key by key
    LIVE       it keeps up: the frames of every step are sent as they are
    OVERFLOW   too many keys waited: `reset` and a snapshot follow when the sink accepts bytes

The map is ordered: key -> (was in the result, the client may have it, first offset). A key that waits keeps its place
and its first offset, and its row is looked up when it is sent, so only the newest value is ever sent. The id of a
frame from the map is the first offset of the next waiting key: everything below it was sent.

    waiting + new     waits
    enter + leave     nothing, if the client cannot have the row; else leave
    leave + enter     update
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from virta.event.row_changes import ROOT_AUTO, row_of
from virta.views.frames import EMPTY_ID, LIVE, NO_ID, PING, RESET, ROW, SNAPSHOT, ViewFrame
from virta.views.tables.index import ENTER, LEAVE, TRUNCATED, UPDATE
from virta.views.tables.table import CHANGED, DELETED, EXPIRED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virta.errors import ViewError
    from virta.views.view import View

# Frames of one write while a consumer catches up, and rows that are examined for it.
PIECE_FRAMES: Final = 512
PIECE_BYTES: Final = 256 * 1024
NO_VALUES: Final[dict[int, bytes]] = {}
# Where the frames of a step may be written without asking the sink: a function that takes bytes, the tag of the
# positions, and whether the bytes are chunks of HTTP/1.1.
Output = tuple[Callable[[bytes], object], bytes, bool]

GAP, OVERFLOW, UNKNOWN_POSITION = "gap", "overflow", "unknown-position"


class FrameSink(Protocol):
    """Where the frames of a consumer go."""

    @property
    def blocked(self) -> bool:
        """Whether it accepts no frames now."""

    def write_frames(self, frames: Sequence[ViewFrame], payloads: dict[object, Any]) -> None:
        """Send frames; `payloads` keeps what equal sinks made of the same frames."""

    def wants_pump(self, consumer: ViewConsumer) -> None:
        """Call `pump` soon: something waits."""

    def failed(self, error: ViewError) -> None:
        """End: the view cannot go on."""


class _Waiting:
    """A key that waits."""

    __slots__ = ("expired", "first", "last", "may_have", "was")

    def __init__(self, *, was: bool, may_have: bool, first: int, last: int) -> None:
        self.was = was
        self.may_have = may_have
        self.first = first
        self.last = last  # offset of the newest change
        self.expired = False


class ViewConsumer:
    """One consumer; its methods are called in one thread."""

    __slots__ = (
        "_cursor",
        "_live",
        "_map",
        "_numbers",
        "_reset",
        "_snapshot_due",
        "closed",
        "direct",
        "output",
        "sink",
        "view",
        "written_at",
    )

    def __init__(self, view: View, sink: FrameSink) -> None:
        self.view = view
        self.sink = sink
        self.closed = False
        self._live = False  # `live` was sent, and nothing has waited since
        self._numbers: list[int] | None = None  # rows of a snapshot that runs
        self._cursor = 0
        self._map: dict[str, _Waiting] = {}
        self._reset = ""  # the reason of a reset that has to be sent
        self._snapshot_due = False
        self.output: Output | None = None
        self.direct: Output | None = None  # the output, only while it keeps up
        self.written_at = 0.0  # monotonic seconds: when frames went to the output

    # Beginning: one of these, then `pump`.

    def begin_snapshot(self, reset: str = "") -> None:
        """Begin with a snapshot, after a `reset` with this reason if one is given."""
        self.view.consumers[self] = None
        self._restart(reset)

    def begin_resume(self, touched: Mapping[str, bool], position: int) -> None:
        """Begin with the keys that changed since `position`: key -> whether it was in the result then."""
        self.view.consumers[self] = None
        last = self.view.table.position - 1
        for key, was in touched.items():
            self._map[key] = _Waiting(was=was, may_have=True, first=position, last=last)
        self._check_overflow()

    def close(self) -> None:
        """End; nothing is sent any more."""
        self.closed = True
        self.direct = None
        self.view.consumers.pop(self, None)
        self._map.clear()
        self._numbers = None

    # State.

    @property
    def keeps_up(self) -> bool:
        """Whether frames of the next step can be sent as they are."""
        return self._live and not self._map and not self.sink.blocked

    @property
    def waiting(self) -> int:
        """Keys that wait."""
        return len(self._map)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and no snapshot runs."""
        return self._live and not self._map

    @property
    def position(self) -> int:
        """The offset below which everything was sent; NO_ID while a snapshot runs."""
        if self._numbers is not None or self._snapshot_due:
            return NO_ID
        for waiting in self._map.values():
            return waiting.first
        return self.view.table.position

    # Called by the view.

    def note(self, hits: Sequence[ViewFrame]) -> None:
        """Let the keys of hits wait."""
        if self.closed or self._snapshot_due:
            return
        for hit in hits:
            if hit.name == TRUNCATED:
                self._restart("truncated")
                break
            if not self._is_ahead(hit.number):
                self._note(hit)
        self._check_overflow()
        self._live = False
        self.direct = None
        if not self.sink.blocked:
            self.sink.wants_pump(self)

    def _note(self, hit: ViewFrame) -> None:
        waiting = self._map.get(hit.key)
        if waiting is None:
            had = hit.name != ENTER
            waiting = _Waiting(was=had, may_have=had, first=hit.offset, last=hit.offset)
            self._map[hit.key] = waiting
        elif hit.name == LEAVE and not waiting.may_have:
            del self._map[hit.key]
            return
        waiting.last = hit.offset
        waiting.expired = hit.reason == EXPIRED

    def _is_ahead(self, number: int) -> bool:
        """Return whether a running snapshot will still come to a row."""
        numbers = self._numbers
        if numbers is None or number < 0:
            return False
        at = bisect_left(numbers, number, self._cursor)
        return at < len(numbers) and numbers[at] == number

    def _check_overflow(self) -> None:
        if len(self._map) > self.view.table.limits.view_pending_max:
            self._restart(OVERFLOW)

    def _restart(self, reset: str) -> None:
        """Forget everything; a snapshot follows, after a `reset` if a reason is given."""
        self._map.clear()
        self._numbers = None
        self._live = False
        self.direct = None
        self._snapshot_due = True
        self._reset = reset

    # Sending.

    def pump(self, values: Mapping[int, bytes] = NO_VALUES) -> list[int]:
        """
        Send one piece of what waits; return the offsets of values that have to be read first.

        Args:
            values: what was read since the last call. Values that are missing and not in it are asked for.
        """
        if self.closed or self.sink.blocked:
            return []
        frames: list[ViewFrame] = []
        missing: list[int] = []
        if self._snapshot_due:
            frames += self._start_snapshot()
        if self._numbers is not None:
            missing = self._send_rows(frames, values)
        if self._numbers is None and not missing:
            missing = self._send_map(frames, values)
        if self._numbers is None and not self._map and not self._live:
            self._live = True
            position = self.view.table.position
            data = {"offset": position, "rows": self.view.count}
            frames.append(ViewFrame(LIVE, position, data=data))
        if frames:
            self.sink.write_frames(frames, {})
        if not missing and not self.idle and not self.sink.blocked and not self.closed:
            self.sink.wants_pump(self)
        self.direct = self.output if self.keeps_up and not self.closed else None
        return missing

    def pause(self) -> None:
        """Ask the sink again before every write: it is blocked, and calls `pump` when it is not."""
        self.direct = None

    def ping(self, timestamp: str) -> ViewFrame:
        """Return a `ping`; its id is the position if nothing waits."""
        position = self.view.table.position
        data = {"timestamp": timestamp, "offset": position}
        return ViewFrame(PING, position if self.idle else NO_ID, data=data)

    def _start_snapshot(self) -> list[ViewFrame]:
        self._snapshot_due = False
        frames = []
        if self._reset:
            frames.append(ViewFrame(RESET, EMPTY_ID, data={"reason": self._reset}))
        frames.append(ViewFrame(SNAPSHOT, EMPTY_ID, data={"rows": self.view.count}))
        self._reset = ""
        self._map.clear()
        self._numbers = self.view.row_numbers()
        self._cursor = 0
        return frames

    def _send_rows(self, frames: list[ViewFrame], values: Mapping[int, bytes]) -> list[int]:
        """Send rows of the snapshot from the cursor on."""
        numbers, table, view = self._numbers, self.view.table, self.view
        assert numbers is not None
        size = 0
        while self._cursor < len(numbers):
            if len(frames) >= PIECE_FRAMES or size >= PIECE_BYTES:
                return []
            number = numbers[self._cursor]
            # A number may have another key by now; its row is in the result or it is not.
            if number < len(table.keys) and view.number in table.members[number]:
                key, offset = table.keys[number], table.offsets[number]
                assert key is not None
                event = self._row_value(number, offset, values)
                if event is None:
                    ahead = numbers[self._cursor : self._cursor + PIECE_FRAMES]
                    return self._missing(ahead, offset, values)
                size += len(event)
                frames.append(ViewFrame(ROW, NO_ID, key, offset, event))
            self._cursor += 1
        self._numbers = None
        return []

    def _missing(
        self, numbers: Sequence[int], stuck: int, values: Mapping[int, bytes]
    ) -> list[int]:
        """Return offsets whose values have to be read; an offset that was read in vain has expired."""
        table = self.view.table
        offsets = [table.row_at(n) for n in numbers if table.values.get(n) is None]
        return sorted({o for o in offsets if o >= 0 and o not in values} | {stuck})

    def _row_value(self, number: int, offset: int, values: Mapping[int, bytes]) -> bytes | None:
        event = self.view.table.values.get(number)
        if event is None:
            event = values.get(offset)
        if event is None:
            return None
        return row_of(event) if self.view.root == ROOT_AUTO else event

    def _send_map(self, frames: list[ViewFrame], values: Mapping[int, bytes]) -> list[int]:
        """Send waiting keys in order."""
        size = 0
        made: ViewFrame | None = None
        missing: list[int] = []
        while self._map and len(frames) < PIECE_FRAMES and size < PIECE_BYTES:
            key = next(iter(self._map))
            waiting = self._map[key]
            frame, offset = self._map_frame(key, waiting, values)
            if offset >= 0:
                missing = self._missing_keys(offset, values)
                break
            del self._map[key]
            if frame is None:
                continue
            if made is not None:
                made.id = waiting.first  # of the frame before this one
            frames.append(frame)
            made = frame
            size += len(frame.event or b"")
        if made is not None:
            made.id = self.position
        return missing

    def _map_frame(
        self, key: str, waiting: _Waiting, values: Mapping[int, bytes]
    ) -> tuple[ViewFrame | None, int]:
        """Return the frame of a waiting key, None for nothing; and the offset of a value it lacks, or -1."""
        view, table = self.view, self.view.table
        number = table.numbers.get(key, -1)
        offset = table.row_at(number)
        if offset >= 0 and view.number in table.members[number]:
            event = self._row_value(number, offset, values)
            if event is None:
                return None, offset
            return ViewFrame(UPDATE if waiting.was else ENTER, NO_ID, key, offset, event), -1
        if not waiting.may_have:
            return None, -1
        if offset < 0:
            reason = EXPIRED if waiting.expired else DELETED
            return ViewFrame(LEAVE, NO_ID, key, waiting.last, None, reason), -1
        event = None
        raw = table.values.get(number) or values.get(offset)
        if raw is None:
            return None, offset
        if view.shows(raw):
            event = row_of(raw) if view.root == ROOT_AUTO else raw
        return ViewFrame(LEAVE, NO_ID, key, offset, event, CHANGED), -1

    def _missing_keys(self, stuck: int, values: Mapping[int, bytes]) -> list[int]:
        table = self.view.table
        ahead = [k for k, _ in zip(self._map, range(PIECE_FRAMES), strict=False)]
        numbers = [table.numbers[key] for key in ahead if key in table.numbers]
        return self._missing(numbers, stuck, values)
