"""
Keys, values and jobs that are never lost and never done twice for nothing.

`protocol` has the messages and their bytes, `values` and `jobs` the state, `engine` what each command
means; none of them does I/O. `storage` keeps the state in a log, `serving` runs it on TCP, HTTP or
embedded, `clients` are the other side, `replication` keeps copies on other daemons.
"""

from virta.journal.clients.aio import AsyncClient
from virta.journal.clients.client import Client
from virta.journal.clients.spool import Spool
from virta.journal.clients.worker import Worker

__all__ = ["AsyncClient", "Client", "Spool", "Worker"]
