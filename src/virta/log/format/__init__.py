"""The bytes of a log: records, batches, segments, indexes, and the files of the directory."""
