"""
The table of settings: one row per setting, from which flags, variables, file keys and docs follow.

A setting is the same word in four cases: `--body-timeout-ms`, `VIRTA_BODY_TIMEOUT_MS`,
`body_timeout_ms` in `virta.toml` and as an attribute. Thorium's and Subtub's own spellings are accepted
too. Values out of range are refused, never clamped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

CPUS = os.cpu_count() or 1
MEBIBYTE = 1024 * 1024
INT_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting; `kind` decides how text becomes a value."""

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
    form: str = ""  # the allowed texts, in words

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


def _number(name: str, default: int | None, low: int, high: int, **more: Any) -> Setting:
    return Setting(name=name, kind=int, default=default, minimum=low, maximum=high, **more)


def _text(name: str, default: str | None, **more: Any) -> Setting:
    return Setting(name=name, kind=str, default=default, **more)


def _switch(name: str, default: bool, **more: Any) -> Setting:  # noqa: FBT001
    return Setting(name=name, kind=bool, default=default, **more)


def _list(name: str, default: None, **more: Any) -> Setting:
    return Setting(name=name, kind=list, default=default, **more)


# fmt: off
SETTINGS: tuple[Setting, ...] = (
    # Addresses and directories.
    _text("host", "127.0.0.1", variables=("SUBTUB_BIND_HOST",),
          help="Address to listen on; anything but loopback needs tokens, JWT or --insecure."),
    # Not a variable: Kubernetes sets VIRTA_PORT to an address for a service called virta.
    _number("server_port", 8232, 0, 65535, thorium=True, also=("port",),
            variables=("SUBTUB_BIND_PORT",),
            help="TCP port of HTTP and WebSocket; 0 takes a free one."),
    _number("journal_port", 8233, 0, 65535, optional=True,
            help="TCP port of the journal; 0 takes a free one, none leaves the journal out."),
    _text("data_dir", "./virta-data",
          help="Directory of everything durable; the log is its `log` subdirectory."),
    _text("data_mode", "0700", choices=("0700", "0750", "0770"),
          help="Mode of a data directory that the server creates: 0750 lets its group read, 0770 write too."),
    _text("durability", "group", choices=("none", "interval", "group", "fsync"),
          help="What a 202 promises: handed to the kernel, or synced to disk (group shares syncs)."),
    _text("log_compression", None, choices=("none", "zstd"),
          help="Compress the log from now on, or no longer; by default it stays as it is."),
    _text("tier_url", None, form="the URL of a store such as s3://bucket/prefix",
          help="Ship the log to this object storage while serving; `url` in [log.tier] of the file."),
    _number("tier_interval_ms", 1000, 10, 3_600_000,
            help="How often new records are shipped; `interval_ms` in [log.tier] of the file."),
    _text("otel_endpoint", None, form="the address of an OTLP receiver such as http://127.0.0.1:4318",
          help="Send OpenTelemetry spans of events with a `traceparent` there; needs the extra `otel`."),
    # What is kept.
    _text("retention_age", None, form="a duration such as 30d or 12h",
          help="Remove what is older than this from the log, in whole segments."),
    _text("retention_bytes", None, form="a size such as 500GiB",
          help="Remove the oldest segments while the log is larger than this."),
    _text("retention_channel", None, many=True, form="PATTERN=DURATION, such as clicks*=7d",
          help="Remove events of matching channels that are older (repeatable): PATTERN=DURATION."),
    _switch("retention_unread", False,
            help="Also remove what a named consumer or a webhook has not read yet."),
    _number("retention_interval_ms", 60_000, 100, INT_MAX,
            help="How often old events are looked for."),
    # Access.
    _switch("require_token", False,
            help="Ask for a credential on loopback too: a token of `virta token create`, or a JWT."),
    _text("token_file", None,
          help="File of bearer tokens with all rights, one per line, plain or `sha256:<hex>`."),
    _text("jwt_keys", None,
          help="Accept JWT signed by the keys of this file: JWKS, a PEM public key, or a secret for HS256."),
    _text("jwt_issuer", None, help="The `iss` that a JWT must have."),
    _text("jwt_audience", None, help="The `aud` that a JWT must have."),
    _text("jwt_claim", "virta", help="The claim of a JWT that has its grants."),
    _switch("token_in_url", False,
            help="Accept tokens as the parameter access_token; without it only tickets come in addresses."),
    _number("max_requests_per_principal", None, 1, INT_MAX, optional=True,
            help="Requests a second of one token or JWT, beyond which it gets 429; none is no limit."),
    _number("max_requests_per_address", None, 1, INT_MAX, optional=True,
            help="Requests a second from one address, beyond which it gets 429; none is no limit."),
    _number("max_scanned_filters_per_principal", 1000, 0, INT_MAX, optional=True,
            help="Filters that every event must test, of one token or JWT (clients without one share it); none is no limit."),
    _switch("insecure", False,
            help="Listen beyond loopback without tokens: everyone who reaches the port may do anything."),
    _text("tls_cert", None, help="PEM certificate chain: serve HTTPS."),
    _text("tls_key", None, help="PEM private key of --tls-cert."),
    # Thorium's own.
    _text("allow_origin", None, many=True,
          form="self, *, null, or origins such as https://app.example.com",
          help="Web pages that may use the server besides its own (repeatable): origins, self or *."),
    _text("allow_host", None, many=True, form="host names or addresses without a port, or *",
          help="Names of this server besides loopback and --host (repeatable); * allows any Host."),
    _switch("thorium_compatible", False,
            help="Use Thorium's names, headers and error bodies: for its clients."),
    _switch("percent_decode_headers", True,
            help="Percent-decode ce- headers, as CloudEvents requires; off leaves them as Thorium does."),
    _text("source_name", None, thorium=True,
          help="`source` of events the server itself makes and of the ce-source header; //virta, or Thorium's with --thorium-compatible."),
    _text("log_level", "info", choices=("trace", "debug", "info", "warn", "error"), thorium=True,
          help="Least level of log lines."),
    _number("router_threads", CPUS, 1, CPUS, aliases=("query_threads",), thorium=True,
            help="Multiplies the outstanding-event limit; matching itself is one index."),
    _number("translator_threads", CPUS, 1, CPUS, thorium=True,
            help="Accepted for Thorium's sake; JSON is decoded where it arrives."),
    _number("web_server_threads", CPUS, 1, 2 * CPUS, thorium=True,
            help="Accepted for Thorium's sake; one event loop serves all connections."),
    _number("max_body_size_bytes", 10 * MEBIBYTE, 128, 1024 * MEBIBYTE, thorium=True,
            help="Largest request body; one event is never larger than 10 MiB."),
    _number("max_unfinished_body_bytes", 128 * MEBIBYTE, MEBIBYTE, 1024 * 1024 * MEBIBYTE,
            help="Bytes of bodies that are still arriving, over all connections; above it the oldest gets 503."),
    _number("max_idempotency_keys", 1048576, 0, INT_MAX, thorium=True,
            help="How many (channel, source, id) are remembered to drop repeats."),
    _number("max_json_parsing_recursion", 64, 0, INT_MAX, thorium=True,
            help="Accepted for Thorium's sake; depth is limited to 1000 in any case."),
    _number("max_outstanding_events_per_router_thread", 131072, 1, INT_MAX,
            aliases=("max_outstanding_events_per_query_thread",), thorium=True,
            help="Events accepted but not yet durable and matched, before publishers get 429."),
    _number("max_query_terms", 32, 1, 10_000, thorium=True, help="Terms in one part of a query."),
    _number("body_timeout_ms", 60_000, 100, INT_MAX, thorium=True,
            help="Time for a request's head and body to arrive."),
    _number("idempotency_expiration_ms", 180_000, 0, INT_MAX, thorium=True,
            help="How long a repeat of an event is recognised."),
    _number("tcp_idle_timeout_ms", 180_000, 200, INT_MAX, thorium=True,
            help="Idle connections are closed after this."),
    # Consumers, connections, shutdown.
    _text("slow_consumer", "disconnect", choices=("disconnect", "drop-oldest"),
          help="What happens to a consumer that does not keep up, unless it chose for itself."),
    _number("slow_consumer_bytes_max", 8 * MEBIBYTE, 65536, INT_MAX,
            help="Bytes that may wait for one consumer."),
    _number("slow_consumer_ms_max", 30_000, 100, INT_MAX,
            help="How long one consumer may take nothing before it is disconnected."),
    _number("ping_interval_ms", 30_000, 100, 30_000,
            help="Silence after which a consumer gets a ping."),
    _number("max_connections", 100_000, 1, INT_MAX,
            help="Open connections; more are refused with 503."),
    _number("tcp_keepalive_ms", 60_000, 1000, 32_767_000, optional=True,
            help="Silence after which the kernel probes a peer; none never probes."),
    _number("tcp_user_timeout_ms", 300_000, 1000, INT_MAX, optional=True,
            help="A connection whose peer acknowledges nothing for this long is closed; none leaves it to the kernel."),
    _number("max_request_line_bytes", 4096, 256, MEBIBYTE, help="Longest request line, else 414."),
    _number("max_header_bytes", 8192, 256, MEBIBYTE, help="Largest request head, else 431."),
    _text("webhook_origin", "virta",
          help="The name by which webhooks know this server (WebHook-Request-Origin)."),
    _text("webhook_allow", None, many=True,
          form="networks such as 10.0.0.0/8, addresses or host names",
          help="Allowed sinks of webhooks besides public addresses (repeatable): CIDR networks or hosts."),
    _text("webhook_callback_url", None, form="an http or https address",
          help="Address by which webhooks reach this server, to consent later by a callback."),
    _number("webhook_consent_ms", 86_400_000, 100, INT_MAX,
            help="Time a webhook has to consent by its callback."),
    _number("webhook_attempts", 8, 1, 100,
            help="Attempts to deliver an event before it is a dead letter."),
    _number("webhook_timeout_ms", 10_000, 100, 600_000, help="Time for a webhook's whole response."),
    _number("webhook_backoff_ms", 1000, 1, 3_600_000,
            help="First wait between attempts; it doubles."),
    _number("drain_timeout_ms", 10_000, 0, INT_MAX,
            help="Time for open requests and streams to end after SIGTERM."),
    # Live views.
    _list("view_keys", None,
          help="Where rows of a channel have their key, separated by commas: CHANNEL=POINTER, as orders=/data/id."),
    _number("view_rows_max", 5_000_000, 1, INT_MAX, help="Rows of one table; a view of more is refused."),
    _number("view_tables_max", 1000, 1, INT_MAX, help="Row tables at once."),
    _number("view_filters_max", 100_000, 1, INT_MAX, help="Distinct filters of live views at once."),
    _number("view_ring", 1_000_000, 1, INT_MAX,
            help="Changes that a table remembers for consumers that resume, 28 bytes each."),
    _number("view_pending_max", 10_000, 1, INT_MAX,
            help="Keys that may wait for one consumer of a view before it gets a reset and a snapshot."),
    _number("view_cache_bytes_max", 256 * MEBIBYTE, 0, 1024 * 1024 * MEBIBYTE,
            help="Bytes of rows that one table keeps in memory; others are read from the log."),
    _number("view_linger_s", 60, 0, INT_MAX, help="Seconds that a filter stands beyond its last consumer."),
    _number("view_idle_s", 600, 0, INT_MAX, help="Seconds that a table stands beyond its last view."),
    _number("view_save_s", 60, 1, INT_MAX, help="Seconds between two writes of a table's file."),
    _number("view_stall_s", 300, 1, INT_MAX,
            help="Seconds that a consumer of a view may take nothing before it is disconnected."),
    # Pipelines beside the server.
    _list("pipelines", None,
          help="Pipeline files to run beside the server: paths or patterns, separated by commas."),
    _list("cdc", None,
          help="Databases to capture beside the server, separated by commas: [NAME=]sqlite:FILE or [NAME=]postgresql://…"),
    _number("pipeline_failures_max", 5, 1, 1000,
            help="Failures within --pipeline-failure-window-ms after which a pipeline is not started again."),
    _number("pipeline_failure_window_ms", 600_000, 1000, INT_MAX,
            help="How long a failure is remembered."),
    _number("pipeline_backoff_ms", 1000, 1, 60_000,
            help="First wait before a failed pipeline starts again; it doubles, up to a minute."),
    _number("pipeline_stop_ms", 15_000, 0, INT_MAX,
            help="Time for pipelines to end after SIGTERM, before they are killed."),
    _number("shard_count", 1, 1, INT_MAX, variables=("SUBTUB_SHARD_COUNT",),
            help="Accepted for Subtub's sake; one index routes all streams."),
)
# fmt: on

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
