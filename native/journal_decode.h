/* Messages from bytes: the whole, well-formed ones at the front of some bytes, up to the first that is not. */
#ifndef VIRTA_JOURNAL_DECODE_H
#define VIRTA_JOURNAL_DECODE_H
#include "journal_shapes.h"

static inline uint16_t get16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static inline uint32_t get32(const uint8_t *p) { return (uint32_t)get16(p) << 16 | get16(p + 2); }
static inline uint64_t get64(const uint8_t *p) { return (uint64_t)get32(p) << 32 | get32(p + 4); }

static inline const uint8_t *step(In *in, size_t size)
{
    if ((size_t)(in->end - in->at) < size) return NULL;
    const uint8_t *p = in->at;
    in->at += size;
    return p;
}

static inline PyObject *small(unsigned number)
{
    return number < 16 ? Py_NewRef(numbers[number]) : PyLong_FromUnsignedLong(number);
}

/* All of these give NULL without an error set where the bytes end or are not as they should be. */
static PyObject *get_u64(In *in)
{
    const uint8_t *p = step(in, 8);
    return p ? PyLong_FromUnsignedLongLong(get64(p)) : NULL;
}

static PyObject *get_sized(In *in, int wide)
{
    const uint8_t *p = step(in, wide ? 2 : 1);
    if (!p) return NULL;
    size_t size = wide ? get16(p) : *p;
    if (!(p = step(in, size))) return NULL;
    return size ? PyBytes_FromStringAndSize((const char *)p, (Py_ssize_t)size) : Py_NewRef(no_bytes);
}

/* The type and the data of a value. */
static int get_typed(In *in, int width, unsigned *type, Span *data)
{
    const uint8_t *p = step(in, (size_t)1 << (width - 1));
    if (!p) return 0;
    size_t size = width == 1 ? *p : width == 2 ? get16(p) : get32(p);
    if (size == 0 || size - 1 > VALUE_DATA_BYTES_MAX || !(p = step(in, size))) return 0;
    if (*p > TYPE_MAX || (*p == 0 && size != 1)) return 0;
    *type = *p;
    *data = (Span){p + 1, size - 1};
    return 1;
}

static PyObject *value_from(unsigned type, Span data)
{
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)data.at, (Py_ssize_t)data.size);
    if (!bytes) return NULL;
    PyObject *args[] = {numbers[type], bytes};
    PyObject *value = PyObject_Vectorcall((PyObject *)value_shape.type, args, V_FIELDS, NULL);
    Py_DECREF(bytes);
    return value;
}

static PyObject *get_value(In *in, int width)
{
    unsigned type;
    Span data;
    return get_typed(in, width, &type, &data) ? value_from(type, data) : NULL;
}

static PyObject *made(const Shape *shape, PyObject **args, int count)
{
    PyObject *object = NULL;
    int whole = 1;
    for (int i = 0; i < count; i++) whole &= args[i] != NULL;
    if (whole) object = PyObject_Vectorcall((PyObject *)shape->type, args, (size_t)count, NULL);
    for (int i = 0; i < count; i++) Py_XDECREF(args[i]);
    return object;
}

static PyObject *get_details(In *in)
{
    const uint8_t *p = step(in, DETAILS_BYTES);
    if (!p) return NULL;
    PyObject *args[D_FIELDS];
    for (int i = 0; i < 6; i++) args[i] = PyLong_FromUnsignedLongLong(get64(p + 8 * i));
    args[6] = PyLong_FromUnsignedLong(get32(p + 48));
    args[7] = small(get16(p + 52));
    args[8] = small(p[54]);
    return made(&details_shape, args, D_FIELDS);
}

static int get_span(In *in, int wide, Span *span)
{
    const uint8_t *p = step(in, wide ? 2 : 1);
    if (!p) return 0;
    span->size = wide ? get16(p) : *p;
    return (span->at = step(in, span->size)) != NULL;
}

int journal_get_ask(In *in, Ask *ask)
{
    const uint8_t *p = step(in, 18);
    if (!p || get32(p) != 0x464A0001) return 0;
    unsigned bits = get16(p + 8), query = bits >> QUERY_SHIFT & 3, width = bits >> WIDTH_SHIFT & 3;
    *ask = (Ask){.function = get16(p + 4), .identifier = get16(p + 6), .query = query, .timestamp = get64(p + 10),
                 .flags = (bits & REQUEST_FLAGS) | (bits & PERSIST_ALIAS ? PERSIST : 0),
                 .timed = (bits & TIMEOUT) != 0, .lived = (bits & TTL) != 0,
                 .counted = query == QUERY_RANGE || bits & COUNT, .valued = width != 0};
    if (ask->timed && !(p = step(in, 8))) return 0;
    if (ask->timed) ask->timeout = get64(p);
    if (ask->lived && !(p = step(in, 8))) return 0;
    if (ask->lived) ask->ttl = get64(p);
    if (ask->counted && !(p = step(in, 2))) return 0;
    if (ask->counted) ask->count = get16(p);
    return get_span(in, bits & KEY16, &ask->key) && (query != QUERY_RANGE || get_span(in, bits & KEY16, &ask->key2))
        && (!width || get_typed(in, (int)width, &ask->type, &ask->data));
}

static PyObject *bytes_of(Span span)
{
    return span.size ? PyBytes_FromStringAndSize((const char *)span.at, (Py_ssize_t)span.size) : Py_NewRef(no_bytes);
}

