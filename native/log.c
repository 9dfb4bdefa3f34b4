/* virta.log._native: the part of the log that is worth C: checksums, codec, locked append, group commit, wake-up.
 *
 * Kernel is one process's hold on one log directory: the lock files, the control page and the active segment.
 * It appends with one pwrite under flock and publishes the new end in the control page. It never repairs:
 * whenever the page and the file disagree it answers ATTENTION and Python looks closer, holding the lock.
 * virta/log/engine/plain_kernel.py is its twin, line for line in meaning. */
#define _GNU_SOURCE
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
#define LOCK_SPINS 60            /* about 30 us: longer than an append holds the lock */
#define LOCK_SLEEP_NS_MAX 1000000
#define GROUP_WAIT_NS 60000      /* a leader waits this long for its usual companions */
#define FOLLOW_WAIT_NS 2000000   /* a follower looks again after this long, whatever happens */
#define LEADER_PATIENCE_NS 1000000000 /* then a follower stops waiting for its leader and syncs itself */
#define GROUP_MAX 1024           /* more arrivals than that are the traces of killed processes */
#define WAKE_SLICE_NS 100000000  /* a lost wake-up costs at most this */
/* Headroom: zeros behind the end, so that neither a write nor an fdatasync has a new file size to note (docs/format.md, 5.5). */
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
    _Atomic uint32_t writing; /* the file may hold bytes behind the end: whoever finds it set looks closer */
    uint64_t extent;          /* size of the active segment's file; its end when that is further */
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
    int extended;      /* there is headroom in the active segment that we made */
    int writable, closed;
    int users; /* calls that are inside with the GIL released, and who holds the lock; the last one out takes the page down */
    int failed; /* errno of a failed fdatasync: the kernel tells it once per descriptor, so we must remember */
    _Atomic int stuck; /* the holder of sync.lock made no progress while we waited: do not wait again */
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

static void word_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t ns)
{
#ifdef __linux__
    struct timespec t = {ns / 1000000000u, ns % 1000000000u};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
#else
    if (atomic_load(word) == seen) sleep_ns(ns < 1000000 ? ns : 1000000);
#endif
}

/* The waiter sets the flag, the waker takes it back: a waiter that was killed costs one needless wake, once. */
static void word_bump(_Atomic uint32_t *word, _Atomic uint32_t *waiters)
{
    atomic_fetch_add(word, 1);
    if (atomic_exchange(waiters, 0)) {
#ifdef __linux__
        syscall(SYS_futex, word, FUTEX_WAKE, 0x7FFFFFFF, NULL, NULL, 0);
#endif
    }
}

/* 0 locked, 1 deadline passed, -1 error. Short holds are met by spinning, long ones by sleeping ever longer. */
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
    /* Mostly it is free: no clock is asked then. */
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

/* A consistent copy of the committed part. FOREIGN: not ours or half-written; OTHER_BOOT: what was true before a reboot. */
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
            return memcmp(out->magic, CONTROL_MAGIC, 8) != 0 ? FOREIGN : out->boot_id == k->boot_id ? CURRENT : OTHER_BOOT;
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

static void control_publish(Kernel *k, uint64_t base, uint64_t end, uint64_t next, uint32_t crc, uint64_t time, uint64_t last_pos,
                            uint64_t extent)
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

/* ---- Kernel -------------------------------------------------------------------------------------------- */

