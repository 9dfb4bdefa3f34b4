/* KeyTable of virta/hub/idempotency.py, which has a plain engine with the same behaviour (PlainKeyTable).
 *
 * Claimed keys are few and are in a small set. Committed keys are in a ring, in the order of their commits,
 * which is the order of their removal; `slots` is the hash table over the ring:
 *
 *     slots[top bits of the digest …]  ──►  ring[(first … next) & mask] = digest, offset
 *
 * Both are open-addressing tables without tombstones: a removal moves later entries up. The slots of all
 * keys of a call are prefetched before the first is read, so that the cache misses overlap. The GIL protects
 * everything. */
#ifndef VIRTA_HUB_KEYS_H
#define VIRTA_HUB_KEYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "hub_digest.h"

#define RING_MIN 1024u
#define RING_MAX (1u << 31)
#define CLAIMED_MIN 256u

typedef struct { Digest digest; uint64_t offset; } Committed;
typedef struct { uint32_t tag, at; } Slot; /* at: index in the ring plus one; 0 is empty */

typedef struct {
    PyObject_HEAD
    Committed *ring;
    Slot *slots; /* twice the size of the ring */
    uint64_t first, next, ring_size, committed_max;
    int shift; /* from a tag to its slot */
    Digest *claimed;
    uint64_t claimed_size, claimed_count;
} KeyTable;

/* --- committed keys --- */

static inline uint32_t tag_of(Digest d) { return (uint32_t)(d.a >> 32); }
static inline uint64_t home_of(const KeyTable *k, uint32_t tag) { return (uint64_t)tag >> k->shift; }

static inline Committed *find_committed(const KeyTable *k, Digest d)
{
    uint64_t mask = 2 * k->ring_size - 1;
    uint32_t tag = tag_of(d);
    for (uint64_t i = home_of(k, tag);; i = (i + 1) & mask) {
        Slot slot = k->slots[i];
        if (!slot.at) return NULL;
        if (slot.tag == tag && digest_same(k->ring[slot.at - 1].digest, d)) return &k->ring[slot.at - 1];
    }
}

static inline void enter_slot(const KeyTable *k, uint32_t tag, uint32_t at)
{
    uint64_t mask = 2 * k->ring_size - 1, i = home_of(k, tag);
    while (k->slots[i].at) i = (i + 1) & mask;
    k->slots[i].tag = tag;
    k->slots[i].at = at;
}

/* Double the ring, or make the first one; -1 without memory, with nothing changed. */
static int grow_ring(KeyTable *k)
{
    /* At most RING_MAX, since committed_max is checked. */
    uint64_t size = k->ring_size ? 2 * k->ring_size : RING_MIN;
    Committed *ring = PyMem_RawMalloc(size * sizeof *ring);
    Slot *slots = PyMem_RawCalloc(2 * size, sizeof *slots);
    if (!ring || !slots) {
        PyMem_RawFree(ring);
        PyMem_RawFree(slots);
        PyErr_NoMemory();
        return -1;
    }
    uint64_t count = k->next - k->first;
    for (uint64_t i = 0; i < count; i++) ring[i] = k->ring[(k->first + i) & (k->ring_size - 1)];
    PyMem_RawFree(k->ring);
    PyMem_RawFree(k->slots);
    k->ring = ring;
    k->slots = slots;
    k->ring_size = size;
    k->first = 0;
    k->next = count;
    k->shift = 31;
    for (uint64_t s = size; s > 1; s >>= 1) k->shift--;
    for (uint64_t i = 0; i < count; i++) enter_slot(k, tag_of(ring[i].digest), (uint32_t)i + 1);
    return 0;
}

static void forget_first(KeyTable *k)
{
    uint64_t ahead = k->first + 16; /* will be removed soon */
    if (ahead < k->next)
        __builtin_prefetch(&k->slots[home_of(k, tag_of(k->ring[ahead & (k->ring_size - 1)].digest))], 1);
    uint64_t mask = 2 * k->ring_size - 1, place = k->first & (k->ring_size - 1);
    uint64_t hole = home_of(k, tag_of(k->ring[place].digest));
    while (k->slots[hole].at != place + 1) hole = (hole + 1) & mask;
    for (uint64_t i = (hole + 1) & mask; k->slots[i].at; i = (i + 1) & mask) {
        uint64_t away = (i - home_of(k, k->slots[i].tag)) & mask;
        if (away < ((i - hole) & mask)) continue; /* its home slot is after the hole */
        k->slots[hole] = k->slots[i];
        hole = i;
    }
    k->slots[hole].at = 0;
    k->first++;
}

