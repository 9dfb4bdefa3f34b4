/* The ordinary PUSH, NEXT and DELETE of a job: virta/journal/jobs.py in short, on the same tables.
 *
 * Each gives the reply, or None where anything is out of the ordinary (a job that waits or is worked on already, a bad
 * request, a key of something else, nothing to do, somebody who watches); then nothing was changed but what no longer
 * held in a heap, and the Python half decides. Of jobs that others have copies of this half knows nothing. */
#ifndef VIRTA_JOURNAL_JOBS_H
#define VIRTA_JOURNAL_JOBS_H

enum { DELAYED, READY, HELD, WORKING, DEAD, GONE }; /* states, as in virta/journal/domain.py */
enum { OVERWRITE = 1 << 5, DELETED = 1 << 4, WORKED_ON = 1 << 6, DATA = 1 << 10, LISTEN = 1 << 11, DETAILED = 1 << 15 };
enum { STRING = 2, PRIORITY_MAX = 255, HEAP_SLACK = 64, NEXT_JOBS_MAX = 1000, HOSTS_MAX = 1024, ID_RANGE_SHIFT = 40 };
enum { REPLY_BYTES_HALF = 8 * 1024 * 1024, BIT_PERSIST = 1, BIT_WORKED = 4 };
#define CLOCK_SKEW_US_MAX 300000000u
#define WORK_DEADLINE_US 86400000000u

enum job_field {
    J_URI, J_DOMAIN, J_ID, J_PRIORITY, J_START, J_TIMESTAMP, J_CREATED, J_PAYLOAD, J_PERSIST, J_ATTEMPTS, J_REASON,
    J_LOGGED, J_STATE, J_LEASE, J_UNTIL, J_SLOT, J_REVISION, J_REPLACED, J_FIELDS
};
static const char *const job_names[J_FIELDS] = {
    "uri", "domain", "id", "priority", "start", "timestamp", "created", "payload", "persist", "attempts", "reason",
    "logged", "state", "lease", "worked_until", "slot", "revision", "replaced"};
enum place_field { L_NAME, L_PREFIX, L_SETTINGS, L_COUNTS, L_WATCH, L_ARMED, L_OFFERED, L_READY, L_DELAYED, L_WORKING, L_FIELDS };
static const char *const place_names[L_FIELDS] = {
    "name", "prefix", "settings", "counts", "watch", "armed", "offered", "_ready", "_delayed", "_working"};
enum settings_field { S_PAUSED, S_DEADLINE, S_FIELDS };
static const char *const settings_names[S_FIELDS] = {"paused", "deadline"};
static Shape job_shape, place_shape, settings_shape;
static PyObject *host_of, *hosts, *no_details, *job_topic;

/* What a call works on: a tuple, in this order. */
enum { X_ENGINE, X_JOBS, X_SCHEDULE, X_WAITING, X_WORKING, X_DEAD, X_BY_ID, X_DIRTY, X_COMMANDS, X_REMEMBERED, X_DOMAINS, X_OFFERS,
       X_ALARMS, X_ENTRIES, X_FIELDS };
typedef struct { PyObject *const *of, *request, *now_o; uint64_t now, flags, timestamp; } Call;

static PyObject *s_next_id, *s_wants_log, *s_last_stamp, *s_jobs_max, *s_primary, *s_leases, *s_free, *s_map, *s_ended, *s_domain,
    *s_sweep, *s_put, *s_lower;

static inline void set_field(const Shape *shape, PyObject *object, int number, PyObject *value)
{
    PyObject **at = (PyObject **)((char *)object + shape->at[number]), *old = *at;
    *at = value; /* the reference goes over */
    Py_XDECREF(old);
}

static inline long long state_of(PyObject *job) { return PyLong_AsLongLong(field(&job_shape, job, J_STATE)); }

/* --- requests --- */

