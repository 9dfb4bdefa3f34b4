"""`virta config`: every setting of the server, its value and where that came from."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import click

from virta.cli.serve import load_config, server_options


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
        click.echo(f"{name:<{width}}  {_shown(setting.value):<24}  {setting.origin}")


def _shown(value: object) -> str:
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
