/* split: turn the JSON of a batch of events into the forms that the log and the matcher read.
 *
 * The first pass checks the JSON and finds each event with its `source` and `id`. The second writes three
 * strings: the events' records as the log stores them (docs/format.md), the events one a line, and the
 * digests of their idempotency keys. A batch with anything uncommon (line ends, escapes in a name, a source
 * or an id, lone surrogates, long numbers, a partition key, deep nesting, errors) is declined with None, and
 * virta/server/event_input.py reads it event by event. Invariant: a batch that is not declined has exactly
 * the events of that reading. */
#ifndef VIRTA_HUB_SPLIT_H
#define VIRTA_HUB_SPLIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include "hub_digest.h"
#include "log_format.h"

#define DEPTH_MAX 60             /* of an event; every JSON reader accepts that */
#define NUMBER_CHARS_MAX 40      /* with an exponent of two digits that is within a double */
#define RECORDS_BYTES_MAX (16 * 1024 * 1024)

typedef struct { const uint8_t *at, *end; int wide; } Text; /* wide: has a byte beyond ASCII */
typedef struct { const uint8_t *at; uint32_t size; } Span;
typedef struct { Span value, source, id; } Event;

/* All of these return 0 if the text is not of the expected form. */

static inline void skip_space(Text *t)
{
    while (t->at < t->end && (*t->at == ' ' || *t->at == '\t')) t->at++;
}

static inline int read_char(Text *t, uint8_t c)
{
    if (t->at == t->end || *t->at != c) return 0;
    t->at++;
    return 1;
}

/* Skip to the next quote, backslash, control character or the end; set `wide` for bytes beyond ASCII. */
static inline void skip_plain(Text *t)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), last = _mm_set1_epi8(0x1F);
    while (t->end - t->at >= 16) {
        __m128i some = _mm_loadu_si128((const __m128i *)t->at);
        __m128i ends = _mm_or_si128(_mm_cmpeq_epi8(some, quote), _mm_cmpeq_epi8(some, slash));
        ends = _mm_or_si128(ends, _mm_cmpeq_epi8(_mm_min_epu8(some, last), some));
        unsigned stop = (unsigned)_mm_movemask_epi8(ends), wide = (unsigned)_mm_movemask_epi8(some);
        if (stop) {
            unsigned n = (unsigned)__builtin_ctz(stop);
            t->wide |= (wide & ((1u << n) - 1)) != 0;
            t->at += n;
            return;
        }
        t->wide |= wide != 0;
        t->at += 16;
    }
#endif
    for (; t->at < t->end && *t->at != '"' && *t->at != '\\' && *t->at >= 0x20; t->at++)
        t->wide |= *t->at >= 0x80;
}

