/* The ordinary PUSH, NEXT and DELETE of a job: virta/journal/jobs/lifecycle.py in short, on the same tables.
 *
 * Each fills an answer, or says DOUBT where anything is out of the ordinary (a job that waits or is worked on already, a
 * bad request, a key of something else, nothing to do, somebody who watches); then nothing was changed but what no longer
 * held in a heap, and the Python half decides. Of jobs that others have copies of this half knows nothing. */
#ifndef VIRTA_JOURNAL_JOBS_H
#define VIRTA_JOURNAL_JOBS_H

#include "journal_decode.h"
#include "journal_domains.h"
#include "journal_leases.h"

typedef struct {
    unsigned flags;
    uint64_t timestamp, timeout; /* timeout: 0 if it has none */
    Py_ssize_t count;
    PyObject *jobs[NEXT_JOBS_MAX]; /* those that were handed out, each with a reference */
} Answer;

/* --- PUSH --- */

/* The domain of a uri (a new reference); NULL without an error if it has none. */
static PyObject *host_name(PyObject *uri)
{
    const char *text = PyBytes_AS_STRING(uri);
    size_t size = (size_t)PyBytes_GET_SIZE(uri), from = 1;
    for (size_t i = 0; i + 1 < size; i++)
        if (text[i] == '/' && text[i + 1] == '/') { from = i + 2; break; }
    const char *end = from < size ? memchr(text + from, '/', size - from) : NULL;
    PyObject *start = PyBytes_FromStringAndSize(text, end ? end - text : (Py_ssize_t)size);
    PyObject *name = start ? PyDict_GetItemWithError(hosts, start) : NULL;
    if (name) Py_INCREF(name);
    else if (start && !PyErr_Occurred()) {
        name = PyObject_CallOneArg(host_of, uri);
        if (!name) PyErr_Clear(); /* it is refused, in words, by the Python half */
        else if (PyDict_GET_SIZE(hosts) >= HOSTS_MAX) PyDict_Clear(hosts);
        if (name && PyDict_SetItem(hosts, start, name) < 0) Py_CLEAR(name);
    }
    Py_XDECREF(start);
    return name;
}

/* 1 if nothing is known of a uri that a command of this moment would not simply come after. */
static int unknown(Call *call, PyObject *uri)
{
    static const int tables[] = {X_WAITING, X_WORKING, X_DEAD};
    for (int i = 0; i < 3; i++)
        if (PyDict_GET_SIZE(call->of[tables[i]]) && PyDict_Contains(call->of[tables[i]], uri)) return 0;
    PyObject *last = PyDict_GetItemWithError(call->of[X_COMMANDS], uri);
    uint64_t finished;
    return !PyErr_Occurred() && (!last || (number(last, UINT64_MAX, &finished) && finished < call->timestamp));
}

static int room_for_one(Call *call)
{
    PyObject *max_o = PyObject_GetAttr(call->of[X_JOBS], s_jobs_max);
    uint64_t max;
    int good = number(max_o, INT64_MAX, &max);
    Py_XDECREF(max_o);
    return good && (uint64_t)(PyDict_GET_SIZE(call->of[X_WAITING]) + PyDict_GET_SIZE(call->of[X_WORKING]) + PyDict_GET_SIZE(call->of[X_DEAD])) < max;
}

/* Take an id (a new reference). */
static PyObject *take_id(Call *call)
{
    PyObject *id = PyObject_GetAttr(call->of[X_JOBS], s_next_id), *next = NULL;
    uint64_t at;
    if (number(id, INT64_MAX - 1, &at)) next = PyLong_FromUnsignedLongLong(at + 1);
    if (!next || PyObject_SetAttr(call->of[X_JOBS], s_next_id, next) < 0) Py_CLEAR(id);
    Py_XDECREF(next);
    return id;
}

