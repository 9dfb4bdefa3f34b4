"""
Keys, values and jobs that are never lost and never done twice for nothing.

`wire` is the protocol, `store` and `jobs` the state, `engine` what each command means; none of them
does I/O. `persistence` keeps the state in a log, `node` runs it, `daemon` serves it on TCP, `http`
answers requests about it; `client`, `spool`, `forwarder` and `worker` are the other side.
"""

from virta.journal.client import AsyncClient, Client
from virta.journal.spool import Spool
from virta.journal.worker import Worker

__all__ = ["AsyncClient", "Client", "Spool", "Worker"]
