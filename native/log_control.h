/* The control page of a log and one process's handle on it: locks, sequence locks, wake-ups (docs/format.md
 * §5). */
#ifndef VIRTA_LOG_CONTROL_H
#define VIRTA_LOG_CONTROL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include "guard.h"
#include "log_batch.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the format is little-endian; use the plain-Python kernel on this machine"
#endif

#define SEGMENT_HEADER_BYTES 64
#define CONTROL_BYTES 4096
#define SEQLOCK_TRIES 1000
#define LOCK_SPINS 60            /* about 30 us: longer than an append has the lock */
#define LOCK_SLEEP_NS_MAX 1000000
#define GROUP_WAIT_NS 60000      /* a leader waits this long for its usual number of callers */
#define FOLLOW_WAIT_NS 2000000   /* a caller that waits for a leader checks again after this long */
#define LEADER_PATIENCE_NS 1000000000 /* then it stops waiting and syncs itself */
#define GROUP_MAX 1024           /* more arrivals than that were left by killed processes */
#define WAKE_SLICE_NS 100000000  /* plain-Python writers send no wake-up: check the page this often */
#define READ_ONLY_SLICE_NS 1000000 /* a read-only page cannot ask to be woken: check it this often */
/* Headroom: zeros after the end, so that writes and fdatasyncs do not change the file's size (docs/format.md
 * §5.5). */
#define HEADROOM_MIN 4096
#define HEADROOM_MAX 262144
#define HEADROOM_BATCH_MAX 65536 /* larger batches would pay more for the zeros than they save */

enum { APPENDED = 0, ATTENTION = 1, ROLL = 2, TIMEOUT = 3 };

typedef struct {
    uint8_t magic[8];
    uint64_t boot_id;
    uint64_t active_base;
    uint64_t end_pos;
    uint64_t next_offset;
    uint32_t last_crc;
    _Atomic uint32_t seq;
    uint64_t last_time;
    uint64_t last_batch_pos;
    uint64_t durable_offset, durable_pos, durable_base;
    _Atomic uint32_t durable_word, durable_waiters, group_size;
    uint32_t holder_pid;
    _Atomic uint32_t durable_seq, arrivals, served;
    _Atomic uint32_t writing; /* the file may have bytes after the end: inspect it if no append is running */
    uint64_t extent;          /* size of the active segment's file; end_pos when that is larger */
    _Atomic uint32_t notify_word, notify_waiters;
} Control;
_Static_assert(offsetof(Control, seq) == 44, "control page layout");
_Static_assert(offsetof(Control, durable_word) == 88, "control page layout");
_Static_assert(offsetof(Control, writing) == 116, "control page layout");
_Static_assert(offsetof(Control, extent) == 120, "control page layout");
_Static_assert(offsetof(Control, notify_word) == 128, "control page layout");

static const uint8_t CONTROL_MAGIC[8] = {'V', 'I', 'R', 'T', 'A', 'C', 'T', '1'};

typedef struct {
    PyObject_HEAD
    int lock_fd, sync_fd, segment_fd;
    uint64_t boot_id, segment_base;
    uint32_t salt, pid;
    uint64_t headroom; /* zeros to write ahead next time: doubles with use */
    int extended;      /* the active segment has headroom that we wrote */
    int writable;
    _Atomic int closed;
    _Atomic uint32_t wakes; /* calls of wake() */
    int users;  /* calls in progress without the GIL, and the owner of the lock; the last unmaps the page */
    int failed; /* errno of a failed fdatasync: the system reports it once per descriptor */
    _Atomic int stuck; /* the owner of sync.lock made no progress while we waited: do not wait again */
    uint64_t own_base, own_pos; /* synced without the lock; guarded by sync_mutex */
    Control *control;
    Guard *guard; /* of the control page */
    pthread_mutex_t write_mutex, sync_mutex;
} Kernel;

/* ---- time, futex, locks -------------------------------------------------------------------------------- */

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000u + t.tv_nsec / 1000;
}

static uint64_t monotonic_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
    struct timespec t = {ns / 1000000000u, ns % 1000000000u};
    nanosleep(&t, NULL);
}

/* Wait while the word is `seen`; -1 with errno EINTR after a signal. */
static int word_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t ns)
{
#ifdef __linux__
    struct timespec t = {ns / 1000000000u, ns % 1000000000u};
    return (int)syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
#else
    if (atomic_load(word) == seen) sleep_ns(ns < 1000000 ? ns : 1000000);
    return 0;
#endif
}

static void word_wake(_Atomic uint32_t *word)
{
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE, 0x7FFFFFFF, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* The waiter sets the flag, the waker clears it: a waiter that was killed costs one needless wake, once. */
static void word_bump(_Atomic uint32_t *word, _Atomic uint32_t *waiters)
{
    atomic_fetch_add(word, 1);
    if (atomic_exchange(waiters, 0)) word_wake(word);
}

/* 0 locked, 1 deadline passed, -1 error. Spins first, then sleeps for ever longer times. */
static int file_lock(int fd, uint64_t deadline_ns)
{
    uint64_t pause = 20000;
    for (int tries = 0;; tries++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) return 0;
        if (errno != EWOULDBLOCK && errno != EINTR) return -1;
        if (tries < LOCK_SPINS) { sched_yield(); continue; }
        if (monotonic_ns() >= deadline_ns) return 1;
        sleep_ns(pause);
        if (pause < LOCK_SLEEP_NS_MAX) pause *= 2;
    }
}

