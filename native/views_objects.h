/* Names of attributes and kinds, interned once; reading and writing attributes of Python objects. */
#ifndef VIRTA_VIEWS_OBJECTS_H
#define VIRTA_VIEWS_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NAMES(X)                                                                                          \
    X(_bytes_max) X(_check_rows) X(_interned) X(_new_number) X(_sweep) X(_values) X(bytes) X(changed)     \
    X(consumers) X(count) X(data) X(deliver) X(direct) X(drop) X(enter) X(event) X(filter) X(hits) X(id)  \
    X(index) X(intern) X(joined) X(key) X(leave) X(limits) X(members) X(name) X(numbers) X(offset)        \
    X(offsets) X(reason) X(root) X(row) X(row_filter) X(rows) X(shows) X(truncated) X(update)             \
    X(view_rows_max) X(views) X(written_at)

#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)
#undef DECLARE
static PyObject *s_empty;

static int make_names(void)
{
#define MAKE(name) \
    if (!(s_##name = PyUnicode_InternFromString(#name))) return -1;
    NAMES(MAKE)
#undef MAKE
    return (s_empty = PyUnicode_InternFromString("")) ? 0 : -1;
}

#define LINE 64 /* bytes of a cache line */

static inline void prefetch(const void *at, int lines)
{
    for (int i = 0; i < lines; i++) __builtin_prefetch((const char *)at + i * LINE, 1);
}

static PyObject *of_type(PyObject *found, PyObject *name, PyTypeObject *type)
{
    if (found && !PyObject_TypeCheck(found, type)) {
        PyErr_Format(PyExc_TypeError, "%U is a %s, not a %s", name, Py_TYPE(found)->tp_name, type->tp_name);
        Py_CLEAR(found);
    }
    return found;
}

static long long number_of(PyObject *found)
{
    if (!found) return -1;
    long long number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return number;
}

/* Return a new reference to an attribute that has to be of a type. */
static PyObject *typed_attribute(PyObject *object, PyObject *name, PyTypeObject *type)
{
    return of_type(PyObject_GetAttr(object, name), name, type);
}

/* Read an attribute as a number; -1 with an exception set if it is none. */
static long long number_attribute(PyObject *object, PyObject *name)
{
    return number_of(PyObject_GetAttr(object, name));
}

static int set_number(PyObject *object, PyObject *name, long long number)
{
    PyObject *made = PyLong_FromLongLong(number);
    if (!made) return -1;
    int failed = PyObject_SetAttr(object, name, made);
    Py_DECREF(made);
    return failed;
}

/* Call a method for what it does. */
static int call_method(PyObject *object, PyObject *name, PyObject *argument)
{
    PyObject *done = argument ? PyObject_CallMethodOneArg(object, name, argument)
                              : PyObject_CallMethodNoArgs(object, name);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

#endif
