/* MemberSets of src/virta/views/tables/member_sets.py: which views an event has that satisfies some filters.
 *
 *     slots[hash of a filter's number …] = number, the set of views
 *     more: tuple of numbers -> the set of views
 *
 * Most events satisfy one filter or none. Open addressing; everything is removed at once. The slots of a
 * batch are prefetched before one is read. */
#ifndef VIRTA_VIEWS_SETS_H
#define VIRTA_VIEWS_SETS_H

#include "views_objects.h"

#define SETS_MIN_BITS 6
#define SETS_MAX 65536 /* KNOWN_SETS_MAX of member_sets.py */

typedef struct { PyObject *members; uint32_t number; } MemberSlot; /* members: NULL if it is empty */
typedef struct { PyObject_HEAD MemberSlot *slots; PyObject *more; uint64_t count; int bits; } MemberSets;

static MemberSlot *find_members(const MemberSets *m, uint32_t number)
{
    uint32_t mask = (1u << m->bits) - 1;
    for (uint32_t i = (number * 2654435769u) >> (32 - m->bits);; i = (i + 1) & mask)
        if (!m->slots[i].members || m->slots[i].number == number) return &m->slots[i];
}

static int resize_sets(MemberSets *m, int bits)
{
    MemberSlot *old = m->slots, *grown = PyMem_RawCalloc((size_t)1 << bits, sizeof *grown);
    uint32_t size = old ? 1u << m->bits : 0;
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    m->slots = grown;
    m->bits = bits;
    for (uint32_t i = 0; i < size; i++)
        if (old[i].members) *find_members(m, old[i].number) = old[i];
    PyMem_RawFree(old);
    return 0;
}

static void clear_sets(MemberSets *m)
{
    for (uint32_t i = 0; m->slots && i < 1u << m->bits; i++) Py_CLEAR(m->slots[i].members);
    m->count = 0;
}

static int check_members(PyObject *members)
{
    if (PyFrozenSet_CheckExact(members)) return 0;
    PyErr_SetString(PyExc_TypeError, "memberships are frozen sets");
    return -1;
}

/* Ask for the views of a filter and remember them. */
static PyObject *ask_members(MemberSets *m, PyObject *key, uint32_t number, PyObject *members_of)
{
    PyObject *made = PyObject_CallOneArg(members_of, key);
    if (!made || check_members(made) < 0) goto failed;
    if (m->count + (uint64_t)PyDict_GET_SIZE(m->more) >= SETS_MAX) {
        clear_sets(m);
        PyDict_Clear(m->more);
    }
    if (PyTuple_Check(key)) {
        if (PyDict_SetItem(m->more, key, made) < 0) goto failed;
        return made;
    }
    if (2 * (m->count + 1) > 1u << m->bits && resize_sets(m, m->bits + 1) < 0) goto failed;
    MemberSlot *slot = find_members(m, number);
    m->count += !slot->members;
    Py_XSETREF(slot->members, Py_NewRef(made));
    slot->number = number;
    return made;
failed:
    Py_XDECREF(made);
    return NULL;
}

/* Return the views of an event that satisfies several filters. */
static PyObject *members_of_several(MemberSets *m, const uint32_t *numbers, uint32_t count,
                                    PyObject *members_of)
{
    PyObject *key = PyTuple_New(count);
    for (uint32_t i = 0; key && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLong(numbers[i]);
        if (number)
            PyTuple_SET_ITEM(key, i, number);
        else
            Py_CLEAR(key);
    }
    PyObject *found = key ? Py_XNewRef(PyDict_GetItemWithError(m->more, key)) : NULL;
    if (key && !found && !PyErr_Occurred()) found = ask_members(m, key, 0, members_of);
    Py_XDECREF(key);
    return found;
}

static PyObject *members_of_one(MemberSets *m, uint32_t number, PyObject *members_of)
{
    PyObject *found = Py_XNewRef(find_members(m, number)->members);
    if (found) return found;
    PyObject *key = PyLong_FromUnsignedLong(number);
    if (key) found = ask_members(m, key, number, members_of);
    Py_XDECREF(key);
    return found;
}

