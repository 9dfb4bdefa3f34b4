/* What the native parts of the journal share: messages (journal.c) and both ends of the lines they travel on (lines.c, asker.c). */
#ifndef VIRTA_JOURNAL_H
#define VIRTA_JOURNAL_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

typedef struct { const uint8_t *at, *end; } In;
typedef struct { uint8_t *data; size_t size, room; uint8_t start[1024]; } Out;
enum outcome { FAILED = -1, DOUBT = 0, WRITTEN = 1 };

/* The message at the front; NULL without an error set where the bytes end or are not as they should be. */
PyObject *journal_get_request(In *in);
PyObject *journal_get_reply(In *in);
/* DOUBT: the plain twin decides; what was written until then is to be taken back. */
enum outcome journal_put_request(Out *out, PyObject *request);
enum outcome journal_put_reply(Out *out, PyObject *reply);
/* Room for so many bytes more, NULL with MemoryError set. */
uint8_t *journal_extend(Out *out, size_t more);
int journal_reply_identifier(PyObject *reply);
int journal_request_identifier(PyObject *request);
/* Add what the others have to the module; nothing where the system has no epoll. */
int journal_add_lines(PyObject *module);
int journal_add_asker(PyObject *module);

static inline void out_init(Out *out)
{
    out->data = out->start;
    out->size = 0;
    out->room = sizeof out->start;
}

static inline void out_release(Out *out)
{
    if (out->data != out->start) PyMem_Free(out->data);
    out_init(out);
}
#endif
