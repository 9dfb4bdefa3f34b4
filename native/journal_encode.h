/* Encode messages; DECLINED for anything that does not fit its field. */
#ifndef VIRTA_JOURNAL_ENCODE_H
#define VIRTA_JOURNAL_ENCODE_H
#include "journal_fields.h"

/* Make space for `more` bytes; NULL with MemoryError set. */
static uint8_t *extend(Out *out, size_t more)
{
    if (out->size + more > out->capacity) {
        size_t capacity = (out->size + more) * 2;
        uint8_t *data = out->data == out->start ? PyMem_Malloc(capacity) : PyMem_Realloc(out->data, capacity);
        if (!data) {
            PyErr_NoMemory();
            return NULL;
        }
        if (out->data == out->start) memcpy(data, out->start, out->size);
        out->data = data;
        out->capacity = capacity;
    }
    uint8_t *p = out->data + out->size;
    out->size += more;
    return p;
}

static inline uint8_t *put16(uint8_t *p, unsigned n)
{
    p[0] = (uint8_t)(n >> 8);
    p[1] = (uint8_t)n;
    return p + 2;
}

static inline uint8_t *put32(uint8_t *p, uint32_t n) { return put16(put16(p, n >> 16), n & 0xFFFF); }
static inline uint8_t *put64(uint8_t *p, uint64_t n)
{
    return put32(put32(p, (uint32_t)(n >> 32)), (uint32_t)n);
}

static inline uint8_t *put_bytes(uint8_t *p, PyObject *bytes)
{
    memcpy(p, PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes));
    return p + PyBytes_GET_SIZE(bytes);
}

static uint8_t *put_sized(uint8_t *p, PyObject *bytes, int wide)
{
    if (wide) p = put16(p, (unsigned)PyBytes_GET_SIZE(bytes));
    else *p++ = (uint8_t)PyBytes_GET_SIZE(bytes);
    return put_bytes(p, bytes);
}

static inline size_t size_of(PyObject *bytes) { return (size_t)PyBytes_GET_SIZE(bytes); }

/* The width of a value's size field, by the size that counts the type byte. */
static inline int width_of(size_t size) { return size <= 0xFF ? 1 : size <= 0xFFFF ? 2 : 3; }

static uint8_t *put_value(uint8_t *p, PyObject *data, unsigned type, int width)
{
    size_t size = (data ? size_of(data) : 0) + 1;
    if (width == 1) *p++ = (uint8_t)size;
    else p = width == 2 ? put16(p, (unsigned)size) : put32(p, (uint32_t)size);
    *p++ = (uint8_t)type;
    return data ? put_bytes(p, data) : p;
}

enum outcome journal_put_request(Out *out, PyObject *request)
{
    uint64_t function, identifier, flags, timestamp, query, timeout = 0, ttl = 0, count = 0, type = 0;
    int timed, lived, counted;
    PyObject *data = NULL, *fields[Q_FIELDS];
    if (!read_fields(&request_type, request, fields)) return DECLINED;
    PyObject *key = fields[Q_KEY], *key2 = fields[Q_KEY2], *value = fields[Q_VALUE];
    if (!number(fields[Q_FUNCTION], 0xFFFF, &function) || !number(fields[Q_IDENTIFIER], 0xFFFF, &identifier)
        || !number(fields[Q_FLAGS], 0xFFFF, &flags) || !number(fields[Q_TIMESTAMP], UINT64_MAX, &timestamp)
        || !number(fields[Q_QUERY], 3, &query) || !optional(fields[Q_TIMEOUT], UINT64_MAX, &timeout, &timed)
        || !optional(fields[Q_TTL], UINT64_MAX, &ttl, &lived)
        || !optional(fields[Q_COUNT], 0xFFFF, &count, &counted) || !is_key(key) || !is_key(key2)
        || (value != Py_None && !read_value(value, &data, &type)))
        return DECLINED;
    int ranged = query == QUERY_RANGE, wide = size_of(key) > 255 || size_of(key2) > 255;
    int width = data ? width_of(size_of(data) + 1) : 0;
    flags |= query << QUERY_SHIFT | (wide ? KEY16 : 0) | (unsigned)width << WIDTH_SHIFT;
    flags |= (timed ? TIMEOUT : 0) | (lived ? TTL : 0) | (counted && !ranged ? COUNT : 0);
    size_t head = 18 + 8 + 8 + 2 + 2 * 2 + 5;
    uint8_t *p = extend(out, head + size_of(key) + size_of(key2) + (data ? size_of(data) : 0));
    if (!p) return FAILED;
    p = put16(put16(put32(p, REQUEST_MAGIC), (unsigned)function), (unsigned)identifier);
    p = put64(put16(p, (unsigned)flags), timestamp);
    if (timed) p = put64(p, timeout);
    if (lived) p = put64(p, ttl);
    if (ranged || counted) p = put16(p, (unsigned)count);
    p = put_sized(p, key, wide);
    if (ranged) p = put_sized(p, key2, wide);
    if (data) p = put_value(p, data, (unsigned)type, width);
    out->size = (size_t)(p - out->data);
    return WRITTEN;
}

