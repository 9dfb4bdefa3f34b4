/* event_stream: frames of rows as server-sent events, as `_sse` in src/virta/views/frames.py writes them.
 *
 * Frames of other shapes and keys that JSON writes with escapes or beyond ASCII are declined with None. */
#ifndef VIRTA_VIEWS_FRAMES_H
#define VIRTA_VIEWS_FRAMES_H

#include <stdio.h>
#include "views_objects.h"

#define FIXED_BYTES 128 /* more than the fixed texts and the numbers of a frame, and the end of a chunk */
#define CHUNK_HEAD 18   /* at most: sixteen digits and the end of a line */

typedef struct { const char *at; Py_ssize_t size; } Part;
typedef struct { PyObject *frame, *name, *key, *reason, *event; long long id, offset; } Frame; /* owned */

static void close_frame(Frame *f)
{
    Py_CLEAR(f->frame);
    Py_CLEAR(f->name);
    Py_CLEAR(f->key);
    Py_CLEAR(f->reason);
    Py_CLEAR(f->event);
}

/* Whether JSON writes a text as it is, within ASCII. */
static int is_plain(PyObject *text, Part *part)
{
    if (!PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text)) return 0;
    part->at = (const char *)PyUnicode_1BYTE_DATA(text);
    part->size = PyUnicode_GET_LENGTH(text);
    for (Py_ssize_t i = 0; i < part->size; i++)
        if (part->at[i] < 0x20 || part->at[i] == '"' || part->at[i] == '\\') return 0;
    return 1;
}

/* 1: read, 0: declined, -1: an exception is set. */
static int read_frame(Frame *f)
{
    PyObject *data = PyObject_GetAttr(f->frame, s_data);
    if (!data) return -1;
    Py_DECREF(data);
    if (data != Py_None) return 0;
    f->id = number_of(PyObject_GetAttr(f->frame, s_id));
    f->offset = number_of(PyObject_GetAttr(f->frame, s_offset));
    f->name = PyObject_GetAttr(f->frame, s_name);
    f->key = PyObject_GetAttr(f->frame, s_key);
    f->reason = PyObject_GetAttr(f->frame, s_reason);
    f->event = PyObject_GetAttr(f->frame, s_event);
    if (PyErr_Occurred()) return -1;
    return f->id >= -1 && (f->event == Py_None || PyBytes_Check(f->event));
}

static char *put(char *at, const char *text, Py_ssize_t size)
{
    memcpy(at, text, (size_t)size);
    return at + size;
}

#define PUT(text) at = put(at, text, sizeof(text) - 1)
#define PUT_PART(part) at = put(at, (part).at, (part).size)

static char *put_frame(char *at, const Frame *f, Part tag, Part name, Part key, Part reason)
{
    PUT("event: ");
    PUT_PART(name);
    PUT("\n");
    if (f->id >= 0) {
        PUT("id: ");
        PUT_PART(tag);
        at += sprintf(at, ".%lld\n", f->id);
    }
    PUT("data: {\"key\":\"");
    PUT_PART(key);
    at += sprintf(at, "\",\"offset\":%lld", f->offset);
    if (reason.size) {
        PUT(",\"reason\":\"");
        PUT_PART(reason);
        PUT("\"");
    }
    if (f->event != Py_None) {
        PUT(",\"event\":");
        at = put(at, PyBytes_AS_STRING(f->event), PyBytes_GET_SIZE(f->event));
    }
    PUT("}\n\n");
    return at;
}

/* Append a frame to the bytes, of which `*used` are written; 1: done, 0: declined, -1: exception. */
static int add_frame(PyObject **bytes, Py_ssize_t *used, const Frame *f, Part tag)
{
    Part name, key, reason;
    if (!is_plain(f->name, &name) || !is_plain(f->key, &key) || !is_plain(f->reason, &reason)) return 0;
    Py_ssize_t size = FIXED_BYTES + tag.size + name.size + key.size + reason.size;
    if (f->event != Py_None) size += PyBytes_GET_SIZE(f->event);
    Py_ssize_t space = PyBytes_GET_SIZE(*bytes);
    if (space - *used < size) {
        Py_ssize_t grown = *used > CHUNK_HEAD ? 2 * (space + size) : *used + size; /* most have one frame */
        if (_PyBytes_Resize(bytes, grown) < 0) return -1;
    }
    char *start = PyBytes_AS_STRING(*bytes);
    *used = put_frame(start + *used, f, tag, name, key, reason) - start;
    return 1;
}

/* Turn what was written from CHUNK_HEAD on into one chunk of HTTP/1.1. */
static Py_ssize_t close_chunk(char *start, Py_ssize_t used)
{
    char head[CHUNK_HEAD + 1];
    Py_ssize_t size = sprintf(head, "%zx\r\n", (size_t)(used - CHUNK_HEAD));
    memmove(start + size, start + CHUNK_HEAD, (size_t)(used - CHUNK_HEAD));
    memcpy(start, head, (size_t)size);
    char *at = start + size + used - CHUNK_HEAD;
    PUT("\r\n");
    return at - start;
}

/* Return frames as bytes, or None if they are declined. */
static PyObject *make_stream(PyObject *tag_bytes, PyObject *frames, int chunked)
{
    Part tag = {PyBytes_AS_STRING(tag_bytes), PyBytes_GET_SIZE(tag_bytes)};
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, CHUNK_HEAD);
    Py_ssize_t used = chunked ? CHUNK_HEAD : 0;
    int done = bytes ? 1 : -1;
    for (Py_ssize_t i = 0; done == 1 && i < PyList_GET_SIZE(frames); i++) {
        Frame f = {.frame = Py_NewRef(PyList_GET_ITEM(frames, i))};
        done = read_frame(&f);
        if (done == 1) done = add_frame(&bytes, &used, &f, tag);
        close_frame(&f);
    }
    if (done == 1) {
        if (chunked) used = close_chunk(PyBytes_AS_STRING(bytes), used);
        if (_PyBytes_Resize(&bytes, used) == 0) return bytes;
        done = -1;
    }
    Py_XDECREF(bytes);
    return done ? NULL : Py_NewRef(Py_None);
}

static PyObject *native_event_stream(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !PyBytes_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "event_stream(tag: bytes, frames: list, chunked)");
        return NULL;
    }
    int chunked = PyObject_IsTrue(args[2]);
    return chunked < 0 ? NULL : make_stream(args[0], args[1], chunked);
}

#endif
