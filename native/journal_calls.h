/* A request of a job carried out: for Python, from a structure to a structure, and for a line, from bytes to bytes. */
#ifndef VIRTA_JOURNAL_CALLS_H
#define VIRTA_JOURNAL_CALLS_H

#include "journal_encode.h"
#include "journal_images.h"
#include "journal_jobs.h"

enum { DELETE = 4, NEXT = 11, PUSH = 12 }; /* functions, as in virta/journal/protocol/messages.py */

static enum outcome carry_out(Call *call, Answer *answer)
{
    switch (call->ask->function) {
    case PUSH: return push_job(call, answer);
    case NEXT: return next_jobs(call, answer);
    case DELETE: return end_job(call, answer);
    default: return DOUBT;
    }
}

static inline void answer_init(Answer *answer)
{
    answer->timeout = 0;
    answer->count = 0;
}

static inline void answer_release(Answer *answer)
{
    while (answer->count) Py_DECREF(answer->jobs[--answer->count]);
}

/* --- a reply as a structure --- */

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

/* What a reply says of a job. */
static int tell_job(PyObject *pairs, PyObject *job, unsigned flags)
{
    PyObject *payload = field(&job_shape, job, J_PAYLOAD);
    PyObject *key = key_of(job), *uri = field(&job_shape, job, J_URI), *args[] = {numbers[STRING], uri};
    PyObject *value = PyObject_Vectorcall((PyObject *)value_shape.type, args, V_FIELDS, NULL);
    PyObject *details = flags & DETAILED ? details_of(job, PyBytes_GET_SIZE(uri)) : Py_NewRef(Py_None);
    int failed = add_pair(pairs, key, value, details);
    Py_XDECREF(key);
    Py_XDECREF(value);
    Py_XDECREF(details);
    if (failed || !(flags & DATA) || payload == Py_None) return failed;
    details = flags & DETAILED ? details_of(job, PyBytes_GET_SIZE(field(&value_shape, payload, V_DATA))) : Py_NewRef(Py_None);
    failed = add_pair(pairs, no_bytes, payload, details);
    Py_XDECREF(details);
    return failed;
}

static PyObject *reply_of(PyObject *identifier, const Answer *answer, const Ask *ask)
{
    PyObject *args[R_FIELDS] = {
        Py_NewRef(identifier), small(answer->flags), PyLong_FromUnsignedLongLong(answer->timestamp),
        answer->timeout ? PyLong_FromUnsignedLongLong(answer->timeout) : Py_NewRef(Py_None), Py_NewRef(numbers[0]), Py_NewRef(no_text)};
    if (ask->function != NEXT) return made(&reply_shape, args, R_PAIRS);
    args[R_PAIRS] = PyList_New(0);
    for (Py_ssize_t i = 0; args[R_PAIRS] && i < answer->count; i++)
        if (tell_job(args[R_PAIRS], answer->jobs[i], ask->flags) < 0) Py_CLEAR(args[R_PAIRS]);
    return made(&reply_shape, args, R_PAIRS + 1);
}

static int call_of(PyObject *tables, PyObject *now_o, const Ask *ask, Call *call)
{
    if (!PyTuple_CheckExact(tables) || PyTuple_GET_SIZE(tables) != X_FIELDS || !job_shape.type) return 0;
    *call = (Call){.of = ((PyTupleObject *)tables)->ob_item, .now_o = now_o, .ask = ask};
    if (!PyByteArray_CheckExact(call->of[X_TOTALS]) || PyByteArray_GET_SIZE(call->of[X_TOTALS]) < TOTALS * 8) return 0;
    return number(now_o, INT64_MAX, &call->now);
}

/* (tables, request, now) -> reply or None */
static PyObject *shortcut(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Ask ask;
    Call call;
    Answer answer;
    if (count != 3 || !ask_of(args[1], &ask) || !call_of(args[0], args[2], &ask, &call)) return declined();
    answer_init(&answer);
    enum outcome found = carry_out(&call, &answer);
    PyObject *reply = found == WRITTEN ? reply_of(field(&request_shape, args[1], Q_IDENTIFIER), &answer, &ask) : NULL;
    answer_release(&answer);
    return found == DOUBT ? declined() : reply;
}

/* --- a reply as bytes --- */

/* What details say of a job, as `details_of` has it; 0 if a number is beyond what they have room for. */
static int put_job_details(uint8_t *p, PyObject *job, size_t size)
{
    uint64_t created, modified, until, attempts;
    if (!number(field(&job_shape, job, J_CREATED), UINT64_MAX, &created) || !number(field(&job_shape, job, J_TIMESTAMP), UINT64_MAX, &modified)
        || !number(field(&job_shape, job, J_UNTIL), UINT64_MAX, &until) || !number(field(&job_shape, job, J_ATTEMPTS), 0xFFFF, &attempts))
        return 0;
    memset(p, 0, DETAILS_BYTES);
    put64(put64(p + 16, created), modified);
    p = put16(put32(put64(p + 40, until), (uint32_t)size), (unsigned)attempts);
    *p = BIT_WORKED | (field(&job_shape, job, J_PERSIST) == Py_True ? BIT_PERSIST : 0);
    return 1;
}

typedef struct { unsigned flags; int wide, width; } Form;