static int kernel_init(Kernel *k, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    int lock_fd, sync_fd, control_fd, writable;
    unsigned long long boot_id;
    if (!PyArg_ParseTuple(args, "iiiKp", &lock_fd, &sync_fd, &control_fd, &boot_id, &writable)) return -1;
    if (k->control) { PyErr_SetString(PyExc_ValueError, "kernel is open already"); return -1; }
    void *page = mmap(NULL, CONTROL_BYTES, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, control_fd, 0);
    if (page == MAP_FAILED) { PyErr_SetFromErrno(PyExc_OSError); return -1; }
    k->guard = guard_add(page, CONTROL_BYTES, control_fd, writable);
    if (!k->guard) {
        PyErr_SetFromErrno(PyExc_OSError);
        munmap(page, CONTROL_BYTES);
        return -1;
    }
    k->control = page;
    k->stuck = 0;
    k->own_base = k->own_pos = 0;
    k->lock_fd = lock_fd;
    k->sync_fd = sync_fd;
    k->segment_fd = -1;
    k->segment_base = UINT64_MAX;
    k->boot_id = boot_id;
    k->pid = (uint32_t)getpid(); /* a forked child abandons this kernel and makes its own */
    k->headroom = HEADROOM_MIN;
    k->writable = writable;
    k->closed = k->users = k->failed = k->extended = 0;
    pthread_mutex_init(&k->write_mutex, NULL);
    pthread_mutex_init(&k->sync_mutex, NULL);
    return 0;
}

static void kernel_release(Kernel *k)
{
    if (!k->control) return;
    guard_remove(k->guard);
    k->guard = NULL;
    munmap(k->control, CONTROL_BYTES);
    k->control = NULL;
    if (k->lock_fd >= 0) close(k->lock_fd);
    if (k->sync_fd >= 0) close(k->sync_fd);
    if (k->segment_fd >= 0) close(k->segment_fd);
    k->lock_fd = k->sync_fd = k->segment_fd = -1;
}

static void kernel_dealloc(Kernel *k)
{
    kernel_release(k);
    PyTypeObject *type = Py_TYPE(k);
    type->tp_free(k);
    Py_DECREF(type);
}

/* Descriptors and page belong to the kernel, so that closing a log cannot pull them from under another thread. */
static PyObject *kernel_close(Kernel *k, PyObject *unused)
{
    (void)unused;
    k->closed = 1;
    if (k->users == 0) kernel_release(k);
    Py_RETURN_NONE;
}

/* After a fork, in the child: whatever threads of the parent were doing inside, they are not here to come out. */
static PyObject *kernel_abandon(Kernel *k, PyObject *unused)
{
    (void)unused;
    k->closed = 1;
    k->users = 0;
    kernel_release(k);
    Py_RETURN_NONE;
}

static int kernel_enter(Kernel *k, int write)
{
    if (k->closed || !k->control) { PyErr_SetString(PyExc_ValueError, "kernel is closed"); return -1; }
    if (write && !k->writable) { PyErr_SetString(PyExc_ValueError, "kernel is read-only"); return -1; }
    /* A private page replaces the file's: reads find nothing in it, and it must never be published to. */
    if (guard_restore(k->guard) < 0 && write) { PyErr_SetFromErrnoWithFilename(PyExc_OSError, "control"); return -1; }
    k->users++;
    return 0;
}

static void kernel_leave(Kernel *k)
{
    if (--k->users == 0 && k->closed) kernel_release(k);
}

/* attach(segment_fd, base, salt): the active segment that append writes to. The caller holds the write lock. */
static PyObject *kernel_attach(Kernel *k, PyObject *args)
{
    int fd, old;
    unsigned long long base;
    unsigned int salt;
    if (!PyArg_ParseTuple(args, "iKI", &fd, &base, &salt) || kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&k->sync_mutex); /* a sync of the old segment may be under way in another thread */
    old = k->segment_fd;
    k->segment_fd = fd;
    k->segment_base = base;
    k->salt = salt;
    k->extended = 0;
    k->own_base = k->own_pos = 0; /* after a repair the same bytes may be written again */
    pthread_mutex_unlock(&k->sync_mutex);
    if (old >= 0) close(old);
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    Py_RETURN_NONE;
}