/* What all three have in common; 0 if it is out of the ordinary. */
static int ordinary(Call *call, PyObject *const *args, Py_ssize_t count, unsigned flags, unsigned query)
{
    if (count != 3 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != X_FIELDS || !job_shape.type) return 0;
    call->of = ((PyTupleObject *)args[0])->ob_item;
    call->request = args[1];
    call->now_o = args[2];
    uint64_t found;
    const Shape *s = &request_shape;
    if (Py_TYPE(args[1]) != s->type || !number(args[2], INT64_MAX, &call->now)) return 0;
    PyObject *key = field(s, args[1], Q_KEY);
    return number(field(s, args[1], Q_FLAGS), 0xFFFF, &call->flags) && !(call->flags & ~(uint64_t)flags)
        && number(field(s, args[1], Q_QUERY), 3, &found) && found == query && field(s, args[1], Q_TTL) == Py_None
        && number(field(s, args[1], Q_TIMESTAMP), call->now + CLOCK_SKEW_US_MAX, &call->timestamp) && is_key(key);
}

/* A timestamp of our own if the request has none: later than every one before, and known only once it is `stamped`. */
static int stamp(Call *call, PyObject **stamp_o, int *own)
{
    *own = call->timestamp == 0;
    if (!*own) {
        *stamp_o = Py_NewRef(field(&request_shape, call->request, Q_TIMESTAMP));
        return 1;
    }
    uint64_t last;
    PyObject *last_o = PyObject_GetAttr(call->of[X_ENGINE], s_last_stamp);
    int good = number(last_o, INT64_MAX, &last);
    Py_XDECREF(last_o);
    if (!good) return 0;
    call->timestamp = call->now > last ? call->now : last + 1;
    *stamp_o = call->now > last ? Py_NewRef(call->now_o) : PyLong_FromUnsignedLongLong(call->timestamp);
    return *stamp_o != NULL;
}

static int stamped(Call *call, PyObject *stamp_o, int own)
{
    if (!own) return 0;
    set_field(&request_shape, call->request, Q_TIMESTAMP, Py_NewRef(stamp_o));
    return PyObject_SetAttr(call->of[X_ENGINE], s_last_stamp, stamp_o);
}

static PyObject *reply(Call *call, unsigned flags, PyObject *timestamp)
{
    PyObject *flags_o = small(flags);
    if (!flags_o) return NULL;
    PyObject *args[] = {field(&request_shape, call->request, Q_IDENTIFIER), flags_o, timestamp};
    PyObject *made_reply = PyObject_Vectorcall((PyObject *)reply_shape.type, args, 3, NULL);
    Py_DECREF(flags_o);
    return made_reply;
}

