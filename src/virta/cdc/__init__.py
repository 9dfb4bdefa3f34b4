"""
Change data capture: the rows of a database as events of a log.

    database ──► capture (SQLite: triggers; PostgreSQL: logical replication) ──► ChangeEvents ──► ChangeLog ──► log

Every change is one CloudEvent in Debezium's shape on the channel `<server>.<schema>.<table>`, keyed by primary key.
The position of the last change is a record of the same batch, so a restart goes on exactly there.
"""