static PyObject *find_every_set(MemberSets *m, const uint32_t *numbers, const uint32_t *ends,
                                Py_ssize_t count, PyObject *no_views, PyObject *members_of)
{
    PyObject *out = PyList_New(count);
    for (Py_ssize_t i = 0; i < count; i++)
        if (ends[i + 1] - ends[i] == 1)
            prefetch(&m->slots[(numbers[ends[i]] * 2654435769u) >> (32 - m->bits)], 1);
    for (Py_ssize_t i = 0; i < count; i++)
        if (ends[i + 1] - ends[i] == 1) prefetch(find_members(m, numbers[ends[i]])->members, 3);
    for (Py_ssize_t i = 0; out && i < count; i++) {
        uint32_t start = ends[i], hits = ends[i + 1] - start;
        PyObject *found = hits == 0   ? Py_NewRef(no_views)
                          : hits == 1 ? members_of_one(m, numbers[start], members_of)
                                      : members_of_several(m, numbers + start, hits, members_of);
        if (found)
            PyList_SET_ITEM(out, i, found);
        else
            Py_CLEAR(out);
    }
    return out;
}

/* Whether the ends are those of events in order, within the numbers. */
static int are_ends(const uint32_t *ends, Py_ssize_t count, Py_ssize_t numbers)
{
    int rising = count > 0 && ends[0] == 0;
    for (Py_ssize_t i = 1; rising && i < count; i++) rising = ends[i] >= ends[i - 1];
    return rising && ends[count - 1] <= numbers;
}

/* find(numbers, ends, no_views, members_of) -> [members]: of each event, by its filters' numbers */
static PyObject *sets_find(MemberSets *m, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer numbers = {0}, ends = {0};
    PyObject *out = NULL;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "find(numbers, ends, no_views, members_of)");
        return NULL;
    }
    if (check_members(args[2]) < 0) return NULL;
    if (PyObject_GetBuffer(args[0], &numbers, PyBUF_SIMPLE) < 0) return NULL;
    if (PyObject_GetBuffer(args[1], &ends, PyBUF_SIMPLE) < 0) goto end;
    if (are_ends(ends.buf, ends.len / 4, numbers.len / 4))
        out = find_every_set(m, numbers.buf, ends.buf, ends.len / 4 - 1, args[2], args[3]);
    else
        PyErr_SetString(PyExc_ValueError, "ends are those of every event's numbers, after a 0");
end:
    PyBuffer_Release(&numbers);
    if (ends.obj) PyBuffer_Release(&ends);
    return out;
}

static PyObject *sets_clear(MemberSets *m, PyObject *none)
{
    (void)none;
    clear_sets(m);
    PyDict_Clear(m->more);
    Py_RETURN_NONE;
}

static PyObject *sets_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    if (!PyArg_ParseTuple(args, "")) return NULL;
    MemberSets *m = (MemberSets *)type->tp_alloc(type, 0);
    if (m && (!(m->more = PyDict_New()) || resize_sets(m, SETS_MIN_BITS) < 0)) Py_CLEAR(m);
    return (PyObject *)m;
}

static void sets_dealloc(MemberSets *m)
{
    PyTypeObject *type = Py_TYPE(m);
    clear_sets(m);
    PyMem_RawFree(m->slots);
    Py_XDECREF(m->more);
    type->tp_free((PyObject *)m);
    Py_DECREF(type);
}

static PyMethodDef sets_methods[] = {
    {"find", (PyCFunction)(void (*)(void))sets_find, METH_FASTCALL, NULL},
    {"clear", (PyCFunction)sets_clear, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sets_slots[] = {
    {Py_tp_methods, sets_methods},
    {Py_tp_new, sets_new},
    {Py_tp_dealloc, sets_dealloc},
    {0, NULL},
};

static PyType_Spec sets_spec = {
    "virta.views._native.MemberSets", sizeof(MemberSets), 0, Py_TPFLAGS_DEFAULT, sets_slots,
};

#endif
