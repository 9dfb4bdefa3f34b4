/* The journal's messages: the fast half of virta/journal/wire.py, which has the layout and decides every doubt.
 *
 * Decoding takes the whole, well-formed messages at the front of some bytes and stops at the first that is short,
 * wrong or beyond a limit; encoding returns None for anything it cannot write as it should be. The plain twin then
 * sees those bytes or that message, so that there is one place where waiting, faults and refusals are defined. */
#include "journal.h"
#include <structmember.h>
#include <string.h>

#include "journal_heap.h"

#define KEY_BYTES_MAX 65535
#define VALUE_DATA_BYTES_MAX (8 * 1024 * 1024)
#define REPLY_DECODE_BYTES_MAX (16 * 1024 * 1024 + VALUE_DATA_BYTES_MAX + 4 * KEY_BYTES_MAX)
#define DETAILS_BYTES 56
#define TYPE_MAX 5

enum bit {
    KEY16 = 1 << 0, TIMEOUT = 1 << 3, CURSOR = 1 << 5, PERSIST = 1 << 9, PERSIST_ALIAS = 1 << 12,
    COUNT = 1 << 13, TTL = 1 << 14, DETAILS = 1 << 14
};
enum { WIDTH_SHIFT = 1, QUERY_SHIFT = 7, QUERY_RANGE = 1 };
#define REQUEST_FLAGS 0x8E70
#define REPLY_FLAGS 0x1E50

/* Where the fields of a structure are, in the order of its definition. */
enum request_field { Q_FUNCTION, Q_IDENTIFIER, Q_FLAGS, Q_TIMESTAMP, Q_TIMEOUT, Q_TTL, Q_COUNT, Q_KEY, Q_KEY2, Q_VALUE, Q_QUERY, Q_FIELDS };
enum reply_field { R_IDENTIFIER, R_FLAGS, R_TIMESTAMP, R_TIMEOUT, R_QUERY, R_ERROR, R_PAIRS, R_PAIR, R_CURSOR, R_FIELDS };
enum pair_field { P_KEY, P_VALUE, P_DETAILS, P_FIELDS };
enum value_field { V_TYPE, V_DATA, V_FIELDS };
enum details_field { D_FIELDS = 9 };

enum { FIELDS_MAX = 20 };
typedef struct { PyTypeObject *type; Py_ssize_t at[FIELDS_MAX]; } Shape;
static Shape request_shape, reply_shape, pair_shape, value_shape, details_shape;
static PyObject *no_bytes, *no_text, *numbers[16];

static inline PyObject *field(const Shape *shape, PyObject *object, int number)
{
    return *(PyObject **)((char *)object + shape->at[number]);
}

/* --- decoding --- */

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

