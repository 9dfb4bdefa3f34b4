/* KeyNumbers of src/virta/views/tables/key_numbers.py: the number of the row of each key.
 *
 *     slots[hash & mask …] = hash, number + 1 (0: empty)  ──►  keys[number], a list of the table
 *
 * Open addressing without tombstones: a removal moves later entries up. It takes a third of the memory of a
 * dictionary, and a batch of keys can be found in stages, so that the cache misses overlap. */
#ifndef VIRTA_VIEWS_NUMBERS_H
#define VIRTA_VIEWS_NUMBERS_H

#include "views_objects.h"

#define SLOTS_MIN 64u
#define NUMBER_MAX (UINT32_MAX - 1)

typedef struct { uint32_t hash, at; } Slot; /* at: the number plus one */
typedef struct { PyObject_HEAD PyObject *keys; Slot *slots; uint64_t mask, count; } KeyNumbers;

static PyTypeObject *key_numbers_type;

/* -1 with an exception: the key is no text. */
static int hash_key(PyObject *key, uint32_t *hash)
{
    if (!PyUnicode_Check(key)) {
        PyErr_SetString(PyExc_TypeError, "a key is a text");
        return -1;
    }
    Py_hash_t whole = PyObject_Hash(key);
    *hash = (uint32_t)((uint64_t)whole ^ (uint64_t)whole >> 32);
    return whole == -1 ? -1 : 0;
}

static int is_same_text(PyObject *a, PyObject *b)
{
    if (a == b) return 1;
    Py_ssize_t size = PyUnicode_GET_LENGTH(a);
    int kind = PyUnicode_KIND(a);
    return size == PyUnicode_GET_LENGTH(b) && kind == (int)PyUnicode_KIND(b)
        && memcmp(PyUnicode_DATA(a), PyUnicode_DATA(b), (size_t)(size * kind)) == 0;
}

/* The key of a number, borrowed; NULL if it has none. */
static inline PyObject *key_at(const KeyNumbers *k, uint32_t number)
{
    if ((Py_ssize_t)number >= PyList_GET_SIZE(k->keys)) return NULL;
    PyObject *key = PyList_GET_ITEM(k->keys, number);
    return PyUnicode_Check(key) ? key : NULL;
}

/* Return the slot of a key, or the empty one where it belongs. */
static Slot *find_slot(const KeyNumbers *k, PyObject *key, uint32_t hash)
{
    for (uint64_t i = hash & k->mask;; i = (i + 1) & k->mask) {
        Slot *slot = &k->slots[i];
        if (!slot->at) return slot;
        if (slot->hash != hash) continue;
        PyObject *known = key_at(k, slot->at - 1);
        if (known && is_same_text(known, key)) return slot;
    }
}

/* Return the first slot that may be that of a key, or NULL; no key is read. */
static const Slot *likely_slot(const KeyNumbers *k, uint32_t hash)
{
    for (uint64_t i = hash & k->mask; k->slots[i].at; i = (i + 1) & k->mask)
        if (k->slots[i].hash == hash) return &k->slots[i];
    return NULL;
}

static int resize_slots(KeyNumbers *k, uint64_t size)
{
    Slot *grown = PyMem_RawCalloc(size, sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint64_t i = 0; k->slots && i <= k->mask; i++) {
        if (!k->slots[i].at) continue;
        uint64_t to = k->slots[i].hash & (size - 1);
        while (grown[to].at) to = (to + 1) & (size - 1);
        grown[to] = k->slots[i];
    }
    PyMem_RawFree(k->slots);
    k->slots = grown;
    k->mask = size - 1;
    return 0;
}

static void remove_slot(KeyNumbers *k, Slot *slot)
{
    uint64_t hole = (uint64_t)(slot - k->slots);
    for (uint64_t i = (hole + 1) & k->mask; k->slots[i].at; i = (i + 1) & k->mask) {
        uint64_t away = (i - k->slots[i].hash) & k->mask;
        if (away < ((i - hole) & k->mask)) continue; /* its first slot is after the hole */
        k->slots[hole] = k->slots[i];
        hole = i;
    }
    k->slots[hole] = (Slot){0, 0};
    k->count--;
}

