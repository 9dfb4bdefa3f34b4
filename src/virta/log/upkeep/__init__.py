"""Upkeep of a log: recovery, verify and repair, retention, compaction."""
