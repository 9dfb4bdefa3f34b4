/* Decode messages: the complete, well-formed ones at the front of some bytes, up to the first that is not.
 * Every function here returns NULL without an error set where the bytes end or are malformed. */
#ifndef VIRTA_JOURNAL_DECODE_H
#define VIRTA_JOURNAL_DECODE_H
#include "journal_fields.h"

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

static PyObject *get_u64(In *in)
{
    const uint8_t *p = step(in, 8);
    return p ? PyLong_FromUnsignedLongLong(get64(p)) : NULL;
}

static PyObject *get_u16(In *in)
{
    const uint8_t *p = step(in, 2);
    return p ? small(get16(p)) : NULL;
}

static PyObject *get_sized(In *in, int wide)
{
    const uint8_t *p = step(in, wide ? 2 : 1);
    if (!p) return NULL;
    size_t size = wide ? get16(p) : *p;
    if (!(p = step(in, size))) return NULL;
    return size ? PyBytes_FromStringAndSize((const char *)p, (Py_ssize_t)size) : Py_NewRef(no_bytes);
}

/* Make a structure of its fields, and release them; NULL if one is missing. */
static PyObject *make(const Structure *structure, PyObject **fields, int count)
{
    PyObject *object = NULL;
    int complete = 1;
    for (int i = 0; i < count; i++) complete &= fields[i] != NULL;
    if (complete) object = PyObject_Vectorcall((PyObject *)structure->type, fields, (size_t)count, NULL);
    for (int i = 0; i < count; i++) Py_XDECREF(fields[i]);
    return object;
}

static PyObject *get_value(In *in, unsigned width)
{
    const uint8_t *p = step(in, (size_t)1 << (width - 1));
    if (!p) return NULL;
    size_t size = width == 1 ? *p : width == 2 ? get16(p) : get32(p);
    if (size == 0 || size - 1 > VALUE_DATA_BYTES_MAX || !(p = step(in, size))) return NULL;
    if (*p > TYPE_MAX || (*p == 0 && size != 1)) return NULL;
    PyObject *fields[] = {small(*p), PyBytes_FromStringAndSize((const char *)p + 1, (Py_ssize_t)size - 1)};
    return make(&value_type, fields, V_FIELDS);
}

static PyObject *get_details(In *in)
{
    const uint8_t *p = step(in, DETAILS_BYTES);
    if (!p) return NULL;
    PyObject *fields[D_FIELDS];
    for (int i = 0; i < 6; i++) fields[i] = PyLong_FromUnsignedLongLong(get64(p + 8 * i));
    fields[6] = PyLong_FromUnsignedLong(get32(p + 48));
    fields[7] = small(get16(p + 52));
    fields[8] = small(p[54]);
    return make(&details_type, fields, D_FIELDS);
}

static PyObject *get_request(In *in)
{
    const uint8_t *p = step(in, 18);
    if (!p || get32(p) != REQUEST_MAGIC) return NULL;
    unsigned bits = get16(p + 8), query = bits >> QUERY_SHIFT & 3, width = bits >> WIDTH_SHIFT & 3;
    unsigned flags = (bits & REQUEST_FLAGS) | (bits & PERSIST_ALIAS ? PERSIST : 0);
    PyObject *fields[Q_FIELDS] = {
        small(get16(p + 4)), small(get16(p + 6)), small(flags), PyLong_FromUnsignedLongLong(get64(p + 10)),
    };
    fields[Q_TIMEOUT] = bits & TIMEOUT ? get_u64(in) : Py_NewRef(Py_None);
    fields[Q_TTL] = bits & TTL ? get_u64(in) : Py_NewRef(Py_None);
    fields[Q_COUNT] = query == QUERY_RANGE || bits & COUNT ? get_u16(in) : Py_NewRef(Py_None);
    fields[Q_KEY] = get_sized(in, bits & KEY16);
    fields[Q_KEY2] = query == QUERY_RANGE ? get_sized(in, bits & KEY16) : Py_NewRef(no_bytes);
    fields[Q_VALUE] = width ? get_value(in, width) : Py_NewRef(Py_None);
    fields[Q_QUERY] = Py_NewRef(numbers[query]);
    return make(&request_type, fields, Q_FIELDS);
}

static PyObject *get_pair(In *in, unsigned bits)
{
    unsigned width = bits >> WIDTH_SHIFT & 3;
    PyObject *fields[P_FIELDS];
    fields[P_KEY] = get_sized(in, bits & KEY16);
    fields[P_DETAILS] = bits & DETAILS ? get_details(in) : Py_NewRef(Py_None);
    fields[P_VALUE] = width ? get_value(in, width) : Py_NewRef(Py_None);
    return make(&pair_type, fields, P_FIELDS);
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
    if (!p || get32(p) != REPLY_MAGIC) return NULL;
    unsigned bits = get16(p + 6), query = bits >> QUERY_SHIFT & 3, count = 0;
    int counted = query == QUERY_RANGE || bits & COUNT;
    PyObject *fields[R_FIELDS] = {NULL};
    fields[R_IDENTIFIER] = small(get16(p + 4));
    fields[R_FLAGS] = small(bits & REPLY_FLAGS);
    fields[R_TIMESTAMP] = PyLong_FromUnsignedLongLong(get64(p + 8));
    fields[R_TIMEOUT] = bits & TIMEOUT ? get_u64(in) : Py_NewRef(Py_None);
    fields[R_QUERY] = Py_NewRef(numbers[query]);
    p = counted ? step(in, 2) : NULL;
    if (p) count = get16(p);
    /* Pairs are read only behind a complete head: a wrong position would make thousands of them. */
    int good = (!counted || p) && (fields[R_ERROR] = get_error(in, bits & KEY16));
    fields[R_PAIRS] = !counted ? Py_NewRef(Py_None) : good ? get_pairs(in, bits, count) : NULL;
    good = good && fields[R_PAIRS];
    int single = !counted && bits >> WIDTH_SHIFT & 3;
    fields[R_PAIR] = !single ? Py_NewRef(Py_None) : good ? get_pair(in, bits) : NULL;
    good = good && fields[R_PAIR];
    fields[R_CURSOR] = !(bits & CURSOR) ? Py_NewRef(Py_None) : good ? get_sized(in, bits & KEY16) : NULL;
    return make(&reply_type, fields, R_FIELDS);
}

/* (bytes) -> (messages, position of the first byte that was not decoded) */
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
        int fits = (size_t)(next.at - in.at) <= limit;
        if (fits && PyList_Append(messages, message) < 0) Py_CLEAR(messages);
        Py_DECREF(message);
        if (!fits) break;
        in = next;
    }
    Py_ssize_t used = in.at - begin;
    PyBuffer_Release(&view);
    return messages ? Py_BuildValue("Nn", messages, used) : NULL;
}

static PyObject *decode_requests(PyObject *module, PyObject *source)
{
    (void)module;
    return decode(source, get_request, SIZE_MAX);
}

static PyObject *decode_replies(PyObject *module, PyObject *source)
{
    (void)module;
    return decode(source, journal_get_reply, REPLY_DECODE_BYTES_MAX);
}
#endif