static PyObject *kernel_lock(Kernel *k, PyObject *args)
{
    double timeout;
    int rc;
    if (!PyArg_ParseTuple(args, "d", &timeout) || kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = write_lock(k, timeout);
    Py_END_ALLOW_THREADS
    if (rc == 0 && PyErr_CheckSignals() < 0) { /* interrupted while it waited: nobody would give the lock back */
        write_unlock(k);
        kernel_leave(k);
        return NULL;
    }
    if (rc != 0) kernel_leave(k); /* else unlock leaves: a close meanwhile must not give the lock away */
    if (rc < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(rc == 0);
}

static PyObject *kernel_unlock(Kernel *k, PyObject *unused)
{
    (void)unused;
    if (!k->control) { PyErr_SetString(PyExc_ValueError, "kernel is closed"); return NULL; }
    write_unlock(k);
    kernel_leave(k);
    Py_RETURN_NONE;
}

/* Clear the magic of a truncated page and restore the file's size; if that fails, the next caller tries again. */
static void control_clear(Kernel *k)
{
    const uint8_t none[8] = {0};
    if (pwrite(k->guard->fd, none, sizeof none, 0) < 0 || ftruncate(k->guard->fd, CONTROL_BYTES) < 0) return;
}

static PyObject *kernel_snapshot(Kernel *k, PyObject *unused)
{
    (void)unused;
    Control c;
    if (kernel_enter(k, 0) < 0) return NULL;
    memset(&c, 0, sizeof c);
    int valid = control_copy(k, &c);
    durable_copy(k, &c);
    if (guard_is_short(k->guard)) {
        valid = FOREIGN; /* truncated: the rest of it is invalid for every process */
        atomic_fetch_add(&k->guard->faults, 1);
        if (k->writable) control_clear(k);
    }
    unsigned int holder = k->control->holder_pid, writing = atomic_load(&k->control->writing);
    kernel_leave(k);
    return Py_BuildValue("(iKKKIKKKKKIKI)", valid, c.active_base, c.end_pos, c.next_offset, c.last_crc, c.last_time,
                         c.last_batch_pos, c.durable_base, c.durable_pos, c.durable_offset, holder, c.extent, writing);
}

static PyObject *kernel_publish(Kernel *k, PyObject *args)
{
    unsigned long long base, end, next, time, last_pos;
    unsigned int crc;
    if (!PyArg_ParseTuple(args, "KKKIKK", &base, &end, &next, &crc, &time, &last_pos) || kernel_enter(k, 1) < 0) return NULL;
    /* Do this first: extending a file clears what was stored past its end. If it fails, other processes find no page. */
    if (guard_is_short(k->guard) && ftruncate(k->guard->fd, CONTROL_BYTES) < 0) { /* see above */ }
    control_publish(k, base, end, next, crc, time, last_pos, end);
    kernel_leave(k);
    Py_RETURN_NONE;
}

static PyObject *kernel_publish_durable(Kernel *k, PyObject *args)
{
    unsigned long long base, pos, offset;
    if (!PyArg_ParseTuple(args, "KKK", &base, &pos, &offset) || kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&k->sync_mutex);
    /* Not beside a leader: of two who write at once each would leave its half, and nobody could tell. */
    int rc = file_lock(k->sync_fd, monotonic_ns() + (atomic_load(&k->stuck) ? 0 : LEADER_PATIENCE_NS));
    atomic_store(&k->stuck, rc != 0);
    /* One that stands still does so in its fdatasync; if it stands between two words, let it have the last. */
    if (rc == 0 || !(atomic_load(&k->control->durable_seq) & 1)) durable_publish(k, base, pos, offset);
    if (rc == 0) flock(k->sync_fd, LOCK_UN);
    pthread_mutex_unlock(&k->sync_mutex);
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    Py_RETURN_NONE;
}

typedef struct {
    uint8_t *data;
    size_t size;
    uint32_t count, sequence, payload_crc;
    uint64_t producer, limit;
    uint16_t flags;
    uint64_t base, time, segment, end;
} Append;

/* Is the open segment still a file of the directory, of that size? Whoever asks for its times as well, as fstat does,
 * makes the next write record new ones at the cost of the write itself. */
static int file_is(int fd, uint64_t size)
{
#ifdef STATX_SIZE
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE | STATX_NLINK, &sx) == 0) return sx.stx_nlink > 0 && sx.stx_size == size;
#endif
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_nlink > 0 && (uint64_t)st.st_size == size;
}

