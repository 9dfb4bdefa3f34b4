"""The decision about a request: its Host, the page that sent it, its credential and its rights."""
