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
#include "hub_digest.h"
#include "json_scan.h"
#include "log_format.h"

#define RECORDS_BYTES_MAX (16 * 1024 * 1024)

typedef struct { Span value, source, id; } Event;

/* Read an object with strings as `source` and `id`; of equal names the last counts. */
static int read_event(Text *t, Event *event)
{
    Span name;
    event->value.at = t->at;
    event->source.at = event->id.at = NULL;
    if (!read_char(t, '{')) return 0;
    do {
        if (!read_name(t, &name)) return 0;
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