/* --- claimed keys --- */

/* Return the index of a digest, or the empty one where it belongs. */
static inline uint64_t claimed_place(const KeyTable *k, Digest d)
{
    uint64_t mask = k->claimed_size - 1, i = d.b & mask;
    while (k->claimed[i].a && !digest_same(k->claimed[i], d)) i = (i + 1) & mask;
    return i;
}

static int grow_claimed(KeyTable *k)
{
    uint64_t before = k->claimed_size;
    Digest *old = k->claimed, *grown = PyMem_RawCalloc(before ? 2 * before : CLAIMED_MIN, sizeof *grown);
    if (!grown) { PyErr_NoMemory(); return -1; }
    k->claimed = grown;
    k->claimed_size = before ? 2 * before : CLAIMED_MIN;
    for (uint64_t i = 0; i < before; i++) if (old[i].a) k->claimed[claimed_place(k, old[i])] = old[i];
    PyMem_RawFree(old);
    return 0;
}

static void unclaim(KeyTable *k, Digest d)
{
    uint64_t mask = k->claimed_size - 1, hole = claimed_place(k, d);
    if (!k->claimed[hole].a) return;
    for (uint64_t i = (hole + 1) & mask; k->claimed[i].a; i = (i + 1) & mask) {
        if (((i - k->claimed[i].b) & mask) < ((i - hole) & mask)) continue;
        k->claimed[hole] = k->claimed[i];
        hole = i;
    }
    k->claimed[hole].a = 0;
    k->claimed_count--;
}

/* 1: claimed, 0: in the table already, -1: no memory. */
static int claim_one(KeyTable *k, Digest d)
{
    if (2 * k->claimed_count >= k->claimed_size && grow_claimed(k) < 0) return -1;
    uint64_t place = claimed_place(k, d);
    if (k->claimed[place].a || find_committed(k, d)) return 0;
    k->claimed[place] = d;
    k->claimed_count++;
    return 1;
}

/* --- arguments: a list of texts, or digests end to end --- */

typedef struct { Digest *digests; Py_ssize_t count; int made; } Given;

static int digest_of_text(PyObject *text, Digest *out)
{
    if (!PyUnicode_Check(text)) { PyErr_SetString(PyExc_TypeError, "a key is a text"); return -1; }
    Py_ssize_t size;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (utf8) {
        *out = digest_of((const uint8_t *)utf8, (size_t)size);
        return 0;
    }
    PyErr_Clear(); /* a lone surrogate, which a key may have */
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    if (!bytes) return -1;
    *out = digest_of((const uint8_t *)PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes));
    Py_DECREF(bytes);
    return 0;
}

static int given_get(PyObject *keys, Given *given)
{
    given->made = !PyBytes_Check(keys);
    if (!given->made) {
        given->digests = (Digest *)PyBytes_AS_STRING(keys); /* read only; bytes objects are aligned */
        given->count = PyBytes_GET_SIZE(keys) / DIGEST_BYTES;
        return 0;
    }
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "keys are a list of texts, or digests");
        return -1;
    }
    given->count = PyList_GET_SIZE(keys);
    given->digests = PyMem_RawMalloc((size_t)(given->count ? given->count : 1) * sizeof(Digest));
    if (!given->digests) { PyErr_NoMemory(); return -1; }
    for (Py_ssize_t i = 0; i < given->count; i++) {
        if (digest_of_text(PyList_GET_ITEM(keys, i), &given->digests[i]) == 0) continue;
        PyMem_RawFree(given->digests);
        return -1;
    }
    return 0;
}

static void given_drop(Given *given) { if (given->made) PyMem_RawFree(given->digests); }

static void prefetch_slots(const KeyTable *k, const Given *given)
{
    for (Py_ssize_t i = 0; i < given->count; i++)
        __builtin_prefetch(&k->slots[home_of(k, tag_of(given->digests[i]))], 1);
}

/* --- methods --- */

static PyObject *table_claim(KeyTable *k, PyObject *key)
{
    Digest d;
    if (digest_of_text(key, &d) < 0) return NULL;
    int claimed = claim_one(k, d);
    return claimed < 0 ? NULL : PyBool_FromLong(claimed);
}

