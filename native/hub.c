/* virta.hub._native: split batches of events, and the table of idempotency keys. */
#include "hub_keys.h"
#include "hub_split.h"

static int make_secret(void)
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *secret = os ? PyObject_CallMethod(os, "urandom", "n", (Py_ssize_t)sizeof digest_secret) : NULL;
    Py_XDECREF(os);
    if (!secret) return -1;
    memcpy(digest_secret, PyBytes_AS_STRING(secret), sizeof digest_secret);
    Py_DECREF(secret);
    return 0;
}

static PyObject *native_digest(PyObject *self, PyObject *key)
{
    (void)self;
    Digest d;
    if (digest_of_text(key, &d) < 0) return NULL;
    return PyBytes_FromStringAndSize((const char *)&d, DIGEST_BYTES);
}

static PyMethodDef module_methods[] = {
    {"digest", native_digest, METH_O, "digest(key) -> bytes"},
    {"split", (PyCFunction)(void (*)(void))native_split, METH_FASTCALL,
     "split(channel, data, start, events_max, event_bytes_max) -> (count, records, lines, digests) | None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "virta.hub._native", NULL, -1, module_methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    crc_init();
    if (make_secret() < 0) return NULL;
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    PyObject *type = PyType_FromSpec(&table_spec);
    if (!type || PyModule_AddObject(m, "KeyTable", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
