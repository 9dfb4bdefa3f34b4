/* The client's end of a line: one call sends a request, waits for the reply and decodes it.
 *
 * Anything but that one reply is handed to virta/journal/client.py as the bytes that came, and a request that cannot be
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

/* Everything sent, or -1 with an error set. */
static int send_all(int fd, const uint8_t *data, size_t size)
{
    while (size) {
        ssize_t sent;
        Py_BEGIN_ALLOW_THREADS
        sent = send(fd, data, size, MSG_NOSIGNAL);
        Py_END_ALLOW_THREADS
        if (sent < 0 && errno == EINTR) {
            if (PyErr_CheckSignals() < 0) return -1;
            continue;
        }
        if (sent < 0) {
            PyErr_SetFromErrno(PyExc_OSError);
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

/* (descriptor, request, what) -> what the reply says, or the reply if that is not so simple; the bytes that came, if they are
 * anything but that; None: encode it elsewhere */
static PyObject *asker_ask(Asker *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "ask takes a descriptor, a request and what is wanted of the reply");
        return NULL;
    }
    long fd = PyLong_AsLong(args[0]), what = PyLong_AsLong(args[2]);
    if ((fd == -1 || what == -1) && PyErr_Occurred()) return NULL;
    Out out;
    out_init(&out);
    enum outcome found = journal_put_request(&out, args[1]);
    if (found != WRITTEN) {
        out_release(&out);
        return found == DOUBT ? Py_NewRef(Py_None) : NULL;
    }
    int identifier = journal_request_identifier(args[1]);
    int sent = send_all((int)fd, out.data, out.size);
    out_release(&out);
    if (sent < 0) return NULL;
    ssize_t size = asker_receive(self, (int)fd, self->data, sizeof self->data);
    if (size < 0) return NULL;
    In in = {self->data, self->data + size};
    PyObject *told = size ? journal_get_told(&in, identifier, (int)what) : NULL;
    if (told || PyErr_Occurred()) return told;
    in.at = self->data;
    PyObject *reply = size ? journal_get_reply(&in) : NULL;
    if (!reply && PyErr_Occurred()) return NULL;
    if (reply && in.at == in.end && journal_reply_identifier(reply) == identifier) return reply;
    Py_XDECREF(reply);
    return PyBytes_FromStringAndSize((const char *)self->data, size);
}

static PyMethodDef asker_methods[] = {
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
