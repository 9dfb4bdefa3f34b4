"""Row tables: what records do to rows, memberships, the touch ring, passes, and table files."""
