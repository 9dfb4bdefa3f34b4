/* TopicTable: which batches of a segment have records of which topic.
 *
 * virta/log/format/topic_table.py is the same in plain Python and documents the methods. An open-addressing
 * hash table from topic to counts and a growing array of places (position, size, base). The GIL is released
 * while a chunk is added; a second call meanwhile is refused. */
#ifndef VIRTA_LOG_TOPICS_H
#define VIRTA_LOG_TOPICS_H

#include "log_batch.h"

#define PLACE_MAX 0xFFFFFFFFULL
#define SLOTS_MIN 64

typedef struct {
    uint8_t *topic; /* NULL: a free slot */
    uint32_t topic_size, hash;
    uint64_t records, bytes, first_offset, last_offset, first_time, last_time, last_pos;
    uint32_t *places; /* three numbers each */
    uint32_t place_count, place_room, order;
} TopicEntry;

typedef struct {
    PyObject_HEAD
    uint64_t base, places;
    TopicEntry *slots;
    uint32_t size, used; /* size is a power of two */
    int busy;
} TopicTable;

enum { ADD_OK = 0, ADD_MEMORY = -2, ADD_OVERFLOW = -3, ADD_EXCEPTION = -4 };

static int table_grow(TopicTable *t)
{
    uint32_t size = t->size ? t->size * 2 : SLOTS_MIN;
    TopicEntry *slots = calloc(size, sizeof *slots);
    if (!slots) return ADD_MEMORY;
    for (uint32_t i = 0; i < t->size; i++) {
        if (!t->slots[i].topic) continue;
        uint32_t at = t->slots[i].hash & (size - 1);
        while (slots[at].topic) at = (at + 1) & (size - 1);
        slots[at] = t->slots[i];
    }
    free(t->slots);
    t->slots = slots;
    t->size = size;
    return ADD_OK;
}

/* The slot of a topic: its own, or the free one where it belongs. The table has a free slot. */
static TopicEntry *table_slot(const TopicTable *t, const uint8_t *topic, uint32_t size, uint32_t hash)
{
    uint32_t at = hash & (t->size - 1);
    for (;; at = (at + 1) & (t->size - 1)) {
        TopicEntry *e = &t->slots[at];
        if (!e->topic) return e;
        if (e->hash == hash && e->topic_size == size && memcmp(e->topic, topic, size) == 0) return e;
    }
}

static int table_note(TopicTable *t, const uint8_t *topic, uint32_t size, const Header *h, uint64_t pos,
                      uint64_t offset, uint64_t bytes)
{
    if (t->used * 2 >= t->size && table_grow(t) < 0) return ADD_MEMORY;
    uint32_t hash = crc32c(0, topic, size);
    TopicEntry *e = table_slot(t, topic, size, hash);
    if (!e->topic) {
        e->topic = malloc(size ? size : 1);
        if (!e->topic) return ADD_MEMORY;
        memcpy(e->topic, topic, size);
        e->topic_size = size;
        e->hash = hash;
        e->order = t->used++;
        e->first_offset = offset;
        e->first_time = h->time;
        e->last_pos = UINT64_MAX;
    }
    e->records++;
    e->bytes += bytes;
    e->last_offset = offset;
    e->last_time = h->time;
    if (e->last_pos == pos) return ADD_OK;
    if (pos > PLACE_MAX || h->base - t->base > PLACE_MAX) return ADD_OVERFLOW;
    if (e->place_count == e->place_room) {
        uint32_t room = e->place_room ? e->place_room * 2 : 2;
        uint32_t *places = realloc(e->places, (size_t)room * 12);
        if (!places) return ADD_MEMORY;
        e->places = places;
        e->place_room = room;
    }
    uint32_t *place = e->places + (size_t)e->place_count * 3;
    place[0] = (uint32_t)pos;
    place[1] = HEADER_BYTES + h->payload_len;
    place[2] = (uint32_t)(h->base - t->base);
    e->place_count++;
    e->last_pos = pos;
    t->places++;
    return ADD_OK;
}

/* Whether the records parse and span the batch's offsets: nothing of a bad batch is added. */
static int records_are_valid(const uint8_t *p, const uint8_t *end, const Header *h)
{
    uint64_t offset = h->base;
    while (p < end) {
        Record r;
        uint32_t gap = 1;
        p = record_parse(p, end, &r);
        if (!p) return 0;
        if (record_is_control(&r)) {
            if (r.topic[0] != 1 || !get_varlong(r.value, r.stop, &gap)) return 0;
        } else if (r.value_size > VALUE_BYTES_MAX) {
            return 0;
        }
        offset += gap;
    }
    return offset == h->base + h->count;
}

