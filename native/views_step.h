/* set_rows and put_values: the live step of a row table, on the table's own Python objects.
 *
 * The plain forms are `RowTable.set_rows_plain` and `ValueCache.put_all_plain` in
 * src/virta/views/tables; what is rare is left to methods of the table, the cache and the view. While
 * set_rows runs, the offsets cannot grow: rows that are new get their numbers first. Any callback may
 * run Python code, so whatever is used after one is owned. */
#ifndef VIRTA_VIEWS_STEP_H
#define VIRTA_VIEWS_STEP_H

#include "views_numbers.h"

#define AHEAD 16             /* rows from the first stage of prefetching to the use */
#define VALUE_ENTRY_BYTES 48 /* ENTRY_BYTES of values.py */

typedef struct {
    PyObject *table, *touched, *frame_type;              /* borrowed */
    PyObject *views, *members, *interned;                /* owned */
    PyObject *change, *key, *number;                     /* of the present row; change is borrowed */
    long long offset;
} Step;

/* Append a frame to the hits of a view, if a consumer gets it. */
static int add_hit(Step *s, PyObject *view, PyObject *kind)
{
    PyObject *consumers = typed_attribute(view, s_consumers, &PyDict_Type);
    if (!consumers) return -1;
    Py_ssize_t waiting = PyDict_GET_SIZE(consumers);
    Py_DECREF(consumers);
    if (!waiting) return 0;

    PyObject *root = NULL, *event = NULL, *hits = NULL, *frame = NULL, *id = NULL, *offset = NULL;
    int failed = -1;
    if (!(root = typed_attribute(view, s_root, &PyUnicode_Type))) goto end;
    int raw = PyUnicode_CompareWithASCIIString(root, "auto") != 0;
    event = PyObject_GetAttr(s->change, raw ? s_event : s_row);
    if (!event) goto end;
    if (kind == s_leave) { /* the row filter of a token decides whether the new row may be shown */
        PyObject *filter = PyObject_GetAttr(view, s_filter);
        PyObject *row_filter = filter ? PyObject_GetAttr(filter, s_row_filter) : NULL;
        Py_XDECREF(filter);
        if (!row_filter) goto end;
        int restricted = row_filter != Py_None;
        Py_DECREF(row_filter);
        if (restricted) {
            PyObject *stored = PyObject_GetAttr(s->change, s_event);
            PyObject *shown = stored ? PyObject_CallMethodOneArg(view, s_shows, stored) : NULL;
            Py_XDECREF(stored);
            int show = shown ? PyObject_IsTrue(shown) : -1;
            Py_XDECREF(shown);
            if (show < 0) goto end;
            if (!show) Py_SETREF(event, Py_NewRef(Py_None));
        }
    }
    if (!(id = PyLong_FromLongLong(s->offset + 1)) || !(offset = PyLong_FromLongLong(s->offset))) goto end;
    PyObject *reason = kind == s_leave ? s_changed : s_empty;
    PyObject *arguments[] = {kind, id, s->key, offset, event, reason, Py_None, s->number};
    frame = PyObject_Vectorcall(s->frame_type, arguments, 8, NULL);
    if (!frame || !(hits = typed_attribute(view, s_hits, &PyList_Type))) goto end;
    if (PyList_Append(hits, frame) < 0 || PyDict_SetItem(s->touched, view, Py_None) < 0) goto end;
    failed = 0;
end:
    Py_XDECREF(root);
    Py_XDECREF(event);
    Py_XDECREF(hits);
    Py_XDECREF(frame);
    Py_XDECREF(id);
    Py_XDECREF(offset);
    return failed;
}

/* Count a row that a view has from now on, or has no longer. */
static int count_row(Step *s, PyObject *view, PyObject *kind)
{
    if (kind == s_enter) return call_method(view, s_joined, s->number);
    if (kind != s_leave) return 0;
    long long count = number_of(PyObject_GetAttr(view, s_count));
    return PyErr_Occurred() ? -1 : set_number(view, s_count, count - 1);
}

/* Return the next number of a set of views, which does not change; NULL at its end. */
static inline PyObject *next_number(PyObject *set, Py_ssize_t *at)
{
    PySetObject *numbers = (PySetObject *)set;
    while (*at <= numbers->mask) {
        PyObject *one = numbers->table[(*at)++].key;
        if (one && PyLong_Check(one)) return one; /* a removed entry has a key that is no number */
    }
    return NULL;
}