static uint64_t file_size(const Control *c) { return c->extent > c->end_pos ? c->extent : c->end_pos; }

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

/* Zeros from the file's end to some way behind the batch that is about to be written; the file's size after it.
 * A disk or a limit that refuses them is no error: then the file grows with every append, as without headroom. */
static uint64_t extend(Kernel *k, const Append *a, uint64_t end, uint64_t size)
{
    static uint8_t zeros[HEADROOM_BATCH_MAX + HEADROOM_MAX + 4096];
    uint64_t to = (end + a->size + k->headroom + 4095) & ~(uint64_t)4095;
    if (to > a->limit) to = a->limit;
    if (to <= size || to <= end + a->size) return size;
    if (write_whole(k->segment_fd, zeros, (size_t)(to - size), size) < 0) {
        if (ftruncate(k->segment_fd, (off_t)size) < 0) { /* the next append finds another size than it should */ }
        k->headroom = HEADROOM_MIN;
        return size;
    }
    if (k->headroom < HEADROOM_MAX) k->headroom *= 2;
    k->extended = 1;
    return to;
}

/* Under the lock: O(1) trust in the control page, one pwrite, publish. Sets errno and returns -1 when the write fails,
 * after cutting the file back to its end. */
static int append_locked(Kernel *k, Append *a)
{
    Control c;
    if (control_copy(k, &c) != CURRENT || c.active_base != k->segment_base || k->segment_fd < 0) return ATTENTION;
    uint64_t size = file_size(&c);
    if (!c.last_batch_pos && c.end_pos > SEGMENT_HEADER_BYTES) return ATTENTION; /* the page was truncated in the middle */
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
    if (a->end > size && a->size <= HEADROOM_BATCH_MAX && !(a->flags & FLAG_SEAL)) size = extend(k, a, c.end_pos, size);
    if (write_whole(k->segment_fd, h, a->size, c.end_pos) < 0) {
        int saved = errno;
        /* If it cannot be cut, `writing` stays: the next lock holder looks closer. */
        if (ftruncate(k->segment_fd, (off_t)c.end_pos) == 0)
            control_publish(k, c.active_base, c.end_pos, c.next_offset, c.last_crc, c.last_time, c.last_batch_pos, c.end_pos);
        errno = saved;
        return -1;
    }
    if (a->flags & FLAG_SEAL) {
        /* Not published, and `writing` stays: until the next segment is there, no writer may find something to append to.
         * Zeros that cannot be cut off behind a seal do no harm. */
        if (size > a->end && ftruncate(k->segment_fd, (off_t)a->end) < 0) { /* as said */ }
        return APPENDED;
    }
    control_publish(k, k->segment_base, a->end, a->base + a->count, header_crc, a->time, c.end_pos, size > a->end ? size : a->end);
    return APPENDED;
}

/* fdatasync the active segment and publish that. 0 done, ATTENTION: another segment is active, -1 fdatasync failed.
 * `publish` is false for one who syncs beside a leader that does not get on (stopped, or a slow disk). */
static int sync_segment(Kernel *k, int publish)
{
    Control copy, now;
    if (control_copy(k, &copy) != CURRENT || copy.active_base != k->segment_base || k->segment_fd < 0) return ATTENTION;
    if (k->failed) { errno = k->failed; return -1; }
    if (fdatasync(k->segment_fd) < 0) { k->failed = errno; return -1; }
    k->own_base = copy.active_base;
    k->own_pos = copy.end_pos;
    /* Who rolled over or recovered meanwhile has said, or is about to say, what is durable now. */
    publish = publish && control_copy(k, &now) == CURRENT && now.active_base == copy.active_base && now.end_pos >= copy.end_pos;
    if (publish) durable_publish(k, copy.active_base, copy.end_pos, copy.next_offset);
    return 0;
}

/* A leader waits a moment for as many companions as came last time, so that one fdatasync serves them all. */
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

/* Lead if nobody else does: 1 led (result in *rc), 0 somebody else is at it. */
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

