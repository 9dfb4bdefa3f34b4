"""Run `virta journal` in this process against a daemon."""

from __future__ import annotations

import json

from click.testing import CliRunner

from virta.cli.journal import journal


class Shell:
    """Calls commands; an exit code other than `code` is an error."""

    def __init__(self, port):
        self.port = port
        self.runner = CliRunner()

    def __call__(self, *words, code=0, **options):
        command, *rest = words
        result = self.runner.invoke(journal, [command, "--port", str(self.port), *rest], **options)
        assert code == result.exit_code, result.output
        return result.output.strip()

    def json(self, *words, **options):
        command, *rest = words
        return [json.loads(line) for line in self(command, "--json", *rest, **options).splitlines()]
