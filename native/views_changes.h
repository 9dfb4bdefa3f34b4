/* read_changes: which rows the events of a batch set, as `read_event_change` in
 * src/virta/event/row_changes.py reads each of them; is_event: whether a value is an event as it is.
 *
 * Only the ordinary event is read here: an object with a text as `subject`, which is its key, and data that
 * are neither null nor Debezium's. Every other one is left to the plain reader, which also says what a delete
 * is. */
#ifndef VIRTA_VIEWS_CHANGES_H
#define VIRTA_VIEWS_CHANGES_H

#include "json_scan.h"
#include "views_objects.h"

#define KEY_BYTES_MAX 1024 /* of row_changes.py */
#define SET_KIND 1         /* SET of row_changes.py */

/* Whether data may be Debezium's: a member `op`, perhaps written with escapes. */
static int may_be_envelope(const uint8_t *first, const uint8_t *end)
{
    size_t size = (size_t)(end - first);
    if (*first != '{') return 0;
    if (memmem(first, size, "\"op\"", 4)) return 1;
    return memchr(first, '\\', size) && memmem(first, size, "\\u", 2);
}

static int is_deletion(Span type)
{
    return type.size >= 7 && memcmp(type.at + type.size - 7, "deleted", 7) == 0;
}

/* Read the key of an event that sets a row; 0: left to the plain reader. Of equal names the last counts. */
static int read_ordinary(Text *t, Span *key)
{
    Span name, type;
    *key = (Span){t->at, 0};
    skip_space(t);
    if (!read_char(t, '{')) return 0;
    do {
        if (!read_name(t, &name)) return 0;
        if (IS(name, "subject")) {
            if (!read_text(t, key)) return 0;
        } else if (IS(name, "type")) {
            if (!read_text(t, &type) || is_deletion(type)) return 0;
        } else {
            const uint8_t *first = t->at;
            if (!skip_value(t)) return 0;
            if (IS(name, "data") && (*first == 'n' || may_be_envelope(first, t->at))) return 0;
        }
        skip_space(t);
    } while (read_char(t, ','));
    if (!read_char(t, '}')) return 0;
    skip_space(t);
    return t->at == t->end && key->size > 0 && key->size <= KEY_BYTES_MAX;
}

/* Return what an event does, read by `plain` unless it is ordinary. */
static PyObject *read_change(PyObject *value, PyObject *kind, PyObject *change_type, PyObject *plain)
{
    if (!PyBytes_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "a value is bytes");
        return NULL;
    }
    const uint8_t *first = (const uint8_t *)PyBytes_AS_STRING(value);
    Text text = {first, first + PyBytes_GET_SIZE(value), 0};
    Span key;
    if (!read_ordinary(&text, &key) || (text.wide && !is_utf8(first, text.end)))
        return PyObject_CallOneArg(plain, value);
    PyObject *name = PyUnicode_DecodeUTF8((const char *)key.at, (Py_ssize_t)key.size, NULL);
    if (!name) return NULL;
    PyObject *arguments[] = {kind, name, value, value};
    PyObject *change = PyObject_Vectorcall(change_type, arguments, 4, NULL);
    Py_DECREF(name);
    return change;
}

/* Whether a value is an event as it is stored: an object on one line with texts as `source` and `id`. */
static int is_stored_event(const uint8_t *first, const uint8_t *end)
{
    Text t = {first, end, 0};
    Span name, text;
    int source = 0, id = 0;
    skip_space(&t);
    if (!read_char(&t, '{')) return 0;
    do {
        if (!read_name(&t, &name)) return 0;
        int is_source = IS(name, "source"), is_id = IS(name, "id");
        if (is_source || is_id ? !read_text(&t, &text) : !skip_value(&t)) return 0;
        source |= is_source;
        id |= is_id;
        skip_space(&t);
    } while (read_char(&t, ','));
    if (!read_char(&t, '}')) return 0;
    skip_space(&t);
    return t.at == end && source && id && (!t.wide || is_utf8(first, end));
}

/* is_event(value) -> bool; what it does not know is left to `event_of` */
static PyObject *native_is_event(PyObject *self, PyObject *value)
{
    (void)self;
    if (!PyBytes_CheckExact(value)) Py_RETURN_FALSE;
    const uint8_t *first = (const uint8_t *)PyBytes_AS_STRING(value);
    return PyBool_FromLong(is_stored_event(first, first + PyBytes_GET_SIZE(value)));
}

/* read_changes(values, offset, change_type, plain) -> [(offset, change)] */
static PyObject *native_read_changes(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 4 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "read_changes(values: list, offset, change_type, plain)");
        return NULL;
    }
    long long offset = PyLong_AsLongLong(args[1]);
    PyObject *kind = PyErr_Occurred() ? NULL : PyLong_FromLong(SET_KIND);
    PyObject *out = kind ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; out && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *value = Py_NewRef(PyList_GET_ITEM(args[0], i));
        PyObject *change = read_change(value, kind, args[2], args[3]);
        Py_DECREF(value);
        PyObject *pair = change ? Py_BuildValue("(LN)", offset + i, change) : NULL;
        if (!pair || PyList_Append(out, pair) < 0) Py_CLEAR(out);
        Py_XDECREF(pair);
    }
    Py_XDECREF(kind);
    return out;
}

#endif
