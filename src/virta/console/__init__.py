"""The web console: static files, served by `virta.server.api.observe.static_files`. It uses the public API only."""