static enum outcome put_job(Out *out, PyObject *job, const Form *form)
{
    PyObject *prefix = field(&place_shape, field(&job_shape, job, J_DOMAIN), L_PREFIX), *uri = field(&job_shape, job, J_URI);
    PyObject *payload = field(&job_shape, job, J_PAYLOAD), *data = NULL;
    uint64_t type = 0;
    char tail[KEY_TAIL + 1];
    if (!key_tail(job, tail) || (payload != Py_None && !value_of(payload, &data, &type))) return DOUBT;
    size_t before = (size_t)PyBytes_GET_SIZE(prefix), size = data ? (size_t)PyBytes_GET_SIZE(data) : 0;
    uint8_t *p = journal_extend(out, 4 + before + KEY_TAIL + 2 * DETAILS_BYTES + 10 + (size_t)PyBytes_GET_SIZE(uri) + size);
    if (!p) return FAILED;
    if (form->wide) p = put16(p, (unsigned)(before + KEY_TAIL));
    else *p++ = (uint8_t)(before + KEY_TAIL);
    memcpy(p, PyBytes_AS_STRING(prefix), before);
    memcpy(p + before, tail, KEY_TAIL);
    p += before + KEY_TAIL;
    if (form->flags & DETAILED) {
        if (!put_job_details(p, job, (size_t)PyBytes_GET_SIZE(uri))) return DOUBT;
        p += DETAILS_BYTES;
    }
    p = put_value(p, uri, STRING, form->width);
    if (data && form->flags & DATA) {
        p = put_sized(p, no_bytes, form->wide);
        if (form->flags & DETAILED && !put_job_details(p, job, size)) return DOUBT;
        if (form->flags & DETAILED) p += DETAILS_BYTES;
        p = put_value(p, data, (unsigned)type, form->width);
    }
    out->size = (size_t)(p - out->data);
    return WRITTEN;
}

/* What `reply_of` says of jobs, in bytes. */
static enum outcome put_jobs(Out *out, const Answer *answer, const Ask *ask)
{
    Form form = {.flags = ask->flags};
    size_t largest = 0, pairs = 0;
    for (Py_ssize_t i = 0; i < answer->count; i++, pairs++) {
        PyObject *job = answer->jobs[i], *payload = field(&job_shape, job, J_PAYLOAD);
        size_t size = (size_t)PyBytes_GET_SIZE(field(&job_shape, job, J_URI));
        if (PyBytes_GET_SIZE(field(&place_shape, field(&job_shape, job, J_DOMAIN), L_PREFIX)) + KEY_TAIL > 255) form.wide = 1;
        if (size > largest) largest = size;
        if (payload == Py_None || !(ask->flags & DATA)) continue;
        size = (size_t)PyBytes_GET_SIZE(field(&value_shape, payload, V_DATA));
        if (size > largest) largest = size;
        pairs++;
    }
    form.width = width_of(largest + 1);
    unsigned flags = answer->flags | COUNT | TIMEOUT | (form.wide ? KEY16 : 0) | (unsigned)form.width << WIDTH_SHIFT | (ask->flags & DETAILED ? DETAILS : 0);
    size_t begin = out->size;
    uint8_t *p = journal_extend(out, 16 + 8 + 2 + 2);
    if (!p) return FAILED;
    p = put64(put16(put16(put32(p, 0x4A520001), ask->identifier), flags), answer->timestamp);
    p = put16(put64(p, answer->timeout), (unsigned)pairs);
    *p++ = 0;
    if (form.wide) *p++ = 0;
    out->size = (size_t)(p - out->data);
    enum outcome found = WRITTEN;
    for (Py_ssize_t i = 0; found == WRITTEN && i < answer->count; i++) found = put_job(out, answer->jobs[i], &form);
    if (found != WRITTEN) out->size = begin;
    return found;
}

enum outcome journal_carry_out(PyObject *tables, const Ask *ask, PyObject *now_o, Out *out, Done *done)
{
    Call call;
    Answer answer;
    if (!call_of(tables, now_o, ask, &call)) return undone();
    answer_init(&answer);
    enum outcome found = carry_out(&call, &answer);
    if (found == WRITTEN) *done = (Done){.flags = answer.flags, .timestamp = answer.timestamp, .due = answer.timeout};
    if (found == WRITTEN && ask->function == NEXT) {
        found = put_jobs(out, &answer, ask);
        done->written = found == WRITTEN;
        if (found == DOUBT) { /* it was done, and can be said in another way only */
            PyObject *identifier = small(ask->identifier);
            if (identifier) done->reply = reply_of(identifier, &answer, ask);
            Py_XDECREF(identifier);
            found = done->reply ? WRITTEN : FAILED;
        }
    }
    answer_release(&answer);
    return found;
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
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not the structures of virta.journal.jobs.domain");
    return good;
}

/* (Job, Domain, Settings, host_of) */
static PyObject *set_job_types(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *job, *place, *settings, *host;
    if (!PyArg_ParseTuple(args, "OOOO", &job, &place, &settings, &host)) return NULL;
    static const struct { PyObject **at; const char *name; } words[] = {
        {&s_next_id, "next_id"}, {&s_wants_log, "wants_log"}, {&s_last_stamp, "_last_stamp"}, {&s_jobs_max, "jobs_max"},
        {&s_primary, "primary"}, {&s_leases, "leases"}, {&s_free, "_free"}, {&s_map, "_map"}, {&s_ended, "_ended"},
        {&s_domain, "domain"}, {&s_sweep, "sweep"}, {&s_put, "put"}, {&job_topic, "job"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!*words[i].at && !(*words[i].at = PyUnicode_InternFromString(words[i].name))) return NULL;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
        crc_table[i] = crc;
    }
    if (!hosts && !(hosts = PyDict_New())) return NULL;
    Py_XSETREF(host_of, Py_NewRef(host));
    if (!learn_named(&place_shape, place, place_names, L_FIELDS) || !learn_named(&settings_shape, settings, settings_names, S_FIELDS)
        || !learn_named(&job_shape, job, job_names, J_FIELDS))
        return NULL;
    Py_RETURN_NONE;
}

#endif
