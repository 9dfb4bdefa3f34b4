/* The ordinary PUSH, NEXT and DELETE of a job: virta/journal/jobs.py in short, on the same tables.
 *
 * Each gives the reply, or None where anything is out of the ordinary (a job that waits or is worked on already, a bad
 * request, a key of something else, nothing to do, somebody who watches); then nothing was changed but what no longer
 * held in a heap, and the Python half decides. Of jobs that others have copies of this half knows nothing. */
#ifndef VIRTA_JOURNAL_JOBS_H
#define VIRTA_JOURNAL_JOBS_H

#include "journal_domains.h"
#include "journal_images.h"

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

static int put_in(Call *call, PyObject *place, PyObject *stamp_o, PyObject *start, uint64_t due)
{
    const Shape *s = &request_shape;
    PyObject *uri = field(s, call->request, Q_KEY), *count = field(s, call->request, Q_COUNT), *id = take_id(call);
    if (!id) return -1;
    int persist = call->flags & PERSIST ? 1 : 0, ready = due <= call->now;
    PyObject *args[] = {uri, place, id, count == Py_None ? numbers[0] : count, start, stamp_o, stamp_o,
                        field(s, call->request, Q_VALUE), persist ? Py_True : Py_False};
    PyObject *job = PyObject_Vectorcall((PyObject *)job_shape.type, args, 9, NULL);
    int failed = !job || PyDict_SetItem(call->of[X_WAITING], uri, job) < 0 || PyDict_SetItem(call->of[X_BY_ID], id, job) < 0
        || (persist && changed(call, uri) < 0) || enter(place, job, ready ? READY : DELAYED) < 0
        || (ready ? offer(call, place, job) : arm(call, place, start)) < 0;
    Py_DECREF(id);
    Py_XDECREF(job);
    return failed ? -1 : 0;
}

/* (tables, request, now) -> reply or None */
static PyObject *push_job(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    Call call;
    const Shape *s = &request_shape;
    if (!ordinary(&call, args, argc, PERSIST, QUERY_RANGE)) return declined();
    PyObject *uri = field(s, call.request, Q_KEY), *domain = field(s, call.request, Q_KEY2), *count = field(s, call.request, Q_COUNT);
    PyObject *timeout = field(s, call.request, Q_TIMEOUT), *value = field(s, call.request, Q_VALUE), *data;
    uint64_t priority = 0, due = call.now, type;
    if (!PyBytes_GET_SIZE(uri) || !is_key(domain) || (count != Py_None && !number(count, PRIORITY_MAX, &priority))
        || (timeout != Py_None && !number(timeout, UINT64_MAX, &due)) || (value != Py_None && !value_of(value, &data, &type)))
        return declined();
    PyObject *stamp_o = NULL, *name = NULL, *place = NULL, *answer = NULL;
    int own = 0, fits = stamp(&call, &stamp_o, &own) && unknown(&call, uri) && room_for_one(&call);
    if (fits) name = PyBytes_GET_SIZE(domain) ? PyObject_CallMethodNoArgs(domain, s_lower) : host_name(uri);
    if (name) {
        place = Py_XNewRef(PyDict_GetItemWithError(call.of[X_DOMAINS], name));
        if (!place && !PyErr_Occurred()) place = PyObject_CallMethodOneArg(call.of[X_SCHEDULE], s_domain, name);
    }
    if (place && field(&place_shape, place, L_WATCH) == Py_None) {
        PyObject *start = Py_NewRef(timeout == Py_None ? call.now_o : timeout);
        if (timeout == Py_None) set_field(s, call.request, Q_TIMEOUT, Py_NewRef(start));
        if (put_in(&call, place, stamp_o, start, due) == 0 && stamped(&call, stamp_o, own) == 0)
            answer = reply(&call, call.flags & PERSIST ? PERSIST : 0, stamp_o);
        Py_DECREF(start);
    } else if (!PyErr_Occurred()) answer = Py_NewRef(Py_None);
    Py_XDECREF(stamp_o);
    Py_XDECREF(name);
    Py_XDECREF(place);
    return answer;
}