static int table_add_records(TopicTable *t, const uint8_t *p, const uint8_t *end, const Header *h,
                             uint64_t pos)
{
    uint64_t offset = h->base;
    while (p < end) {
        Record r;
        uint32_t gap = 0;
        p = record_parse(p, end, &r);
        if (!p) return ST_BAD_RECORD;
        if (record_is_control(&r)) {
            if (get_varlong(r.value, r.stop, &gap)) offset += gap;
            continue;
        }
        uint64_t bytes = (uint64_t)r.key_size + r.value_size;
        int rc = table_note(t, r.topic, r.topic_size, h, pos, offset, bytes);
        if (rc != ADD_OK) return rc;
        offset++;
    }
    return ADD_OK;
}

static int table_add_valid(TopicTable *t, const uint8_t *p, const uint8_t *end, const Header *h, uint64_t pos)
{
    if (!records_are_valid(p, end, h)) return ST_BAD_RECORD;
    return table_add_records(t, p, end, h, pos);
}

static int table_add_compressed(TopicTable *t, const uint8_t *payload, const Header *h, uint64_t pos)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *data = payload_expand(payload, h->payload_len);
    int rc = data ? ADD_OK : PyErr_Occurred() ? ADD_EXCEPTION : ST_BAD_RECORD;
    if (data) {
        const uint8_t *records = (const uint8_t *)PyBytes_AS_STRING(data);
        rc = table_add_valid(t, records, records + PyBytes_GET_SIZE(data), h, pos);
    }
    Py_XDECREF(data);
    PyGILState_Release(gil);
    return rc;
}

/* Add one batch whose header and payload checksum are valid: ADD_OK, ST_BAD_RECORD, or an error below 0. */
static int table_add_batch(TopicTable *t, const uint8_t *payload, const Header *h, uint64_t pos)
{
    static const uint8_t repairs[1] = {2};
    if (h->flags & FLAG_REPAIR) return h->count ? table_note(t, repairs, 1, h, pos, h->base, 0) : ADD_OK;
    if (h->flags & FLAG_COMPRESSED) return table_add_compressed(t, payload, h, pos);
    return table_add_valid(t, payload, payload + h->payload_len, h, pos);
}

typedef struct { Py_ssize_t pos; int64_t prev; uint64_t next, detail; int status; } TableCursor;

static int table_add_chunk(TopicTable *t, const uint8_t *data, Py_ssize_t end, uint64_t file_pos,
                           uint32_t salt, TableCursor *c)
{
    while (c->pos < end) {
        Header h;
        c->status = header_parse(data + c->pos, end - c->pos, salt, c->prev, c->next, &h);
        if (c->status == ST_SHORT) c->detail = HEADER_BYTES;
        if (c->status != ST_END) return ADD_OK;
        if ((size_t)(end - c->pos - HEADER_BYTES) < h.payload_len) {
            c->status = ST_SHORT;
            c->detail = HEADER_BYTES + (uint64_t)h.payload_len;
            return ADD_OK;
        }
        const uint8_t *payload = data + c->pos + HEADER_BYTES;
        if (crc32c(0, payload, h.payload_len) != h.payload_crc) { c->status = ST_BAD_PAYLOAD; return ADD_OK; }
        if (h.flags & FLAG_SEAL) {
            int sealed = seal_next(payload, h.payload_len, &c->detail) == 0;
            c->status = sealed ? ST_SEAL : ST_BAD_RECORD;
            if (!sealed) return ADD_OK;
        } else {
            int rc = table_add_batch(t, payload, &h, file_pos + (uint64_t)c->pos);
            if (rc < 0) return rc;
            if (rc != ADD_OK) { c->status = rc; return ADD_OK; }
        }
        c->pos += HEADER_BYTES + (Py_ssize_t)h.payload_len;
        c->next += h.count;
        c->prev = chain_after(&h);
        if (c->status == ST_SEAL) return ADD_OK;
    }
    return ADD_OK;
}

/* ---- the Python type --------------------------------------------------------------------------------- */

static int topic_table_init(TopicTable *t, PyObject *args, PyObject *kwargs)
{
    unsigned long long base;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "TopicTable takes one positional argument");
        return -1;
    }
    if (t->slots || !PyArg_ParseTuple(args, "K", &base)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "TopicTable is initialised already");
        return -1;
    }
    t->base = base;
    if (table_grow(t) == ADD_OK) return 0;
    PyErr_NoMemory();
    return -1;
}

static void topic_table_dealloc(TopicTable *t)
{
    PyTypeObject *type = Py_TYPE(t);
    for (uint32_t i = 0; i < t->size; i++) {
        free(t->slots[i].topic);
        free(t->slots[i].places);
    }
    free(t->slots);
    type->tp_free((PyObject *)t);
    Py_DECREF(type);
}