static PyObject *declined(void)
{
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* The image of a uri in the log is wrong from now on. */
static int changed(Call *call, PyObject *uri)
{
    if (PyDict_SetItem(call->of[X_DIRTY], uri, Py_None) < 0) return -1;
    return PyObject_SetAttr(call->of[X_JOBS], s_wants_log, Py_True);
}

/* --- domains --- */

static int bump(PyObject *place, int state, long by)
{
    PyObject *counts = field(&place_shape, place, L_COUNTS);
    PyObject *count = PyLong_FromLong(PyLong_AsLong(PyList_GET_ITEM(counts, state)) + by);
    return count ? PyList_SetItem(counts, state, count) : -1;
}

static inline Py_ssize_t counted_jobs(PyObject *place, int state)
{
    return PyLong_AsSsize_t(PyList_GET_ITEM(field(&place_shape, place, L_COUNTS), state));
}

static int same(const Item *item, PyObject *rank, PyObject *time, PyObject *number)
{
    Item now;
    if (item_of(rank, time, number, &now) < 0) return -1;
    return now.rank == item->rank && now.time == item->time && now.number == item->number;
}

/* Whether a heap item still says what its job says; `place` is the domain whose heap it is. */
static int is_ready(const Item *item, PyObject *place)
{
    PyObject *job = item->object;
    if (state_of(job) != READY || field(&job_shape, job, J_DOMAIN) != place) return 0;
    return same(item, field(&job_shape, job, J_PRIORITY), field(&job_shape, job, J_START), field(&job_shape, job, J_ID));
}

static int is_delayed(const Item *item, PyObject *place)
{
    PyObject *job = item->object;
    if (state_of(job) != DELAYED || field(&job_shape, job, J_DOMAIN) != place) return 0;
    return same(item, NULL, field(&job_shape, job, J_START), field(&job_shape, job, J_ID));
}

static int is_working(const Item *item, PyObject *place)
{
    PyObject *job = item->object;
    if (state_of(job) != WORKING || field(&job_shape, job, J_DOMAIN) != place) return 0;
    return same(item, NULL, field(&job_shape, job, J_UNTIL), field(&job_shape, job, J_LEASE));
}

/* Domain.move, for a job that is in no state now. */
static int enter(PyObject *place, PyObject *job, int state)
{
    static const struct { int heap, rank, time, number; int (*valid)(const Item *, PyObject *); } ways[] = {
        [DELAYED] = {L_DELAYED, -1, J_START, J_ID, is_delayed},
        [READY] = {L_READY, J_PRIORITY, J_START, J_ID, is_ready},
        [WORKING] = {L_WORKING, -1, J_UNTIL, J_LEASE, is_working},
    };
    Heap *heap = (Heap *)field(&place_shape, place, ways[state].heap);
    Item item = {.object = job};
    PyObject *rank = ways[state].rank < 0 ? NULL : field(&job_shape, job, ways[state].rank);
    if (item_of(rank, field(&job_shape, job, ways[state].time), field(&job_shape, job, ways[state].number), &item) < 0) return -1;
    set_field(&job_shape, job, J_STATE, Py_NewRef(numbers[state]));
    if (bump(place, state, 1) < 0 || heap_push(heap, &item) < 0) return -1;
    if (heap->size <= 2 * counted_jobs(place, state) + HEAP_SLACK) return 0;
    return heap_filter(heap, ways[state].valid, place);
}

static inline int paused(PyObject *place)
{
    return field(&settings_shape, field(&place_shape, place, L_SETTINGS), S_PAUSED) != Py_False;
}

static int offer_item(PyObject *offered, Item *item)
{
    return item_of(PyTuple_GET_ITEM(offered, 0), PyTuple_GET_ITEM(offered, 1), PyTuple_GET_ITEM(offered, 2), item);
}

/* Whether an alarm or offer still says what its domain says. */
static int is_armed(const Item *item, PyObject *unused)
{
    (void)unused;
    PyObject *armed = field(&place_shape, item->object, L_ARMED);
    return armed == Py_None ? 0 : same(item, NULL, armed, numbers[0]);
}

static int is_offered(const Item *item, PyObject *unused)
{
    (void)unused;
    Item now;
    PyObject *offered = field(&place_shape, item->object, L_OFFERED);
    if (offered == Py_None) return 0;
    if (offer_item(offered, &now) < 0) return -1;
    return !before(&now, item) && !before(item, &now);
}

/* One more domain in a heap of all of them, which is rebuilt when most of it is stale. */
static int announce(Call *call, int which, const Item *item, int (*valid)(const Item *, PyObject *))
{
    Heap *heap = (Heap *)call->of[which];
    if (heap_push(heap, item) < 0) return -1;
    return heap->size <= 2 * PyDict_GET_SIZE(call->of[X_DOMAINS]) + HEAP_SLACK ? 0 : heap_filter(heap, valid, NULL);
}

/* The head of a domain as it is offered to the choice across domains. */
static int set_offered(PyObject *place, PyObject *job, Item *item)
{
    PyObject *rank = PyTuple_Pack(
        3, field(&job_shape, job, J_PRIORITY), field(&job_shape, job, J_START), field(&job_shape, job, J_ID));
    if (!rank || offer_item(rank, item) < 0) return -1;
    item->object = place;
    set_field(&place_shape, place, L_OFFERED, rank);
    return 0;
}

/* Schedule.offer of a job that is new. */
static int offer(Call *call, PyObject *place, PyObject *job)
{
    if (paused(place)) return 0;
    PyObject *offered = field(&place_shape, place, L_OFFERED);
    Item item, known;
    if (offered != Py_None) {
        if (item_of(field(&job_shape, job, J_PRIORITY), field(&job_shape, job, J_START), field(&job_shape, job, J_ID), &item) < 0
            || offer_item(offered, &known) < 0)
            return -1;
        if (!before(&item, &known)) return 0;
    }
    if (set_offered(place, job, &item) < 0) return -1;
    return announce(call, X_OFFERS, &item, is_offered);
}

/* Schedule.arm with a time. */
static int arm(Call *call, PyObject *place, PyObject *time_o)
{
    PyObject *armed = field(&place_shape, place, L_ARMED);
    Item item, known;
    if (item_of(NULL, time_o, numbers[0], &item) < 0) return -1;
    if (armed != Py_None && (item_of(NULL, armed, numbers[0], &known) < 0 || !before(&item, &known))) return PyErr_Occurred() ? -1 : 0;
    set_field(&place_shape, place, L_ARMED, Py_NewRef(time_o));
    item.object = place;
    return announce(call, X_ALARMS, &item, is_armed);
}

/* Domain.head: the job to hand out next (borrowed), NULL if there is none or with an error. */
static PyObject *head_of(PyObject *place)
{
    Heap *heap = (Heap *)field(&place_shape, place, L_READY);
    while (heap->size) {
        int good = is_ready(heap->items, place);
        if (good) return good < 0 ? NULL : heap->items[0].object;
        heap_pop(heap);
    }
    return NULL;
}

/* Schedule.head: the best job of a domain, or of all of them. */
static PyObject *head(Call *call, PyObject *domain)
{
    if (PyBytes_GET_SIZE(domain)) {
        PyObject *place = PyDict_GetItemWithError(call->of[X_DOMAINS], domain);
        return !place || paused(place) ? NULL : head_of(place);
    }
    Heap *offers = (Heap *)call->of[X_OFFERS];
    while (offers->size) {
        PyObject *place = offers->items[0].object;
        Item item = offers->items[0];
        int good = is_offered(offers->items, NULL);
        if (good < 0) return NULL;
        if (!good) {
            heap_pop(offers); /* a better one took its place */
            continue;
        }
        PyObject *job = paused(place) ? NULL : head_of(place);
        if (!job) {
            if (PyErr_Occurred()) return NULL;
            set_field(&place_shape, place, L_OFFERED, Py_NewRef(Py_None));
            heap_pop(offers);
            continue;
        }
        if (same(&item, field(&job_shape, job, J_PRIORITY), field(&job_shape, job, J_START), field(&job_shape, job, J_ID))) return job;
        if (set_offered(place, job, &item) < 0) return NULL;
        heap_replace(offers, &item);
    }
    return NULL;
}

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

/* --- images for the log --- */

/* MessagePack, as msgspec writes what virta/journal/images.py gives it. */
static inline uint8_t *sized(uint8_t *p, uint64_t n, int first) /* the shortest of 8, 16, 32 and 64 bits */
{
    if (n <= 0xFF) { *p++ = (uint8_t)first; *p++ = (uint8_t)n; return p; }
    if (n <= 0xFFFF) { *p++ = (uint8_t)(first + 1); return put16(p, (unsigned)n); }
    if (n <= UINT32_MAX) { *p++ = (uint8_t)(first + 2); return put32(p, (uint32_t)n); }
    *p++ = (uint8_t)(first + 3);
    return put64(p, n);
}

static int pack_number(Out *out, PyObject *object)
{
    uint64_t n;
    int sign = time_of(object, &n);
    uint8_t *p = sign < 0 ? NULL : journal_extend(out, 9);
    if (!p) return -1;
    int64_t below = (int64_t)n;
    if (sign && n < 128) *p++ = (uint8_t)n;
    else if (sign) p = sized(p, n, 0xCC);
    else if (below >= -32) *p++ = (uint8_t)below;
    else if (below >= INT8_MIN) { *p++ = 0xD0; *p++ = (uint8_t)below; }
    else if (below >= INT16_MIN) { *p++ = 0xD1; p = put16(p, (unsigned)below & 0xFFFF); }
    else if (below >= INT32_MIN) { *p++ = 0xD2; p = put32(p, (uint32_t)below); }
    else { *p++ = 0xD3; p = put64(p, n); }
    out->size = (size_t)(p - out->data);
    return 0;
}

static int pack_bytes(Out *out, PyObject *bytes)
{
    if (!PyBytes_CheckExact(bytes)) { PyErr_SetString(PyExc_TypeError, "not bytes"); return -1; }
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    uint8_t *p = journal_extend(out, 9 + size);
    if (!p) return -1;
    p = sized(p, size, 0xC4);
    memcpy(p, PyBytes_AS_STRING(bytes), size);
    out->size = (size_t)(p + size - out->data);
    return 0;
}

static int pack_text(Out *out, PyObject *text)
{
    Py_ssize_t size;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    uint8_t *p = utf8 ? journal_extend(out, 9 + (size_t)size) : NULL;
    if (!p) return -1;
    if (size < 32) *p++ = (uint8_t)(0xA0 | size);
    else p = sized(p, (uint64_t)size, 0xD9);
    memcpy(p, utf8, (size_t)size);
    out->size = (size_t)(p + size - out->data);
    return 0;
}

static int pack_byte(Out *out, int byte)
{
    uint8_t *p = journal_extend(out, 1);
    if (p) *p = (uint8_t)byte;
    return p ? 0 : -1;
}

static int pack_truth(Out *out, int truth) { return truth < 0 ? -1 : pack_byte(out, truth ? 0xC3 : 0xC2); }

/* images.job_image of a job that took the place of no other. */
static int pack_job(Out *out, PyObject *job)
{
    static const int numbers_before[] = {J_ID, J_PRIORITY, J_START, J_TIMESTAMP, J_CREATED}, numbers_after[] = {J_UNTIL, J_LEASE, J_REVISION};
    PyObject *payload = field(&job_shape, job, J_PAYLOAD);
    int none = payload == Py_None;
    if (pack_byte(out, 0x9F) < 0 || pack_bytes(out, field(&place_shape, field(&job_shape, job, J_DOMAIN), L_NAME)) < 0) return -1;
    for (int i = 0; i < 5; i++)
        if (pack_number(out, field(&job_shape, job, numbers_before[i])) < 0) return -1;
    if ((none ? pack_byte(out, 0xFF) : pack_number(out, field(&value_shape, payload, V_TYPE))) < 0
        || pack_bytes(out, none ? no_bytes : field(&value_shape, payload, V_DATA)) < 0 || pack_number(out, field(&job_shape, job, J_ATTEMPTS)) < 0
        || pack_text(out, field(&job_shape, job, J_REASON)) < 0 || pack_truth(out, state_of(job) == DEAD) < 0)
        return -1;
    for (int i = 0; i < 3; i++)
        if (pack_number(out, field(&job_shape, job, numbers_after[i])) < 0) return -1;
    return pack_truth(out, PyObject_IsTrue(field(&job_shape, job, J_PERSIST)));
}

enum { TOPIC_KEY_MAX = 1024, ENTRIES_MAX = 3 };

/* One record: 1, 0 if the Python half has to write it, -1 with an error. */
static int pack_uri(Out *out, PyObject *const *of, PyObject *uri, PyObject *now)
{
    static const int tables[ENTRIES_MAX] = {X_WORKING, X_WAITING, X_DEAD};
    PyObject *kept[ENTRIES_MAX], *finished = PyDict_GetItemWithError(of[X_COMMANDS], uri);
    int count = 0;
    for (int i = 0; i < ENTRIES_MAX; i++) {
        PyObject *job = PyDict_GET_SIZE(of[tables[i]]) ? PyDict_GetItemWithError(of[tables[i]], uri) : NULL;
        if (!job) continue;
        if (field(&job_shape, job, J_REPLACED) != Py_None) return 0;
        PyObject *persist = field(&job_shape, job, J_PERSIST);
        set_field(&job_shape, job, J_LOGGED, Py_NewRef(persist));
        if (persist == Py_True) kept[count++] = job;
    }
    if (PyErr_Occurred() || pack_byte(out, 0x94) < 0 || pack_bytes(out, uri) < 0
        || (finished ? pack_number(out, finished) : pack_byte(out, 0xFF)) < 0 || pack_number(out, now) < 0 || pack_byte(out, 0x90 | count) < 0)
        return -1;
    for (int i = 0; i < count; i++)
        if (pack_job(out, kept[i]) < 0) return -1;
    return 1;
}

/* ([job]) -> a chunk of a snapshot, ["jobs", [uri, image]...], or None: the Python half has to write it */
static PyObject *jobs_chunk(PyObject *self, PyObject *jobs)
{
    (void)self;
    if (!PyList_CheckExact(jobs) || !job_shape.type) return declined();
    Py_ssize_t count = PyList_GET_SIZE(jobs);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *job = PyList_GET_ITEM(jobs, i);
        if (Py_TYPE(job) != job_shape.type || field(&job_shape, job, J_REPLACED) != Py_None) return declined();
    }
    Out out;
    out.data = out.start;
    out.room = sizeof out.start;
    out.size = 0;
    PyObject *kind = PyUnicode_FromString("jobs"), *chunk = NULL;
    int failed = !kind || pack_byte(&out, 0x92) < 0 || pack_text(&out, kind) < 0;
    uint8_t *p = failed ? NULL : journal_extend(&out, 5);
    failed = !p;
    if (p && count < 16) *p++ = (uint8_t)(0x90 | count);
    else if (p && count <= 0xFFFF) { *p++ = 0xDC; p = put16(p, (unsigned)count); }
    else if (p) { *p++ = 0xDD; p = put32(p, (uint32_t)count); }
    if (p) out.size = (size_t)(p - out.data);
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        PyObject *job = PyList_GET_ITEM(jobs, i);
        failed = pack_byte(&out, 0x92) < 0 || pack_bytes(&out, field(&job_shape, job, J_URI)) < 0 || pack_job(&out, job) < 0;
    }
    if (!failed) chunk = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
    if (out.data != out.start) PyMem_Free(out.data);
    Py_XDECREF(kind);
    return chunk;
}

