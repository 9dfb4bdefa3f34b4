/* The client's end of a line: one call sends a request, waits for the reply and decodes it.
 *
 * Anything but that one reply is handed to virta/journal/clients/client.py as the bytes that came, and a request that cannot be
 * encoded here is declined before anything was sent. The socket blocks, and the system keeps its timeout. */
#include "journal.h"
#if defined(__linux__)
#include "look.h"
#include <errno.h>
#include <structmember.h>
#include <sys/socket.h>

#define IN_BYTES 65536
/* A client that asks less often than this does not look: it has other things to do. */
#define RARE_NS 2000000

typedef struct { PyObject_HEAD Look look; int64_t answered; long long looked; uint8_t data[IN_BYTES]; } Asker;
static PyTypeObject asker_type;

static PyObject *asker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    long long look;
    if (!PyArg_ParseTuple(args, "L", &look)) return NULL;
    Asker *self = (Asker *)type->tp_alloc(type, 0);
    if (self) look_init(&self->look, look);
    return (PyObject *)self;
}

/* Everything sent, or -1 with an error set. After half a request nothing can be sent any more: the daemon would take it for
 * the other half. */
static int send_all(int fd, const uint8_t *data, size_t size)
{
    const uint8_t *begin = data;
    while (size) {
        ssize_t sent;
        Py_BEGIN_ALLOW_THREADS
        sent = send(fd, data, size, MSG_NOSIGNAL);
        Py_END_ALLOW_THREADS
        if (sent < 0 && errno == EINTR && PyErr_CheckSignals() == 0) continue;
        if (sent < 0) {
            if (!PyErr_Occurred()) PyErr_SetFromErrno(PyExc_OSError);
            if (data > begin) shutdown(fd, SHUT_RDWR);
            return -1;
        }
        data += sent;
        size -= (size_t)sent;
    }
    return 0;
}

/* What comes next, at most so many bytes: looked for at first, if that is worth it, then waited for. */
static ssize_t asker_receive(Asker *self, int fd, uint8_t *data, size_t room)
{
    ssize_t size = -1;
    int64_t began = now_ns();
    int looked = began - self->answered < RARE_NS && look_worthwhile(&self->look), looking = looked;
    Moment moment = {0};
    if (looked) moment = look_begin(&self->look, began);
    Py_BEGIN_ALLOW_THREADS
    while (looking) {
        size = recv(fd, data, room, MSG_DONTWAIT);
        if (size >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) break;
        looking = look_on(&moment);
    }
    if (!looking) size = recv(fd, data, room, 0);
    Py_END_ALLOW_THREADS
    int error = errno;
    if (looked) look_judge(&self->look, looking, &moment);
    self->looked += looking;
    while (size < 0 && error == EINTR) {
        if (PyErr_CheckSignals() < 0) return -1;
        Py_BEGIN_ALLOW_THREADS
        size = recv(fd, data, room, 0);
        error = errno;
        Py_END_ALLOW_THREADS
    }
    self->answered = now_ns();
    look_learn(&self->look, self->answered - began);
    if (size < 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return size;
}

/* Send what was written and wait for its reply: what that says, or the reply if that is not so simple, or the bytes that
 * came if they are anything but that. Releases what was written. */
static PyObject *exchange(Asker *self, PyObject *descriptor, Out *out, int identifier, int what)
{
    long fd = PyLong_AsLong(descriptor);
    int sent = fd == -1 && PyErr_Occurred() ? -1 : send_all((int)fd, out->data, out->size);
    out_release(out);
    if (sent < 0) return NULL;
    ssize_t size = asker_receive(self, (int)fd, self->data, sizeof self->data);
    if (size < 0) return NULL;
    In in = {self->data, self->data + size};
    PyObject *told = size ? journal_get_told(&in, identifier, what) : NULL;
    if (told || PyErr_Occurred()) return told;
    in.at = self->data;
    PyObject *reply = size ? journal_get_reply(&in) : NULL;
    if (!reply && PyErr_Occurred()) return NULL;
    if (reply && in.at == in.end && journal_reply_identifier(reply) == identifier) return reply;
    Py_XDECREF(reply);
    return PyBytes_FromStringAndSize((const char *)self->data, size);
}

/* (descriptor, request, what) -> what `exchange` gives; None: encode it elsewhere */
static PyObject *asker_ask(Asker *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) return PyErr_Format(PyExc_TypeError, "ask takes a descriptor, a request and what is wanted of the reply");
    long what = PyLong_AsLong(args[2]);
    if (what == -1 && PyErr_Occurred()) return NULL;
    Out out;
    out_init(&out);
    enum outcome found = journal_put_request(&out, args[1]);
    if (found == WRITTEN) return exchange(self, args[0], &out, journal_request_identifier(args[1]), (int)what);
    out_release(&out);
    return found == DOUBT ? Py_NewRef(Py_None) : NULL;
}