/* Give a hit to the views of `some` that are in `others`, or to those that are not. */
static int hit_views(Step *s, PyObject *some, PyObject *others, int in, PyObject *kind)
{
    PyObject *one;
    for (Py_ssize_t at = 0; (one = next_number(some, &at));) {
        int found = others == some ? 1 : PySet_Contains(others, one);
        if (found < 0) return -1;
        if (found != in) continue;
        PyObject *view = PyDict_GetItemWithError(s->views, one);
        if (view) {
            Py_INCREF(view);
            int failed = count_row(s, view, kind) < 0 || add_hit(s, view, kind) < 0;
            Py_DECREF(view);
            if (failed) return -1;
        } else if (PyErr_Occurred()) {
            return -1;
        } else if (kind != s_leave) { /* a view that was removed may stay in a row */
            PyErr_SetObject(PyExc_KeyError, one);
            return -1;
        }
    }
    return 0;
}

/* Return the one copy of a set of views. */
static PyObject *intern_members(Step *s, PyObject *members)
{
    PyObject *found = PyDict_GetItemWithError(s->interned, members);
    if (found || PyErr_Occurred()) return Py_XNewRef(found);
    found = PyObject_CallMethodOneArg(s->table, s_intern, members);
    if (found) { /* it may have rebuilt the dictionary */
        PyObject *interned = typed_attribute(s->table, s__interned, &PyDict_Type);
        if (!interned)
            Py_CLEAR(found);
        else
            Py_SETREF(s->interned, interned);
    }
    return found;
}

/* Give a row the views that it has now; `had` are those before. */
static int set_members(Step *s, Py_ssize_t row, PyObject *had, PyObject *now)
{
    if (now == had) return PySet_GET_SIZE(now) ? hit_views(s, now, now, 1, s_update) : 0;
    PyObject *copy = intern_members(s, now);
    if (!copy || PyList_SetItem(s->members, row, copy) < 0) return -1;
    if (hit_views(s, now, had, 1, s_update) < 0) return -1;
    if (hit_views(s, now, had, 0, s_enter) < 0) return -1;
    return hit_views(s, had, now, 0, s_leave);
}

static PyObject *changed_key(PyObject *item, long long *offset, PyObject **change)
{
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
        PyErr_SetString(PyExc_TypeError, "a change is (offset, RowChange)");
        return NULL;
    }
    *offset = PyLong_AsLongLong(PyTuple_GET_ITEM(item, 0));
    *change = PyTuple_GET_ITEM(item, 1);
    return PyErr_Occurred() ? NULL : typed_attribute(*change, s_key, &PyUnicode_Type);
}

/* The numbers of a batch of rows are found in stages, each for all of them: the slot of a key, the number in
 * it, the key of that number. So the processor waits for the memory of many rows at once. */

typedef struct { KeyNumbers *known; PyObject *changes; uint32_t *hashes; Py_ssize_t count; } Lookup;

static int hash_keys(Lookup *l)
{
    for (Py_ssize_t i = 0; i < l->count; i++) {
        long long offset;
        PyObject *change, *key = changed_key(PySequence_Fast_GET_ITEM(l->changes, i), &offset, &change);
        int failed = !key || hash_key(key, &l->hashes[i]) < 0;
        Py_XDECREF(key);
        if (failed) return -1;
        prefetch(&l->known->slots[l->hashes[i] & l->known->mask], 1);
    }
    return 0;
}

static void prefetch_keys(const Lookup *l, int stage)
{
    PyObject *keys = l->known->keys;
    for (Py_ssize_t i = 0; i < l->count; i++) {
        const Slot *slot = likely_slot(l->known, l->hashes[i]);
        if (!slot || (Py_ssize_t)slot->at > PyList_GET_SIZE(keys)) continue;
        PyObject **place = &PyList_GET_ITEM(keys, slot->at - 1);
        prefetch(stage ? (void *)*place : (void *)place, 1);
    }
}

