/* virta.log._native: checksums, codec, locked append, group commit and wake-up of the log.
 *
 * A Kernel is one process's handle on a log directory: lock files, control page, active segment. It appends
 * with one pwrite under flock and publishes the new end in the control page. It never repairs: whenever page
 * and file disagree it returns ATTENTION, and Python inspects the files with the write lock.
 * virta/log/engine/plain_kernel.py is the same in plain Python. */
#define _GNU_SOURCE
#include "log_kernel.h"
#include "log_topic_index.h"


static PyObject *native_crc8(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    unsigned char crc = 0;
    if (!PyArg_ParseTuple(args, "y*|b", &buf, &crc)) return NULL;
    crc = crc8(crc, buf.buf, (size_t)buf.len);
    PyBuffer_Release(&buf);
    return PyLong_FromLong(crc);
}

static PyObject *native_crc32c(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &buf, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c(crc, buf.buf, (size_t)buf.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buf);
    return PyLong_FromUnsignedLong(crc);
}

/* Records and Names are created by the million. They are Python classes without dict, weak references or
 * finalizer, so the general destructor of Python classes has nothing else to free: these do the rest of its
 * work. */
static void record_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_GC_IsTracked(self)) PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = Py_SIZE(self); --i >= 0;) Py_XDECREF(PyTuple_GET_ITEM(self, i));
    type->tp_free(self);
    Py_DECREF(type);
}

static void name_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *native_set_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *record, *name;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &record, &PyType_Type, &name)) return NULL;
    PyTypeObject *types[2] = {(PyTypeObject *)record, (PyTypeObject *)name};
    PyTypeObject *bases[2] = {&PyTuple_Type, &PyBytes_Type};
    for (int i = 0; i < 2; i++) {
        if (types[i]->tp_base != bases[i] || types[i]->tp_dictoffset || types[i]->tp_weaklistoffset
            || types[i]->tp_del || types[i]->tp_finalize) {
            PyErr_SetString(PyExc_TypeError, "Record must be a plain tuple, Name plain bytes");
            return NULL;
        }
    }
    types[0]->tp_dealloc = record_dealloc;
    types[1]->tp_dealloc = name_dealloc;
    Py_INCREF(record);
    Py_XSETREF(record_type, record);
    Py_INCREF(name);
    Py_XSETREF(name_type, name);
    Py_RETURN_NONE;
}

/* guard(map, fd) -> handle: protect a writable map of a file that other processes may truncate. */
static PyObject *native_guard(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    int fd;
    if (!PyArg_ParseTuple(args, "w*i", &buf, &fd)) return NULL;
    Guard *g = guard_add(buf.buf, (size_t)buf.len, fd, 1);
    PyBuffer_Release(&buf);
    return g ? PyLong_FromLong((long)(g - guards)) : PyErr_SetFromErrno(PyExc_OSError);
}

static Guard *guard_of(PyObject *handle)
{
    long i = PyLong_AsLong(handle);
    if (!PyErr_Occurred() && i >= 0 && i < GUARDS_MAX && atomic_load(&guards[i].used)) return &guards[i];
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not a guard");
    return NULL;
}

static PyObject *native_unguard(PyObject *self, PyObject *handle)
{
    (void)self;
    Guard *g = guard_of(handle);
    if (!g) return NULL;
    guard_remove(g);
    Py_RETURN_NONE;
}

static PyObject *native_guard_faults(PyObject *self, PyObject *handle)
{
    (void)self;
    Guard *g = guard_of(handle);
    return g ? PyLong_FromUnsignedLong(atomic_load(&g->faults)) : NULL;
}

static PyMethodDef module_methods[] = {
    {"crc8", native_crc8, METH_VARARGS, "crc8(data, crc=0) -> int"},
    {"crc32c", native_crc32c, METH_VARARGS, "crc32c(data, crc=0) -> int"},
    {"encode", native_encode, METH_O, "encode(records) -> bytearray"},
    {"find_places", native_find_places, METH_VARARGS, "find_places(fd, end, salt, buckets, topic) -> bytes"},
    {"guard", native_guard, METH_VARARGS, "guard(map, fd) -> handle"},
    {"guard_faults", native_guard_faults, METH_O, "guard_faults(handle) -> int"},
    {"unguard", native_unguard, METH_O, "unguard(handle), before the map is closed"},
    {"read", native_read, METH_VARARGS, "read(...) -> (records, pos, prev, next, status, detail)"},
    {"set_decompress", native_set_decompress, METH_O, "set_decompress(function)"},
    {"set_types", native_set_types, METH_VARARGS, "set_types(Record, Name)"},
    {"walk", native_walk, METH_VARARGS, "walk(...) -> (batches, pos, prev, next, status, detail)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "virta.log._native", NULL, -1, module_methods, NULL, NULL, NULL, NULL,
};

static int add_type(PyObject *m, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type && PyModule_AddObject(m, name, type) == 0) return 0;
    Py_XDECREF(type);
    return -1;
}

PyMODINIT_FUNC PyInit__native(void)
{
    crc_init();
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    if (add_type(m, "Kernel", &kernel_spec) < 0 || add_type(m, "TopicTable", &topic_table_spec) < 0) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
