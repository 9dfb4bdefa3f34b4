/* Append under the write lock, and group commit: one fdatasync for all who wait. No Python in here. */
#ifndef VIRTA_LOG_APPEND_H
#define VIRTA_LOG_APPEND_H

#include "log_control.h"

typedef struct {
    uint8_t *data;
    size_t size;
    uint32_t count, sequence, payload_crc;
    uint64_t producer, limit;
    uint16_t flags;
    uint64_t base, time, segment, end;
} Append;

/* Whether the open segment is still a file of the directory, of that size. Not with fstat where statx exists:
 * reading the times makes the next write update them, which costs as much as the write itself. */
static int file_is(int fd, uint64_t size)
{
#ifdef STATX_SIZE
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE | STATX_NLINK, &sx) == 0)
        return sx.stx_nlink > 0 && sx.stx_size == size;
#endif
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_nlink > 0 && (uint64_t)st.st_size == size;
}

static uint64_t file_size(const Control *c)
{
    return c->extent > c->end_pos ? c->extent : c->end_pos;
}

/* Copy the control page; whether it is current and names the segment that we have open. */
static int control_is_ours(Kernel *k, Control *c)
{
    return control_copy(k, c) == CURRENT && c->active_base == k->segment_base && k->segment_fd >= 0;
}

/* Publish the same end again, with no headroom after it. */
static void control_republish(Kernel *k, const Control *c)
{
    control_publish(k, c->active_base, c->end_pos, c->next_offset, c->last_crc, c->last_time,
                    c->last_batch_pos, c->end_pos);
}

/* All of it, or -1 with errno set. */
static int write_whole(int fd, const uint8_t *data, size_t size, uint64_t at)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, data + done, size - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            if (n == 0) errno = ENOSPC;
            return -1;
        }
        done += (size_t)n;
    }
    return 0;
}

/* Write zeros from the file's end to beyond the batch that is about to be written; return the file's new
 * size. It is no error if the disk or a limit refuses them: the file then grows with every append. */
static uint64_t extend(Kernel *k, const Append *a, uint64_t end, uint64_t size)
{
    static uint8_t zeros[HEADROOM_BATCH_MAX + HEADROOM_MAX + 4096];
    uint64_t to = (end + a->size + k->headroom + 4095) & ~(uint64_t)4095;
    if (to > a->limit) to = a->limit;
    if (to <= size || to <= end + a->size) return size;
    if (write_whole(k->segment_fd, zeros, (size_t)(to - size), size) < 0) {
        if (ftruncate(k->segment_fd, (off_t)size) < 0) { /* the next append finds a wrong size */ }
        k->headroom = HEADROOM_MIN;
        return size;
    }
    if (k->headroom < HEADROOM_MAX) k->headroom *= 2;
    k->extended = 1;
    return to;
}

/* Under the lock: check the control page in O(1), one pwrite, publish. Returns -1 with errno set when the
 * write fails, after cutting the file back to its end. */
static int append_locked(Kernel *k, Append *a)
{
    Control c;
    if (!control_is_ours(k, &c)) return ATTENTION;
    uint64_t size = file_size(&c);
    /* This page was truncated in the middle. */
    if (!c.last_batch_pos && c.end_pos > SEGMENT_HEADER_BYTES) return ATTENTION;
    if (atomic_load_explicit(&k->control->writing, memory_order_relaxed)) return ATTENTION;
    if (!file_is(k->segment_fd, size)) return ATTENTION;
    if (c.end_pos + a->size > a->limit && c.end_pos > SEGMENT_HEADER_BYTES) return ROLL;
    uint64_t time = now_us();
    uint8_t *h = a->data;
    a->base = c.next_offset;
    a->time = time > c.last_time ? time : c.last_time;
    memcpy(h + 1, "\x36\x01\x04\x00\x01", 5);
    put16(h + 6, a->flags);
    put64(h + 8, a->base);
    put64(h + 16, a->time);
    put32(h + 24, a->count);
    put32(h + 28, (uint32_t)(a->size - HEADER_BYTES));
    put64(h + 32, a->producer);
    put32(h + 40, a->sequence);
    put32(h + 44, c.last_crc);
    put32(h + 48, a->payload_crc);
    uint32_t header_crc = crc32c(k->salt, h + 1, 51);
    put32(h + 52, header_crc);
    h[0] = crc8(0, h + 1, 55);
    a->end = c.end_pos + a->size;
    a->segment = k->segment_base;
    atomic_store_explicit(&k->control->writing, 1, memory_order_seq_cst);
    if (a->end > size && a->size <= HEADROOM_BATCH_MAX && !(a->flags & FLAG_SEAL))
        size = extend(k, a, c.end_pos, size);
    if (write_whole(k->segment_fd, h, a->size, c.end_pos) < 0) {
        int saved = errno;
        /* If it cannot be cut, `writing` stays set: the next owner of the lock inspects the file. */
        if (ftruncate(k->segment_fd, (off_t)c.end_pos) == 0) control_republish(k, &c);
        errno = saved;
        return -1;
    }
    if (a->flags & FLAG_SEAL) {
        /* Not published, and `writing` stays set: until the next segment exists no writer may append here.
         * Zeros that cannot be cut off after a seal do no harm. */
        if (size > a->end && ftruncate(k->segment_fd, (off_t)a->end) < 0) { /* as said */ }
        return APPENDED;
    }
    control_publish(k, k->segment_base, a->end, a->base + a->count, header_crc, a->time, c.end_pos,
                    size > a->end ? size : a->end);
    return APPENDED;
}

