"""Bodies of the routes that show what the server does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from virta.server.api.description.schemas import ChannelName, Dialect  # noqa: TC001 - read at run time
from virta.server.operating.figures import FigureHistory, FigureSample

DAY_S = 86_400
BINS_MAX = 288
EVENTS_MAX = 200

__all__ = [
    "ClientView",
    "ConsoleServer",
    "CountBody",
    "CountView",
    "DeadLetter",
    "DeadLetterPage",
    "ExplainBody",
    "ExplainView",
    "FigureHistory",
    "FigureSample",
    "HealthCheck",
    "HealthView",
    "PipelineGraph",
    "PipelineLog",
    "PipelineStep",
    "QueryView",
    "RedeliverBody",
    "RedeliverResult",
    "RedeliverView",
    "SegmentView",
    "SendResult",
    "StandingBody",
    "StandingFilter",
    "StandingView",
    "StatsView",
    "SubscriberPage",
    "TierView",
    "VerifyView",
]


class ConsoleServer(Struct, rename="camel"):
    """Which server this is."""

    version: str
    started: str
    durability: str
    data_dir: str
    journal: bool
    tokens: bool


class StatsView(Struct):
    server: ConsoleServer
    now: FigureSample


class ExplainBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A filter and one event, or up to 200."""

    filter: Any
    dialect: Dialect | UnsetType = UNSET
    event: dict[str, Any] | UnsetType = UNSET
    events: Annotated[list[dict[str, Any]], Meta(max_length=EVENTS_MAX)] | UnsetType = UNSET


class ExplainView(Struct):
    """An explanation per event; `root` says whether paths begin at the event or at its data."""

    id: str
    root: Literal["event", "document"]
    explanations: list[dict[str, Any]]


class StandingBody(Struct, forbid_unknown_fields=True):
    channel: ChannelName
    event: dict[str, Any]


class StandingFilter(Struct):
    """A filter that holds: of subscribers, registered, or of a webhook."""

    kind: Literal["query", "filter", "webhook"]
    id: str
    text: str
    dialect: str
    subscribers: int


class StandingView(Struct):
    """`total` counts all standing filters of the channel, `matched` those that hold; 100 of them are listed."""

    total: int
    matched: int
    filters: list[StandingFilter]


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    channel: ChannelName
    filter: Any
    dialect: Dialect | UnsetType = UNSET
    seconds: Annotated[int, Meta(ge=1, le=31 * DAY_S)] = DAY_S
    bins: Annotated[int, Meta(ge=1, le=BINS_MAX)] = 48


class CountView(Struct):
    """
    How many events of a channel a filter would have matched.

    Numbers are exact, or estimates from `sampled` records; `error` is then the half-width of the 95 % interval of
    `matched`.
    """

    seconds: int
    exact: bool
    events: int
    matched: int
    error: int
    sampled: int
    bins: list[int]


class ClientView(Struct, rename="camel"):
    """One subscriber; `lag` is the number of records it has not been sent yet."""

    id: str
    transport: str
    address: str | None
    since: str
    sent: int
    dropped: int
    waiting_bytes: int
    waiting_seconds: float
    lag: int


class QueryView(Struct, rename="camel"):
    """A distinct filter of a channel and up to 100 of its subscribers."""

    channel: str
    filter_id: str
    dialect: str
    query: str
    subscribers: int
    matched: int
    waiting_bytes: int
    clients: list[ClientView]


class SubscriberPage(Struct):
    """`total` counts queries; at most 500 are listed, those with the most bytes waiting first."""

    total: int
    queries: list[QueryView]
    streams: int


CheckState = Literal["ok", "warning", "wrong"]


class HealthCheck(Struct):
    name: str
    state: CheckState
    text: str


class SegmentView(Struct, rename="camel"):
    base_offset: int
    next_offset: int
    bytes: int
    created: str
    last_time: str
    sealed: bool
    compacted: bool


class TierView(Struct, rename="camel"):
    """How far the log is shipped to object storage; bytes of a partly shipped segment are estimated."""

    url: str
    shipped_offset: int
    pending_records: int
    pending_bytes: int
    problem: str | None


class HealthView(Struct, rename="camel"):
    state: CheckState
    checks: list[HealthCheck]
    segments: list[SegmentView]
    segments_total: int
    versions: dict[str, str]
    tier: TierView | None = None


class VerifyView(Struct):
    ok: bool
    segments: int
    records: int
    bytes: int
    seconds: float
    problems: list[str]


class DeadLetter(Struct):
    """An event that a webhook did not accept."""

    offset: int
    time: str
    reason: str
    attempts: int
    event: Any


class DeadLetterPage(Struct, rename="camel"):
    """Newest first; `complete` is false if older ones were not searched for."""

    dead_letters: list[DeadLetter]
    complete: bool


class RedeliverBody(Struct, forbid_unknown_fields=True):
    offsets: Annotated[
        list[Annotated[int, Meta(ge=0, le=2**63 - 1)]], Meta(min_length=1, max_length=100)
    ]


class RedeliverResult(Struct):
    offset: int
    delivered: bool
    reason: str


class RedeliverView(Struct):
    results: list[RedeliverResult]


class SendResult(Struct):
    delivered: bool
    reason: str


class PipelineStep(Struct):
    kind: str
    title: str
    detail: str


class PipelineGraph(Struct):
    """Steps in their order; those of one list run side by side."""

    pipeline: str
    file: str
    trigger: str
    steps: list[list[PipelineStep]]


class PipelineLog(Struct):
    pipeline: str
    lines: list[str]


class CaptureView(Struct):
    """A database that is captured; figures are those of its last status."""

    name: str
    kind: Literal["postgres", "sqlite"]
    state: str
    restarts: int
    reason: str | None
    time: str | UnsetType = UNSET
    records: int | UnsetType = UNSET
    slot: str | UnsetType | None = UNSET
    lag_bytes: int | UnsetType | None = UNSET
    retained_bytes: int | UnsetType | None = UNSET
    recorded: int | UnsetType = UNSET