/* claim_all(keys) -> bool: all, or none if one is in the table or occurs twice */
static PyObject *table_claim_all(KeyTable *k, PyObject *keys)
{
    Given given;
    if (given_get(keys, &given) < 0) return NULL;
    prefetch_slots(k, &given);
    int claimed = 1;
    Py_ssize_t i = 0;
    while (i < given.count && (claimed = claim_one(k, given.digests[i])) == 1) i++;
    if (claimed != 1) while (i > 0) unclaim(k, given.digests[--i]);
    given_drop(&given);
    return claimed < 0 ? NULL : PyBool_FromLong(claimed);
}

static PyObject *table_release(KeyTable *k, PyObject *keys)
{
    Given given;
    if (given_get(keys, &given) < 0) return NULL;
    for (Py_ssize_t i = 0; i < given.count; i++) unclaim(k, given.digests[i]);
    given_drop(&given);
    Py_RETURN_NONE;
}

/* commit_run(keys, first) -> how many are new; their offsets are first, first + 1, … */
static PyObject *table_commit_run(KeyTable *k, PyObject *const *args, Py_ssize_t count)
{
    Given given;
    if (count != 2) { PyErr_SetString(PyExc_TypeError, "commit_run(keys, first)"); return NULL; }
    uint64_t offset = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || given_get(args[0], &given) < 0) return NULL;
    uint64_t wanted = k->next - k->first + (uint64_t)given.count, fresh = 0;
    if (wanted > k->committed_max) wanted = k->committed_max;
    while (k->ring_size < wanted)
        if (grow_ring(k) < 0) { given_drop(&given); return NULL; }
    prefetch_slots(k, &given);
    for (Py_ssize_t i = 0; i < given.count; i++, offset++) {
        Digest d = given.digests[i];
        unclaim(k, d);
        Committed *known = find_committed(k, d);
        if (known) { known->offset = offset; continue; }
        if (k->next - k->first == k->committed_max) forget_first(k);
        uint64_t place = k->next++ & (k->ring_size - 1);
        k->ring[place].digest = d;
        k->ring[place].offset = offset;
        enter_slot(k, tag_of(d), (uint32_t)place + 1);
        fresh++;
    }
    given_drop(&given);
    return PyLong_FromUnsignedLongLong(fresh);
}

/* forget(count): remove the keys that were committed first */
static PyObject *table_forget(KeyTable *k, PyObject *number)
{
    uint64_t count = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    while (count-- && k->first != k->next) forget_first(k);
    Py_RETURN_NONE;
}

static PyObject *table_offset(KeyTable *k, PyObject *key)
{
    Digest d;
    if (digest_of_text(key, &d) < 0) return NULL;
    Committed *known = find_committed(k, d);
    if (!known) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(known->offset);
}

static Py_ssize_t table_length(KeyTable *k) { return (Py_ssize_t)(k->next - k->first + k->claimed_count); }

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "K", &most)) return NULL;
    if (most < 1 || most > RING_MAX) {
        PyErr_SetString(PyExc_ValueError, "at least one key, at most 2^31");
        return NULL;
    }
    KeyTable *k = (KeyTable *)type->tp_alloc(type, 0);
    if (k) k->committed_max = most;
    if (k && (grow_ring(k) < 0 || grow_claimed(k) < 0)) Py_CLEAR(k);
    return (PyObject *)k;
}

static void table_dealloc(KeyTable *k)
{
    PyTypeObject *type = Py_TYPE(k);
    PyMem_RawFree(k->ring);
    PyMem_RawFree(k->slots);
    PyMem_RawFree(k->claimed);
    type->tp_free((PyObject *)k);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"claim", (PyCFunction)table_claim, METH_O, NULL},
    {"claim_all", (PyCFunction)table_claim_all, METH_O, NULL},
    {"release", (PyCFunction)table_release, METH_O, NULL},
    {"commit_run", (PyCFunction)(void (*)(void))table_commit_run, METH_FASTCALL, NULL},
    {"forget", (PyCFunction)table_forget, METH_O, NULL},
    {"offset", (PyCFunction)table_offset, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_methods, table_methods},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_mp_length, table_length},
    {0, NULL},
};

static PyType_Spec table_spec = {
    "virta.hub._native.KeyTable", sizeof(KeyTable), 0, Py_TPFLAGS_DEFAULT, table_slots,
};

#endif