/* Make everything up to `pos` of segment `base` durable: 0 done, ATTENTION: attach the active segment first, -1 fdatasync
 * failed. With `group` somebody else's fdatasync will do; without, it is our own. */
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
            /* The holder may be stopped for hours: wait once, and again only after the lock was free in between. An
             * fdatasync needs no lock to be correct; only publishing the result in the page does. */
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

/* sync(base, pos, group) -> bool, as above; False: attach the active segment first. */
static PyObject *kernel_sync(Kernel *k, PyObject *args)
{
    unsigned long long base, pos;
    int group, rc;
    if (!PyArg_ParseTuple(args, "KKp", &base, &pos, &group) || kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rc = sync_until(k, base, pos, group);
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    if (rc < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(rc == 0);
}

enum { SETTLE_NOT = 0, SETTLE_GROUP = 1, SETTLE_FSYNC = 2 };

/* append(buf, count, producer, sequence, flags, limit, timeout, held, settle)
 *   -> (status, base, time, segment, end_pos, unsettled)
 * `buf` is what encode() made: its first 56 bytes are filled in here. With `held` the caller has the lock.
 * `settle` asks to make it durable before returning; `unsettled` is 0 when there is nothing left to do, 1 when sync()
 * has to be called, and -errno when fdatasync failed. */
static PyObject *kernel_append(Kernel *k, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer buf;
    Append a;
    int held, settle, rc, unsettled = 0;
    if (given != 9) { PyErr_Format(PyExc_TypeError, "append takes 9 arguments, got %zd", given); return NULL; }
    unsigned long count = PyLong_AsUnsignedLong(args[1]), sequence = PyLong_AsUnsignedLong(args[3]);
    unsigned long long producer = PyLong_AsUnsignedLongLong(args[2]), limit = PyLong_AsUnsignedLongLong(args[5]);
    unsigned long flags = PyLong_AsUnsignedLong(args[4]);
    double timeout = PyFloat_AsDouble(args[6]);
    held = PyObject_IsTrue(args[7]);
    settle = (int)PyLong_AsLong(args[8]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &buf, PyBUF_WRITABLE) < 0) return NULL;
    if (buf.len < HEADER_BYTES || buf.len - HEADER_BYTES > (Py_ssize_t)UINT32_MAX || count > UINT32_MAX
        || sequence > UINT32_MAX || flags > UINT16_MAX)
        PyErr_SetString(PyExc_ValueError, "not a batch");
    if (PyErr_Occurred() || kernel_enter(k, 1) < 0) {
        PyBuffer_Release(&buf);
        return NULL;
    }
    memset(&a, 0, sizeof a);
    a.data = buf.buf;
    a.size = (size_t)buf.len;
    a.count = (uint32_t)count;
    a.producer = producer;
    a.sequence = (uint32_t)sequence;
    a.flags = (uint16_t)flags;
    a.limit = limit;
    Py_BEGIN_ALLOW_THREADS
    a.payload_crc = crc32c(0, a.data + HEADER_BYTES, a.size - HEADER_BYTES);
    rc = held ? 0 : write_lock(k, timeout);
    if (rc == 0) {
        rc = append_locked(k, &a);
        int saved = errno;
        if (!held) write_unlock(k);
        errno = saved;
    } else if (rc == 1) {
        rc = TIMEOUT;
    }
    if (rc == APPENDED && settle != SETTLE_NOT) {
        unsettled = held ? 1 : sync_until(k, a.segment, a.end, settle == SETTLE_GROUP);
        if (unsettled < 0) unsettled = -errno;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buf);
    kernel_leave(k);
    if (rc < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return Py_BuildValue("(iKKKKi)", rc, a.base, a.time, a.segment, a.end, unsettled);
}

/* trim(): at closing time, give back the headroom that this kernel made; not if anybody is busy. */
static PyObject *kernel_trim(Kernel *k, PyObject *unused)
{
    (void)unused;
    if (kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    Control c;
    if (k->extended && !k->failed && write_lock(k, 0) == 0) {
        if (control_copy(k, &c) == CURRENT && c.active_base == k->segment_base && !atomic_load(&k->control->writing)
            && c.extent > c.end_pos && file_is(k->segment_fd, c.extent)) {
            atomic_store(&k->control->writing, 1);
            if (ftruncate(k->segment_fd, (off_t)c.end_pos) == 0)
                control_publish(k, c.active_base, c.end_pos, c.next_offset, c.last_crc, c.last_time, c.last_batch_pos, c.end_pos);
            else
                atomic_store(&k->control->writing, 0); /* it is as it was */
        }
        write_unlock(k);
    }
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    Py_RETURN_NONE;
}

static PyObject *kernel_notified(Kernel *k, PyObject *unused)
{
    (void)unused;
    if (kernel_enter(k, 0) < 0) return NULL;
    uint32_t word = atomic_load(&k->control->notify_word);
    kernel_leave(k);
    return PyLong_FromUnsignedLong(word);
}

/* wait(seen, timeout) -> word: returns when something was published since `seen` was read, or after a slice of time. */
static PyObject *kernel_wait(Kernel *k, PyObject *args)
{
    unsigned int seen;
    double timeout;
    if (!PyArg_ParseTuple(args, "Id", &seen, &timeout) || kernel_enter(k, 0) < 0) return NULL;
    uint64_t ns = timeout <= 0 ? 0 : timeout >= 0.1 ? WAKE_SLICE_NS : (uint64_t)(timeout * 1e9);
    Control *c = k->control;
    Py_BEGIN_ALLOW_THREADS
    if (k->writable) {
        atomic_store(&c->notify_waiters, 1);
        if (atomic_load(&c->notify_word) == seen) word_wait(&c->notify_word, seen, ns);
    } else if (atomic_load(&c->notify_word) == seen) {
        /* A read-only page cannot ask to be woken: look again soon. */
        sleep_ns(ns < 1000000 ? ns : 1000000);
    }
    seen = atomic_load(&c->notify_word);
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    return PyLong_FromUnsignedLong(seen);
}

/* faults() -> how often the control page was found truncated */
static PyObject *kernel_faults(Kernel *k, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(k->guard ? atomic_load(&k->guard->faults) : 0);
}

static PyMethodDef kernel_methods[] = {
    {"abandon", (PyCFunction)kernel_abandon, METH_NOARGS, NULL},
    {"append", (PyCFunction)(void (*)(void))kernel_append, METH_FASTCALL, NULL},
    {"attach", (PyCFunction)kernel_attach, METH_VARARGS, NULL},
    {"close", (PyCFunction)kernel_close, METH_NOARGS, NULL},
    {"faults", (PyCFunction)kernel_faults, METH_NOARGS, NULL},
    {"lock", (PyCFunction)kernel_lock, METH_VARARGS, NULL},
    {"notified", (PyCFunction)kernel_notified, METH_NOARGS, NULL},
    {"publish", (PyCFunction)kernel_publish, METH_VARARGS, NULL},
    {"publish_durable", (PyCFunction)kernel_publish_durable, METH_VARARGS, NULL},
    {"snapshot", (PyCFunction)kernel_snapshot, METH_NOARGS, NULL},
    {"sync", (PyCFunction)kernel_sync, METH_VARARGS, NULL},
    {"trim", (PyCFunction)kernel_trim, METH_NOARGS, NULL},
    {"unlock", (PyCFunction)kernel_unlock, METH_NOARGS, NULL},
    {"wait", (PyCFunction)kernel_wait, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_init, kernel_init},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_methods, kernel_methods},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_doc, "Kernel(lock_fd, sync_fd, control_fd, boot_id, writable)"},
    {0, NULL},
};

static PyType_Spec kernel_spec = {"virta.log._native.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT, kernel_slots};

/* ---- module -------------------------------------------------------------------------------------------- */

static PyObject *native_crc8(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    unsigned char crc = 0;
    if (!PyArg_ParseTuple(args, "y*|b", &buf, &crc)) return NULL;
    crc = crc8(crc, buf.buf, (size_t)buf.len);
    PyBuffer_Release(&buf);
    return PyLong_FromLong(crc);
}

static PyObject *native_crc32c(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &buf, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c(crc, buf.buf, (size_t)buf.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buf);
    return PyLong_FromUnsignedLong(crc);
}

/* Records and Names come and go by the million. They are classes written in Python, without dict, weak references or
 * finalizer, so what the general destructor of such classes looks for is never there: these do the rest of its work. */
static void record_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_GC_IsTracked(self)) PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = Py_SIZE(self); --i >= 0;) Py_XDECREF(PyTuple_GET_ITEM(self, i));
    type->tp_free(self);
    Py_DECREF(type);
}

