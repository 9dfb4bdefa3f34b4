"""The rows of a live view as a client keeps them: frames to changes; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

from virta.client.calls import QUERY_SAFE
from virta.client.resume import ResumeState

if TYPE_CHECKING:
    from virta.client.frames import Frame

SETTING = frozenset({"row", "enter", "update"})
SHOWN = SETTING | {"leave", "live", "snapshot", "reset", "aggregate"}


@dataclass(frozen=True)
class LiveChange:
    """
    A frame of a live view.

    `kind` is snapshot, row, live, enter, update, leave, reset or aggregate; `event` is the JSON object of an
    event; `data` is the whole frame.
    """

    kind: str
    key: str
    event: dict[str, Any] | None
    reason: str
    data: dict[str, Any]


class LiveState(ResumeState):
    """The rows of a view, which outlive its connections."""

    def __init__(
        self,
        channel: str,
        query: str,
        options: dict[str, str],
        since: str | None,
        *,
        reconnect: bool,
    ) -> None:
        path = live_path(channel, query, options)
        super().__init__(lambda _: path, None, since, reconnect=reconnect)
        self.rows: dict[str, dict[str, Any]] = {}
        self.groups: dict[Any, dict[str, Any]] = {}
        self.is_live = False

    def read_change(self, frame: Frame) -> LiveChange | None:
        """Apply a frame to the rows; return the change to report, if any."""
        self.read_frame(frame)
        if frame.id == "":
            self.last_event_id = None  # a cut from here on must not resume from before
        if frame.event not in SHOWN:
            return None
        data = frame.json()
        kind, key, event = frame.event, data.get("key", ""), data.get("event")
        if kind == "snapshot":
            self.rows.clear()
            self.groups.clear()
        elif kind in SETTING:
            self.rows[key] = event
        elif kind == "leave":
            self.rows.pop(key, None)
        elif kind == "aggregate":
            for gone in data["gone"]:
                self.groups.pop(gone, None)
            self.groups |= {group["group"]: group for group in data["groups"]}
        self.is_live = kind not in {"snapshot", "row", "reset"}
        return LiveChange(kind, key, event, data.get("reason", ""), data)


class CurrentRows:
    """The rows of a live view as its iterator shows them."""

    _live: LiveState

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows by key, as of the last change that was read."""
        return self._live.rows

    @property
    def groups(self) -> dict[Any, dict[str, Any]]:
        """The aggregates by group."""
        return self._live.groups

    @property
    def is_live(self) -> bool:
        """Whether `rows` is complete: no snapshot is being read."""
        return self._live.is_live


def live_path(channel: str, query: str, options: dict[str, str]) -> str:
    """Return the path of a live view."""
    terms = [quote(query, safe=QUERY_SAFE)] if query else []
    terms += [f"${name}={quote(value, safe='')}" for name, value in options.items() if value]
    return f"/channels/{quote_plus(channel)}/live" + ("?" + "&".join(terms) if terms else "")
