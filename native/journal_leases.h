/* The table of leases while jobs are handed out; see virta/journal/storage/leases.py for a slot. */
#ifndef VIRTA_JOURNAL_LEASES_H
#define VIRTA_JOURNAL_LEASES_H
#include "journal_domains.h"

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

/* (map, free, [job]): nobody works on these any more, and the log knows */
static PyObject *free_slots(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    Slots slots = {0};
    if (count != 3 || !PyList_CheckExact(args[1]) || !PyList_CheckExact(args[2]) || !job_shape.type)
        return PyErr_Format(PyExc_TypeError, "free_slots takes a map, a list of slots and a list of jobs");
    if (PyObject_GetBuffer(args[0], &slots.view, PyBUF_WRITABLE) < 0) return NULL;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(args[2]); i++) {
        PyObject *job = PyList_GET_ITEM(args[2], i), *slot_o;
        uint64_t slot, lease;
        if (Py_TYPE(job) != job_shape.type || !number(slot_o = field(&job_shape, job, J_SLOT), UINT32_MAX, &slot)
            || !number(field(&job_shape, job, J_LEASE), UINT64_MAX, &lease))
            failed = 1;
        else if (slot && !lease && (Py_ssize_t)(slot + 1) * SLOT_BYTES <= slots.view.len) {
            memset((uint8_t *)slots.view.buf + slot * SLOT_BYTES, 0, 8);
            failed = PyList_Append(args[1], slot_o) < 0;
            set_field(&job_shape, job, J_SLOT, Py_NewRef(numbers[0]));
        }
    }
    slots_close(&slots);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not a job of virta.journal.jobs.domain");
    return failed ? NULL : Py_NewRef(Py_None);
}

#endif
