/* Messages to bytes; DOUBT for anything that cannot be written as it should be. */
#ifndef VIRTA_JOURNAL_ENCODE_H
#define VIRTA_JOURNAL_ENCODE_H
#include "journal_shapes.h"

uint8_t *journal_extend(Out *out, size_t more)
{
    if (out->size + more > out->room) {
        size_t room = (out->size + more) * 2;
        uint8_t *data = out->data == out->start ? PyMem_Malloc(room) : PyMem_Realloc(out->data, room);
        if (!data) { PyErr_NoMemory(); return NULL; }
        if (out->data == out->start) memcpy(data, out->start, out->size);
        out->data = data;
        out->room = room;
    }
    uint8_t *p = out->data + out->size;
    out->size += more;
    return p;
}

static inline uint8_t *put16(uint8_t *p, unsigned n) { p[0] = (uint8_t)(n >> 8); p[1] = (uint8_t)n; return p + 2; }
static inline uint8_t *put32(uint8_t *p, uint32_t n) { return put16(put16(p, n >> 16), n & 0xFFFF); }
static inline uint8_t *put64(uint8_t *p, uint64_t n) { return put32(put32(p, (uint32_t)(n >> 32)), (uint32_t)n); }

static inline uint8_t *put_span(uint8_t *p, Span span, int wide)
{
    if (wide) p = put16(p, (unsigned)span.size);
    else *p++ = (uint8_t)span.size;
    if (span.size) memcpy(p, span.at, span.size);
    return p + span.size;
}

static inline uint8_t *put_sized(uint8_t *p, PyObject *bytes, int wide) { return put_span(p, span_of(bytes), wide); }

static inline int width_of(size_t size) { return size <= 0xFF ? 1 : size <= 0xFFFF ? 2 : 3; }

static uint8_t *put_typed(uint8_t *p, Span data, unsigned type, int width)
{
    if (width == 1) *p++ = (uint8_t)(data.size + 1);
    else p = width == 2 ? put16(p, (unsigned)data.size + 1) : put32(p, (uint32_t)data.size + 1);
    *p++ = (uint8_t)type;
    if (data.size) memcpy(p, data.at, data.size);
    return p + data.size;
}

static inline uint8_t *put_value(uint8_t *p, PyObject *data, unsigned type, int width)
{
    return put_typed(p, data ? span_of(data) : (Span){NULL, 0}, type, width);
}

enum outcome journal_put_ask(Out *out, const Ask *ask)
{
    int wide = ask->key.size > 255 || ask->key2.size > 255, width = ask->valued ? width_of(ask->data.size + 1) : 0;
    uint8_t *p = journal_extend(out, 18 + 8 + 8 + 2 + 4 + ask->key.size + ask->key2.size + 5 + ask->data.size);
    if (!p) return FAILED;
    unsigned flags = ask->flags | ask->query << QUERY_SHIFT | (wide ? KEY16 : 0) | (unsigned)width << WIDTH_SHIFT;
    flags |= (ask->timed ? TIMEOUT : 0) | (ask->lived ? TTL : 0) | (ask->query != QUERY_RANGE && ask->counted ? COUNT : 0);
    p = put16(put16(put32(p, 0x464A0001), ask->function), ask->identifier);
    p = put64(put16(p, flags), ask->timestamp);
    if (ask->timed) p = put64(p, ask->timeout);
    if (ask->lived) p = put64(p, ask->ttl);
    if (ask->query == QUERY_RANGE || ask->counted) p = put16(p, ask->count);
    p = put_span(p, ask->key, wide);
    if (ask->query == QUERY_RANGE) p = put_span(p, ask->key2, wide);
    if (ask->valued) p = put_typed(p, ask->data, ask->type, width);
    out->size = (size_t)(p - out->data);
    return WRITTEN;
}

enum outcome journal_put_request(Out *out, PyObject *request)
{
    Ask ask;
    return ask_of(request, &ask) ? journal_put_ask(out, &ask) : DOUBT;
}

static enum outcome put_details(Out *out, PyObject *details)
{
    uint8_t *p = journal_extend(out, DETAILS_BYTES);
    if (!p) return FAILED;
    memset(p, 0, DETAILS_BYTES);
    if (details == Py_None) return WRITTEN;
    if (!details || Py_TYPE(details) != details_shape.type) return DOUBT;
    uint64_t n[D_FIELDS];
    static const uint64_t max[D_FIELDS] = {
        UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX, 0xFFFF, 0xFF};
    for (int i = 0; i < D_FIELDS; i++)
        if (!number(field(&details_shape, details, i), max[i], n + i)) return DOUBT;
    for (int i = 0; i < 6; i++) p = put64(p, n[i]);
    put16(put32(p, (uint32_t)n[6]), (unsigned)n[7])[0] = (uint8_t)n[8];
    return WRITTEN;
}

/* What the pairs of a reply have in common; 0 if one cannot be sent. */
static int survey(PyObject **pairs, Py_ssize_t count, int *wide, int *width)
{
    size_t largest = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *data;
        uint64_t type;
        if (Py_TYPE(pairs[i]) != pair_shape.type) return 0;
        PyObject *key = field(&pair_shape, pairs[i], P_KEY), *value = field(&pair_shape, pairs[i], P_VALUE);
        if (!is_key(key)) return 0;
        if (PyBytes_GET_SIZE(key) > 255) *wide = 1;
        if (value == Py_None) continue;
        if (!value_of(value, &data, &type)) return 0;
        if ((size_t)PyBytes_GET_SIZE(data) + 1 > largest) largest = (size_t)PyBytes_GET_SIZE(data) + 1;
    }
    *width = largest ? width_of(largest) : 0;
    return 1;
}