/* Return the number of the row of a key; a key without a row gets one. */
static PyObject *number_of_key(PyObject *table, const KeyNumbers *known, PyObject *item, uint32_t hash)
{
    long long offset;
    PyObject *change, *key = changed_key(item, &offset, &change);
    if (!key) return NULL;
    const Slot *slot = find_slot(known, key, hash);
    PyObject *number = slot->at ? PyLong_FromUnsignedLong(slot->at - 1)
                                : PyObject_CallMethodOneArg(table, s__new_number, key);
    Py_DECREF(key);
    return number;
}

/* Return the numbers of the rows that changes set. */
static PyObject *row_numbers(PyObject *table, PyObject *changes)
{
    PyObject *found = typed_attribute(table, s_numbers, key_numbers_type);
    if (!found) return NULL;
    Lookup l = {(KeyNumbers *)found, changes, NULL, PySequence_Fast_GET_SIZE(changes)};
    l.hashes = PyMem_Malloc((size_t)(l.count + 1) * sizeof *l.hashes);
    PyObject *numbers = l.hashes ? PyList_New(l.count) : PyErr_NoMemory();
    if (numbers && hash_keys(&l) < 0) Py_CLEAR(numbers);
    if (numbers) {
        prefetch_keys(&l, 0);
        prefetch_keys(&l, 1);
    }
    for (Py_ssize_t i = 0; numbers && i < l.count; i++) {
        PyObject *number = number_of_key(table, l.known, PySequence_Fast_GET_ITEM(changes, i), l.hashes[i]);
        if (number)
            PyList_SET_ITEM(numbers, i, number);
        else
            Py_CLEAR(numbers);
    }
    PyMem_Free(l.hashes);
    Py_DECREF(found);
    return numbers;
}

typedef struct {
    PyObject *changes, *found, *numbers, *replaced, *before; /* owned */
    Py_buffer offsets;
    long long rows, rows_max;
} Rows;

/* Return the number of a row, -1 with an exception if the table has no such row. */
static Py_ssize_t row_of_change(Step *s, Rows *r, Py_ssize_t i)
{
    Py_ssize_t row = PyLong_AsSsize_t(PyList_GET_ITEM(r->numbers, i));
    if (row >= 0 && row < r->offsets.len / 8 && row < PyList_GET_SIZE(s->members)) return row;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no row has this number");
    return -1;
}

static int set_row(Step *s, Rows *r, Py_ssize_t i)
{
    int64_t *offsets = r->offsets.buf;
    Py_ssize_t row = row_of_change(s, r, i);
    PyObject *now = PySequence_Fast_GET_ITEM(r->found, i);
    if (row < 0) return -1;
    s->key = changed_key(PySequence_Fast_GET_ITEM(r->changes, i), &s->offset, &s->change);
    if (!s->key) return -1;
    s->number = PyList_GET_ITEM(r->numbers, i);
    int64_t previous = offsets[row];
    PyObject *had = Py_NewRef(PyList_GET_ITEM(s->members, row));
    PyList_SET_ITEM(r->before, i, had);
    int failed = -1;
    if (!PyFrozenSet_CheckExact(now) || !PyFrozenSet_CheckExact(had)) {
        PyErr_SetString(PyExc_TypeError, "memberships are frozen sets");
        goto end;
    }
    if (previous < 0) {
        previous = -1;
        if (++r->rows > r->rows_max
            && (set_number(s->table, s_rows, r->rows) < 0 || call_method(s->table, s__check_rows, NULL) < 0))
            goto end;
    }
    offsets[row] = s->offset;
    PyObject *replaced = PyLong_FromLongLong(previous);
    if (!replaced) goto end;
    PyList_SET_ITEM(r->replaced, i, replaced);
    failed = set_members(s, row, had, now);
end:
    Py_CLEAR(s->key);
    return failed;
}

/* A million rows and thousands of views are in no cache: prefetch what a row needs, stage by stage. Errors
 * are found again when the row is set. */

static void prefetch_columns(Step *s, Rows *r, Py_ssize_t i)
{
    Py_ssize_t row = row_of_change(s, r, i);
    if (row < 0) return;
    prefetch((int64_t *)r->offsets.buf + row, 1);
    prefetch(&PyList_GET_ITEM(s->members, row), 1);
    prefetch(PySequence_Fast_GET_ITEM(r->found, i), 3);
}

