/* Keys: the table behind virta/hub/idempotency.py; its plain twin is virta/hub/keys.py.
 *
 * Claimed keys are few and stand in a small set. Settled ones stand in a ring, in the order in which they were settled,
 * which is the order in which they are forgotten, by order or when there are too many; `slots` finds them in it:
 *
 *     slots[top bits of the digest …]  ──►  ring[(first … next) & mask] = digest, offset
 *
 * Both are open tables without tombstones: what is removed is closed up. All keys of a call are asked for before the
 * first is looked at, so that their memory arrives together. The GIL protects everything. */
#ifndef VIRTA_HUB_KEYS_H
#define VIRTA_HUB_KEYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "hub_digest.h"

#define RING_MIN 1024u
#define RING_MAX (1u << 31)
#define CLAIMED_MIN 256u

typedef struct { Digest digest; uint64_t offset; } Settled;
typedef struct { uint32_t tag, at; } Slot; /* at: place in the ring and one more; 0 is empty */

typedef struct {
    PyObject_HEAD
    Settled *ring;
    Slot *slots; /* twice as many as the ring has places */
    uint64_t first, next, ring_size, settled_max;
    int shift; /* of a tag, to its slot */
    Digest *claimed;
    uint64_t claimed_size, claimed_count;
} Keys;

/* --- settled --- */

static inline uint32_t tag_of(Digest d) { return (uint32_t)(d.a >> 32); }
static inline uint64_t home_of(const Keys *k, uint32_t tag) { return (uint64_t)tag >> k->shift; }

static inline Settled *find_settled(const Keys *k, Digest d)
{
    uint64_t mask = 2 * k->ring_size - 1;
    uint32_t tag = tag_of(d);
    for (uint64_t i = home_of(k, tag);; i = (i + 1) & mask) {
        Slot slot = k->slots[i];
        if (!slot.at) return NULL;
        if (slot.tag == tag && digest_same(k->ring[slot.at - 1].digest, d)) return &k->ring[slot.at - 1];
    }
}

static inline void enter_slot(const Keys *k, uint32_t tag, uint32_t at)
{
    uint64_t mask = 2 * k->ring_size - 1, i = home_of(k, tag);
    while (k->slots[i].at) i = (i + 1) & mask;
    k->slots[i].tag = tag;
    k->slots[i].at = at;
}

/* Twice the room, or the first; -1 without memory: nothing has changed then. */
static int grow_ring(Keys *k)
{
    uint64_t size = k->ring_size ? 2 * k->ring_size : RING_MIN; /* at most RING_MAX: more is not asked for */
    Settled *ring = PyMem_RawMalloc(size * sizeof *ring);
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

static void forget_first(Keys *k)
{
    uint64_t ahead = k->first + 16; /* one that will follow soon: its slot is somewhere else */
    if (ahead < k->next)
        __builtin_prefetch(&k->slots[home_of(k, tag_of(k->ring[ahead & (k->ring_size - 1)].digest))], 1);
    uint64_t mask = 2 * k->ring_size - 1, place = k->first & (k->ring_size - 1);
    uint64_t hole = home_of(k, tag_of(k->ring[place].digest));
    while (k->slots[hole].at != place + 1) hole = (hole + 1) & mask;
    for (uint64_t i = (hole + 1) & mask; k->slots[i].at; i = (i + 1) & mask) {
        uint64_t away = (i - home_of(k, k->slots[i].tag)) & mask;
        if (away < ((i - hole) & mask)) continue; /* its home is behind the hole */
        k->slots[hole] = k->slots[i];
        hole = i;
    }
    k->slots[hole].at = 0;
    k->first++;
}

/* --- claimed --- */

/* The place of a digest, or the empty one where it would be. */
static inline uint64_t claimed_place(const Keys *k, Digest d)
{
    uint64_t mask = k->claimed_size - 1, i = d.b & mask;
    while (k->claimed[i].a && !digest_same(k->claimed[i], d)) i = (i + 1) & mask;
    return i;
}

static int grow_claimed(Keys *k)
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

static void unclaim(Keys *k, Digest d)
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

/* 1: taken, 0: held already, -1: no memory. */
static int claim_one(Keys *k, Digest d)
{
    if (2 * k->claimed_count >= k->claimed_size && grow_claimed(k) < 0) return -1;
    uint64_t place = claimed_place(k, d);
    if (k->claimed[place].a || find_settled(k, d)) return 0;
    k->claimed[place] = d;
    k->claimed_count++;
    return 1;
}

/* --- keys as they are given: a list of texts, or digests end to end --- */

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
    PyErr_Clear(); /* a lone surrogate: a key like any other */
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
        given->digests = (Digest *)PyBytes_AS_STRING(keys); /* only read; bytes are aligned like any object */
        given->count = PyBytes_GET_SIZE(keys) / DIGEST_BYTES;
        return 0;
    }
    if (!PyList_Check(keys)) { PyErr_SetString(PyExc_TypeError, "keys are a list of texts, or digests"); return -1; }
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

