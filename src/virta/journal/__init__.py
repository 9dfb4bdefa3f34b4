"""
Keys, values and jobs that are never lost and never done twice for nothing.

`wire` is the protocol, `store` and `jobs` the state, `engine` what each command means; none of them
does I/O. `persistence` keeps the state in a log, `daemon` serves it, `client`, `spool`, `forwarder`
and `worker` are the other side.
"""
