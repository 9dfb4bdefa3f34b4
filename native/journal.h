/* What the codec (journal.c) and the client's exchange (client_io.c) share. */
#ifndef VIRTA_JOURNAL_H
#define VIRTA_JOURNAL_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

typedef struct { const uint8_t *at, *end; } In;
typedef struct { uint8_t *data; size_t size, capacity; uint8_t start[1024]; } Out;
/* FAILED: a Python error is set. DECLINED: the plain codec has to encode this message. */
enum outcome { FAILED = -1, DECLINED = 0, WRITTEN = 1 };

/* Decode the reply at the front; NULL without an error set when it is incomplete or malformed. */
PyObject *journal_get_reply(In *in);
/* Append the bytes of a request; what was appended before DECLINED or FAILED is to be discarded. */
enum outcome journal_put_request(Out *out, PyObject *request);
/* Return the identifier of a message, -1 if it has none that fits. */
int journal_reply_identifier(PyObject *reply);
int journal_request_identifier(PyObject *request);
/* (descriptor, request) -> Reply | bytes | None, see client_io.c */
PyObject *journal_exchange(PyObject *module, PyObject *const *args, Py_ssize_t count);

static inline void out_init(Out *out)
{
    out->data = out->start;
    out->size = 0;
    out->capacity = sizeof out->start;
}

static inline void out_release(Out *out)
{
    if (out->data != out->start) PyMem_Free(out->data);
    out_init(out);
}
#endif
