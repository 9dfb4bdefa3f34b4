/* The structures of virta/journal/protocol/messages.py as they lie in memory, and the limits of what is in them. */
#ifndef VIRTA_JOURNAL_SHAPES_H
#define VIRTA_JOURNAL_SHAPES_H
#include "journal.h"
#include <structmember.h>
#include <string.h>

#define KEY_BYTES_MAX 65535
#define VALUE_DATA_BYTES_MAX (8 * 1024 * 1024)
#define REPLY_DECODE_BYTES_MAX (16 * 1024 * 1024 + VALUE_DATA_BYTES_MAX + 4 * KEY_BYTES_MAX)
#define DETAILS_BYTES 56
#define TYPE_MAX 5

enum bit {
    KEY16 = 1 << 0, TIMEOUT = 1 << 3, CURSOR = 1 << 5, PERSIST = 1 << 9, PERSIST_ALIAS = 1 << 12,
    COUNT = 1 << 13, TTL = 1 << 14, DETAILS = 1 << 14
};
enum { WIDTH_SHIFT = 1, QUERY_SHIFT = 7, QUERY_RANGE = 1 };
#define REQUEST_FLAGS 0x8E70
#define REPLY_FLAGS 0x1E50

/* Where the fields of a structure are, in the order of its definition. */
enum request_field { Q_FUNCTION, Q_IDENTIFIER, Q_FLAGS, Q_TIMESTAMP, Q_TIMEOUT, Q_TTL, Q_COUNT, Q_KEY, Q_KEY2, Q_VALUE, Q_QUERY, Q_FIELDS };
enum reply_field { R_IDENTIFIER, R_FLAGS, R_TIMESTAMP, R_TIMEOUT, R_QUERY, R_ERROR, R_PAIRS, R_PAIR, R_CURSOR, R_FIELDS };
enum pair_field { P_KEY, P_VALUE, P_DETAILS, P_FIELDS };
enum value_field { V_TYPE, V_DATA, V_FIELDS };
enum details_field { D_FIELDS = 9 };

enum { FIELDS_MAX = 20 };
typedef struct { PyTypeObject *type; Py_ssize_t at[FIELDS_MAX]; } Shape;
static Shape request_shape, reply_shape, pair_shape, value_shape, details_shape;
static PyObject *no_bytes, *no_text, *numbers[16];

static inline PyObject *field(const Shape *shape, PyObject *object, int number)
{
    return *(PyObject **)((char *)object + shape->at[number]);
}

/* The number of an object, if it is none below zero and none above `max`. */
static int number_at_large(PyObject *object, uint64_t max, uint64_t *out)
{
    if (!object || !PyLong_Check(object)) return 0;
    *out = PyLong_AsUnsignedLongLong(object);
    if (*out == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *out <= max;
}

static inline int number(PyObject *object, uint64_t max, uint64_t *out)
{
#if PY_VERSION_HEX < 0x030C0000 && PYLONG_BITS_IN_DIGIT == 30
    if (object && PyLong_CheckExact(object) && (size_t)Py_SIZE(object) <= 2) { /* as good as all; the library is thorough */
        const digit *digits = ((PyLongObject *)object)->ob_digit;
        *out = Py_SIZE(object) == 2 ? (uint64_t)digits[1] << 30 | digits[0] : Py_SIZE(object) ? digits[0] : 0;
        return *out <= max;
    }
#endif
    return number_at_large(object, max, out);
}

static inline int is_key(PyObject *object)
{
    return object && PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) <= KEY_BYTES_MAX;
}

/* The data of a value and its type; 0 if it is none that can be sent. */
static int value_of(PyObject *value, PyObject **data, uint64_t *type)
{
    if (!value || Py_TYPE(value) != value_shape.type) return 0;
    *data = field(&value_shape, value, V_DATA);
    return number(field(&value_shape, value, V_TYPE), 255, type) && *data && PyBytes_CheckExact(*data)
        && PyBytes_GET_SIZE(*data) <= VALUE_DATA_BYTES_MAX;
}

static inline Span span_of(PyObject *bytes)
{
    return (Span){(const uint8_t *)PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)};
}

/* The request of a structure; 0 if there is anything in it that a line could not bring. */
static int ask_of(PyObject *request, Ask *ask)
{
    const Shape *s = &request_shape;
    uint64_t function, identifier, flags, query, count = 0, type = 0;
    if (Py_TYPE(request) != s->type) return 0;
    PyObject *timeout = field(s, request, Q_TIMEOUT), *counted = field(s, request, Q_COUNT), *value = field(s, request, Q_VALUE), *data;
    PyObject *key = field(s, request, Q_KEY), *key2 = field(s, request, Q_KEY2), *ttl = field(s, request, Q_TTL);
    *ask = (Ask){.object = request, .timed = timeout != Py_None, .lived = ttl != Py_None, .counted = counted != Py_None, .valued = value != Py_None};
    if (!number(field(s, request, Q_FUNCTION), 0xFFFF, &function) || !number(field(s, request, Q_FLAGS), 0xFFFF, &flags)
        || !number(field(s, request, Q_IDENTIFIER), 0xFFFF, &identifier) || !number(field(s, request, Q_QUERY), 3, &query)
        || !number(field(s, request, Q_TIMESTAMP), UINT64_MAX, &ask->timestamp)
        || (ask->timed && !number(timeout, UINT64_MAX, &ask->timeout)) || (ask->lived && !number(ttl, UINT64_MAX, &ask->ttl))
        || (ask->counted && !number(counted, 0xFFFF, &count)) || !is_key(key) || !is_key(key2)
        || (ask->valued && !value_of(value, &data, &type)))
        return 0;
    ask->function = (unsigned)function;
    ask->identifier = (unsigned)identifier;
    ask->flags = (unsigned)flags;
    ask->query = (unsigned)query;
    ask->count = (unsigned)count;
    ask->type = (unsigned)type;
    ask->key = span_of(key);
    ask->key2 = span_of(key2);
    if (ask->valued) ask->data = span_of(data);
    return 1;
}

static int learn(Shape *shape, PyObject *type, int fields)
{
    PyObject *names = PyType_Check(type) ? PyObject_GetAttrString(type, "__struct_fields__") : NULL;
    int good = names && PyTuple_Check(names) && PyTuple_GET_SIZE(names) == fields;
    for (int i = 0; good && i < fields; i++) {
        PyObject *member = PyObject_GetAttr(type, PyTuple_GET_ITEM(names, i));
        good = member && Py_TYPE(member) == &PyMemberDescr_Type;
        if (good) shape->at[i] = ((PyMemberDescrObject *)member)->d_member->offset;
        Py_XDECREF(member);
    }
    Py_XDECREF(names);
    if (good) Py_XSETREF(shape->type, (PyTypeObject *)Py_NewRef(type));
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not the structures of virta.journal.messages");
    return good;
}

#endif
