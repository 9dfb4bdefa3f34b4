/* What a client wants to know of an ordinary reply, without the structures in between; virta/journal/protocol/commands.py says the
 * same in Python and has every other case: refusals, notifications, values of other types. */
#ifndef VIRTA_JOURNAL_TOLD_H
#define VIRTA_JOURNAL_TOLD_H
#include "journal_decode.h"

enum { TOLD_BUFFER = 1, TOLD_STRING = 2, FLAG_DELETED = 1 << 4, ATTEMPTS_AT = 52, LEASE_FIELDS = 5, NEXT_FIELDS = 2 };
static PyTypeObject *lease_type, *next_type;

/* A job that was handed out, up to its payload; NULL without an error if it is not as it usually is. */
static PyObject *get_lease(In *in, unsigned bits, PyObject *deadline)
{
    Span key, uri;
    unsigned type;
    const uint8_t *details = NULL;
    if (!get_span(in, bits & KEY16, &key) || !key.size || (bits & DETAILS && !(details = step(in, DETAILS_BYTES)))
        || !get_typed(in, (int)(bits >> WIDTH_SHIFT & 3), &type, &uri) || type != TOLD_STRING)
        return NULL;
    PyObject *lease = lease_type->tp_alloc(lease_type, LEASE_FIELDS);
    if (!lease) return NULL;
    PyTuple_SET_ITEM(lease, 0, bytes_of(key));
    PyTuple_SET_ITEM(lease, 1, bytes_of(uri));
    PyTuple_SET_ITEM(lease, 2, Py_NewRef(Py_None));
    PyTuple_SET_ITEM(lease, 3, Py_NewRef(deadline));
    PyTuple_SET_ITEM(lease, 4, small(details ? get16(details + ATTEMPTS_AT) : 0));
    for (int i = 0; i < LEASE_FIELDS; i++)
        if (!PyTuple_GET_ITEM(lease, i)) Py_CLEAR(lease);
    return lease;
}

/* The pair without a key that follows a job, if it has a payload: 1, 0 if there is none, -1 if it is not as it usually is. */
static int get_payload(In *in, unsigned bits, PyObject *lease)
{
    In ahead = *in;
    Span key, data;
    unsigned type;
    if (!get_span(&ahead, bits & KEY16, &key)) return -1;
    if (key.size) return 0;
    if ((bits & DETAILS && !step(&ahead, DETAILS_BYTES)) || !get_typed(&ahead, (int)(bits >> WIDTH_SHIFT & 3), &type, &data) || type != TOLD_BUFFER)
        return -1;
    PyObject *payload = PyBytes_FromStringAndSize((const char *)data.at, (Py_ssize_t)data.size), *none = PyTuple_GET_ITEM(lease, 2);
    if (!payload) return -1;
    PyTuple_SET_ITEM(lease, 2, payload);
    Py_DECREF(none);
    *in = ahead;
    return 1;
}

static PyObject *get_jobs(In *in, unsigned bits, unsigned pairs, PyObject *deadline)
{
    PyObject *jobs = PyList_New(0);
    while (jobs && pairs) {
        PyObject *lease = get_lease(in, bits, deadline);
        int more = lease && --pairs ? get_payload(in, bits, lease) : 0;
        if (!lease || more < 0 || PyList_Append(jobs, lease) < 0) Py_CLEAR(jobs);
        else pairs -= (unsigned)more;
        Py_XDECREF(lease);
    }
    return jobs;
}

static PyObject *get_next(In *in, unsigned bits)
{
    const uint8_t *p = bits & TIMEOUT ? step(in, 8) : NULL;
    if (!next_type || !(bits & COUNT) || bits & (CURSOR | 3 << QUERY_SHIFT) || !p) return NULL;
    uint64_t timeout = get64(p);
    p = step(in, bits & KEY16 ? 4 : 3); /* the count and no error */
    unsigned pairs = p ? get16(p) : 0;
    if (!pairs || p[2] || (bits & KEY16 && p[3]) || !(bits >> WIDTH_SHIFT & 3)) return NULL;
    PyObject *deadline = PyFloat_FromDouble((double)timeout / 1e6), *jobs = deadline ? get_jobs(in, bits, pairs, deadline) : NULL;
    Py_XDECREF(deadline);
    PyObject *next = jobs ? next_type->tp_alloc(next_type, NEXT_FIELDS) : NULL;
    if (!next) {
        Py_XDECREF(jobs);
        return NULL;
    }
    PyTuple_SET_ITEM(next, 0, jobs);
    PyTuple_SET_ITEM(next, 1, Py_NewRef(Py_None));
    return next;
}

PyObject *journal_get_told(In *in, int identifier, int what)
{
    const uint8_t *p = what == TOLD_REPLY ? NULL : step(in, 16);
    if (!p || get32(p) != 0x4A520001 || get16(p + 4) != identifier) return NULL;
    unsigned bits = get16(p + 6);
    if (what == TOLD_NEXT) {
        PyObject *next = get_next(in, bits);
        if (next && in->at != in->end) Py_CLEAR(next);
        return next;
    }
    if (bits & ~(unsigned)REPLY_FLAGS || in->end - in->at != 1 || *in->at) return NULL;
    return what == TOLD_DELETED ? PyBool_FromLong(bits & FLAG_DELETED) : PyLong_FromUnsignedLongLong(get64(p + 8));
}

/* (Lease, Next) */
static PyObject *set_told_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *lease, *next;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &lease, &PyType_Type, &next)) return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)lease, &PyTuple_Type) || !PyType_IsSubtype((PyTypeObject *)next, &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "not the tuples of virta.journal.commands");
    Py_XSETREF(lease_type, (PyTypeObject *)Py_NewRef(lease));
    Py_XSETREF(next_type, (PyTypeObject *)Py_NewRef(next));
    Py_RETURN_NONE;
}

#endif