static int put_in(Call *call, PyObject *uri, PyObject *place, PyObject *stamp_o, PyObject *start, uint64_t due)
{
    const Ask *ask = call->ask;
    int persist = ask->flags & PERSIST ? 1 : 0, ready = due <= call->now;
    PyObject *id = take_id(call), *priority = small(ask->count), *value = Py_None, *job = NULL;
    if (ask->valued) value = ask->object ? field(&request_shape, ask->object, Q_VALUE) : value_from(ask->type, ask->data);
    if (id && priority && value) {
        PyObject *args[] = {uri, place, id, priority, start, stamp_o, stamp_o, value, persist ? Py_True : Py_False};
        job = PyObject_Vectorcall((PyObject *)job_shape.type, args, 9, NULL);
    }
    int failed = !job || PyDict_SetItem(call->of[X_WAITING], uri, job) < 0 || PyDict_SetItem(call->of[X_BY_ID], id, job) < 0
        || (persist && changed(call, uri, Py_None) < 0) || enter(place, job, ready ? READY : DELAYED) < 0
        || (ready ? offer(call, place, job) : arm(call, place, start)) < 0;
    if (ask->valued && !ask->object) Py_XDECREF(value);
    Py_XDECREF(id);
    Py_XDECREF(priority);
    Py_XDECREF(job);
    return failed ? -1 : 0;
}

/* The domain somebody named, in small letters (a new reference). */
static PyObject *lowered(Span name)
{
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)name.at, (Py_ssize_t)name.size);
    char *text = bytes ? PyBytes_AS_STRING(bytes) : NULL;
    for (size_t i = 0; bytes && i < name.size; i++)
        if (text[i] >= 'A' && text[i] <= 'Z') text[i] += 'a' - 'A';
    return bytes;
}

/* The domain a job is to wait in (a new reference), made if there is none. */
static PyObject *place_for(Call *call, PyObject *uri)
{
    PyObject *name = call->ask->key2.size ? lowered(call->ask->key2) : host_name(uri);
    if (!name) return NULL;
    PyObject *place = Py_XNewRef(PyDict_GetItemWithError(call->of[X_DOMAINS], name));
    if (!place && !PyErr_Occurred()) place = PyObject_CallMethodOneArg(call->of[X_SCHEDULE], s_domain, name);
    Py_DECREF(name);
    return place;
}

static enum outcome push_job(Call *call, Answer *answer)
{
    const Ask *ask = call->ask;
    if (!ordinary(call, PERSIST, QUERY_RANGE) || !ask->key.size || ask->count > PRIORITY_MAX) return DOUBT;
    PyObject *uri = ask->object ? Py_NewRef(field(&request_shape, ask->object, Q_KEY)) : bytes_of(ask->key);
    PyObject *stamp_o = NULL, *place = NULL, *start = NULL;
    uint64_t due = ask->timed ? ask->timeout : call->now;
    enum outcome found = DOUBT;
    if (uri && stamp(call, &stamp_o) && unknown(call, uri) && room_for_one(call)) place = place_for(call, uri);
    if (place && field(&place_shape, place, L_WATCH) == Py_None) {
        start = ask->timed ? PyLong_FromUnsignedLongLong(due) : Py_NewRef(call->now_o);
        if (start && !ask->timed && ask->object) set_field(&request_shape, ask->object, Q_TIMEOUT, Py_NewRef(start));
        if (start && put_in(call, uri, place, stamp_o, start, due) == 0 && stamped(call, stamp_o) == 0) {
            found = WRITTEN;
            count_up(call, TOTAL_PUSHED);
        }
        answer->flags = ask->flags & PERSIST;
        answer->timestamp = call->timestamp;
    }
    Py_XDECREF(start);
    Py_XDECREF(place);
    Py_XDECREF(stamp_o);
    Py_XDECREF(uri);
    return found == DOUBT ? undone() : found;
}

/* --- NEXT --- */

