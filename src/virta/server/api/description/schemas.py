"""Bodies of requests and responses; `/openapi.json` and `/asyncapi.json` are made of these types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

# One control character alone is a topic of the log itself.
ChannelName = Annotated[str, Meta(pattern=r"^([^\x00-\x1f]|[^\x00]{2,})$")]
Dialect = Literal["koncorde", "query-string", "cesql", "cloudevents"]
SUBSCRIPTION_STATES = ["pending", "active", "gone", "expired", "revoked"]
# Of 24 to 64 bytes.
Secret = Annotated[str, Meta(pattern="^whsec_[A-Za-z0-9+/]{32,86}={0,2}$")] | Literal[True]
PipelineState = Literal[
    "never run", "starting", "running", "waiting", "finished",
    "stopping", "stopped", "failed", "lost", "invalid",
]  # fmt: skip


class RefusalBody(Struct):
    """Why a request was refused (RFC 9457): some codes have further members. `message` is `detail`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    message: str


class AcceptedBody(Struct):
    code: Literal["accepted"]


class EventBody(Struct):
    """A CloudEvent; members other than `source` and `id` are stored, not checked."""

    source: str
    id: str | float
    specversion: Any = UNSET
    type: Any = UNSET
    data: Any = UNSET


class MessageBody(Struct):
    """A message to a stream."""

    publish_to: Annotated[str, Meta(pattern=":[^:]|[^:]:")]
    payload: str


class FilterBody(Struct):
    """A Koncorde filter, or `filter` and `dialect`."""

    filter: Any = UNSET
    dialect: Dialect | UnsetType = UNSET


class FilterTest(Struct, rename="camel"):
    """A document or an event to test filters with."""

    document: dict[str, Any] | UnsetType = UNSET
    document_id: str | UnsetType | None = UNSET
    event: dict[str, Any] | UnsetType = UNSET


class FilterRegistration(Struct):
    """`diff` is false if an equal filter was registered before."""

    id: str
    diff: dict[str, Any] | bool


class FilterIds(Struct):
    ids: list[str]


class FilterPrice(Struct):
    """How events find a filter; `scans` is what it uses of a principal's budget for scanned filters."""

    kind: Literal["indexed", "verified", "scanned"]
    scans: int
    found_by: list[str]
    python: list[str]
    python_at_times: list[str]


class FilterValidation(Struct):
    """`subscribers` have an equal query now."""

    valid: Literal[True]
    id: str
    canonical: Any
    conditions: int
    subscribers: int
    cost: FilterPrice


class FilterDescription(Struct):
    id: str
    index: str
    collection: str
    dialect: Dialect
    filter: Any


class StreamTicket(Struct):
    """A credential for one use, as the parameter `ticket`."""

    ticket: str
    expires: str


class SessionInfo(Struct, omit_defaults=True):
    """Who sends a request, and what it may do."""

    principal: str
    kind: str
    required: Annotated[bool, Meta(description="Whether the server asks for credentials.")]
    grants: list[dict[str, Any]]
    expires: str | None = None


class ChannelSummary(Struct, rename="camel"):
    """A channel; offsets and times are null if the log has no record of it."""

    name: str
    records: int
    bytes: Annotated[int, Meta(description="Of keys and values.")]
    first_offset: int | None
    first_time: str | None
    last_offset: int | None
    last_time: str | None
    subscribers: int
    events_per_second: Annotated[float, Meta(description="In the last second.")] = 0.0
    kept: Annotated[str, Meta(description="How long its events are kept, in words.")] = "for ever"


class ChannelPage(Struct):
    """`next` is the `after` of the next page."""

    channels: list[ChannelSummary]
    next: str | None


class RowBody(Struct):
    """A row of a live view: the newest event of a key."""

    key: str
    offset: int
    event: dict[str, Any]


class RowPage(Struct):
    """`position` is where a live view of the same query continues."""

    position: str
    rows: list[RowBody]


class LiveFrame(Struct):
    """A frame; an empty `id` means: forget the position."""

    frame: Literal[
        "snapshot", "row", "live", "enter", "update", "leave", "reset", "ping", "aggregate"
    ]
    id: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    event: dict[str, Any] | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    rows: int | UnsetType = UNSET


class SubscriptionConfig(Struct, forbid_unknown_fields=True, rename={"from_": "from"}):
    """The channel, and where to start: `latest` without `from`."""

    channel: ChannelName
    from_: str | int | UnsetType = UNSET


class SubscriptionSettings(Struct, forbid_unknown_fields=True):
    """
    How events are sent. Values of headers and secrets are shown as `true`, which keeps them when it is put back.

    Deliveries are signed with each secret; the server makes one if none is given, and shows it once.
    """

    headers: dict[str, str | Literal[True]] | UnsetType = UNSET
    method: Literal["POST", "PUT", "PATCH"] | UnsetType = UNSET
    secrets: Annotated[list[Secret], Meta(max_length=3)] | UnsetType = UNSET


class SubscriptionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A filter on a channel and the webhook to which matching events are sent."""

    id: str | UnsetType = UNSET
    sink: str
    config: SubscriptionConfig
    protocol: Literal["HTTP"] | UnsetType = UNSET
    protocolsettings: SubscriptionSettings | UnsetType = UNSET
    filters: list[dict[str, Any]] | UnsetType = UNSET
    types: list[str] | UnsetType = UNSET
    source: str | UnsetType = UNSET


class SubscriptionStatus(Struct, rename="camel", omit_defaults=True):
    """`offset` is the next record to deliver."""

    state: Annotated[str, Meta(extra_json_schema={"enum": SUBSCRIPTION_STATES})]
    offset: int
    delivered: int
    dead_letters: int
    last_error: str
    last_answer: str | UnsetType = UNSET
    last_answer_time: str | UnsetType = UNSET
    expires: str | UnsetType = UNSET
    allowed_rate: int | UnsetType = UNSET


class SubscriptionView(SubscriptionBody, kw_only=True):
    """A subscription with its status."""

    id: str
    status: SubscriptionStatus


class SubscriptionConfirmation(Struct):
    id: str
    state: str


class PipelineView(Struct):
    """What a pipeline does: the object of `virta pipeline status --json`."""

    pipeline: str
    state: PipelineState
    queries: dict[str, Any]
    description: str | UnsetType = UNSET
    pid: int | UnsetType | None = UNSET
    updated: float | UnsetType | None = UNSET
    reason: str | UnsetType | None = UNSET
    restarts: int | UnsetType = UNSET
    log: str | UnsetType | None = UNSET
    sinks: dict[str, Any] | UnsetType = UNSET
    rows: float | UnsetType = UNSET
    rows_per_second: float | UnsetType = UNSET
    late: int | UnsetType = UNSET
    repeats: int | UnsetType = UNSET
    dead: int | UnsetType = UNSET
    lag: int | UnsetType | None = UNSET
    batch: int | UnsetType = UNSET
    watermark: str | UnsetType | None = UNSET