/* --- requests of jobs from their arguments; None: not ordinary ones, build them elsewhere --- */

enum { DELETE = 4, NEXT = 11, PUSH = 12, RANGE = 1, BUFFER = 1, KEY_BYTES_MAX = 65535, DATA_BYTES_MAX = 8 * 1024 * 1024 };
enum { OVERWRITE = 1 << 5, PERSIST = 1 << 9, DATA = 1 << 10, DETAILS = 1 << 15 };

/* Bytes or text as a key. */
static int key_from(PyObject *object, Span *span)
{
    Py_ssize_t size = 0;
    const char *text;
    if (PyBytes_CheckExact(object)) {
        text = PyBytes_AS_STRING(object);
        size = PyBytes_GET_SIZE(object);
    } else if (!PyUnicode_CheckExact(object) || !(text = PyUnicode_AsUTF8AndSize(object, &size))) {
        PyErr_Clear();
        return 0;
    }
    *span = (Span){(const uint8_t *)text, (size_t)size};
    return size <= KEY_BYTES_MAX;
}

static int count_from(PyObject *object, unsigned *number)
{
    long value = PyLong_CheckExact(object) ? PyLong_AsLong(object) : -1;
    if (value == -1 && PyErr_Occurred()) PyErr_Clear();
    *number = (unsigned)value;
    return value >= 0 && value <= 0xFFFF;
}

static PyObject *exchange_ask(Asker *self, PyObject *descriptor, const Ask *ask, int what)
{
    Out out;
    out_init(&out);
    if (journal_put_ask(&out, ask) == WRITTEN) return exchange(self, descriptor, &out, (int)ask->identifier, what);
    out_release(&out);
    return NULL;
}

/* (descriptor, identifier, uri, domain, priority, payload) */
static PyObject *asker_push(Asker *self, PyObject *const *args, Py_ssize_t count)
{
    Ask ask = {.function = PUSH, .flags = PERSIST, .query = RANGE, .counted = 1, .type = BUFFER};
    if (count != 6 || !count_from(args[1], &ask.identifier) || !key_from(args[2], &ask.key) || !key_from(args[3], &ask.key2)
        || !count_from(args[4], &ask.count))
        Py_RETURN_NONE;
    if ((ask.valued = args[5] != Py_None)) {
        if (!PyBytes_CheckExact(args[5]) || PyBytes_GET_SIZE(args[5]) > DATA_BYTES_MAX) Py_RETURN_NONE;
        ask.data = (Span){(const uint8_t *)PyBytes_AS_STRING(args[5]), (size_t)PyBytes_GET_SIZE(args[5])};
    }
    return exchange_ask(self, args[0], &ask, TOLD_TIMESTAMP);
}

/* (descriptor, identifier, domain, count) */
static PyObject *asker_next(Asker *self, PyObject *const *args, Py_ssize_t count)
{
    Ask ask = {.function = NEXT, .flags = DATA | DETAILS, .counted = 1};
    if (count != 4 || !count_from(args[1], &ask.identifier) || !key_from(args[2], &ask.key) || !count_from(args[3], &ask.count)) Py_RETURN_NONE;
    return exchange_ask(self, args[0], &ask, TOLD_NEXT);
}

/* (descriptor, identifier, key) */
static PyObject *asker_done(Asker *self, PyObject *const *args, Py_ssize_t count)
{
    Ask ask = {.function = DELETE, .flags = OVERWRITE};
    if (count != 3 || !count_from(args[1], &ask.identifier) || !key_from(args[2], &ask.key)) Py_RETURN_NONE;
    return exchange_ask(self, args[0], &ask, TOLD_DELETED);
}

static PyMethodDef asker_methods[] = {
    {"push", (PyCFunction)(void (*)(void))asker_push, METH_FASTCALL, "Push a job."},
    {"next", (PyCFunction)(void (*)(void))asker_next, METH_FASTCALL, "Take jobs."},
    {"done", (PyCFunction)(void (*)(void))asker_done, METH_FASTCALL, "Acknowledge a job."},
    {"ask", (PyCFunction)(void (*)(void))asker_ask, METH_FASTCALL, "Send a request and wait for its reply."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef asker_members[] = {
    {"looked", T_LONGLONG, offsetof(Asker, looked), READONLY, "How often looking found something."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject asker_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "virta.journal._native.Asker",
    .tp_basicsize = sizeof(Asker),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = asker_new,
    .tp_methods = asker_methods,
    .tp_members = asker_members,
};

int journal_add_asker(PyObject *module) { return PyModule_AddType(module, &asker_type); }

#else
int journal_add_asker(PyObject *module)
{
    (void)module;
    return 0;
}
#endif