static void prefetch_members(Step *s, Rows *r, Py_ssize_t i)
{
    Py_ssize_t row = row_of_change(s, r, i);
    if (row >= 0) prefetch(PyList_GET_ITEM(s->members, row), 1);
}

/* Of the first view that has the row now. */
static PyObject *first_view(Step *s, Rows *r, Py_ssize_t i)
{
    PyObject *now = PySequence_Fast_GET_ITEM(r->found, i);
    Py_ssize_t at = 0;
    PyObject *one = PyFrozenSet_CheckExact(now) ? next_number(now, &at) : NULL;
    return one ? PyDict_GetItemWithError(s->views, one) : NULL;
}

static void prefetch_view(Step *s, Rows *r, Py_ssize_t i)
{
    PyObject *view = first_view(s, r, i);
    if (view) prefetch(view, 3);
}

static void prefetch_view_parts(Step *s, Rows *r, Py_ssize_t i)
{
    PyObject *view = first_view(s, r, i);
    PyObject *consumers = view ? PyObject_GetAttr(view, s_consumers) : NULL;
    PyObject *hits = view ? PyObject_GetAttr(view, s_hits) : NULL;
    if (consumers) prefetch(consumers, 1);
    if (hits) prefetch(hits, 1);
    Py_XDECREF(consumers);
    Py_XDECREF(hits);
}

static void prefetch_row(Step *s, Rows *r, Py_ssize_t i, void (*stage)(Step *, Rows *, Py_ssize_t))
{
    if (i < PyList_GET_SIZE(r->numbers)) stage(s, r, i);
    PyErr_Clear();
}

static int set_every_row(Step *s, Rows *r)
{
    for (Py_ssize_t i = 0; i < AHEAD; i++) prefetch_row(s, r, i, prefetch_columns);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(r->numbers); i++) {
        prefetch_row(s, r, i + AHEAD, prefetch_columns);
        prefetch_row(s, r, i + 12, prefetch_members);
        prefetch_row(s, r, i + 8, prefetch_view);
        prefetch_row(s, r, i + 4, prefetch_view_parts);
        if (set_row(s, r, i) < 0) return -1;
    }
    return 0;
}

static int open_rows(Step *s, Rows *r, PyObject *changes, PyObject *found)
{
    if (!(r->changes = PySequence_Fast(changes, "changes are a sequence"))) return -1;
    if (!(r->found = PySequence_Fast(found, "found is a sequence"))) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(r->changes);
    if (PySequence_Fast_GET_SIZE(r->found) != count) {
        PyErr_SetString(PyExc_ValueError, "there is a set of views for every change");
        return -1;
    }
    if (!(r->numbers = row_numbers(s->table, r->changes))) return -1;
    if (!(r->replaced = PyList_New(count)) || !(r->before = PyList_New(count))) return -1;
    PyObject *index = PyObject_GetAttr(s->table, s_index);
    s->views = index ? typed_attribute(index, s_views, &PyDict_Type) : NULL;
    Py_XDECREF(index);
    s->members = typed_attribute(s->table, s_members, &PyList_Type);
    s->interned = typed_attribute(s->table, s__interned, &PyDict_Type);
    PyObject *limits = PyObject_GetAttr(s->table, s_limits);
    r->rows_max = limits ? number_attribute(limits, s_view_rows_max) : -1;
    Py_XDECREF(limits);
    r->rows = number_attribute(s->table, s_rows);
    if (!s->views || !s->members || !s->interned || PyErr_Occurred()) return -1;
    PyObject *offsets = PyObject_GetAttr(s->table, s_offsets);
    int failed = !offsets || PyObject_GetBuffer(offsets, &r->offsets, PyBUF_WRITABLE) < 0;
    Py_XDECREF(offsets);
    if (!failed && r->offsets.itemsize != 8) {
        PyErr_SetString(PyExc_TypeError, "offsets take eight bytes");
        failed = 1;
    }
    return failed ? -1 : 0;
}