/* --- NEXT --- */

/* The table of leases while jobs are handed out; see virta/journal/leases.py for a slot. */
typedef struct { PyObject *leases, *free; Py_buffer view; } Slots;
enum { SLOT_BYTES = 32, SLOT_BODY = 28 };
static uint32_t crc_table[256];

static int slots_open(Slots *slots)
{
    if (slots->leases == Py_None) return 0;
    PyObject *map = PyObject_GetAttr(slots->leases, s_map);
    Py_XSETREF(slots->free, PyObject_GetAttr(slots->leases, s_free));
    int failed = !map || !slots->free || !PyList_CheckExact(slots->free) || PyObject_GetBuffer(map, &slots->view, PyBUF_WRITABLE) < 0;
    Py_XDECREF(map);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not a table of leases");
    return failed ? -1 : 0;
}

static void slots_close(Slots *slots)
{
    if (slots->view.obj) PyBuffer_Release(&slots->view);
}

static inline uint8_t *little(uint8_t *p, uint64_t n, int bytes)
{
    for (int i = 0; i < bytes; i++) *p++ = (uint8_t)(n >> 8 * i);
    return p;
}

static int lease_put(Slots *slots, PyObject *job)
{
    uint64_t slot, id, lease, until, attempts;
    if (slots->leases == Py_None || field(&job_shape, job, J_PERSIST) != Py_True) return 0;
    int good = number(field(&job_shape, job, J_SLOT), UINT32_MAX, &slot);
    if (good && !slot && PyList_GET_SIZE(slots->free)) {
        Py_ssize_t last = PyList_GET_SIZE(slots->free) - 1;
        PyObject *taken = Py_NewRef(PyList_GET_ITEM(slots->free, last));
        good = number(taken, UINT32_MAX, &slot) && PyList_SetSlice(slots->free, last, last + 1, NULL) == 0;
        set_field(&job_shape, job, J_SLOT, taken);
    }
    good = good && number(field(&job_shape, job, J_ID), UINT64_MAX, &id) && number(field(&job_shape, job, J_LEASE), UINT64_MAX, &lease)
        && number(field(&job_shape, job, J_UNTIL), UINT64_MAX, &until) && number(field(&job_shape, job, J_ATTEMPTS), UINT32_MAX, &attempts);
    if (!good || !slot || (Py_ssize_t)(slot + 1) * SLOT_BYTES > slots->view.len) { /* it has to grow, and nobody may hold the map then */
        slots_close(slots);
        PyObject *done = PyErr_Occurred() ? NULL : PyObject_CallMethodOneArg(slots->leases, s_put, job);
        Py_XDECREF(done);
        return done ? slots_open(slots) : -1;
    }
    uint8_t body[SLOT_BYTES];
    little(little(little(little(body, id, 8), lease, 8), until, 8), attempts, 4);
    uint32_t crc = UINT32_MAX;
    for (int i = 0; i < SLOT_BODY; i++) crc = crc_table[(crc ^ body[i]) & 0xFF] ^ crc >> 8;
    little(body + SLOT_BODY, ~crc, 4);
    memcpy((uint8_t *)slots->view.buf + slot * SLOT_BYTES, body, SLOT_BYTES);
    return 0;
}

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

