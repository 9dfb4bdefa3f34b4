"""`virta cdc`: capture the changes of a database into a log."""

from virta.cli.cdc.group import cdc

__all__ = ["cdc"]
