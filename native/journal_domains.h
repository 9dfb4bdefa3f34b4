/* What the native half of the journal's jobs works on: jobs, domains and their heaps, as virta/journal/jobs/domain.py has them. */
#ifndef VIRTA_JOURNAL_DOMAINS_H
#define VIRTA_JOURNAL_DOMAINS_H

enum { DELAYED, READY, HELD, WORKING, DEAD, GONE }; /* states, as in virta/journal/jobs/domain.py */
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
static PyObject *host_of, *hosts, *job_topic;

/* What a call works on: a tuple, in this order. */
enum { X_ENGINE, X_JOBS, X_SCHEDULE, X_WAITING, X_WORKING, X_DEAD, X_BY_ID, X_DIRTY, X_COMMANDS, X_REMEMBERED, X_DOMAINS, X_OFFERS,
       X_ALARMS, X_ENTRIES, X_TOTALS, X_FIELDS };
typedef struct { PyObject *const *of, *now_o; const Ask *ask; uint64_t now, timestamp; } Call;

static PyObject *s_next_id, *s_wants_log, *s_last_stamp, *s_jobs_max, *s_primary, *s_leases, *s_free, *s_map, *s_ended, *s_domain,
    *s_sweep, *s_put;

/* Counters, the same as in virta/journal/jobs/table.py. */
enum { TOTAL_PUSHED, TOTAL_HANDED_OUT, TOTAL_DONE, TOTALS };

static inline void count_up(Call *call, int which)
{
    ((uint64_t *)(void *)PyByteArray_AS_STRING(call->of[X_TOTALS]))[which]++;
}

static inline void set_field(const Shape *shape, PyObject *object, int number, PyObject *value)
{
    PyObject **at = (PyObject **)((char *)object + shape->at[number]), *old = *at;
    *at = value; /* the reference goes over */
    Py_XDECREF(old);
}

static inline int state_of(PyObject *job)
{
    uint64_t state;
    return number(field(&job_shape, job, J_STATE), GONE, &state) ? (int)state : -1;
}

/* --- requests --- */

/* What all three have in common; 0 if it is out of the ordinary. */
static inline int ordinary(Call *call, unsigned flags, unsigned query)
{
    const Ask *ask = call->ask;
    call->timestamp = ask->timestamp;
    return !(ask->flags & ~flags) && ask->query == query && !ask->lived && ask->timestamp <= call->now + CLOCK_SKEW_US_MAX;
}

/* A timestamp of our own if the request has none: later than every one before, and known only once it is `stamped`. */
static int stamp(Call *call, PyObject **stamp_o)
{
    uint64_t last;
    if (!call->ask->timestamp) {
        PyObject *last_o = PyObject_GetAttr(call->of[X_ENGINE], s_last_stamp);
        int good = number(last_o, INT64_MAX, &last);
        Py_XDECREF(last_o);
        if (!good || last > call->now + CLOCK_SKEW_US_MAX) return 0; /* the clock was far ahead: Engine.stamp decides */
        call->timestamp = call->now > last ? call->now : last + 1;
    }
    *stamp_o = call->timestamp == call->now ? Py_NewRef(call->now_o) : PyLong_FromUnsignedLongLong(call->timestamp);
    return *stamp_o != NULL;
}

static int stamped(Call *call, PyObject *stamp_o)
{
    if (call->ask->timestamp) return 0;
    if (call->ask->object) set_field(&request_shape, call->ask->object, Q_TIMESTAMP, Py_NewRef(stamp_o));
    return PyObject_SetAttr(call->of[X_ENGINE], s_last_stamp, stamp_o);
}

static inline enum outcome undone(void) { return PyErr_Occurred() ? FAILED : DOUBT; }

static PyObject *declined(void)
{
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* The image of a uri in the log is wrong from now on. If nothing of it is left, `finished` is all there is to write. */
static int changed(Call *call, PyObject *uri, PyObject *finished)
{
    if (PyDict_SetItem(call->of[X_DIRTY], uri, finished) < 0) return -1;
    if (PyDict_GET_SIZE(call->of[X_DIRTY]) > 1) return 0; /* whoever was first has said so */
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

#endif