static void name_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *native_set_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *record, *name;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &record, &PyType_Type, &name)) return NULL;
    PyTypeObject *types[2] = {(PyTypeObject *)record, (PyTypeObject *)name};
    PyTypeObject *bases[2] = {&PyTuple_Type, &PyBytes_Type};
    for (int i = 0; i < 2; i++) {
        if (types[i]->tp_base != bases[i] || types[i]->tp_dictoffset || types[i]->tp_weaklistoffset || types[i]->tp_del
            || types[i]->tp_finalize) {
            PyErr_SetString(PyExc_TypeError, "Record must be a plain tuple, Name plain bytes");
            return NULL;
        }
    }
    types[0]->tp_dealloc = record_dealloc;
    types[1]->tp_dealloc = name_dealloc;
    Py_INCREF(record);
    Py_XSETREF(record_type, record);
    Py_INCREF(name);
    Py_XSETREF(name_type, name);
    Py_RETURN_NONE;
}

/* guard(map, fd) -> handle: keep SIGBUS away from a writable map of a file that others may truncate. */
static PyObject *native_guard(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    int fd;
    if (!PyArg_ParseTuple(args, "w*i", &buf, &fd)) return NULL;
    Guard *g = guard_add(buf.buf, (size_t)buf.len, fd, 1);
    PyBuffer_Release(&buf);
    return g ? PyLong_FromLong((long)(g - guards)) : PyErr_SetFromErrno(PyExc_OSError);
}