static enum outcome put_details(Out *out, PyObject *details)
{
    static const uint64_t max[D_FIELDS] = {
        UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX, 0xFFFF, 0xFF};
    uint64_t n[D_FIELDS] = {0};
    PyObject *fields[D_FIELDS];
    if (details != Py_None) {
        if (!read_fields(&details_type, details, fields)) return DECLINED;
        for (int i = 0; i < D_FIELDS; i++)
            if (!number(fields[i], max[i], n + i)) return DECLINED;
    }
    uint8_t *p = extend(out, DETAILS_BYTES);
    if (!p) return FAILED;
    for (int i = 0; i < 6; i++) p = put64(p, n[i]);
    p = put16(put32(p, (uint32_t)n[6]), (unsigned)n[7]);
    put16(p, (unsigned)n[8] << 8);
    return WRITTEN;
}

/* A pair as it was read: the fields, and the type and data of its value (NULL without one). */
typedef struct { PyObject *fields[P_FIELDS], *data; uint64_t type; } Read;

/* Read the pairs of a reply and find the widths that they share; 0 if one of them cannot be sent. */
static int read_pairs(PyObject **pairs, Py_ssize_t count, Read *read, int *wide, int *width)
{
    size_t largest = 0;
    for (Py_ssize_t i = 0; i < count; i++, read++) {
        read->data = NULL;
        read->type = 0;
        if (!read_fields(&pair_type, pairs[i], read->fields) || !is_key(read->fields[P_KEY])) return 0;
        if (size_of(read->fields[P_KEY]) > 255) *wide = 1;
        if (read->fields[P_VALUE] == Py_None) continue;
        if (!read_value(read->fields[P_VALUE], &read->data, &read->type)) return 0;
        if (size_of(read->data) + 1 > largest) largest = size_of(read->data) + 1;
    }
    *width = largest ? width_of(largest) : 0;
    return 1;
}

static enum outcome put_pair(Out *out, const Read *read, int wide, int width, int detailed)
{
    PyObject *key = read->fields[P_KEY], *data = read->data;
    uint8_t *p = extend(out, 2 + size_of(key));
    if (!p) return FAILED;
    out->size = (size_t)(put_sized(p, key, wide) - out->data);
    enum outcome found = detailed ? put_details(out, read->fields[P_DETAILS]) : WRITTEN;
    if (found != WRITTEN || !width) return found;
    if (!(p = extend(out, 5 + (data ? size_of(data) : 0)))) return FAILED;
    out->size = (size_t)(put_value(p, data, (unsigned)read->type, width) - out->data);
    return WRITTEN;
}