static PyObject *get_value(In *in, int width)
{
    const uint8_t *p = step(in, (size_t)1 << (width - 1));
    if (!p) return NULL;
    size_t size = width == 1 ? *p : width == 2 ? get16(p) : get32(p);
    if (size == 0 || size - 1 > VALUE_DATA_BYTES_MAX || !(p = step(in, size))) return NULL;
    if (*p > TYPE_MAX || (*p == 0 && size != 1)) return NULL;
    PyObject *data = PyBytes_FromStringAndSize((const char *)p + 1, (Py_ssize_t)size - 1);
    if (!data) return NULL;
    PyObject *args[] = {numbers[*p], data};
    PyObject *value = PyObject_Vectorcall((PyObject *)value_shape.type, args, V_FIELDS, NULL);
    Py_DECREF(data);
    return value;
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

PyObject *journal_get_request(In *in)
{
    const uint8_t *p = step(in, 18);
    if (!p || get32(p) != 0x464A0001) return NULL;
    unsigned bits = get16(p + 8), query = bits >> QUERY_SHIFT & 3, width = bits >> WIDTH_SHIFT & 3;
    int wide = bits & KEY16;
    PyObject *args[Q_FIELDS] = {NULL};
    args[Q_FUNCTION] = small(get16(p + 4));
    args[Q_IDENTIFIER] = small(get16(p + 6));
    args[Q_FLAGS] = PyLong_FromLong((bits & REQUEST_FLAGS) | (bits & PERSIST_ALIAS ? PERSIST : 0));
    args[Q_TIMESTAMP] = PyLong_FromUnsignedLongLong(get64(p + 10));
    args[Q_TIMEOUT] = bits & TIMEOUT ? get_u64(in) : Py_NewRef(Py_None);
    args[Q_TTL] = bits & TTL ? get_u64(in) : Py_NewRef(Py_None);
    if (query == QUERY_RANGE || bits & COUNT) args[Q_COUNT] = (p = step(in, 2)) ? small(get16(p)) : NULL;
    else args[Q_COUNT] = Py_NewRef(Py_None);
    args[Q_KEY] = get_sized(in, wide);
    args[Q_KEY2] = query == QUERY_RANGE ? get_sized(in, wide) : Py_NewRef(no_bytes);
    args[Q_VALUE] = width ? get_value(in, (int)width) : Py_NewRef(Py_None);
    args[Q_QUERY] = Py_NewRef(numbers[query]);
    return made(&request_shape, args, Q_FIELDS);
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
    return decode(source, journal_get_request, SIZE_MAX);
}

static PyObject *decode_replies(PyObject *self, PyObject *source)
{
    (void)self;
    return decode(source, journal_get_reply, REPLY_DECODE_BYTES_MAX);
}

/* --- encoding --- */

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

static inline uint8_t *put_sized(uint8_t *p, PyObject *bytes, int wide)
{
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    if (wide) p = put16(p, (unsigned)size);
    else *p++ = (uint8_t)size;
    memcpy(p, PyBytes_AS_STRING(bytes), size);
    return p + size;
}

static int number(PyObject *object, uint64_t max, uint64_t *out)
{
    if (!object || !PyLong_Check(object)) return 0;
    *out = PyLong_AsUnsignedLongLong(object);
    if (*out == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *out <= max;
}

static inline int is_key(PyObject *object)
{
    return object && PyBytes_CheckExact(object) && PyBytes_GET_SIZE(object) <= KEY_BYTES_MAX;
}

/* The data of a value and its type; 0 if it is none that can be sent. */
static int value_of(PyObject *value, PyObject **data, uint64_t *type)
{
    if (!value || Py_TYPE(value) != value_shape.type) return 0;
    *data = field(&value_shape, value, V_DATA);
    return number(field(&value_shape, value, V_TYPE), 255, type) && *data && PyBytes_CheckExact(*data)
        && PyBytes_GET_SIZE(*data) <= VALUE_DATA_BYTES_MAX;
}

static inline int width_of(size_t size) { return size <= 0xFF ? 1 : size <= 0xFFFF ? 2 : 3; }

static uint8_t *put_value(uint8_t *p, PyObject *data, unsigned type, int width)
{
    size_t size = data ? (size_t)PyBytes_GET_SIZE(data) : 0;
    if (width == 1) *p++ = (uint8_t)(size + 1);
    else p = width == 2 ? put16(p, (unsigned)size + 1) : put32(p, (uint32_t)size + 1);
    *p++ = (uint8_t)type;
    if (size) memcpy(p, PyBytes_AS_STRING(data), size);
    return p + size;
}

enum outcome journal_put_request(Out *out, PyObject *request)
{
    uint64_t function, identifier, flags, timestamp, timeout = 0, ttl = 0, count = 0, query, type = 0;
    if (Py_TYPE(request) != request_shape.type) return DOUBT;
    const Shape *s = &request_shape;
    PyObject *timeout_o = field(s, request, Q_TIMEOUT), *ttl_o = field(s, request, Q_TTL), *data = NULL;
    PyObject *count_o = field(s, request, Q_COUNT), *value = field(s, request, Q_VALUE);
    PyObject *key = field(s, request, Q_KEY), *key2 = field(s, request, Q_KEY2);
    if (!number(field(s, request, Q_FUNCTION), 0xFFFF, &function) || !number(field(s, request, Q_IDENTIFIER), 0xFFFF, &identifier)
        || !number(field(s, request, Q_FLAGS), 0xFFFF, &flags) || !number(field(s, request, Q_TIMESTAMP), UINT64_MAX, &timestamp)
        || !number(field(s, request, Q_QUERY), 3, &query)
        || (timeout_o != Py_None && !number(timeout_o, UINT64_MAX, &timeout)) || (ttl_o != Py_None && !number(ttl_o, UINT64_MAX, &ttl))
        || (count_o != Py_None && !number(count_o, 0xFFFF, &count)) || !is_key(key) || !is_key(key2)
        || (value != Py_None && !value_of(value, &data, &type)))
        return DOUBT;
    size_t size = (size_t)PyBytes_GET_SIZE(key), size2 = (size_t)PyBytes_GET_SIZE(key2);
    int wide = size > 255 || size2 > 255, width = data ? width_of((size_t)PyBytes_GET_SIZE(data) + 1) : 0;
    size_t begin = out->size;
    uint8_t *p = journal_extend(out, 18 + 8 + 8 + 2 + 4 + size + size2 + 5 + (data ? (size_t)PyBytes_GET_SIZE(data) : 0));
    if (!p) return FAILED;
    flags |= query << QUERY_SHIFT | (wide ? KEY16 : 0) | (unsigned)width << WIDTH_SHIFT;
    flags |= (timeout_o != Py_None ? TIMEOUT : 0) | (ttl_o != Py_None ? TTL : 0);
    if (query != QUERY_RANGE && count_o != Py_None) flags |= COUNT;
    p = put16(put16(put32(p, 0x464A0001), (unsigned)function), (unsigned)identifier);
    p = put64(put16(p, (unsigned)flags), timestamp);
    if (timeout_o != Py_None) p = put64(p, timeout);
    if (ttl_o != Py_None) p = put64(p, ttl);
    if (query == QUERY_RANGE || count_o != Py_None) p = put16(p, (unsigned)count);
    p = put_sized(p, key, wide);
    if (query == QUERY_RANGE) p = put_sized(p, key2, wide);
    if (data) p = put_value(p, data, (unsigned)type, width);
    out->size = (size_t)(p - out->data);
    return out->size > begin ? WRITTEN : DOUBT;
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

#include "journal_jobs.h"

/* --- the module --- */

static int identifier_of(const Shape *shape, PyObject *message, int at)
{
    uint64_t identifier;
    return Py_TYPE(message) == shape->type && number(field(shape, message, at), 0xFFFF, &identifier) ? (int)identifier : -1;
}

int journal_reply_identifier(PyObject *reply) { return identifier_of(&reply_shape, reply, R_IDENTIFIER); }
int journal_request_identifier(PyObject *request) { return identifier_of(&request_shape, request, Q_IDENTIFIER); }

static int learn(Shape *shape, PyObject *type, int fields)
{
    PyObject *names = PyType_Check(type) ? PyObject_GetAttrString(type, "__struct_fields__") : NULL;
    int good = names && PyTuple_Check(names) && PyTuple_GET_SIZE(names) == fields;
    for (int i = 0; good && i < fields; i++) {
        PyObject *member = PyObject_GetAttr(type, PyTuple_GET_ITEM(names, i));
        good = member && Py_TYPE(member) == &PyMemberDescr_Type;
        if (good) shape->at[i] = ((PyMemberDescrObject *)member)->d_member->offset;
        Py_XDECREF(member);
    }
    Py_XDECREF(names);
    if (good) Py_XSETREF(shape->type, (PyTypeObject *)Py_NewRef(type));
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not the structures of virta.journal.messages");
    return good;
}

/* (Request, Reply, Pair, Value, Details) */
static PyObject *set_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *request, *reply, *pair, *value, *details;
    if (!PyArg_ParseTuple(args, "OOOOO", &request, &reply, &pair, &value, &details)) return NULL;
    if (!learn(&request_shape, request, Q_FIELDS) || !learn(&reply_shape, reply, R_FIELDS) || !learn(&pair_shape, pair, P_FIELDS)
        || !learn(&value_shape, value, V_FIELDS) || !learn(&details_shape, details, D_FIELDS))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_types", set_types, METH_VARARGS, "The structures to make and to read."},
    {"decode_requests", decode_requests, METH_O, "The requests at the front of some bytes, and where they end."},
    {"decode_replies", decode_replies, METH_O, "The replies at the front of some bytes, and where they end."},
    {"encode_request", encode_request, METH_O, "The bytes of a request, None if it is not an ordinary one."},
    {"encode_reply", encode_reply, METH_O, "The bytes of a reply, None if it is not an ordinary one."},
    {"set_job_types", set_job_types, METH_VARARGS, "The structures of jobs."},
    {"push_job", (PyCFunction)(void (*)(void))push_job, METH_FASTCALL, "The reply to an ordinary PUSH, or None."},
    {"next_jobs", (PyCFunction)(void (*)(void))next_jobs, METH_FASTCALL, "The reply to an ordinary NEXT, or None."},
    {"job_records", (PyCFunction)(void (*)(void))job_records, METH_FASTCALL, "What the log has to learn of jobs, or None."},
    {"jobs_chunk", jobs_chunk, METH_O, "Jobs as a snapshot has them, or None."},
    {"restore_jobs", (PyCFunction)(void (*)(void))restore_jobs, METH_FASTCALL, "Take jobs of a snapshot, up to one that does not simply wait."},
    {"delete_job", (PyCFunction)(void (*)(void))delete_job, METH_FASTCALL, "The reply to the end of a job, or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "virta.journal._native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    for (int i = 0; i < 16; i++)
        if (!(numbers[i] = PyLong_FromLong(i))) return NULL;
    if (!(no_bytes = PyBytes_FromStringAndSize("", 0)) || !(no_text = PyUnicode_FromString(""))) return NULL;
    PyObject *made_module = PyModule_Create(&module);
    if (made_module
        && (PyModule_AddType(made_module, &HeapType) < 0 || journal_add_lines(made_module) < 0 || journal_add_asker(made_module) < 0))
        Py_CLEAR(made_module);
    return made_module;
}
