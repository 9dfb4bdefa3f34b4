"""`python -m virta` is the `virta` command."""

from __future__ import annotations

from virta.cli import main

main(prog_name="virta")
