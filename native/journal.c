/* The native codec of the journal's messages; protocol/codec.py has the layout and the plain codec.
 *
 * Decoding returns the complete, well-formed messages at the front of some bytes and stops at the first that
 * is incomplete, malformed or beyond a limit; encoding returns None for anything that does not fit. The plain
 * codec continues there, so waiting, errors and refusals are defined in one place. */
#include "journal.h"
#include "journal_decode.h"
#include "journal_encode.h"

int journal_reply_identifier(PyObject *reply)
{
    uint64_t identifier;
    PyObject *fields[R_FIELDS];
    if (!read_fields(&reply_type, reply, fields)) return -1;
    return number(fields[R_IDENTIFIER], 0xFFFF, &identifier) ? (int)identifier : -1;
}

int journal_request_identifier(PyObject *request)
{
    uint64_t identifier;
    PyObject *fields[Q_FIELDS];
    if (!read_fields(&request_type, request, fields)) return -1;
    return number(fields[Q_IDENTIFIER], 0xFFFF, &identifier) ? (int)identifier : -1;
}

/* (Request, Reply, Pair, Value, Details, msgspec.structs.astuple) */
static PyObject *set_types(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *request, *reply, *pair, *value, *details, *function;
    if (!PyArg_ParseTuple(args, "OOOOOO", &request, &reply, &pair, &value, &details, &function)) return NULL;
    if (!learn(&request_type, request, Q_FIELDS) || !learn(&reply_type, reply, R_FIELDS)
        || !learn(&pair_type, pair, P_FIELDS) || !learn(&value_type, value, V_FIELDS)
        || !learn(&details_type, details, D_FIELDS))
        return NULL;
    Py_XSETREF(as_tuple, Py_NewRef(function));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_types", set_types, METH_VARARGS, "Set the structures to make and to read, and how."},
    {"decode_requests", decode_requests, METH_O, "Return (requests, end) of some bytes."},
    {"decode_replies", decode_replies, METH_O, "Return (replies, end) of some bytes."},
    {"encode_request", encode_request, METH_O, "Return the bytes of a request, or None to decline it."},
    {"encode_reply", encode_reply, METH_O, "Return the bytes of a reply, or None to decline it."},
    {"encode_replies", encode_replies, METH_O, "Return the bytes of replies, or None to decline them."},
    {"exchange", (PyCFunction)(void (*)(void))journal_exchange, METH_FASTCALL,
     "Send a request and return its reply."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "virta.journal._native", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    for (int i = 0; i < 16; i++)
        if (!(numbers[i] = PyLong_FromLong(i))) return NULL;
    if (!(no_bytes = PyBytes_FromStringAndSize("", 0)) || !(no_text = PyUnicode_FromString(""))) return NULL;
    return PyModule_Create(&module_definition);
}
