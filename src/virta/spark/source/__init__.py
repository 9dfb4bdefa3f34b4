"""The data source `virta`: reads a log as a table or a stream, and appends rows to one."""
