"""`virta demo`: a shop in SQLite, captured, queried, worked on and charted, all on this machine."""

from virta.cli.demo.command import demo

__all__ = ["demo"]
