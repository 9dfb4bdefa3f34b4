"""HTTP connections: parsing, the fast path for publishing, responses and deadlines."""
