"""Keys and values: entries, their order, queries, numbers."""