static enum outcome put_pair(Out *out, PyObject *pair, int wide, int width, int detailed)
{
    PyObject *key = field(&pair_shape, pair, P_KEY), *value = field(&pair_shape, pair, P_VALUE), *data = NULL;
    uint64_t type = 0;
    uint8_t *p = journal_extend(out, 2 + (size_t)PyBytes_GET_SIZE(key));
    if (!p) return FAILED;
    out->size = (size_t)(put_sized(p, key, wide) - out->data);
    if (detailed) {
        enum outcome found = put_details(out, field(&pair_shape, pair, P_DETAILS));
        if (found != WRITTEN) return found;
    }
    if (!width) return WRITTEN;
    if (value != Py_None && !value_of(value, &data, &type)) return DOUBT;
    if (!(p = journal_extend(out, 5 + (data ? (size_t)PyBytes_GET_SIZE(data) : 0)))) return FAILED;
    out->size = (size_t)(put_value(p, data, (unsigned)type, width) - out->data);
    return WRITTEN;
}

enum outcome journal_put_reply(Out *out, PyObject *reply)
{
    uint64_t identifier, flags, timestamp, timeout = 0, query;
    if (Py_TYPE(reply) != reply_shape.type) return DOUBT;
    const Shape *s = &reply_shape;
    PyObject *timeout_o = field(s, reply, R_TIMEOUT), *error = field(s, reply, R_ERROR), *cursor = field(s, reply, R_CURSOR);
    PyObject *list = field(s, reply, R_PAIRS), *one = field(s, reply, R_PAIR), **pairs = NULL;
    if (!number(field(s, reply, R_IDENTIFIER), 0xFFFF, &identifier) || !number(field(s, reply, R_FLAGS), 0xFFFF, &flags)
        || !number(field(s, reply, R_TIMESTAMP), UINT64_MAX, &timestamp) || !number(field(s, reply, R_QUERY), 3, &query)
        || (timeout_o != Py_None && !number(timeout_o, UINT64_MAX, &timeout)) || !error || !PyUnicode_Check(error)
        || (cursor != Py_None && !is_key(cursor)))
        return DOUBT;
    if (PyUnicode_GET_LENGTH(error)) return DOUBT; /* rare, and rarely short */
    int counted = list != Py_None, wide = cursor != Py_None && PyBytes_GET_SIZE(cursor) > 255, width = 0;
    Py_ssize_t count = 0;
    if (counted) {
        if (!list || !PyList_CheckExact(list) || PyList_GET_SIZE(list) > 0xFFFF) return DOUBT;
        pairs = ((PyListObject *)list)->ob_item;
        count = PyList_GET_SIZE(list);
    } else if (one != Py_None) {
        if (!one) return DOUBT;
        pairs = &one;
        count = 1;
    }
    if (!survey(pairs, count, &wide, &width)) return DOUBT;
    int detailed = count && field(&pair_shape, pairs[0], P_DETAILS) != Py_None;
    flags |= (timeout_o != Py_None ? TIMEOUT : 0) | (cursor != Py_None ? CURSOR : 0) | (wide ? KEY16 : 0);
    flags |= (unsigned)width << WIDTH_SHIFT | (detailed ? DETAILS : 0);
    if (counted) flags |= query << QUERY_SHIFT | (query == QUERY_RANGE ? 0 : COUNT);
    else if (query != QUERY_RANGE) flags |= query << QUERY_SHIFT;
    uint8_t *p = journal_extend(out, 16 + 8 + 2 + 2);
    if (!p) return FAILED;
    p = put64(put16(put16(put32(p, 0x4A520001), (unsigned)identifier), (unsigned)flags), timestamp);
    if (timeout_o != Py_None) p = put64(p, timeout);
    if (counted) p = put16(p, (unsigned)count);
    *p++ = 0;
    if (wide) *p++ = 0;
    out->size = (size_t)(p - out->data);
    for (Py_ssize_t i = 0; i < count; i++) {
        enum outcome found = put_pair(out, pairs[i], wide, width, detailed);
        if (found != WRITTEN) return found;
    }
    if (cursor != Py_None) {
        if (!(p = journal_extend(out, 2 + (size_t)PyBytes_GET_SIZE(cursor)))) return FAILED;
        out->size = (size_t)(put_sized(p, cursor, wide) - out->data);
    }
    return WRITTEN;
}

/* (message) -> its bytes, or None: the plain twin decides */
static PyObject *encode(PyObject *message, enum outcome (*put)(Out *, PyObject *))
{
    Out out;
    out_init(&out);
    enum outcome found = put(&out, message);
    PyObject *bytes = NULL;
    if (found == WRITTEN) bytes = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
    else if (found == DOUBT) bytes = Py_NewRef(Py_None);
    out_release(&out);
    return bytes;
}

static PyObject *encode_request(PyObject *self, PyObject *request)
{
    (void)self;
    return encode(request, journal_put_request);
}

static PyObject *encode_reply(PyObject *self, PyObject *reply)
{
    (void)self;
    return encode(reply, journal_put_reply);
}

#endif
