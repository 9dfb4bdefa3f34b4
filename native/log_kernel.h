/* The Python type Kernel: methods that take a Kernel's locks, append, sync, wait and publish. */
#ifndef VIRTA_LOG_KERNEL_H
#define VIRTA_LOG_KERNEL_H

#include "log_append.h"


static int kernel_init(Kernel *k, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    int lock_fd, sync_fd, control_fd, writable;
    unsigned long long boot_id;
    if (!PyArg_ParseTuple(args, "iiiKp", &lock_fd, &sync_fd, &control_fd, &boot_id, &writable)) return -1;
    if (k->control) { PyErr_SetString(PyExc_ValueError, "kernel is open already"); return -1; }
    int access = PROT_READ | (writable ? PROT_WRITE : 0);
    void *page = mmap(NULL, CONTROL_BYTES, access, MAP_SHARED, control_fd, 0);
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
    k->users = k->failed = k->extended = 0;
    atomic_store(&k->closed, 0);
    atomic_store(&k->wakes, 0);
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

/* Descriptors and page stay until the last call in progress returns: other threads may be using them. */
static PyObject *kernel_close(Kernel *k, PyObject *unused)
{
    (void)unused;
    k->closed = 1;
    if (k->users == 0) kernel_release(k);
    Py_RETURN_NONE;
}

/* After a fork, in the child: calls that were in progress in threads of the parent never return here. */
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
    if (guard_restore(k->guard) < 0 && write) {
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, "control");
        return -1;
    }
    k->users++;
    return 0;
}

static void kernel_leave(Kernel *k)
{
    if (--k->users == 0 && k->closed) kernel_release(k);
}

/* attach(segment_fd, base, salt): the active segment that append writes to. The caller has the write lock. */
static PyObject *kernel_attach(Kernel *k, PyObject *args)
{
    int fd, old;
    unsigned long long base;
    unsigned int salt;
    if (!PyArg_ParseTuple(args, "iKI", &fd, &base, &salt) || kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&k->sync_mutex); /* another thread may be syncing the old segment */
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
    if (rc == 0 && PyErr_CheckSignals() < 0) { /* interrupted while it waited: no caller would unlock */
        write_unlock(k);
        kernel_leave(k);
        return NULL;
    }
    if (rc != 0) kernel_leave(k); /* else unlock leaves: a close meanwhile must not release the lock */
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

/* Clear the magic of a truncated page and restore the file's size; if that fails the next caller tries again.
 * */
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
    return Py_BuildValue("(iKKKIKKKKKIKI)", valid, c.active_base, c.end_pos, c.next_offset, c.last_crc,
                         c.last_time, c.last_batch_pos, c.durable_base, c.durable_pos, c.durable_offset,
                         holder, c.extent, writing);
}