/* (tables, now) -> a record per uri that changed, or None: the Python half has to write them */
static PyObject *job_records(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    if (argc != 2 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != X_FIELDS || !job_shape.type) return declined();
    PyObject *const *of = ((PyTupleObject *)args[0])->ob_item, *uri, *unused, *records = PyList_New(0);
    Out out;
    out.data = out.start;
    out.room = sizeof out.start;
    int written = records ? 1 : -1;
    for (Py_ssize_t at = 0; written > 0 && PyDict_Next(of[X_DIRTY], &at, &uri, &unused);) {
        out.size = 0;
        if ((written = pack_uri(&out, of, uri, args[1])) <= 0) break;
        PyObject *key = PyBytes_GET_SIZE(uri) <= TOPIC_KEY_MAX ? Py_NewRef(uri) : PyBytes_FromStringAndSize(PyBytes_AS_STRING(uri), TOPIC_KEY_MAX);
        PyObject *image = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
        PyObject *record = key && image ? PyTuple_Pack(3, job_topic, key, image) : NULL;
        if (!record || PyList_Append(records, record) < 0) written = -1;
        Py_XDECREF(key);
        Py_XDECREF(image);
        Py_XDECREF(record);
    }
    if (out.data != out.start) PyMem_Free(out.data);
    if (written > 0) return records;
    Py_XDECREF(records);
    return declined();
}