/* Errors are left to the plain codec: they are rare. */
static enum outcome put_reply_of(Out *out, PyObject **fields, PyObject **pairs, Py_ssize_t count, Read *read)
{
    uint64_t identifier, flags, timestamp, query, timeout = 0;
    int timed, wide = 0, width = 0, counted = fields[R_PAIRS] != Py_None;
    PyObject *error = fields[R_ERROR], *cursor = fields[R_CURSOR];
    if (!number(fields[R_IDENTIFIER], 0xFFFF, &identifier) || !number(fields[R_FLAGS], 0xFFFF, &flags)
        || !number(fields[R_TIMESTAMP], UINT64_MAX, &timestamp) || !number(fields[R_QUERY], 3, &query)
        || !optional(fields[R_TIMEOUT], UINT64_MAX, &timeout, &timed) || !PyUnicode_Check(error)
        || PyUnicode_GET_LENGTH(error) || (cursor != Py_None && !is_key(cursor))
        || !read_pairs(pairs, count, read, &wide, &width))
        return DECLINED;
    wide |= cursor != Py_None && size_of(cursor) > 255;
    int detailed = count && read->fields[P_DETAILS] != Py_None;
    flags |= (timed ? TIMEOUT : 0) | (cursor != Py_None ? CURSOR : 0) | (wide ? KEY16 : 0);
    flags |= (unsigned)width << WIDTH_SHIFT | (detailed ? DETAILS : 0);
    if (counted || query != QUERY_RANGE) flags |= query << QUERY_SHIFT;
    if (counted && query != QUERY_RANGE) flags |= COUNT;
    uint8_t *p = extend(out, 16 + 8 + 2 + 2);
    if (!p) return FAILED;
    p = put64(put16(put16(put32(p, REPLY_MAGIC), (unsigned)identifier), (unsigned)flags), timestamp);
    if (timed) p = put64(p, timeout);
    if (counted) p = put16(p, (unsigned)count);
    *p++ = 0;
    if (wide) *p++ = 0;
    out->size = (size_t)(p - out->data);
    for (Py_ssize_t i = 0; i < count; i++) {
        enum outcome found = put_pair(out, read + i, wide, width, detailed);
        if (found != WRITTEN) return found;
    }
    if (cursor == Py_None) return WRITTEN;
    if (!(p = extend(out, 2 + size_of(cursor)))) return FAILED;
    out->size = (size_t)(put_sized(p, cursor, wide) - out->data);
    return WRITTEN;
}

static enum outcome put_reply(Out *out, PyObject *reply)
{
    PyObject *fields[R_FIELDS];
    if (!read_fields(&reply_type, reply, fields)) return DECLINED;
    PyObject *list = fields[R_PAIRS];
    Read one;
    if (list == Py_None) return put_reply_of(out, fields, fields + R_PAIR, fields[R_PAIR] != Py_None, &one);
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) > 0xFFFF) return DECLINED;
    Py_ssize_t count = PyList_GET_SIZE(list);
    Read *read = count > 1 ? PyMem_New(Read, (size_t)count) : &one;
    if (!read) {
        PyErr_NoMemory();
        return FAILED;
    }
    enum outcome found = put_reply_of(out, fields, PySequence_Fast_ITEMS(list), count, read);
    if (read != &one) PyMem_Free(read);
    return found;
}

/* (message) -> its bytes, or None when the plain codec has to encode it */
static PyObject *encode(PyObject *message, enum outcome (*put)(Out *, PyObject *))
{
    Out out;
    out_init(&out);
    enum outcome found = put(&out, message);
    PyObject *bytes = NULL;
    if (found == WRITTEN) bytes = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
    else if (found == DECLINED) bytes = Py_NewRef(Py_None);
    out_release(&out);
    return bytes;
}

static PyObject *encode_request(PyObject *module, PyObject *request)
{
    (void)module;
    return encode(request, journal_put_request);
}

static PyObject *encode_reply(PyObject *module, PyObject *reply)
{
    (void)module;
    return encode(reply, put_reply);
}

static enum outcome put_replies(Out *out, PyObject *replies)
{
    enum outcome found = PyList_CheckExact(replies) ? WRITTEN : DECLINED;
    for (Py_ssize_t i = 0; found == WRITTEN && i < PyList_GET_SIZE(replies); i++)
        found = put_reply(out, PyList_GET_ITEM(replies, i));
    return found;
}

static PyObject *encode_replies(PyObject *module, PyObject *replies)
{
    (void)module;
    return encode(replies, put_replies);
}
#endif