static int topic_table_is_free(TopicTable *t)
{
    if (t->slots && !t->busy) return 1;
    PyErr_SetString(PyExc_RuntimeError, "the topic table is in use by another thread");
    return 0;
}

/* add(buf, end, file_pos, salt, prev, next) -> (pos, prev, next, status, detail) */
static PyObject *topic_table_add(TopicTable *t, PyObject *args)
{
    Py_buffer buf;
    Py_ssize_t end;
    unsigned long long file_pos, next;
    unsigned int salt;
    long long prev;
    if (!PyArg_ParseTuple(args, "y*nKILK", &buf, &end, &file_pos, &salt, &prev, &next)) return NULL;
    PyObject *out = NULL;
    if (!topic_table_is_free(t) || !range_is_valid(&buf, 0, end)) goto done;
    TableCursor c = {0, prev, next, 0, ST_END};
    int rc;
    t->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    rc = table_add_chunk(t, buf.buf, end, file_pos, salt, &c);
    Py_END_ALLOW_THREADS
    t->busy = 0;
    if (rc == ADD_MEMORY) PyErr_NoMemory();
    else if (rc == ADD_OVERFLOW)
        PyErr_SetString(PyExc_OverflowError, "the segment is too large for a topic table");
    else if (!PyErr_Occurred())
        out = Py_BuildValue("(nLKiK)", c.pos, (long long)c.prev, (unsigned long long)c.next, c.status,
                            (unsigned long long)c.detail);
done:
    PyBuffer_Release(&buf);
    return out;
}

static PyObject *entry_places(const TopicEntry *e)
{
    return PyBytes_FromStringAndSize((const char *)e->places, (Py_ssize_t)e->place_count * 12);
}

/* rows() -> [(topic, records, size, first_offset, last_offset, first_time, last_time, places), ...] */
static PyObject *topic_table_rows(TopicTable *t, PyObject *unused)
{
    (void)unused;
    if (!topic_table_is_free(t)) return NULL;
    PyObject *rows = PyList_New(t->used);
    for (uint32_t i = 0; rows && i < t->size; i++) {
        const TopicEntry *e = &t->slots[i];
        if (!e->topic) continue;
        PyObject *row = Py_BuildValue("(y#KKKKKKN)", (const char *)e->topic, (Py_ssize_t)e->topic_size,
                                      (unsigned long long)e->records, (unsigned long long)e->bytes,
                                      (unsigned long long)e->first_offset, (unsigned long long)e->last_offset,
                                      (unsigned long long)e->first_time, (unsigned long long)e->last_time,
                                      entry_places(e));
        if (!row) { Py_CLEAR(rows); break; }
        PyList_SET_ITEM(rows, e->order, row);
    }
    return rows;
}

static PyObject *topic_table_find(TopicTable *t, PyObject *topic)
{
    if (!PyBytes_Check(topic)) { PyErr_SetString(PyExc_TypeError, "a topic must be bytes"); return NULL; }
    if (!topic_table_is_free(t)) return NULL;
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(topic);
    uint32_t size = (uint32_t)PyBytes_GET_SIZE(topic);
    const TopicEntry *e = table_slot(t, data, size, crc32c(0, data, size));
    return e->topic ? entry_places(e) : PyBytes_FromStringAndSize(NULL, 0);
}

static Py_ssize_t topic_table_length(TopicTable *t) { return t->used; }

static PyObject *topic_table_places(TopicTable *t, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(t->places);
}

static PyMethodDef topic_table_methods[] = {
    {"add", (PyCFunction)topic_table_add, METH_VARARGS, "add(...) -> (pos, prev, next, status, detail)"},
    {"find", (PyCFunction)topic_table_find, METH_O, "find(topic) -> places"},
    {"rows", (PyCFunction)topic_table_rows, METH_NOARGS, "rows() -> list"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef topic_table_getset[] = {
    {"places", (getter)topic_table_places, NULL, "places of all topics", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot topic_table_slots[] = {
    {Py_tp_init, topic_table_init},
    {Py_tp_dealloc, topic_table_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_methods, topic_table_methods},
    {Py_tp_getset, topic_table_getset},
    {Py_mp_length, topic_table_length},
    {Py_tp_doc, "The topics of a segment's batches."},
    {0, NULL},
};

static PyType_Spec topic_table_spec = {
    "virta.log._native.TopicTable", sizeof(TopicTable), 0, Py_TPFLAGS_DEFAULT, topic_table_slots,
};

#endif
