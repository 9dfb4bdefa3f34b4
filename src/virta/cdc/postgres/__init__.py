"""Capture of PostgreSQL by logical replication: needs psycopg2 (`pip install 'virta[cdc]'`)."""