/* --- jobs of a snapshot --- */

enum image_field { I_DOMAIN, I_ID, I_PRIORITY, I_START, I_TIMESTAMP, I_CREATED, I_TYPE, I_PAYLOAD, I_ATTEMPTS, I_REASON, I_DEAD, I_UNTIL,
                   I_LEASE, I_REVISION, I_PERSIST, I_FIELDS };

/* The job of an image (a new reference); NULL without an error if it is not one that simply waits. */
static PyObject *waiting_job(PyObject *const *of, PyObject *uri, PyObject **image, uint64_t *id, uint64_t *start)
{
    uint64_t priority, timestamp, created, until, lease, attempts, revision;
    int none = PyLong_Check(image[I_TYPE]) && PyLong_AsLong(image[I_TYPE]) < 0;
    if (!is_key(uri) || !PyBytes_CheckExact(image[I_DOMAIN]) || !PyBytes_CheckExact(image[I_PAYLOAD]) || !PyUnicode_CheckExact(image[I_REASON])
        || image[I_DEAD] != Py_False || !PyBool_Check(image[I_PERSIST]) || !number(image[I_ID], INT64_MAX, id)
        || !number(image[I_PRIORITY], PRIORITY_MAX, &priority) || !number(image[I_START], UINT64_MAX, start)
        || !number(image[I_TIMESTAMP], UINT64_MAX, &timestamp) || !number(image[I_CREATED], UINT64_MAX, &created)
        || !number(image[I_UNTIL], 0, &until) || !number(image[I_LEASE], 0, &lease) || !number(image[I_ATTEMPTS], UINT32_MAX, &attempts)
        || !number(image[I_REVISION], UINT64_MAX, &revision) || PyDict_Contains(of[X_WORKING], uri))
        return NULL;
    PyObject *place = Py_XNewRef(PyDict_GetItemWithError(of[X_DOMAINS], image[I_DOMAIN])), *job = NULL;
    if (!place && !PyErr_Occurred()) place = PyObject_CallMethodOneArg(of[X_SCHEDULE], s_domain, image[I_DOMAIN]);
    PyObject *value_args[] = {image[I_TYPE], image[I_PAYLOAD]};
    PyObject *value = none ? Py_NewRef(Py_None) : PyObject_Vectorcall((PyObject *)value_shape.type, value_args, V_FIELDS, NULL);
    if (place && value) {
        /* Times that are the same are one number in memory. */
        PyObject *stamp_o = image[I_TIMESTAMP], *args[] = {
            uri, place, image[I_ID], image[I_PRIORITY], *start == timestamp ? stamp_o : image[I_START], stamp_o,
            created == timestamp ? stamp_o : image[I_CREATED], value, image[I_PERSIST], image[I_ATTEMPTS], image[I_REASON], Py_True};
        job = PyObject_Vectorcall((PyObject *)job_shape.type, args, 12, NULL);
        if (job && revision) set_field(&job_shape, job, J_REVISION, Py_NewRef(image[I_REVISION]));
    }
    Py_XDECREF(place);
    Py_XDECREF(value);
    return job;
}