/* As a mapping. */

static int numbers_store(KeyNumbers *k, PyObject *key, PyObject *value)
{
    uint32_t hash;
    if (hash_key(key, &hash) < 0) return -1;
    if (!value) {
        Slot *slot = find_slot(k, key, hash);
        if (slot->at) return remove_slot(k, slot), 0;
        PyErr_SetObject(PyExc_KeyError, key);
        return -1;
    }
    unsigned long long number = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred()) return -1;
    if (number > NUMBER_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a number is below 2^32 - 1");
        return -1;
    }
    if (3 * k->count >= 2 * k->mask && resize_slots(k, 2 * (k->mask + 1)) < 0) return -1;
    Slot *slot = find_slot(k, key, hash);
    k->count += !slot->at;
    *slot = (Slot){hash, (uint32_t)number + 1};
    return 0;
}

static PyObject *numbers_subscript(KeyNumbers *k, PyObject *key)
{
    uint32_t hash;
    if (hash_key(key, &hash) < 0) return NULL;
    const Slot *slot = find_slot(k, key, hash);
    if (slot->at) return PyLong_FromUnsignedLong(slot->at - 1);
    PyErr_SetObject(PyExc_KeyError, key);
    return NULL;
}

static PyObject *numbers_get(KeyNumbers *k, PyObject *const *args, Py_ssize_t count)
{
    uint32_t hash;
    if (count != 1 && count != 2) {
        PyErr_SetString(PyExc_TypeError, "get(key, default=None)");
        return NULL;
    }
    if (hash_key(args[0], &hash) < 0) return NULL;
    const Slot *slot = find_slot(k, args[0], hash);
    if (slot->at) return PyLong_FromUnsignedLong(slot->at - 1);
    return Py_NewRef(count == 2 ? args[1] : Py_None);
}

static int numbers_contains(KeyNumbers *k, PyObject *key)
{
    uint32_t hash;
    return hash_key(key, &hash) < 0 ? -1 : find_slot(k, key, hash)->at != 0;
}

static Py_ssize_t numbers_length(KeyNumbers *k) { return (Py_ssize_t)k->count; }

static PyObject *numbers_clear(KeyNumbers *k, PyObject *none)
{
    (void)none;
    Slot *old = k->slots;
    k->slots = NULL;
    if (resize_slots(k, SLOTS_MIN) < 0) {
        k->slots = old;
        return NULL;
    }
    PyMem_RawFree(old);
    k->count = 0;
    Py_RETURN_NONE;
}

static PyObject *numbers_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    PyObject *keys;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &keys)) return NULL;
    KeyNumbers *k = (KeyNumbers *)type->tp_alloc(type, 0);
    if (!k) return NULL;
    k->keys = Py_NewRef(keys);
    if (resize_slots(k, SLOTS_MIN) < 0) Py_CLEAR(k);
    return (PyObject *)k;
}

static void numbers_dealloc(KeyNumbers *k)
{
    PyTypeObject *type = Py_TYPE(k);
    Py_XDECREF(k->keys);
    PyMem_RawFree(k->slots);
    type->tp_free((PyObject *)k);
    Py_DECREF(type);
}

static PyMethodDef numbers_methods[] = {
    {"get", (PyCFunction)(void (*)(void))numbers_get, METH_FASTCALL, NULL},
    {"clear", (PyCFunction)numbers_clear, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot numbers_slots[] = {
    {Py_tp_methods, numbers_methods},
    {Py_tp_new, numbers_new},
    {Py_tp_dealloc, numbers_dealloc},
    {Py_mp_length, numbers_length},
    {Py_mp_subscript, numbers_subscript},
    {Py_mp_ass_subscript, numbers_store},
    {Py_sq_contains, numbers_contains},
    {0, NULL},
};

static PyType_Spec numbers_spec = {
    "virta.views._native.KeyNumbers", sizeof(KeyNumbers), 0, Py_TPFLAGS_DEFAULT, numbers_slots,
};

#endif
