/* Compressed batches: the payload is one record of topic 06 whose value is the size of the records and a zstd
 * frame. The frame is decompressed by virta/log/format/compression.py, which both engines use. */
#ifndef VIRTA_LOG_COMPRESSED_H
#define VIRTA_LOG_COMPRESSED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "log_format.h"

static PyObject *decompress_function; /* set once by set_decompress() */

/* The records of a compressed payload as bytes. NULL with an exception set, or without one: it is damaged.
 * The caller has the GIL. */
static PyObject *payload_expand(const uint8_t *payload, uint32_t size)
{
    const uint8_t *end = payload + size;
    Record r = {0};
    uint32_t expanded;
    if (size < 2 || record_parse(payload, end, &r) != end || crc8(0, payload + 1, size - 1) != payload[0])
        return NULL;
    if (r.topic_size != 1 || r.topic[0] != TOPIC_COMPRESSED || r.key_size != 0) return NULL;
    const uint8_t *frame = get_varlong(r.value, end, &expanded);
    if (!frame || expanded > BATCH_BYTES_MAX) return NULL;
    if (!decompress_function) {
        PyErr_SetString(PyExc_RuntimeError, "set_decompress() was not called");
        return NULL;
    }
    PyObject *view = PyMemoryView_FromMemory((char *)frame, end - frame, PyBUF_READ);
    if (!view) return NULL;
    PyObject *data = PyObject_CallFunction(decompress_function, "OI", view, (unsigned int)expanded);
    Py_DECREF(view);
    /* CompressionError is a ValueError: damage. A missing library is another error. */
    if (!data && PyErr_ExceptionMatches(PyExc_ValueError)) PyErr_Clear();
    if (data && (!PyBytes_Check(data) || (uint32_t)PyBytes_GET_SIZE(data) != expanded)) Py_CLEAR(data);
    return data;
}

static PyObject *native_set_decompress(PyObject *self, PyObject *function)
{
    (void)self;
    Py_INCREF(function);
    Py_XSETREF(decompress_function, function);
    Py_RETURN_NONE;
}

#endif
