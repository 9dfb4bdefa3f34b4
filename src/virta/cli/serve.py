"""`virta serve` and `virta config`: the server as a command, and its settings."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from virta.errors import VirtaError
from virta.server.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from virta.server.config_loader import Config
    from virta.server.settings import Setting

EXIT_USAGE = 2
EXIT_FAILURE = 1


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command one option per setting; ranges are checked later, where all origins meet."""
    for setting in reversed(SETTINGS):
        option = click.option(
            *_declared(setting),
            setting.name,
            default=None,
            is_flag=setting.kind is bool,
            multiple=setting.many,
            type=None if setting.kind is bool else str,
            metavar=_metavar(setting),
            help=_help(setting.help, setting.default),
        )
        command = option(command)
    return click.option(
        "--config", "config_file", type=click.Path(), help="TOML file instead of ./virta.toml."
    )(command)


def _declared(setting: Setting) -> tuple[str, ...]:
    """Return the setting's flags; a setting that is on by default has one to turn it off."""
    if setting.kind is bool and setting.default:
        return tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in setting.flags)
    return setting.flags


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices)
    return "" if setting.kind is bool else "N" if setting.kind is int else "TEXT"


def _help(text: str, default: object) -> str:
    return text if default in (None, False) else f"{text}  [default: {default}]"


def load_config(options: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Merge flags, variables and file; exit with code 2 and a list of what is wrong."""
    from virta.errors import ConfigError
    from virta.server.config_loader import load

    # A repeatable flag that was not given is an empty tuple.
    flags = {n: None if v == () else v for n, v in options.items() if n != "config_file"}
    file = options.get("config_file") or environ.get("VIRTA_CONFIG")
    try:
        return load(flags, environ=environ, file=file)
    except ConfigError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(EXIT_USAGE)


@click.command()
@server_options
def serve(**options: Any) -> None:
    """
    Serve channels, streams, filters and the journal over HTTP.

    Every option is also a variable (--log-level is VIRTA_LOG_LEVEL) and a key of virta.toml
    (log_level, in the table [server]); `virta config` shows each value and where it came from.

    Exit codes: 0 after a clean stop, 1 when the server cannot run, 2 for settings that cannot be
    used.
    """
    config = load_config(options, os.environ)
    try:
        from virta.server.run import run
    except ModuleNotFoundError as error:
        click.echo(f"error: {error.name} is missing: pip install 'virta[server]'", err=True)
        sys.exit(EXIT_FAILURE)
    try:
        run(config)
    except VirtaError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(EXIT_FAILURE)


@click.command()
@server_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: name → value and origin.")
def config(*, as_json: bool, **options: Any) -> None:
    """
    Show each setting's value and origin.

    Takes the flags of `virta serve`; exits 2 when a value cannot be used.
    """
    values = load_config(options, os.environ).values
    if as_json:
        report = {
            name: {"value": _without_passwords(v.value), "origin": v.origin}
            for name, v in values.items()
        }
        click.echo(json.dumps(report, indent=2))
        return
    width = max(map(len, values))
    for name, setting in values.items():
        click.echo(f"{name:<{width}}  {_setting_text(setting.value):<24}  {setting.origin}")


def _setting_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ",".join(_without_passwords(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_passwords(value: Any) -> Any:
    """Hide the passwords of DSNs (`cdc`)."""
    if isinstance(value, tuple):
        return tuple(re.sub(r"(://[^:@/]*):[^@/]*@", r"\1:…@", text) for text in value)
    return value
