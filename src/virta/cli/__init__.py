"""
The `virta` command: one module per command group, each imported only when it is used.
"""

from __future__ import annotations

from importlib import import_module

import click

# command -> (module, attribute, one-line help shown without importing the module)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "backup": ("virta.cli.operating.backup", "backup", "Copy a data directory while it is used."),
    "cdc": ("virta.cli.cdc", "cdc", "Capture the changes of a database into a log."),
    "config": ("virta.cli.serve", "config", "Show every server setting and where it came from."),
    "demo": ("virta.cli.demo", "demo", "Show everything at work on this machine."),
    "doctor": ("virta.cli.doctor", "doctor", "Check that what Virta needs is installed and works."),
    "filter": ("virta.cli.filter", "filter_group", "Validate, canonicalise and explain filters."),
    "journal": ("virta.cli.journal", "journal", "Keys, values and jobs that are never lost."),
    "lake": ("virta.cli.lake", "lake", "Keep a log's history as Parquet, Delta or Iceberg."),
    "live": ("virta.cli.operating.live", "live", "Show the rows of a live view, in place."),
    "publish": ("virta.cli.publish", "publish", "Publish events to a channel."),
    "restore": ("virta.cli.operating.backup", "restore", "Make a data directory from a backup."),
    "serve": ("virta.cli.serve", "serve", "Serve channels, streams and filters over HTTP."),
    "subscribe": ("virta.cli.subscribe", "subscribe", "Print the events of a channel."),
    "log": ("virta.cli.log", "log", "Append to, read, inspect and maintain an event log."),
    "top": ("virta.cli.operating.top", "top", "Show what a server does, in the terminal."),
    "match": ("virta.cli.match", "match", "Print which filters each document matches."),
    "token": ("virta.cli.token", "token", "Create, list and revoke tokens of a server."),
    "pipeline": ("virta.cli.pipeline", "pipeline", "Check, run and watch Spark pipelines."),
}


class LazyGroup(click.Group):
    """A group that imports its commands on use, so that `virta --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][2]) for name in sorted(COMMANDS)])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="virta")
def main() -> None:
    """The SQLite of event streams, with live queries, that grows into Spark."""