/* Read four hexadecimal digits; -1 if they are not. */
static int hex4(Text *t)
{
    int value = 0;
    if (t->end - t->at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = *t->at++, lower = c | 32;
        int digit = c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* Skip what follows a backslash; surrogates only in pairs. */
static int skip_escape(Text *t)
{
    if (t->at == t->end) return 0;
    switch (*t->at++) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return 1;
    case 'u':
        break;
    default:
        return 0;
    }
    int unit = hex4(t);
    if (unit < 0 || (unit & 0xFC00) == 0xDC00) return 0;
    if ((unit & 0xFC00) != 0xD800) return 1;
    return read_char(t, '\\') && read_char(t, 'u') && (hex4(t) & ~0x3FF) == 0xDC00;
}

/* Skip the rest of a string after its opening quote. */
static inline int skip_string(Text *t)
{
    for (;;) {
        skip_plain(t);
        if (t->at == t->end) return 0;
        uint8_t c = *t->at++;
        if (c == '"') return 1;
        if (c != '\\' || !skip_escape(t)) return 0;
    }
}

/* Read a string without escapes; the span is the text between its quotes. */
static inline int read_text(Text *t, Span *span)
{
    if (!read_char(t, '"')) return 0;
    span->at = t->at;
    skip_plain(t);
    span->size = (uint32_t)(t->at - span->at);
    return read_char(t, '"');
}

static inline size_t skip_digits(Text *t)
{
    const uint8_t *first = t->at;
    while (t->at < t->end && *t->at >= '0' && *t->at <= '9') t->at++;
    return (size_t)(t->at - first);
}

static int skip_number(Text *t)
{
    const uint8_t *first = t->at;
    (void)read_char(t, '-');
    if (!read_char(t, '0') && !skip_digits(t)) return 0;
    if (read_char(t, '.') && !skip_digits(t)) return 0;
    if (t->at < t->end && (*t->at | 32) == 'e') {
        t->at++;
        if (!read_char(t, '+')) (void)read_char(t, '-');
        size_t digits = skip_digits(t);
        if (digits < 1 || digits > 2) return 0;
    }
    return t->at - first <= NUMBER_CHARS_MAX;
}

static int skip_word(Text *t, const char *word, size_t size)
{
    if ((size_t)(t->end - t->at) < size || memcmp(t->at, word, size) != 0) return 0;
    t->at += size;
    return 1;
}

/* Skip a string, a number or a literal. */
static inline int skip_scalar(Text *t)
{
    if (t->at == t->end) return 0;
    switch (*t->at) {
    case '"': t->at++; return skip_string(t);
    case 't': return skip_word(t, "true", 4);
    case 'f': return skip_word(t, "false", 5);
    case 'n': return skip_word(t, "null", 4);
    default: return skip_number(t);
    }
}

static inline int skip_name(Text *t)
{
    skip_space(t);
    if (!read_char(t, '"') || !skip_string(t)) return 0;
    skip_space(t);
    return read_char(t, ':');
}

/* Skip any value. `objects` has a bit for each open bracket: whether it is a brace. */
static int skip_value(Text *t)
{
    uint64_t objects = 0;
    int depth = 0;
    for (;;) {
        skip_space(t);
        if (t->at == t->end) return 0;
        int brace = *t->at == '{';
        if (brace || *t->at == '[') {
            if (depth == DEPTH_MAX) return 0;
            t->at++;
            skip_space(t);
            objects = objects << 1 | (uint64_t)brace;
            depth++;
            if (t->at < t->end && *t->at != (brace ? '}' : ']')) {
                if (brace && !skip_name(t)) return 0;
                continue;
            }
        } else if (!skip_scalar(t)) {
            return 0;
        }
        while (depth) { /* after a value: its container continues or ends */
            skip_space(t);
            if (read_char(t, ',')) {
                if (objects & 1 && !skip_name(t)) return 0;
                break;
            }
            if (!read_char(t, objects & 1 ? '}' : ']')) return 0;
            objects >>= 1;
            depth--;
        }
        if (!depth) return 1;
    }
}

#define IS(span, text) ((span).size == sizeof(text) - 1 && memcmp((span).at, text, sizeof(text) - 1) == 0)

/* Read an object with strings as `source` and `id`; of equal names the last counts. */
static int read_event(Text *t, Event *event)
{
    Span name;
    event->value.at = t->at;
    event->source.at = event->id.at = NULL;
    if (!read_char(t, '{')) return 0;
    do {
        skip_space(t);
        if (!read_text(t, &name)) return 0;
        skip_space(t);
        if (!read_char(t, ':')) return 0;
        skip_space(t);
        Span *wanted = IS(name, "source") ? &event->source : IS(name, "id") ? &event->id : NULL;
        if (wanted ? !read_text(t, wanted) : IS(name, "partitionkey") || !skip_value(t)) return 0;
        skip_space(t);
    } while (read_char(t, ','));
    if (!read_char(t, '}')) return 0;
    event->value.size = (uint32_t)(t->at - event->value.at);
    return event->source.at && event->id.at;
}

typedef struct { Event *events; size_t count, capacity; } Events;

/* 1: read, 0: declined, -1: no memory. */
static int read_events(Text *t, Events *all, size_t count_max, size_t bytes_max)
{
    skip_space(t);
    if (!read_char(t, '[')) return 0;
    do {
        if (all->count == all->capacity) {
            size_t capacity = all->capacity ? 2 * all->capacity : 128;
            Event *grown = PyMem_RawRealloc(all->events, capacity * sizeof *grown);
            if (!grown) return -1;
            all->events = grown;
            all->capacity = capacity;
        }
        skip_space(t);
        Event *event = &all->events[all->count++];
        if (all->count > count_max || !read_event(t, event) || event->value.size > bytes_max) return 0;
        skip_space(t);
    } while (read_char(t, ','));
    if (!read_char(t, ']')) return 0;
    skip_space(t);
    return t->at == t->end;
}

/* The scan does not check UTF-8: decode a text that is not ASCII. */
static int is_utf8(const uint8_t *first, const uint8_t *end)
{
    PyObject *text = PyUnicode_DecodeUTF8((const char *)first, end - first, NULL);
    if (!text) PyErr_Clear();
    Py_XDECREF(text);
    return text != NULL;
}

static size_t record_size(size_t topic, size_t value, size_t *total)
{
    *total = (size_t)varlong_size(topic) + topic + 1 + value;
    return 1 + (size_t)varlong_size(*total) + *total;
}

static uint8_t *put_record(uint8_t *at, Span topic, Span value)
{
    size_t total;
    uint8_t *start = at++;
    record_size(topic.size, value.size, &total);
    at = put_varlong(at, total);
    at = put_varlong(at, topic.size);
    memcpy(at, topic.at, topic.size);
    at += topic.size;
    *at++ = 0; /* no key */
    memcpy(at, value.at, value.size);
    at += value.size;
    start[0] = crc8(0, start + 1, (size_t)(at - start - 1));
    return at;
}

static void put_digests(Digest *out, const Events *all, Span topic, uint8_t *scratch)
{
    memcpy(scratch, topic.at, topic.size);
    scratch[topic.size] = 0;
    for (size_t i = 0; i < all->count; i++) {
        const Event *event = &all->events[i];
        uint8_t *at = scratch + topic.size + 1;
        memcpy(at, event->source.at, event->source.size);
        at += event->source.size;
        *at++ = 0;
        memcpy(at, event->id.at, event->id.size);
        at += event->id.size;
        out[i] = digest_of(scratch, (size_t)(at - scratch));
    }
}

static PyObject *build_result(const Events *all, Span topic, size_t bytes_max)
{
    size_t records = 0, lines = all->count - 1, total;
    for (size_t i = 0; i < all->count; i++) {
        records += record_size(topic.size, all->events[i].value.size, &total);
        lines += all->events[i].value.size;
    }
    if (records > RECORDS_BYTES_MAX) Py_RETURN_NONE;
    PyObject *r = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)records);
    PyObject *l = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)lines);
    PyObject *d = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(all->count * DIGEST_BYTES));
    uint8_t *scratch = PyMem_RawMalloc(topic.size + 2 + bytes_max);
    PyObject *out = NULL;
    if (!scratch) PyErr_NoMemory();
    if (r && l && d && scratch) {
        uint8_t *record = (uint8_t *)PyBytes_AS_STRING(r), *line = (uint8_t *)PyBytes_AS_STRING(l);
        for (size_t i = 0; i < all->count; i++) {
            Span value = all->events[i].value;
            record = put_record(record, topic, value);
            if (i) *line++ = '\n';
            memcpy(line, value.at, value.size);
            line += value.size;
        }
        put_digests((Digest *)PyBytes_AS_STRING(d), all, topic, scratch);
        out = Py_BuildValue("(nOOO)", (Py_ssize_t)all->count, r, l, d);
    }
    PyMem_RawFree(scratch);
    Py_XDECREF(r);
    Py_XDECREF(l);
    Py_XDECREF(d);
    return out;
}

