"""
The table of settings: one row per setting, from which flags, variables, file keys and docs follow.

A setting is the same word in four cases: `--body-timeout-ms`, `VIRTA_BODY_TIMEOUT_MS`,
`body_timeout_ms` in `virta.toml` and as an attribute. Thorium's and Subtub's own spellings are
accepted beside ours. Values out of range are refused, never clamped: a server that runs with other
values than it was given is a riddle at three in the morning.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

CPUS = os.cpu_count() or 1
MEBIBYTE = 1024 * 1024
INT_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting; `kind` decides how text becomes a value and which values are allowed."""

    name: str
    kind: type
    default: int | str | bool | None
    help: str
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # further names, as flag, variable and file key
    also: tuple[str, ...] = ()  # further flags that are neither variables nor file keys
    variables: tuple[str, ...] = ()  # variables of other products, spelled whole
    thorium: bool = False  # also read from THORIUM_…
    optional: bool = False  # the word `none` switches it off
    many: bool = False  # a list: the flag repeated, or one text with commas
    form: str = ""  # what a text has to look like, in words

    @property
    def flags(self) -> tuple[str, ...]:
        names = (self.name, *self.aliases, *self.also)
        return tuple("--" + name.replace("_", "-") for name in names)

    @property
    def environment(self) -> tuple[str, ...]:
        """Variables that may hold it, the strongest first."""
        names = [name.upper() for name in (self.name, *self.aliases)]
        ours = tuple(f"VIRTA_{name}" for name in names)
        theirs = tuple(f"THORIUM_{name}" for name in names) if self.thorium else ()
        return (*ours, *theirs, *self.variables)

    @property
    def allowed(self) -> str:
        """The allowed values, in words for an error message."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.minimum is not None and self.maximum is not None:
            number = f"a whole number from {self.minimum} to {self.maximum}"
            return f"{number}, or none" if self.optional else number
        if self.kind is list:
            return "a list of texts, or one text with commas"
        return self.form or "a text"


def _number(name: str, default: int, low: int, high: int, text: str, **more: object) -> Setting:
    return Setting(
        name=name,
        kind=int,
        default=default,
        minimum=low,
        maximum=high,
        help=text,
        **more,  # type: ignore[arg-type]
    )


SETTINGS: tuple[Setting, ...] = (
    # Where it listens and keeps things.
    Setting(
        name="host",
        kind=str,
        default="127.0.0.1",
        help="Address to listen on; anything but loopback needs --token-file or --insecure.",
        variables=("SUBTUB_BIND_HOST",),
    ),
    _number(
        "server_port",
        8232,
        0,
        65535,
        "TCP port of HTTP and WebSocket; 0 takes a free one.",
        thorium=True,
        # Not a variable: Kubernetes sets VIRTA_PORT to an address for a service called virta.
        also=("port",),
        variables=("SUBTUB_BIND_PORT",),
    ),
    _number(
        "journal_port",
        8233,
        0,
        65535,
        "TCP port of the journal; 0 takes a free one, none leaves the journal out.",
        optional=True,
    ),
    Setting(
        name="data_dir",
        kind=str,
        default="./virta-data",
        help="Directory of everything durable; the log is its `log` subdirectory.",
    ),
    Setting(
        name="data_mode",
        kind=str,
        default="0700",
        choices=("0700", "0750", "0770"),
        help="Mode of a data directory that the server creates: 0750 lets its group read, 0770 write too.",
    ),
    Setting(
        name="durability",
        kind=str,
        default="group",
        choices=("none", "interval", "group", "fsync"),
        help="What a 202 promises: handed to the kernel, or synced to disk (group shares syncs).",
    ),
    # Who may come in.
    Setting(
        name="token_file",
        kind=str,
        default=None,
        help="File of bearer tokens, one per line, plain or `sha256:<hex>`.",
    ),
    Setting(
        name="insecure",
        kind=bool,
        default=False,
        help="Listen beyond loopback without tokens: everyone who reaches the port may do anything.",
    ),
    Setting(name="tls_cert", kind=str, default=None, help="PEM certificate chain: serve HTTPS."),
    Setting(name="tls_key", kind=str, default=None, help="PEM private key of --tls-cert."),
    # Thorium's own.
    Setting(
        name="allow_origin",
        kind=str,
        default=None,
        many=True,
        form="self, *, null, or origins such as https://app.example.com",
        help="Web pages that may use the server besides its own (repeatable): origins, self or *.",
    ),
    Setting(
        name="allow_host",
        kind=str,
        default=None,
        many=True,
        form="host names or addresses without a port, or *",
        help="Names of this server besides loopback and --host (repeatable); * allows any Host.",
    ),
    Setting(
        name="thorium_compatible",
        kind=bool,
        default=False,
        help="Send Thorium's `Access-Control-Allow-Origin: *` with every response.",
    ),
    Setting(
        name="percent_decode_headers",
        kind=bool,
        default=True,
        help="Percent-decode ce- headers, as CloudEvents requires; off leaves them as Thorium does.",
    ),
    Setting(
        name="source_name",
        kind=str,
        default="//name.djsweet.thorium",
        help="`source` of events the server itself makes and of the ce-source header.",
        thorium=True,
    ),
    Setting(
        name="log_level",
        kind=str,
        default="info",
        choices=("trace", "debug", "info", "warn", "error"),
        help="Least level of log lines.",
        thorium=True,
    ),
    _number(
        "router_threads",
        CPUS,
        1,
        CPUS,
        "Multiplies the outstanding-event limit; matching itself is one index.",
        aliases=("query_threads",),
        thorium=True,
    ),
    _number(
        "translator_threads",
        CPUS,
        1,
        CPUS,
        "Accepted for Thorium's sake; JSON is decoded where it arrives.",
        thorium=True,
    ),
    _number(
        "web_server_threads",
        CPUS,
        1,
        2 * CPUS,
        "Accepted for Thorium's sake; one event loop serves all connections.",
        thorium=True,
    ),
    _number(
        "max_body_size_bytes",
        10 * MEBIBYTE,
        128,
        1024 * MEBIBYTE,
        "Largest request body; one event is never larger than 10 MiB.",
        thorium=True,
    ),
    _number(
        "max_unfinished_body_bytes",
        128 * MEBIBYTE,
        MEBIBYTE,
        1024 * 1024 * MEBIBYTE,
        "Bytes of bodies that are still arriving, over all connections; above it the oldest gets 503.",
    ),
    _number(
        "max_idempotency_keys",
        1048576,
        0,
        INT_MAX,
        "How many (channel, source, id) are remembered to drop repeats.",
        thorium=True,
    ),
    _number(
        "max_json_parsing_recursion",
        64,
        0,
        INT_MAX,
        "Accepted for Thorium's sake; depth is limited to 1000 in any case.",
        thorium=True,
    ),
    _number(
        "max_outstanding_events_per_router_thread",
        131072,
        1,
        INT_MAX,
        "Events accepted but not yet durable and matched, before publishers get 429.",
        aliases=("max_outstanding_events_per_query_thread",),
        thorium=True,
    ),
    _number("max_query_terms", 32, 1, 10_000, "Terms in one part of a query.", thorium=True),
    _number(
        "body_timeout_ms",
        60_000,
        100,
        INT_MAX,
        "Time for a request's head and body to arrive.",
        thorium=True,
    ),
    _number(
        "idempotency_expiration_ms",
        180_000,
        0,
        INT_MAX,
        "How long a repeat of an event is recognised.",
        thorium=True,
    ),
    _number(
        "tcp_idle_timeout_ms",
        180_000,
        200,
        INT_MAX,
        "Idle connections are closed after this.",
        thorium=True,
    ),
    # Consumers, connections and the end.
    Setting(
        name="slow_consumer",
        kind=str,
        default="disconnect",
        choices=("disconnect", "drop-oldest"),
        help="What happens to a consumer that does not keep up, unless it chose for itself.",
    ),
    _number(
        "slow_consumer_bytes_max",
        8 * MEBIBYTE,
        65536,
        INT_MAX,
        "Bytes that may wait for one consumer.",
    ),
    _number(
        "slow_consumer_ms_max",
        30_000,
        100,
        INT_MAX,
        "How long one consumer may take nothing before it is disconnected.",
    ),
    _number("ping_interval_ms", 30_000, 100, 30_000, "Silence after which a consumer gets a ping."),
    _number("max_connections", 100_000, 1, INT_MAX, "Open connections; more are refused with 503."),
    _number(
        "tcp_keepalive_ms",
        60_000,
        1000,
        32_767_000,
        "Silence after which the kernel probes a peer; none never probes.",
        optional=True,
    ),
    _number(
        "tcp_user_timeout_ms",
        300_000,
        1000,
        INT_MAX,
        "A connection whose peer acknowledges nothing for this long is closed; none leaves it to the kernel.",
        optional=True,
    ),
    _number("max_request_line_bytes", 4096, 256, MEBIBYTE, "Longest request line, else 414."),
    _number("max_header_bytes", 8192, 256, MEBIBYTE, "Largest request head, else 431."),
    Setting(
        name="webhook_origin",
        kind=str,
        default="virta",
        help="The name by which webhooks know this server (WebHook-Request-Origin).",
    ),
    Setting(
        name="webhook_allow",
        kind=str,
        default=None,
        many=True,
        form="networks such as 10.0.0.0/8, addresses or host names",
        help="Allowed sinks of webhooks besides public addresses (repeatable): CIDR networks or hosts.",
    ),
    Setting(
        name="webhook_callback_url",
        kind=str,
        default=None,
        form="an http or https address",
        help="Address by which webhooks reach this server, to consent later by a callback.",
    ),
    _number(
        "webhook_consent_ms",
        86_400_000,
        100,
        INT_MAX,
        "Time a webhook has to consent by its callback.",
    ),
    _number(
        "webhook_attempts", 8, 1, 100, "Attempts to deliver an event before it is a dead letter."
    ),
    _number("webhook_timeout_ms", 10_000, 100, 600_000, "Time for a webhook's whole response."),
    _number("webhook_backoff_ms", 1000, 1, 3_600_000, "First wait between attempts; it doubles."),
    _number(
        "drain_timeout_ms",
        10_000,
        0,
        INT_MAX,
        "Time for open requests and streams to end after SIGTERM.",
    ),
    # Pipelines beside the server.
    Setting(
        name="pipelines",
        kind=list,
        default=None,
        help="Pipeline files to run beside the server: paths or patterns, separated by commas.",
    ),
    _number(
        "pipeline_failures_max",
        5,
        1,
        1000,
        "Failures within --pipeline-failure-window-ms after which a pipeline is left alone.",
    ),
    _number(
        "pipeline_failure_window_ms", 600_000, 1000, INT_MAX, "How long a failure is remembered."
    ),
    _number(
        "pipeline_backoff_ms",
        1000,
        1,
        60_000,
        "First wait before a failed pipeline starts again; it doubles, up to a minute.",
    ),
    _number(
        "pipeline_stop_ms",
        15_000,
        0,
        INT_MAX,
        "Time for pipelines to end after SIGTERM, before they are killed.",
    ),
    _number(
        "shard_count",
        1,
        1,
        INT_MAX,
        "Accepted for Subtub's sake; one index routes all streams.",
        variables=("SUBTUB_SHARD_COUNT",),
    ),
)

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