static PyObject *kernel_publish(Kernel *k, PyObject *args)
{
    unsigned long long base, end, next, time, last_pos;
    unsigned int crc;
    if (!PyArg_ParseTuple(args, "KKKIKK", &base, &end, &next, &crc, &time, &last_pos)
        || kernel_enter(k, 1) < 0)
        return NULL;
    /* First, because extending a file clears what was stored past its end. If it fails, others find no page.
     * */
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
    /* Not next to a leader: two writers at once would mix their values undetected. */
    int rc = file_lock(k->sync_fd, monotonic_ns() + (atomic_load(&k->stuck) ? 0 : LEADER_PATIENCE_NS));
    atomic_store(&k->stuck, rc != 0);
    /* A stopped leader is in its fdatasync; if it is between two words its values come last. */
    if (rc == 0 || !(atomic_load(&k->control->durable_seq) & 1)) durable_publish(k, base, pos, offset);
    if (rc == 0) flock(k->sync_fd, LOCK_UN);
    pthread_mutex_unlock(&k->sync_mutex);
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    Py_RETURN_NONE;
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

enum { SYNC_NONE = 0, SYNC_GROUP = 1, SYNC_FSYNC = 2 };

/* append(buf, count, producer, sequence, flags, limit, timeout, locked, sync)
 *   -> (status, base, time, segment, end_pos, unsynced)
 * `buf` is what encode() made: its first 56 bytes are filled in here. With `locked` the caller has the lock.
 * `sync` asks to make the batch durable before returning; `unsynced` is 0
 * when there is nothing left to do, 1 when sync() must be called, and -errno when fdatasync failed. */
static PyObject *kernel_append(Kernel *k, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer buf;
    Append a;
    int locked, sync, rc, unsynced = 0;
    if (given != 9) return PyErr_Format(PyExc_TypeError, "append takes 9 arguments, got %zd", given);
    unsigned long count = PyLong_AsUnsignedLong(args[1]), sequence = PyLong_AsUnsignedLong(args[3]);
    unsigned long long producer = PyLong_AsUnsignedLongLong(args[2]);
    unsigned long long limit = PyLong_AsUnsignedLongLong(args[5]);
    unsigned long flags = PyLong_AsUnsignedLong(args[4]);
    double timeout = PyFloat_AsDouble(args[6]);
    locked = PyObject_IsTrue(args[7]);
    sync = (int)PyLong_AsLong(args[8]);
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
    rc = locked ? 0 : write_lock(k, timeout);
    if (rc == 0) {
        rc = append_locked(k, &a);
        int saved = errno;
        if (!locked) write_unlock(k);
        errno = saved;
    } else if (rc == 1) {
        rc = TIMEOUT;
    }
    if (rc == APPENDED && sync != SYNC_NONE) {
        unsynced = locked ? 1 : sync_until(k, a.segment, a.end, sync == SYNC_GROUP);
        if (unsynced < 0) unsynced = -errno;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buf);
    kernel_leave(k);
    if (rc < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return Py_BuildValue("(iKKKKi)", rc, a.base, a.time, a.segment, a.end, unsynced);
}

/* trim(): before closing, cut off the headroom that this kernel wrote, unless another process has the lock.
 * */
static PyObject *kernel_trim(Kernel *k, PyObject *unused)
{
    (void)unused;
    if (kernel_enter(k, 1) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    Control c;
    if (k->extended && !k->failed && write_lock(k, 0) == 0) {
        if (control_is_ours(k, &c) && !atomic_load(&k->control->writing) && c.extent > c.end_pos
            && file_is(k->segment_fd, c.extent)) {
            atomic_store(&k->control->writing, 1);
            if (ftruncate(k->segment_fd, (off_t)c.end_pos) == 0)
                control_republish(k, &c);
            else
                atomic_store(&k->control->writing, 0); /* nothing changed */
        }
        write_unlock(k);
    }
    Py_END_ALLOW_THREADS
    kernel_leave(k);
    Py_RETURN_NONE;
}

/* Changes with every publish by any process, and with every wake() of this kernel. */
static uint32_t wait_token(Kernel *k)
{
    return atomic_load(&k->control->notify_word) + atomic_load(&k->wakes);
}

static PyObject *kernel_notified(Kernel *k, PyObject *unused)
{
    (void)unused;
    if (kernel_enter(k, 0) < 0) return NULL;
    uint32_t token = wait_token(k);
    kernel_leave(k);
    return PyLong_FromUnsignedLong(token);
}

/* wake(): end every wait() of this kernel. Other processes are woken too and find that nothing changed. */
static PyObject *kernel_wake(Kernel *k, PyObject *unused)
{
    (void)unused;
    if (kernel_enter(k, 0) < 0) return NULL;
    atomic_fetch_add(&k->wakes, 1);
    word_wake(&k->control->notify_word);
    kernel_leave(k);
    Py_RETURN_NONE;
}

/* wait(seen, timeout) -> token: wait until something was published or wake() was called since `seen`, or for
 * `timeout` seconds. Also returns after a signal, when the kernel is closed, and when the page was truncated.
 * */
static PyObject *kernel_wait(Kernel *k, PyObject *args)
{
    unsigned int seen;
    double timeout;
    if (!PyArg_ParseTuple(args, "Id", &seen, &timeout) || kernel_enter(k, 0) < 0) return NULL;
    uint64_t slice_max = k->writable ? WAKE_SLICE_NS : READ_ONLY_SLICE_NS;
    uint64_t until = monotonic_ns() + (timeout <= 0 ? 0 : (uint64_t)((timeout < 1e6 ? timeout : 1e6) * 1e9));
    uint32_t faults = atomic_load(&k->guard->faults);
    Py_BEGIN_ALLOW_THREADS
    while (wait_token(k) == seen && !atomic_load(&k->closed) && atomic_load(&k->guard->faults) == faults) {
        uint64_t now = monotonic_ns();
        if (now >= until || guard_is_short(k->guard)) break;
        uint64_t slice = until - now < slice_max ? until - now : slice_max;
        if (k->writable) {
            uint32_t word = seen - atomic_load(&k->wakes);
            atomic_store(&k->control->notify_waiters, 1);
            if (word_wait(&k->control->notify_word, word, slice) < 0 && errno == EINTR) break;
        } else {
            sleep_ns(slice);
        }
    }
    seen = wait_token(k);
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
    {"wake", (PyCFunction)kernel_wake, METH_NOARGS, NULL},
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

static PyType_Spec kernel_spec = {
    "virta.log._native.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT, kernel_slots,
};

#endif
