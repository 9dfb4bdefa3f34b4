"""The other side of the wire: clients, spool, forwarder, worker."""
