"""The server: HTTP channels, live queries, streams and filters over one log."""
