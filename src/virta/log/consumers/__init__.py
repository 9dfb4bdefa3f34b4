"""Named consumers: durable positions, members that share the partitions, lag."""
