/* Requests of jobs that the lines carry out themselves, and those of their replies that wait for the log. */
#ifndef VIRTA_HELD_H
#define VIRTA_HELD_H
#include "line.h"

enum { HELD_ROOM_MIN = 16 };

static Held *held_new(void)
{
    Held *held = PyObject_New(Held, &held_type);
    if (!held) return NULL;
    held->items = NULL;
    held->count = held->room = 0;
    return held;
}

static void held_dealloc(Held *held)
{
    while (held->count) Py_DECREF(held->items[--held->count].line);
    PyMem_Free(held->items);
    PyObject_Free(held);
}

static int hold(Line *line, const Ask *ask, const Done *done)
{
    Lines *home = line->home;
    if (!home->held && !(home->held = held_new())) return 0;
    Held *held = home->held;
    if (held->count == held->room) {
        size_t room = held->room ? 2 * held->room : HELD_ROOM_MIN;
        Late *items = PyMem_Realloc(held->items, room * sizeof *items);
        if (!items) { PyErr_NoMemory(); return 0; }
        held->items = items;
        held->room = room;
    }
    held->items[held->count++] = (Late){(Line *)Py_NewRef(line), ask->identifier, done->flags, done->timestamp};
    line->unanswered++;
    return 1;
}

/* The same refusal for everybody: its bytes, with the identifier of each. */
static int put_refusal(Out *out, PyObject *bytes, unsigned identifier)
{
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    uint8_t *p = journal_extend(out, size);
    if (!p) return 0;
    memcpy(p, PyBytes_AS_STRING(bytes), size);
    p[4] = (uint8_t)(identifier >> 8);
    p[5] = (uint8_t)identifier;
    return 1;
}

/* (reply): to say so to everybody if it has an error, and what is true otherwise; they wait no longer */
static PyObject *held_respond(Held *held, PyObject *reply)
{
    PyObject *error = PyObject_GetAttrString(reply, "error"), *refusal = NULL;
    int good = error != NULL;
    if (good && held->count && PyObject_IsTrue(error)) {
        refusal = PyObject_CallOneArg(held->items[0].line->home->encode, reply);
        good = refusal && PyBytes_Check(refusal) && PyBytes_GET_SIZE(refusal) >= 6;
    }
    Py_XDECREF(error);
    for (size_t i = 0; good && i < held->count; i++) {
        Late *late = &held->items[i];
        Line *line = late->line;
        line->unanswered--;
        if (line->fd < 0 || line->ended) continue;
        if (refusal) good = put_refusal(&line->out, refusal, late->identifier);
        else good = journal_put_short(&line->out, late->identifier, late->flags, late->timestamp);
        if (good) wrote(line);
    }
    Py_XDECREF(refusal);
    while (held->count) Py_DECREF(held->items[--held->count].line);
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "encode must return the bytes of a reply");
    if (!good) return NULL;
    Py_RETURN_NONE;
}

static PyObject *time_now(Lines *home)
{
    if (home->clock) return PyObject_CallNoArgs(home->clock);
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return PyLong_FromLongLong((long long)t.tv_sec * 1000000 + t.tv_nsec / 1000);
}

/* Carry out a request here, if that can be; DOUBT: it is for Python. */
static enum outcome line_carry_out(Line *line, const Ask *ask)
{
    Lines *home = line->home;
    Done done = {0};
    PyObject *now_o = time_now(home), *none;
    if (!now_o) return FAILED;
    enum outcome found = journal_carry_out(home->tables, ask, now_o, &line->out, &done);
    Py_DECREF(now_o);
    if (found != WRITTEN) return found;
    if (!home->carried++ || done.due < home->due) home->due = done.due;
    if (done.reply) {
        none = line_notify(line, done.reply);
        Py_DECREF(done.reply);
        Py_XDECREF(none);
        return none ? WRITTEN : FAILED;
    }
    if (!done.written && home->lasting) return hold(line, ask, &done) ? WRITTEN : FAILED;
    if (!done.written && !journal_put_short(&line->out, ask->identifier, done.flags, done.timestamp)) return FAILED;
    wrote(line);
    return WRITTEN;
}

#endif