/* Job.key of a job that is worked on; 0 with or without an error if that cannot be. */
enum { KEY_TAIL = 1 + 3 + 1 + 20 + 1 + 16 };
static int key_tail(PyObject *job, char tail[KEY_TAIL + 1])
{
    uint64_t priority, start, lease;
    if (!number(field(&job_shape, job, J_PRIORITY), PRIORITY_MAX, &priority) || !number(field(&job_shape, job, J_START), UINT64_MAX, &start)
        || !number(field(&job_shape, job, J_LEASE), UINT64_MAX, &lease))
        return 0;
    char *p = tail + KEY_TAIL;
    *p = 0;
    for (int i = 0; i < 16; i++, lease >>= 4) *--p = "0123456789abcdef"[lease & 15];
    *--p = ':';
    for (int i = 0; i < 20; i++, start /= 10) *--p = (char)('0' + start % 10);
    *--p = ':';
    for (int i = 0; i < 3; i++, priority /= 10) *--p = (char)('0' + priority % 10);
    *--p = ':';
    return 1;
}

/* JobTable._reserve */
static int reserve(Call *call, Slots *slots, PyObject *job, PyObject *until)
{
    PyObject *uri = field(&job_shape, job, J_URI), *id = field(&job_shape, job, J_ID), *place = field(&job_shape, job, J_DOMAIN);
    PyObject *lease = take_id(call);
    if (!lease) return -1;
    set_field(&job_shape, job, J_LEASE, lease);
    set_field(&job_shape, job, J_UNTIL, Py_NewRef(until));
    if (PyDict_SetItem(call->of[X_WORKING], uri, job) < 0 || PyDict_SetItem(call->of[X_BY_ID], lease, job) < 0
        || PyDict_DelItem(call->of[X_WAITING], uri) < 0 || PyDict_DelItem(call->of[X_BY_ID], id) < 0)
        return -1;
    Heap *ready = (Heap *)field(&place_shape, place, L_READY);
    if (bump(place, READY, -1) < 0 || enter(place, job, WORKING) < 0) return -1;
    if (ready->size && ready->items[0].object == job) heap_pop(ready); /* it would be found stale a moment later */
    return arm(call, place, until) < 0 ? -1 : lease_put(slots, job);
}

/* Jobs._deadline (a new reference) */
static PyObject *deadline_of(Call *call, PyObject *job)
{
    PyObject *settings = field(&place_shape, field(&job_shape, job, J_DOMAIN), L_SETTINGS);
    double seconds = PyFloat_AsDouble(field(&settings_shape, settings, S_DEADLINE));
    if (seconds == -1.0 && PyErr_Occurred()) return NULL;
    return PyLong_FromUnsignedLongLong(call->now + (seconds != 0 ? (uint64_t)(seconds * 1000000) : WORK_DEADLINE_US));
}