static PyObject *key_of(PyObject *job)
{
    char tail[KEY_TAIL + 1];
    PyObject *prefix = field(&place_shape, field(&job_shape, job, J_DOMAIN), L_PREFIX);
    if (!key_tail(job, tail)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a job whose numbers do not fit its key");
        return NULL;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(prefix);
    PyObject *key = PyBytes_FromStringAndSize(NULL, size + KEY_TAIL);
    if (!key) return NULL;
    memcpy(PyBytes_AS_STRING(key), PyBytes_AS_STRING(prefix), (size_t)size);
    memcpy(PyBytes_AS_STRING(key) + size, tail, KEY_TAIL);
    return key;
}

static PyObject *details_of(PyObject *job, Py_ssize_t size)
{
    PyObject *zero = numbers[0];
    PyObject *size_o = PyLong_FromSsize_t(size);
    int persist = field(&job_shape, job, J_PERSIST) == Py_True ? BIT_PERSIST : 0;
    PyObject *args[] = {zero, zero, field(&job_shape, job, J_CREATED), field(&job_shape, job, J_TIMESTAMP), zero,
                        field(&job_shape, job, J_UNTIL), size_o, field(&job_shape, job, J_ATTEMPTS), numbers[BIT_WORKED | persist]};
    PyObject *details = size_o ? PyObject_Vectorcall((PyObject *)details_shape.type, args, D_FIELDS, NULL) : NULL;
    Py_XDECREF(size_o);
    return details;
}

static int add_pair(PyObject *pairs, PyObject *key, PyObject *value, PyObject *details)
{
    PyObject *args[] = {key, value, details};
    PyObject *pair = key && value && details ? PyObject_Vectorcall((PyObject *)pair_shape.type, args, P_FIELDS, NULL) : NULL;
    int failed = !pair || PyList_Append(pairs, pair) < 0;
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* What a reply says of a job: the bytes of its payload, -1 with an error. */
static Py_ssize_t tell(PyObject *pairs, PyObject *job, uint64_t flags)
{
    PyObject *payload = field(&job_shape, job, J_PAYLOAD);
    Py_ssize_t size = payload == Py_None ? 0 : PyBytes_GET_SIZE(field(&value_shape, payload, V_DATA));
    PyObject *key = key_of(job), *args[] = {numbers[STRING], field(&job_shape, job, J_URI)};
    PyObject *value = PyObject_Vectorcall((PyObject *)value_shape.type, args, V_FIELDS, NULL);
    PyObject *details = flags & DETAILED ? details_of(job, size) : Py_NewRef(Py_None);
    int failed = add_pair(pairs, key, value, details);
    Py_XDECREF(key);
    Py_XDECREF(value);
    Py_XDECREF(details);
    if (failed) return -1;
    if (!(flags & DATA) || payload == Py_None) return 0;
    return add_pair(pairs, no_bytes, payload, flags & DETAILED ? no_details : Py_None) < 0 ? -1 : size;
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

static int hand_out(Call *call, PyObject *pairs, uint64_t wanted, PyObject **first_end)
{
    PyObject *domain = field(&request_shape, call->request, Q_KEY), *timeout = field(&request_shape, call->request, Q_TIMEOUT), *job;
    Slots slots = {.leases = PyObject_GetAttr(call->of[X_JOBS], s_leases)};
    int failed = !slots.leases || slots_open(&slots) < 0;
    uint64_t end, earliest = UINT64_MAX;
    Py_ssize_t size = 0, more;
    while (!failed && wanted-- && size <= REPLY_BYTES_HALF && (job = head(call, domain))
           && field(&job_shape, job, J_REPLACED) == Py_None) {
        Py_INCREF(job);
        PyObject *until = timeout == Py_None ? deadline_of(call, job) : Py_NewRef(timeout);
        failed = !until || reserve(call, &slots, job, until) < 0 || (more = tell(pairs, job, call->flags)) < 0;
        if (!failed) {
            size += more;
            if (number(until, UINT64_MAX, &end) && (!*first_end || end < earliest)) {
                Py_XSETREF(*first_end, Py_NewRef(until));
                earliest = end;
            }
        }
        Py_XDECREF(until);
        Py_DECREF(job);
    }
    slots_close(&slots);
    Py_XDECREF(slots.leases);
    Py_XDECREF(slots.free);
    return failed || PyErr_Occurred() ? -1 : 0;
}

/* (tables, request, now) -> reply or None */
static PyObject *next_jobs(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    Call call;
    const Shape *s = &request_shape;
    if (!ordinary(&call, args, argc, DATA | LISTEN | DETAILED, 0)) return declined();
    PyObject *domain = field(s, call.request, Q_KEY), *timeout = field(s, call.request, Q_TIMEOUT), *count = field(s, call.request, Q_COUNT);
    uint64_t wanted = 1, until;
    if (field(s, call.request, Q_VALUE) != Py_None || (timeout != Py_None && !number(timeout, UINT64_MAX, &until))
        || (count != Py_None && !number(count, 0xFFFF, &wanted)))
        return declined();
    if (!wanted || wanted > NEXT_JOBS_MAX) wanted = NEXT_JOBS_MAX;
    const char *name = PyBytes_AS_STRING(domain);
    for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(domain); i++)
        if (name[i] >= 'A' && name[i] <= 'Z') Py_RETURN_NONE;
    Heap *alarms = (Heap *)call.of[X_ALARMS];
    if (alarms->size && (!(alarms->items[0].rank & 1) || alarms->items[0].time <= call.now)) Py_RETURN_NONE; /* time passes first */
    PyObject *primary = PyObject_GetAttr(call.of[X_ENGINE], s_primary);
    Py_XDECREF(primary); /* one of two that always are */
    PyObject *best = primary == Py_True ? head(&call, domain) : NULL;
    if (!best || field(&place_shape, field(&job_shape, best, J_DOMAIN), L_WATCH) != Py_None || field(&job_shape, best, J_REPLACED) != Py_None)
        return declined();
    PyObject *stamp_o = NULL, *answer = NULL, *first_end = NULL, *pairs = PyList_New(0);
    int own;
    if (pairs && stamp(&call, &stamp_o, &own) && stamped(&call, stamp_o, own) == 0 && hand_out(&call, pairs, wanted, &first_end) == 0) {
        PyObject *flags = PyLong_FromLong(DATA | WORKED_ON);
        PyObject *fields[R_FIELDS] = {field(s, call.request, Q_IDENTIFIER), flags, call.now_o, first_end, numbers[0], no_text, pairs};
        if (flags) answer = PyObject_Vectorcall((PyObject *)reply_shape.type, fields, R_PAIRS + 1, NULL);
        Py_XDECREF(flags);
    }
    Py_XDECREF(pairs);
    Py_XDECREF(stamp_o);
    Py_XDECREF(first_end);
    return answer;
}

/* --- DELETE of a job that is worked on --- */

/* The job whose key this is (borrowed), NULL if it is not that of a job somebody works on now. */
static PyObject *worked_on(Call *call, PyObject *key)
{
    Py_ssize_t size = PyBytes_GET_SIZE(key) - KEY_TAIL;
    if (size < 0) return NULL;
    const char *tail = PyBytes_AS_STRING(key) + size;
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
    if (PyBytes_GET_SIZE(uri) == PyBytes_GET_SIZE(key) && !memcmp(PyBytes_AS_STRING(uri), PyBytes_AS_STRING(key), (size_t)size + KEY_TAIL)) return NULL;
    if (PyBytes_GET_SIZE(prefix) != size || memcmp(PyBytes_AS_STRING(key), PyBytes_AS_STRING(prefix), (size_t)size)
        || memcmp(tail, expected, KEY_TAIL))
        return NULL;
    return job;
}

/* Finished.remember */
static int remember(Call *call, PyObject *uri, PyObject *timestamp)
{
    uint64_t finished, mine;
    PyObject *last = PyDict_GetItemWithError(call->of[X_COMMANDS], uri);
    if (PyErr_Occurred() || !number(timestamp, UINT64_MAX, &mine)) return PyErr_Occurred() ? -1 : 0;
    if (last && number(last, UINT64_MAX, &finished) && finished >= mine) return 0;
    PyObject *item = PyTuple_Pack(3, call->now_o, uri, timestamp);
    PyObject *done = item ? PyObject_CallOneArg(call->of[X_REMEMBERED], item) : NULL;
    int failed = !done || PyDict_SetItem(call->of[X_COMMANDS], uri, timestamp) < 0;
    if (item) PyObject_GC_UnTrack(item); /* bytes and numbers are in no cycle */
    Py_XDECREF(item);
    Py_XDECREF(done);
    return failed ? -1 : 0;
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
    if (bump(place, WORKING, -1) < 0 || remember(call, uri, field(&job_shape, job, J_TIMESTAMP)) < 0 || (lasting && changed(call, uri) < 0))
        return -1;
    return sweep(call, place);
}

/* (tables, request, now) -> reply or None */
static PyObject *delete_job(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    Call call;
    const Shape *s = &request_shape;
    if (!ordinary(&call, args, argc, OVERWRITE, 0)) return declined();
    PyObject *key = field(s, call.request, Q_KEY);
    if (field(s, call.request, Q_TIMEOUT) != Py_None || field(s, call.request, Q_COUNT) != Py_None
        || field(s, call.request, Q_VALUE) != Py_None || PyDict_Contains(call.of[X_ENTRIES], key))
        return declined();
    PyObject *job = worked_on(&call, key);
    if (!job || field(&place_shape, field(&job_shape, job, J_DOMAIN), L_WATCH) != Py_None
        || PyDict_Contains(call.of[X_WAITING], field(&job_shape, job, J_URI)))
        return declined();
    PyObject *stamp_o = NULL, *answer = NULL;
    int own;
    Py_INCREF(job);
    if (stamp(&call, &stamp_o, &own) && finish(&call, job) == 0 && stamped(&call, stamp_o, own) == 0) answer = reply(&call, DELETED, stamp_o);
    Py_XDECREF(stamp_o);
    Py_DECREF(job);
    return answer;
}

/* --- types --- */

static int learn_named(Shape *shape, PyObject *type, const char *const *names, int fields)
{
    int good = PyType_Check(type);
    for (int i = 0; good && i < fields; i++) {
        PyObject *member = PyObject_GetAttrString(type, names[i]);
        good = member && Py_TYPE(member) == &PyMemberDescr_Type;
        if (good) shape->at[i] = ((PyMemberDescrObject *)member)->d_member->offset;
        Py_XDECREF(member);
    }
    if (good) Py_XSETREF(shape->type, (PyTypeObject *)Py_NewRef(type));
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not the structures of virta.journal.domain");
    return good;
}

/* (Job, Domain, Settings, host_of, no_details) */
static PyObject *set_job_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *job, *place, *settings, *host, *nothing;
    if (!PyArg_ParseTuple(args, "OOOOO", &job, &place, &settings, &host, &nothing)) return NULL;
    static const struct { PyObject **at; const char *name; } words[] = {
        {&s_next_id, "next_id"}, {&s_wants_log, "wants_log"}, {&s_last_stamp, "_last_stamp"}, {&s_jobs_max, "jobs_max"},
        {&s_primary, "primary"}, {&s_leases, "leases"}, {&s_free, "_free"}, {&s_map, "_map"}, {&s_ended, "_ended"},
        {&s_domain, "domain"}, {&s_sweep, "sweep"}, {&s_put, "put"}, {&s_lower, "lower"}, {&job_topic, "job"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!*words[i].at && !(*words[i].at = PyUnicode_InternFromString(words[i].name))) return NULL;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        crc_table[i] = crc;
    }
    if (!hosts && !(hosts = PyDict_New())) return NULL;
    Py_XSETREF(host_of, Py_NewRef(host));
    Py_XSETREF(no_details, Py_NewRef(nothing));
    if (!learn_named(&place_shape, place, place_names, L_FIELDS) || !learn_named(&settings_shape, settings, settings_names, S_FIELDS)
        || !learn_named(&job_shape, job, job_names, J_FIELDS))
        return NULL;
    Py_RETURN_NONE;
}

#endif