PyObject *journal_request_of(const Ask *ask)
{
    PyObject *args[Q_FIELDS] = {
        [Q_FUNCTION] = small(ask->function),
        [Q_IDENTIFIER] = small(ask->identifier),
        [Q_FLAGS] = PyLong_FromUnsignedLong(ask->flags),
        [Q_TIMESTAMP] = PyLong_FromUnsignedLongLong(ask->timestamp),
        [Q_TIMEOUT] = ask->timed ? PyLong_FromUnsignedLongLong(ask->timeout) : Py_NewRef(Py_None),
        [Q_TTL] = ask->lived ? PyLong_FromUnsignedLongLong(ask->ttl) : Py_NewRef(Py_None),
        [Q_COUNT] = ask->counted ? small(ask->count) : Py_NewRef(Py_None),
        [Q_KEY] = bytes_of(ask->key),
        [Q_KEY2] = bytes_of(ask->key2),
        [Q_VALUE] = ask->valued ? value_from(ask->type, ask->data) : Py_NewRef(Py_None),
        [Q_QUERY] = Py_NewRef(numbers[ask->query]),
    };
    return made(&request_shape, args, Q_FIELDS);
}

static PyObject *get_request(In *in)
{
    Ask ask;
    return journal_get_ask(in, &ask) ? journal_request_of(&ask) : NULL;
}

static PyObject *get_pair(In *in, unsigned bits)
{
    unsigned width = bits >> WIDTH_SHIFT & 3;
    PyObject *args[P_FIELDS];
    args[P_KEY] = get_sized(in, bits & KEY16);
    args[P_DETAILS] = bits & DETAILS ? get_details(in) : Py_NewRef(Py_None);
    args[P_VALUE] = width ? get_value(in, (int)width) : Py_NewRef(Py_None);
    return made(&pair_shape, args, P_FIELDS);
}

static PyObject *get_pairs(In *in, unsigned bits, unsigned count)
{
    PyObject *pairs = PyList_New(0);
    while (pairs && count--) {
        PyObject *pair = get_pair(in, bits);
        if (!pair || PyList_Append(pairs, pair) < 0) Py_CLEAR(pairs);
        Py_XDECREF(pair);
    }
    return pairs;
}

static PyObject *get_error(In *in, int wide)
{
    const uint8_t *p = step(in, wide ? 2 : 1);
    if (!p) return NULL;
    size_t size = wide ? get16(p) : *p;
    if (size == 0) return Py_NewRef(no_text);
    if (!(p = step(in, size))) return NULL;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)p, (Py_ssize_t)size, NULL);
    if (!text && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    return text;
}

PyObject *journal_get_reply(In *in)
{
    const uint8_t *p = step(in, 16);
    if (!p || get32(p) != 0x4A520001) return NULL;
    unsigned bits = get16(p + 6), query = bits >> QUERY_SHIFT & 3, count = 0;
    int counted = query == QUERY_RANGE || bits & COUNT;
    PyObject *args[R_FIELDS] = {NULL};
    args[R_IDENTIFIER] = small(get16(p + 4));
    args[R_FLAGS] = PyLong_FromLong(bits & REPLY_FLAGS);
    args[R_TIMESTAMP] = PyLong_FromUnsignedLongLong(get64(p + 8));
    args[R_TIMEOUT] = bits & TIMEOUT ? get_u64(in) : Py_NewRef(Py_None);
    args[R_QUERY] = Py_NewRef(numbers[query]);
    p = counted ? step(in, 2) : NULL;
    if (counted && p) count = get16(p);
    args[R_ERROR] = counted && !p ? NULL : get_error(in, bits & KEY16);
    int good = args[R_ERROR] != NULL;
    args[R_PAIRS] = !counted ? Py_NewRef(Py_None) : good ? get_pairs(in, bits, count) : NULL;
    good &= args[R_PAIRS] != NULL;
    args[R_PAIR] = !counted && bits >> WIDTH_SHIFT & 3 ? (good ? get_pair(in, bits) : NULL) : Py_NewRef(Py_None);
    good &= args[R_PAIR] != NULL;
    args[R_CURSOR] = bits & CURSOR ? (good ? get_sized(in, bits & KEY16) : NULL) : Py_NewRef(Py_None);
    return made(&reply_shape, args, R_FIELDS);
}

/* (bytes) -> (messages, where the first byte is that was not understood) */
static PyObject *decode(PyObject *source, PyObject *(*get)(In *), size_t limit)
{
    Py_buffer view;
    if (PyObject_GetBuffer(source, &view, PyBUF_SIMPLE) < 0) return NULL;
    const uint8_t *begin = view.buf;
    In in = {begin, begin + view.len};
    PyObject *messages = PyList_New(0);
    while (messages && in.at < in.end) {
        In next = in;
        PyObject *message = get(&next);
        if (!message) {
            if (PyErr_Occurred()) Py_CLEAR(messages);
            break;
        }
        if ((size_t)(next.at - in.at) > limit) {
            Py_DECREF(message);
            break;
        }
        if (PyList_Append(messages, message) < 0) Py_CLEAR(messages);
        Py_DECREF(message);
        in = next;
    }
    Py_ssize_t used = in.at - begin;
    PyBuffer_Release(&view);
    return messages ? Py_BuildValue("Nn", messages, used) : NULL;
}

static PyObject *decode_requests(PyObject *self, PyObject *source)
{
    (void)self;
    return decode(source, get_request, SIZE_MAX);
}

static PyObject *decode_replies(PyObject *self, PyObject *source)
{
    (void)self;
    return decode(source, journal_get_reply, REPLY_DECODE_BYTES_MAX);
}

#endif
