"""Consumers of events: server-sent events and WebSockets."""
