"""The durable log: a directory of segments that many processes append to and read."""
