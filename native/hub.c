/* virta.hub._native: the fast half of what publishers send; who takes over where it declines: virta/hub/kernel.py. */
#include "hub_keys.h"
#include "hub_split.h"

static PyObject *native_set_secret(PyObject *self, PyObject *secret)
{
    (void)self;
    if (!PyBytes_Check(secret) || PyBytes_GET_SIZE(secret) != sizeof digest_secret) {
        PyErr_SetString(PyExc_ValueError, "the secret is 16 bytes");
        return NULL;
    }
    memcpy(digest_secret, PyBytes_AS_STRING(secret), sizeof digest_secret);
    Py_RETURN_NONE;
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
    {"set_secret", native_set_secret, METH_O, "set_secret(bytes)"},
    {"split", (PyCFunction)(void (*)(void))native_split, METH_FASTCALL, "split(...) -> (count, records, lines, digests) | None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "virta.hub._native", NULL, -1, module_methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    crc_init();
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    PyObject *type = PyType_FromSpec(&keys_spec);
    if (!type || PyModule_AddObject(m, "Keys", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
