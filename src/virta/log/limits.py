"""The log's limits: every size and wait has a name, a number and a reason."""

from __future__ import annotations

from typing import Final

# The seed's limits, inclusive. Enforced on write and again on read before anything is allocated.
TOPIC_BYTES_MAX: Final = 1024
KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 10 * 1024 * 1024

# One batch is one pwrite and is decoded whole: six of the largest records fit.
BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
BATCH_HEADER_BYTES: Final = 56
SEGMENT_HEADER_BYTES: Final = 64

# A batch below this size is not compressed: a frame has some twenty bytes of its own.
COMPRESS_BYTES_MIN: Final = 256

# Positions inside a segment are 32 bits in the index; a batch may overshoot the limit once.
SEGMENT_BYTES_DEFAULT: Final = 256 * 1024 * 1024
SEGMENT_BYTES_MIN: Final = 4 * 1024
SEGMENT_BYTES_MAX: Final = 2 * 1024 * 1024 * 1024

# Zeros written after the end (native/log_control.h has the same numbers): doubling with use, at most what fits in a
# processor's cache, and none for batches so large that the zeros would cost more than they save.
HEADROOM_MIN: Final = 4 * 1024
HEADROOM_MAX: Final = 256 * 1024
HEADROOM_BATCH_MAX: Final = 64 * 1024

# One index entry per this many bytes: a seek reads at most this much too early.
INDEX_STEP_BYTES: Final = 64 * 1024
# Idempotent producers remembered; the least recently used is dropped first.
PRODUCERS_MAX: Final = 65_536

# Topics and batches that one topic index lists: some 100 MiB while it is built. A segment with more gets none.
TOPIC_INDEX_TOPICS_MAX: Final = 250_000
TOPIC_INDEX_PLACES_MAX: Final = 4_000_000
# An index of a segment up to this size is built by the append that sealed it, a larger one by a thread.
TOPIC_INDEX_INLINE_BYTES: Final = 4 * 1024 * 1024
# Topic indexes that a handle keeps open: one descriptor each.
TOPIC_INDEXES_OPEN_MAX: Final = 64
# A reader of more topics reads everything: so many lookups would cost more.
TOPIC_LOOKUPS_MAX: Final = 256
# Batches closer than this are read in one go, and a topic that is denser than this is read in order: reading on is
# cheaper than another system call.
TOPIC_RUN_GAP_BYTES: Final = 16 * 1024
TOPIC_DENSE_BYTES: Final = 4 * 1024
# An active segment below this size is read in order: that takes a few milliseconds.
ACTIVE_TABLE_BYTES_MIN: Final = 4 * 1024 * 1024
# Positions of the active segment that a handle remembers by topic: some 50 MiB.
ACTIVE_PLACES_MAX: Final = 2_000_000

# Bytes that a reader reads at once, and records it decodes before it returns them.
READ_CHUNK_BYTES: Final = 1024 * 1024
READ_RECORDS_MAX: Final = 16_384

# A GAP record's count is a four-byte varlong.
GAP_MAX: Final = (1 << 28) - 1

# Topics in one result of `log.topics()`; further ones come in pages.
TOPICS_MAX: Final = 10_000
# Counts of topics remembered, over all segments of a handle: some 40 MiB. Segments beyond are read again each time.
TOPIC_COUNTS_MAX: Final = 100_000

LOCK_TIMEOUT_S: Final = 10.0
# A probe of the disk writes at most this much, however large the failed append was.
PROBE_BYTES_MAX: Final = 1024 * 1024
# Opening waits this long for the write lock if the log needs no recovery: reading needs no lock.
OPEN_LOCK_TIMEOUT_S: Final = 1.0
# A newest record this far in the future gets a warning; synchronised clocks differ by less.
CLOCK_AHEAD_S: Final = 60.0
SYNC_INTERVAL_S: Final = 0.05
# Without a wake-up (a plain-Python writer, a read-only directory) a follower checks this often.
POLL_S: Final = 0.1
# A watcher reports changes at most this often: a busy log must not wake a thread for every append.
WATCH_INTERVAL_S: Final = 0.005
# A watcher reports this often even if nothing was published, in case the control page was lost and rebuilt.
WATCH_S_MAX: Final = 1.0

CONSUMER_NAME_MAX: Final = 128
PARTITIONS_DEFAULT: Final = 16
PARTITIONS_MAX: Final = 256
MEMBERS_MAX: Final = 1023
# The poll interval: a member that reads no record and commits nothing for this long is considered hung.
LEASE_S_DEFAULT: Final = 30.0
LEASE_S_MAX: Final = 86_400.0
# A change of positions takes microseconds; one that takes this long is a stopped process's. A wrong guess costs a
# file copy, but no data.
CHANGE_PATIENCE_S: Final = 1.0
# Processes that may be stopped in the middle of a change before a consumer gives up.
TURNS_MAX: Final = 64
# Limits of what counting a consumer's lag reads; later offsets are counted without being read.
LAG_RECORDS_MAX: Final = 200_000
LAG_BYTES_MAX: Final = 64 * 1024 * 1024

# An empty value deletes its key; compaction keeps that record this long for readers that were offline.
TOMBSTONE_AGE_S: Final = 86_400.0
