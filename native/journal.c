/* The journal's messages: the fast half of virta/journal/protocol/codec.py, which has the layout and decides every doubt.
 *
 * Decoding takes the whole, well-formed messages at the front of some bytes and stops at the first that is short,
 * wrong or beyond a limit; encoding returns None for anything it cannot write as it should be. The plain twin then
 * sees those bytes or that message, so that there is one place where waiting, faults and refusals are defined. */
#include "journal.h"
#include "journal_decode.h"
#include "journal_encode.h"
#include "journal_told.h"

static int identifier_of(const Shape *shape, PyObject *message, int at)
{
    uint64_t identifier;
    return Py_TYPE(message) == shape->type && number(field(shape, message, at), 0xFFFF, &identifier) ? (int)identifier : -1;
}

int journal_reply_identifier(PyObject *reply) { return identifier_of(&reply_shape, reply, R_IDENTIFIER); }
int journal_request_identifier(PyObject *request) { return identifier_of(&request_shape, request, Q_IDENTIFIER); }

/* (Request, Reply, Pair, Value, Details) */
static PyObject *set_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *request, *reply, *pair, *value, *details;
    if (!PyArg_ParseTuple(args, "OOOOO", &request, &reply, &pair, &value, &details)) return NULL;
    if (!learn(&request_shape, request, Q_FIELDS) || !learn(&reply_shape, reply, R_FIELDS) || !learn(&pair_shape, pair, P_FIELDS)
        || !learn(&value_shape, value, V_FIELDS) || !learn(&details_shape, details, D_FIELDS))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_types", set_types, METH_VARARGS, "The structures to make and to read."},
    {"set_told_types", set_told_types, METH_VARARGS, "The tuples a client gives out."},
    {"decode_requests", decode_requests, METH_O, "The requests at the front of some bytes, and where they end."},
    {"decode_replies", decode_replies, METH_O, "The replies at the front of some bytes, and where they end."},
    {"encode_request", encode_request, METH_O, "The bytes of a request, None if it is not an ordinary one."},
    {"encode_reply", encode_reply, METH_O, "The bytes of a reply, None if it is not an ordinary one."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "virta.journal._native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    for (int i = 0; i < 16; i++)
        if (!(numbers[i] = PyLong_FromLong(i))) return NULL;
    if (!(no_bytes = PyBytes_FromStringAndSize("", 0)) || !(no_text = PyUnicode_FromString(""))) return NULL;
    PyObject *made_module = PyModule_Create(&module);
    if (made_module
        && (journal_add_lines(made_module) < 0 || journal_add_asker(made_module) < 0))
        Py_CLEAR(made_module);
    return made_module;
}