/* fdatasync the active segment and publish that. 0 done, ATTENTION another segment is active, -1 fdatasync
 * failed. `publish` is false without sync.lock, next to a leader that makes no progress (stopped, or a slow
 * disk). */
static int sync_segment(Kernel *k, int publish)
{
    Control copy, now;
    if (!control_is_ours(k, &copy)) return ATTENTION;
    if (k->failed) { errno = k->failed; return -1; }
    if (fdatasync(k->segment_fd) < 0) { k->failed = errno; return -1; }
    k->own_base = copy.active_base;
    k->own_pos = copy.end_pos;
    /* After a rollover or recovery meanwhile, that process publishes what is durable now. */
    publish = publish && control_copy(k, &now) == CURRENT && now.active_base == copy.active_base
              && now.end_pos >= copy.end_pos;
    if (publish) durable_publish(k, copy.active_base, copy.end_pos, copy.next_offset);
    return 0;
}

/* A leader waits briefly for as many callers as came last time, so that one fdatasync serves them all. */
static void sync_gather(Kernel *k)
{
    Control *c = k->control;
    uint32_t usual = atomic_load(&c->group_size);
    uint64_t until = monotonic_ns() + GROUP_WAIT_NS;
    while (usual > 1 && atomic_load(&c->arrivals) - atomic_load(&c->served) < usual && monotonic_ns() < until)
        sched_yield();
    uint32_t arrived = atomic_load(&c->arrivals);
    uint32_t size = arrived - atomic_load(&c->served);
    atomic_store(&c->group_size, size > GROUP_MAX ? 1 : size);
    atomic_store(&c->served, arrived);
}

/* Sync as the leader: 1 done (result in *rc), 0 another caller leads. */
static int sync_lead(Kernel *k, int group, int *rc)
{
    int led = 0;
    if (pthread_mutex_trylock(&k->sync_mutex) != 0) return 0;
    if (flock(k->sync_fd, LOCK_EX | LOCK_NB) == 0) {
        if (group) sync_gather(k);
        *rc = sync_segment(k, 1);
        led = 1;
        int saved = errno;
        flock(k->sync_fd, LOCK_UN);
        errno = saved;
    }
    int saved = errno;
    pthread_mutex_unlock(&k->sync_mutex);
    errno = saved;
    return led;
}

/* Make everything up to `pos` of segment `base` durable: 0 done, ATTENTION attach the active segment first,
 * -1 fdatasync failed. With `group` another caller's fdatasync counts; without, only our own. */
static int sync_until(Kernel *k, uint64_t base, uint64_t pos, int group)
{
    Control *c = k->control, copy;
    int rc = 0;
    uint64_t patience = monotonic_ns() + LEADER_PATIENCE_NS;
    if (group) atomic_fetch_add(&c->arrivals, 1);
    for (;;) {
        uint32_t seen = atomic_load(&c->durable_word);
        durable_copy(k, &copy);
        if (group && position_reached(&copy, base, pos)) return 0;
        if (sync_lead(k, group, &rc)) {
            atomic_store(&k->stuck, 0);
            return rc;
        }
        int stuck = atomic_load(&k->stuck) || monotonic_ns() > patience;
        if (!group || stuck) {
            /* The leader may be stopped for hours: wait once, and again only after the lock was free in
             * between. An fdatasync is correct without the lock; only publishing the result in the page needs
             * it. */
            if (group) atomic_store(&k->stuck, 1);
            pthread_mutex_lock(&k->sync_mutex); /* keeps attach from closing the descriptor meanwhile */
            int done = group && (k->own_base > base || (k->own_base == base && k->own_pos >= pos));
            rc = done ? 0 : sync_segment(k, 0);
            int saved = errno;
            pthread_mutex_unlock(&k->sync_mutex);
            errno = saved;
            return rc;
        }
        atomic_store(&c->durable_waiters, 1);
        word_wait(&c->durable_word, seen, FOLLOW_WAIT_NS);
    }
}

#endif