static PyObject *native_set_rows(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 5 || !PyDict_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "set_rows(table, changes, found, touched: dict, frame_type)");
        return NULL;
    }
    Step s = {.table = args[0], .touched = args[3], .frame_type = args[4]};
    Rows r = {0};
    int failed = open_rows(&s, &r, args[1], args[2]);
    if (!failed) failed = set_every_row(&s, &r);
    if (r.offsets.obj) {
        PyBuffer_Release(&r.offsets);
        if (!failed) failed = set_number(s.table, s_rows, r.rows);
    }
    PyObject *out = failed ? NULL : PyTuple_Pack(3, r.numbers, r.replaced, r.before);
    Py_XDECREF(r.changes);
    Py_XDECREF(r.found);
    Py_XDECREF(r.numbers);
    Py_XDECREF(r.replaced);
    Py_XDECREF(r.before);
    Py_XDECREF(s.views);
    Py_XDECREF(s.members);
    Py_XDECREF(s.interned);
    return out;
}

/* put_values: */

typedef struct { PyObject *cache, *values; long long bytes, bytes_max; } Cache;

static int put_value(Cache *c, PyObject *number, PyObject *value)
{
    if (!PyBytes_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "a value is bytes");
        return -1;
    }
    Py_ssize_t at = PyLong_AsSsize_t(number);
    if (at < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "a row number is not negative");
        return -1;
    }
    long long size = PyBytes_GET_SIZE(value) + VALUE_ENTRY_BYTES;
    PyObject *rare = size > c->bytes_max ? s_drop : NULL;
    if (!rare) {
        while (PyList_GET_SIZE(c->values) <= at)
            if (PyList_Append(c->values, Py_None) < 0) return -1;
        PyObject *old = PyList_GET_ITEM(c->values, at);
        c->bytes += size;
        if (PyBytes_Check(old)) c->bytes -= PyBytes_GET_SIZE(old) + VALUE_ENTRY_BYTES;
        PyList_SetItem(c->values, at, Py_NewRef(value));
        if (c->bytes <= c->bytes_max) return 0;
        rare = s__sweep;
    }
    if (set_number(c->cache, s_bytes, c->bytes) < 0 || call_method(c->cache, rare, number) < 0) return -1;
    c->bytes = number_attribute(c->cache, s_bytes);
    return PyErr_Occurred() ? -1 : 0;
}

/* Prefetch the place of a value, and later the old value that is there. */
static void prefetch_value(Cache *c, PyObject *numbers, Py_ssize_t i, int old)
{
    if (i >= PySequence_Fast_GET_SIZE(numbers)) return;
    Py_ssize_t at = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(numbers, i));
    if (at >= 0 && at < PyList_GET_SIZE(c->values)) {
        PyObject **place = &PyList_GET_ITEM(c->values, at);
        prefetch(old ? (void *)*place : (void *)place, 1);
    }
    PyErr_Clear();
}

static PyObject *native_put_values(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "put_values(cache, numbers, values)");
        return NULL;
    }
    PyObject *numbers = PySequence_Fast(args[1], "numbers are a sequence");
    PyObject *new = numbers ? PySequence_Fast(args[2], "values are a sequence") : NULL;
    Cache c = {.cache = args[0], .values = new ? typed_attribute(args[0], s__values, &PyList_Type) : NULL};
    int failed = !c.values;
    if (!failed) {
        c.bytes = number_attribute(c.cache, s_bytes);
        c.bytes_max = number_attribute(c.cache, s__bytes_max);
        failed = PyErr_Occurred() != NULL;
    }
    Py_ssize_t size = failed ? 0 : PySequence_Fast_GET_SIZE(numbers);
    if (!failed && PySequence_Fast_GET_SIZE(new) != size) {
        PyErr_SetString(PyExc_ValueError, "there is a value for every number");
        failed = 1;
    }
    for (Py_ssize_t i = 0; !failed && i < AHEAD; i++) prefetch_value(&c, numbers, i, 0);
    for (Py_ssize_t i = 0; !failed && i < size; i++) {
        prefetch_value(&c, numbers, i + AHEAD, 0);
        prefetch_value(&c, numbers, i + AHEAD / 2, 1);
        failed = put_value(&c, PySequence_Fast_GET_ITEM(numbers, i), PySequence_Fast_GET_ITEM(new, i)) < 0;
    }
    if (!failed) failed = set_number(c.cache, s_bytes, c.bytes) < 0;
    Py_XDECREF(numbers);
    Py_XDECREF(new);
    Py_XDECREF(c.values);
    return failed ? NULL : Py_NewRef(Py_None);
}

#endif
