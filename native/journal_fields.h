/* The structures of virta/journal/protocol/messages.py: their fields and their limits. */
#ifndef VIRTA_JOURNAL_FIELDS_H
#define VIRTA_JOURNAL_FIELDS_H
#include "journal.h"
#include <string.h>

#define KEY_BYTES_MAX 65535
#define VALUE_DATA_BYTES_MAX (8 * 1024 * 1024)
#define REPLY_DECODE_BYTES_MAX (16 * 1024 * 1024 + VALUE_DATA_BYTES_MAX + 4 * KEY_BYTES_MAX)
#define DETAILS_BYTES 56
#define TYPE_MAX 5
#define REQUEST_MAGIC 0x464A0001 /* "FJ", version 1 */
#define REPLY_MAGIC 0x4A520001   /* "JR", version 1 */

enum bit {
    KEY16 = 1 << 0, TIMEOUT = 1 << 3, CURSOR = 1 << 5, PERSIST = 1 << 9, PERSIST_ALIAS = 1 << 12,
    COUNT = 1 << 13, TTL = 1 << 14, DETAILS = 1 << 14
};
enum { WIDTH_SHIFT = 1, QUERY_SHIFT = 7, QUERY_RANGE = 1 };
#define REQUEST_FLAGS 0x8E70
#define REPLY_FLAGS 0x1E50

/* The fields of each structure, in the order of its definition. */
enum request_field {
    Q_FUNCTION, Q_IDENTIFIER, Q_FLAGS, Q_TIMESTAMP, Q_TIMEOUT, Q_TTL, Q_COUNT, Q_KEY, Q_KEY2, Q_VALUE,
    Q_QUERY, Q_FIELDS
};
enum reply_field {
    R_IDENTIFIER, R_FLAGS, R_TIMESTAMP, R_TIMEOUT, R_QUERY, R_ERROR, R_PAIRS, R_PAIR, R_CURSOR, R_FIELDS
};
enum pair_field { P_KEY, P_VALUE, P_DETAILS, P_FIELDS };
enum value_field { V_TYPE, V_DATA, V_FIELDS };
enum details_field { D_FIELDS = 9 };

typedef struct { PyTypeObject *type; Py_ssize_t fields; } Structure;
static Structure request_type, reply_type, pair_type, value_type, details_type;
static PyObject *as_tuple; /* msgspec.structs.astuple */
static PyObject *no_bytes, *no_text, *numbers[16];

/* Read all fields, borrowed: the structure keeps them alive, as no Python code runs during encoding.
 * 0 if the object is something else or one of its fields was deleted. */
static int read_fields(const Structure *structure, PyObject *object, PyObject **fields)
{
    if (!object || Py_TYPE(object) != structure->type) return 0;
    PyObject *tuple = PyObject_CallOneArg(as_tuple, object);
    if (!tuple) PyErr_Clear();
    int whole = tuple && PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == structure->fields;
    for (Py_ssize_t i = 0; whole && i < structure->fields; i++) fields[i] = PyTuple_GET_ITEM(tuple, i);
    Py_XDECREF(tuple);
    return whole;
}

/* Read an unsigned integer of at most `max`; 0 if the object is anything else. */
static int number(PyObject *object, uint64_t max, uint64_t *out)
{
    if (!object || !PyLong_Check(object)) return 0;
    *out = PyLong_AsUnsignedLongLong(object);
    if (*out == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *out <= max;
}

/* Read an unsigned integer or None; 0 if the object is anything else. */
static int optional(PyObject *object, uint64_t max, uint64_t *out, int *present)
{
    *present = object != Py_None;
    return !*present || number(object, max, out);
}

static int is_key(PyObject *object)
{
    return object && PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) <= KEY_BYTES_MAX;
}

/* Read the type and data (borrowed) of a Value; 0 if it cannot be sent. */
static int read_value(PyObject *value, PyObject **data, uint64_t *type)
{
    PyObject *fields[V_FIELDS];
    if (!read_fields(&value_type, value, fields)) return 0;
    *data = fields[V_DATA];
    return number(fields[V_TYPE], 255, type) && PyBytes_CheckExact(*data)
        && PyBytes_GET_SIZE(*data) <= VALUE_DATA_BYTES_MAX;
}

/* Remember a structure. */
static int learn(Structure *structure, PyObject *type, int fields)
{
    PyObject *names = PyType_Check(type) ? PyObject_GetAttrString(type, "__struct_fields__") : NULL;
    int good = names && PyTuple_Check(names) && PyTuple_GET_SIZE(names) == fields;
    Py_XDECREF(names);
    if (!good) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not a structure of protocol.messages");
        return 0;
    }
    Py_XSETREF(structure->type, (PyTypeObject *)Py_NewRef(type));
    structure->fields = fields;
    return 1;
}
#endif
