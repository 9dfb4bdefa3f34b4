"""`virta token`: create, list and revoke the tokens of a data directory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from virta.cli.report import InputError, ReportingGroup, json_option, print_report, table
from virta.cli.units import DURATION

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

VERBS = {
    "read": "Read and subscribe to channels and streams that fit PATTERN (repeatable).",
    "publish": "Publish to channels and streams that fit PATTERN (repeatable).",
    "jobs": "Use job domains that fit PATTERN; ** includes keys (repeatable).",
    "filters": "Register filters on index/collection names that fit PATTERN (repeatable).",
    "webhooks": "Deliver channels that fit PATTERN, which also need --read, to webhooks (repeatable).",
    "pipelines": "See and control pipelines whose names fit PATTERN (repeatable).",
    "admin": "See and disconnect subscribers of channels; `**`: metrics, figures, health (repeatable).",
}
ALL = "**"

data_dir_option = click.option(
    "--data-dir",
    envvar="VIRTA_DATA_DIR",
    default="./virta-data",
    show_default=True,
    help="Data directory of the server.",
)


@click.group(cls=ReportingGroup)
def token() -> None:
    """
    Tokens of a server: what their owner may do, and on which names.

    A pattern is a name in which * stands for any characters but . / and :, and ** for any. A running
    server notices changes within a second.
    """


def right_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option per verb."""
    for verb, text in reversed(VERBS.items()):
        option = click.option(f"--{verb}", multiple=True, metavar="PATTERN", help=text)
        command = option(command)
    return command


@token.command()
@data_dir_option
@right_options
@click.option("--all", "everything", is_flag=True, help="Every right on every name.")
@click.option("--filter", "filter_", help="Row filter: only events that satisfy it.")
@click.option(
    "--dialect",
    type=click.Choice(["query-string", "koncorde", "cesql", "cloudevents"]),
    default="query-string",
    show_default=True,
    help="The language of --filter.",
)
@click.option(
    "--expires", type=DURATION, help="How long it is valid, such as 30d; without it, always."
)
@click.option("--name", default="", help="What it is for; shown in lists.")
def create(
    *,
    data_dir: str,
    everything: bool,
    filter_: str | None,
    dialect: str,
    expires: timedelta | None,
    name: str,
    **rights: tuple[str, ...],
) -> None:
    """
    Create a token and print it, alone on its line. It is not stored and cannot be shown again.

    Example: virta token create --read 'orders.*' --publish orders.eu --filter tenant=42 --expires 30d
    """
    from virta.access import TokenStore
    from virta.access.grants import make_grant

    if everything:
        rights = dict.fromkeys(VERBS, (ALL,))
    by_pattern: dict[str, list[str]] = {}
    for verb, patterns in rights.items():
        for pattern in patterns:
            by_pattern.setdefault(pattern, []).append(verb)
    if not by_pattern:
        shown = ", ".join(f"--{verb}" for verb in VERBS)
        raise InputError(f"a token needs a right: give at least one of {shown} or --all")
    grants = tuple(
        make_grant(verbs, pattern, filter_, dialect) for pattern, verbs in by_pattern.items()
    )
    until = None if expires is None else time.time() + expires.total_seconds()
    text, record = TokenStore(data_dir).create(grants, name=name, expires=until)
    click.echo(f"created {record.prefix}: keep the token, it cannot be shown again", err=True)
    click.echo(text)


@token.command("list")
@data_dir_option
@json_option
def list_(*, data_dir: str, as_json: bool) -> None:
    """List tokens by their prefix, with their rights; secrets are not stored."""
    from virta.access import TokenStore
    from virta.clock import time_text

    def shown(seconds: float | None) -> str | None:
        return None if seconds is None else time_text(int(seconds * 1_000_000))

    records = TokenStore(data_dir).records()
    members: list[dict[str, Any]] = [
        {
            "token": record.prefix,
            "name": record.name,
            "grants": record.grants,
            "created": shown(record.created),
            "expires": shown(record.expires),
            "expired": record.expires is not None and record.expires <= time.time(),
        }
        for record in records
    ]
    rows = [
        (
            one["token"],
            one["name"] or "-",
            f"{one['expires'] or 'never'}{' (expired)' if one['expired'] else ''}",
            "; ".join(_right(grant) for grant in one["grants"]),
        )
        for one in members
    ]
    lines = table(("token", "name", "expires", "rights"), rows) if rows else ["no tokens"]
    print_report(members, lines, as_json=as_json)


@token.command()
@click.argument("prefix")
@data_dir_option
def revoke(*, prefix: str, data_dir: str) -> None:
    """Revoke the token that begins with PREFIX; its open streams end within a second."""
    from virta.access import TokenStore

    record = TokenStore(data_dir).revoke(prefix)
    click.echo(f"revoked {record.prefix}{f' ({record.name})' if record.name else ''}")


def _right(grant: dict[str, Any]) -> str:
    limit = f" if {grant['filter']}" if "filter" in grant else ""
    return f"{','.join(grant['verbs'])} {grant['pattern']}{limit}"