static int write_lock(Kernel *k, double timeout)
{
    /* Usually it is free: then no clock is read. */
    if (pthread_mutex_trylock(&k->write_mutex) == 0) {
        if (flock(k->lock_fd, LOCK_EX | LOCK_NB) == 0) {
            k->control->holder_pid = k->pid;
            return 0;
        }
        pthread_mutex_unlock(&k->write_mutex);
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    uint64_t ns = timeout < 0 ? 0 : (uint64_t)(timeout * 1e9);
    uint64_t deadline = monotonic_ns() + ns;
    ns += until.tv_nsec;
    until.tv_sec += ns / 1000000000u;
    until.tv_nsec = ns % 1000000000u;
    if (pthread_mutex_timedlock(&k->write_mutex, &until) != 0) return 1;
    int rc = file_lock(k->lock_fd, deadline);
    if (rc != 0) {
        int saved = errno;
        pthread_mutex_unlock(&k->write_mutex);
        errno = saved;
    } else {
        k->control->holder_pid = k->pid;
    }
    return rc;
}

static void write_unlock(Kernel *k)
{
    k->control->holder_pid = 0;
    flock(k->lock_fd, LOCK_UN);
    pthread_mutex_unlock(&k->write_mutex);
}

/* ---- control page -------------------------------------------------------------------------------------- */

enum { FOREIGN = 0, OTHER_BOOT = 1, CURRENT = 2 };

/* Copy the committed part consistently. FOREIGN: not ours or half-written; OTHER_BOOT: from before a reboot.
 * */
static int control_copy(Kernel *k, Control *out)
{
    Control *c = k->control;
    for (int i = 0; i < SEQLOCK_TRIES; i++) {
        uint32_t before = atomic_load_explicit(&c->seq, memory_order_acquire);
        if (before & 1) { sched_yield(); continue; }
        memcpy(out, c, offsetof(Control, durable_offset));
        out->extent = c->extent;
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&c->seq, memory_order_relaxed) == before)
            return memcmp(out->magic, CONTROL_MAGIC, 8) != 0 ? FOREIGN
                   : out->boot_id == k->boot_id              ? CURRENT
                                                             : OTHER_BOOT;
    }
    return FOREIGN;
}

static int durable_copy(Kernel *k, Control *out)
{
    Control *c = k->control;
    for (int i = 0; i < SEQLOCK_TRIES; i++) {
        uint32_t before = atomic_load_explicit(&c->durable_seq, memory_order_acquire);
        if (before & 1) { sched_yield(); continue; }
        out->durable_offset = c->durable_offset;
        out->durable_pos = c->durable_pos;
        out->durable_base = c->durable_base;
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&c->durable_seq, memory_order_relaxed) == before) return 1;
    }
    out->durable_offset = out->durable_pos = out->durable_base = 0;
    return 0;
}

static void control_publish(Kernel *k, uint64_t base, uint64_t end, uint64_t next, uint32_t crc,
                            uint64_t time, uint64_t last_pos, uint64_t extent)
{
    Control *c = k->control;
    uint32_t seq = atomic_load_explicit(&c->seq, memory_order_relaxed) | 1;
    atomic_store_explicit(&c->seq, seq, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    memcpy(c->magic, CONTROL_MAGIC, 8);
    c->boot_id = k->boot_id;
    c->active_base = base;
    c->end_pos = end;
    c->next_offset = next;
    c->last_crc = crc;
    c->last_time = time;
    c->last_batch_pos = last_pos;
    c->extent = extent;
    atomic_store_explicit(&c->seq, seq + 1, memory_order_release);
    atomic_store_explicit(&c->writing, 0, memory_order_release);
    word_bump(&c->notify_word, &c->notify_waiters);
}

static void durable_publish(Kernel *k, uint64_t base, uint64_t pos, uint64_t offset)
{
    Control *c = k->control;
    uint32_t seq = atomic_load_explicit(&c->durable_seq, memory_order_relaxed) | 1;
    atomic_store_explicit(&c->durable_seq, seq, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    c->durable_base = base;
    c->durable_pos = pos;
    c->durable_offset = offset;
    atomic_store_explicit(&c->durable_seq, seq + 1, memory_order_release);
    word_bump(&c->durable_word, &c->durable_waiters);
    word_bump(&c->notify_word, &c->notify_waiters);
}

static int position_reached(const Control *c, uint64_t base, uint64_t pos)
{
    return c->durable_base > base || (c->durable_base == base && c->durable_pos >= pos);
}

#endif