/* (tables, [[uri, image]], first, now) -> the first item that is for the Python half */
static PyObject *restore_jobs(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    uint64_t now, next, id, start;
    if (argc != 4 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != X_FIELDS || !PyList_CheckExact(args[1])
        || !number(args[3], INT64_MAX, &now))
        return PyErr_Format(PyExc_TypeError, "restore_jobs takes tables, items, a place and a time");
    PyObject *const *of = ((PyTupleObject *)args[0])->ob_item, *next_o = PyObject_GetAttr(of[X_JOBS], s_next_id);
    int failed = !number(next_o, INT64_MAX, &next);
    Py_XDECREF(next_o);
    Py_ssize_t at = PyLong_AsSsize_t(args[2]);
    for (; !failed && at >= 0 && at < PyList_GET_SIZE(args[1]); at++) {
        PyObject *item = PyList_GET_ITEM(args[1], at), *image = PyList_CheckExact(item) && PyList_GET_SIZE(item) == 2 ? PyList_GET_ITEM(item, 1) : NULL;
        if (!image || !PyList_CheckExact(image) || PyList_GET_SIZE(image) != I_FIELDS) break;
        PyObject *uri = PyList_GET_ITEM(item, 0), *job = waiting_job(of, uri, ((PyListObject *)image)->ob_item, &id, &start);
        if (!job) break;
        failed = PyDict_SetItem(of[X_WAITING], uri, job) < 0 || PyDict_SetItem(of[X_BY_ID], field(&job_shape, job, J_ID), job) < 0
            || enter(field(&job_shape, job, J_DOMAIN), job, start <= now ? READY : DELAYED) < 0;
        if (id >= next && id >> ID_RANGE_SHIFT == next >> ID_RANGE_SHIFT) next = id + 1;
        Py_DECREF(job);
    }
    if (failed || PyErr_Occurred() || !(next_o = PyLong_FromUnsignedLongLong(next))) return NULL;
    failed = PyObject_SetAttr(of[X_JOBS], s_next_id, next_o) < 0;
    Py_DECREF(next_o);
    return failed ? NULL : PyLong_FromSsize_t(at);
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