/* From the best job on, up to so many. */
static int hand_out(Call *call, PyObject *domain, PyObject *job, uint64_t wanted, Answer *answer)
{
    const Ask *ask = call->ask;
    Slots slots = {.leases = PyObject_GetAttr(call->of[X_JOBS], s_leases)};
    int failed = !slots.leases || slots_open(&slots) < 0;
    size_t size = 0;
    PyObject *payload;
    while (!failed && job && field(&job_shape, job, J_REPLACED) == Py_None) {
        uint64_t end = 0;
        PyObject *until = ask->timed ? PyLong_FromUnsignedLongLong(ask->timeout) : deadline_of(call, job);
        answer->jobs[answer->count++] = Py_NewRef(job);
        failed = !number(until, UINT64_MAX, &end) || reserve(call, &slots, job, until) < 0;
        count_up(call, TOTAL_HANDED_OUT);
        if (!answer->timeout || end < answer->timeout) answer->timeout = end;
        payload = field(&job_shape, job, J_PAYLOAD);
        if (ask->flags & DATA && payload != Py_None) size += (size_t)PyBytes_GET_SIZE(field(&value_shape, payload, V_DATA));
        Py_XDECREF(until);
        job = !failed && --wanted && size <= REPLY_BYTES_HALF ? head(call, domain) : NULL;
    }
    slots_close(&slots);
    Py_XDECREF(slots.leases);
    Py_XDECREF(slots.free);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static enum outcome next_jobs(Call *call, Answer *answer)
{
    const Ask *ask = call->ask;
    if (!ordinary(call, DATA | LISTEN | DETAILED, 0) || ask->valued || (ask->timed && !ask->timeout)) return DOUBT;
    uint64_t wanted = !ask->counted ? 1 : ask->count && ask->count < NEXT_JOBS_MAX ? ask->count : NEXT_JOBS_MAX;
    for (size_t i = 0; i < ask->key.size; i++)
        if (ask->key.at[i] >= 'A' && ask->key.at[i] <= 'Z') return DOUBT;
    Heap *alarms = (Heap *)call->of[X_ALARMS];
    if (alarms->size && (!(alarms->items[0].rank & 1) || alarms->items[0].time <= call->now)) return DOUBT; /* time passes first */
    PyObject *primary = PyObject_GetAttr(call->of[X_ENGINE], s_primary);
    Py_XDECREF(primary); /* one of two that always are */
    PyObject *domain = primary == Py_True ? bytes_of(ask->key) : NULL, *best = domain ? head(call, domain) : NULL, *stamp_o = NULL;
    enum outcome found = DOUBT;
    if (best && field(&place_shape, field(&job_shape, best, J_DOMAIN), L_WATCH) == Py_None && field(&job_shape, best, J_REPLACED) == Py_None
        && stamp(call, &stamp_o)) {
        found = stamped(call, stamp_o) < 0 || hand_out(call, domain, best, wanted, answer) < 0 ? FAILED : WRITTEN;
        answer->flags = DATA | WORKED_ON;
        answer->timestamp = call->now;
    }
    Py_XDECREF(stamp_o);
    Py_XDECREF(domain);
    return found == DOUBT ? undone() : found;
}

/* --- DELETE of a job that is worked on --- */

/* The job whose key this is (borrowed), NULL if it is not that of a job somebody works on now. */
static PyObject *worked_on(Call *call, Span key)
{
    if (key.size < KEY_TAIL) return NULL;
    size_t size = key.size - KEY_TAIL;
    const uint8_t *tail = key.at + size;
    uint64_t lease = 0, found, until;
    for (int i = KEY_TAIL - 16; i < KEY_TAIL; i++) {
        int digit = tail[i] >= '0' && tail[i] <= '9' ? tail[i] - '0' : tail[i] >= 'a' && tail[i] <= 'f' ? tail[i] - 'a' + 10 : -1;
        if (digit < 0) return NULL;
        lease = lease << 4 | (uint64_t)digit;
    }
    PyObject *lease_o = PyLong_FromUnsignedLongLong(lease);
    PyObject *job = lease_o ? PyDict_GetItemWithError(call->of[X_BY_ID], lease_o) : NULL;
    Py_XDECREF(lease_o);
    char expected[KEY_TAIL + 1];
    if (!job || state_of(job) != WORKING || !number(field(&job_shape, job, J_LEASE), UINT64_MAX, &found) || found != lease
        || !number(field(&job_shape, job, J_UNTIL), UINT64_MAX, &until) || until <= call->now || !key_tail(job, expected))
        return NULL;
    PyObject *prefix = field(&place_shape, field(&job_shape, job, J_DOMAIN), L_PREFIX);
    PyObject *uri = field(&job_shape, job, J_URI);
    if ((size_t)PyBytes_GET_SIZE(uri) == key.size && !memcmp(PyBytes_AS_STRING(uri), key.at, key.size)) return NULL;
    if ((size_t)PyBytes_GET_SIZE(prefix) != size || memcmp(key.at, PyBytes_AS_STRING(prefix), size) || memcmp(tail, expected, KEY_TAIL))
        return NULL;
    return job;
}

/* Whether there is a value of that key; -1 with an error. */
static int is_entry(Call *call, Span key)
{
    if (!PyDict_GET_SIZE(call->of[X_ENTRIES])) return 0;
    PyObject *bytes = bytes_of(key);
    int found = bytes ? PyDict_Contains(call->of[X_ENTRIES], bytes) : -1;
    Py_XDECREF(bytes);
    return found;
}

/* Finished.remember: the last command that is finished now (borrowed), NULL with an error. */
static PyObject *remember(Call *call, PyObject *uri, PyObject *timestamp)
{
    uint64_t finished, mine;
    Py_ssize_t known = PyDict_GET_SIZE(call->of[X_COMMANDS]);
    PyObject *last = PyDict_SetDefault(call->of[X_COMMANDS], uri, timestamp);
    if (!last) return NULL;
    if (PyDict_GET_SIZE(call->of[X_COMMANDS]) == known) {
        if (!number(timestamp, UINT64_MAX, &mine) || (number(last, UINT64_MAX, &finished) && finished >= mine)) return last;
        if (PyDict_SetItem(call->of[X_COMMANDS], uri, timestamp) < 0) return NULL;
    }
    PyObject *item = PyTuple_Pack(3, call->now_o, uri, timestamp);
    PyObject *done = item ? PyObject_CallOneArg(call->of[X_REMEMBERED], item) : NULL;
    if (item) PyObject_GC_UnTrack(item); /* bytes and numbers are in no cycle */
    Py_XDECREF(item);
    Py_XDECREF(done);
    return done ? timestamp : NULL;
}

/* Domains nobody needs any more are forgotten. */
static int sweep(Call *call, PyObject *place)
{
    for (int state = 0; state < GONE; state++)
        if (counted_jobs(place, state)) return 0;
    PyObject *done = PyObject_CallMethodOneArg(call->of[X_SCHEDULE], s_sweep, place);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Jobs._finish of a job behind which nothing waits. */
static int finish(Call *call, PyObject *job)
{
    PyObject *uri = field(&job_shape, job, J_URI), *lease = field(&job_shape, job, J_LEASE), *place = field(&job_shape, job, J_DOMAIN);
    if (PyDict_DelItem(call->of[X_BY_ID], lease) < 0 || PyDict_DelItem(call->of[X_WORKING], uri) < 0) return -1;
    set_field(&job_shape, job, J_LEASE, Py_NewRef(numbers[0]));
    set_field(&job_shape, job, J_UNTIL, Py_NewRef(numbers[0]));
    if (field(&job_shape, job, J_SLOT) != numbers[0]) {
        PyObject *leases = PyObject_GetAttr(call->of[X_JOBS], s_leases);
        PyObject *ended = !leases || leases == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(leases, s_ended);
        int failed = !leases || !ended || (ended != Py_None && PyList_Append(ended, job) < 0);
        Py_XDECREF(leases);
        Py_XDECREF(ended);
        if (failed) return -1;
    }
    set_field(&job_shape, job, J_STATE, Py_NewRef(numbers[GONE]));
    int lasting = field(&job_shape, job, J_PERSIST) == Py_True || field(&job_shape, job, J_LOGGED) == Py_True;
    PyObject *last = remember(call, uri, field(&job_shape, job, J_TIMESTAMP));
    if (!last || bump(place, WORKING, -1) < 0) return -1;
    if (lasting && changed(call, uri, PyDict_GET_SIZE(call->of[X_DEAD]) ? Py_None : last) < 0) return -1;
    return sweep(call, place);
}

static enum outcome end_job(Call *call, Answer *answer)
{
    const Ask *ask = call->ask;
    if (!ordinary(call, OVERWRITE, 0) || ask->timed || ask->counted || ask->valued || is_entry(call, ask->key)) return undone();
    PyObject *job = worked_on(call, ask->key), *stamp_o = NULL;
    if (!job || field(&place_shape, field(&job_shape, job, J_DOMAIN), L_WATCH) != Py_None
        || PyDict_Contains(call->of[X_WAITING], field(&job_shape, job, J_URI)) || !stamp(call, &stamp_o))
        return undone();
    Py_INCREF(job);
    int good = finish(call, job) == 0 && stamped(call, stamp_o) == 0;
    if (good) count_up(call, TOTAL_DONE);
    answer->flags = DELETED;
    answer->timestamp = call->timestamp;
    Py_DECREF(job);
    Py_DECREF(stamp_o);
    return good ? WRITTEN : FAILED;
}

#endif