static void prefetch_slots(const Keys *k, const Given *given)
{
    for (Py_ssize_t i = 0; i < given->count; i++)
        __builtin_prefetch(&k->slots[home_of(k, tag_of(given->digests[i]))], 1);
}

/* --- methods --- */

static PyObject *keys_claim(Keys *k, PyObject *key)
{
    Digest d;
    if (digest_of_text(key, &d) < 0) return NULL;
    int taken = claim_one(k, d);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

/* claim_all(keys) -> bool: all of them, or none when one is held or stands twice. */
static PyObject *keys_claim_all(Keys *k, PyObject *keys)
{
    Given given;
    if (given_get(keys, &given) < 0) return NULL;
    prefetch_slots(k, &given);
    int taken = 1;
    Py_ssize_t i = 0;
    while (i < given.count && (taken = claim_one(k, given.digests[i])) == 1) i++;
    if (taken != 1) while (i > 0) unclaim(k, given.digests[--i]);
    given_drop(&given);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *keys_release(Keys *k, PyObject *keys)
{
    Given given;
    if (given_get(keys, &given) < 0) return NULL;
    for (Py_ssize_t i = 0; i < given.count; i++) unclaim(k, given.digests[i]);
    given_drop(&given);
    Py_RETURN_NONE;
}

/* settle_run(keys, first) -> how many of them are new: offsets first, first + 1, …; makes room for each. */
static PyObject *keys_settle_run(Keys *k, PyObject *const *args, Py_ssize_t count)
{
    Given given;
    if (count != 2) { PyErr_SetString(PyExc_TypeError, "settle_run(keys, first)"); return NULL; }
    uint64_t offset = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || given_get(args[0], &given) < 0) return NULL;
    uint64_t wanted = k->next - k->first + (uint64_t)given.count, fresh = 0;
    if (wanted > k->settled_max) wanted = k->settled_max;
    while (k->ring_size < wanted)
        if (grow_ring(k) < 0) { given_drop(&given); return NULL; }
    prefetch_slots(k, &given);
    for (Py_ssize_t i = 0; i < given.count; i++, offset++) {
        Digest d = given.digests[i];
        unclaim(k, d);
        Settled *held = find_settled(k, d);
        if (held) { held->offset = offset; continue; }
        if (k->next - k->first == k->settled_max) forget_first(k);
        uint64_t place = k->next++ & (k->ring_size - 1);
        k->ring[place].digest = d;
        k->ring[place].offset = offset;
        enter_slot(k, tag_of(d), (uint32_t)place + 1);
        fresh++;
    }
    given_drop(&given);
    return PyLong_FromUnsignedLongLong(fresh);
}

/* forget(count): so many that were settled first. */
static PyObject *keys_forget(Keys *k, PyObject *number)
{
    uint64_t count = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    while (count-- && k->first != k->next) forget_first(k);
    Py_RETURN_NONE;
}

static PyObject *keys_offset(Keys *k, PyObject *key)
{
    Digest d;
    if (digest_of_text(key, &d) < 0) return NULL;
    Settled *held = find_settled(k, d);
    if (!held) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(held->offset);
}

static Py_ssize_t keys_length(Keys *k) { return (Py_ssize_t)(k->next - k->first + k->claimed_count); }

static PyObject *keys_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    (void)named;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "K", &most)) return NULL;
    if (most < 1 || most > RING_MAX) { PyErr_SetString(PyExc_ValueError, "at least one key, at most 2^31"); return NULL; }
    Keys *k = (Keys *)type->tp_alloc(type, 0);
    if (k) k->settled_max = most;
    if (k && (grow_ring(k) < 0 || grow_claimed(k) < 0)) Py_CLEAR(k);
    return (PyObject *)k;
}

static void keys_dealloc(Keys *k)
{
    PyTypeObject *type = Py_TYPE(k);
    PyMem_RawFree(k->ring);
    PyMem_RawFree(k->slots);
    PyMem_RawFree(k->claimed);
    type->tp_free((PyObject *)k);
    Py_DECREF(type);
}

static PyMethodDef keys_methods[] = {
    {"claim", (PyCFunction)keys_claim, METH_O, NULL},
    {"claim_all", (PyCFunction)keys_claim_all, METH_O, NULL},
    {"release", (PyCFunction)keys_release, METH_O, NULL},
    {"settle_run", (PyCFunction)(void (*)(void))keys_settle_run, METH_FASTCALL, NULL},
    {"forget", (PyCFunction)keys_forget, METH_O, NULL},
    {"offset", (PyCFunction)keys_offset, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot keys_slots[] = {
    {Py_tp_methods, keys_methods},
    {Py_tp_new, keys_new},
    {Py_tp_dealloc, keys_dealloc},
    {Py_mp_length, keys_length},
    {0, NULL},
};

static PyType_Spec keys_spec = {"virta.hub._native.Keys", sizeof(Keys), 0, Py_TPFLAGS_DEFAULT, keys_slots};

#endif