static Guard *guard_of(PyObject *handle)
{
    long i = PyLong_AsLong(handle);
    if (!PyErr_Occurred() && i >= 0 && i < GUARDS_MAX && atomic_load(&guards[i].used)) return &guards[i];
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not a guard");
    return NULL;
}

static PyObject *native_unguard(PyObject *self, PyObject *handle)
{
    (void)self;
    Guard *g = guard_of(handle);
    if (!g) return NULL;
    guard_remove(g);
    Py_RETURN_NONE;
}

static PyObject *native_guard_faults(PyObject *self, PyObject *handle)
{
    (void)self;
    Guard *g = guard_of(handle);
    return g ? PyLong_FromUnsignedLong(atomic_load(&g->faults)) : NULL;
}

static PyMethodDef module_methods[] = {
    {"crc8", native_crc8, METH_VARARGS, "crc8(data, crc=0) -> int"},
    {"crc32c", native_crc32c, METH_VARARGS, "crc32c(data, crc=0) -> int"},
    {"encode", native_encode, METH_O, "encode(records) -> bytearray"},
    {"guard", native_guard, METH_VARARGS, "guard(map, fd) -> handle"},
    {"guard_faults", native_guard_faults, METH_O, "guard_faults(handle) -> int"},
    {"unguard", native_unguard, METH_O, "unguard(handle), before the map is closed"},
    {"read", native_read, METH_VARARGS, "read(...) -> (records, pos, prev, next, status, detail)"},
    {"set_types", native_set_types, METH_VARARGS, "set_types(Record, Name)"},
    {"walk", native_walk, METH_VARARGS, "walk(...) -> (batches, pos, prev, next, status, detail)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "virta.log._native", NULL, -1, module_methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    crc_init();
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    PyObject *type = PyType_FromSpec(&kernel_spec);
    if (!type || PyModule_AddObject(m, "Kernel", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