/* split(channel, data, start, events_max, event_bytes_max) -> (count, records, lines, digests), or None */
static PyObject *native_split(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 5 || !PyUnicode_Check(args[0]) || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError,
                        "split(channel: str, data: bytes, start, events_max, event_bytes_max)");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[2]), topic_size;
    size_t events_max = PyLong_AsSize_t(args[3]), bytes_max = PyLong_AsSize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    const char *name = PyUnicode_AsUTF8AndSize(args[0], &topic_size);
    if (!name) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Span topic = {(const uint8_t *)name, (uint32_t)topic_size};
    if (start < 0 || start > PyBytes_GET_SIZE(args[1]) || PyBytes_GET_SIZE(args[1]) > RECORDS_BYTES_MAX
        || bytes_max > RECORDS_BYTES_MAX || topic_size > TOPIC_BYTES_MAX
        || (topic_size == 1 && topic.at[0] < 0x20))
        Py_RETURN_NONE;
    const uint8_t *first = (const uint8_t *)PyBytes_AS_STRING(args[1]) + start;
    Text text = {first, (const uint8_t *)PyBytes_AS_STRING(args[1]) + PyBytes_GET_SIZE(args[1]), 0};
    Events all = {NULL, 0, 0};
    int found = read_events(&text, &all, events_max, bytes_max);
    PyObject *out = NULL;
    if (found < 0)
        PyErr_NoMemory();
    else if (!found || (text.wide && !is_utf8(first, text.end)))
        out = Py_NewRef(Py_None);
    else
        out = build_result(&all, topic, bytes_max);
    PyMem_RawFree(all.events);
    return out;
}

#endif
