/* Records and batches: encode, walk, decode. The byte layout is docs/format.md.
 *
 * Everything here is pure computation on buffers; nothing reads a file or takes a lock. A reader hands in
 * bytes of one segment and the state of its chain (`prev`, `next`), and gets back whole batches only. */
#ifndef VIRTA_LOG_BATCH_H
#define VIRTA_LOG_BATCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "log_compressed.h"

static PyObject *record_type, *name_type; /* set once by set_types() */

/* ---- encode ------------------------------------------------------------------------------------------ */

typedef struct {
    const uint8_t *data;
    Py_ssize_t size;
    Py_buffer view;
    int has_view;
} Field;

static int field_get(PyObject *o, Field *f, int text)
{
    f->has_view = 0;
    if (PyBytes_Check(o)) {
        f->data = (const uint8_t *)PyBytes_AS_STRING(o);
        f->size = PyBytes_GET_SIZE(o);
        return 0;
    }
    if (PyUnicode_Check(o)) {
        if (!text) return -1;
        f->data = (const uint8_t *)PyUnicode_AsUTF8AndSize(o, &f->size);
        if (f->data) return 0;
        PyErr_Clear();
        return -1;
    }
    if (!PyObject_CheckBuffer(o) || PyObject_GetBuffer(o, &f->view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return -1;
    }
    f->has_view = 1;
    f->data = f->view.buf;
    f->size = f->view.len;
    return 0;
}

static void field_drop(Field *f) { if (f->has_view) PyBuffer_Release(&f->view); }

/* Append one record to the bytearray; -1 bad record, -2 memory, -3 batch too large. */
static int encode_one(PyObject *out, Py_ssize_t *used, PyObject *item)
{
    if (!PyTuple_Check(item) && !PyList_Check(item)) return -1;
    if (PySequence_Fast_GET_SIZE(item) != 3) return -1;
    PyObject **items = PySequence_Fast_ITEMS(item);
    Field topic = {0}, key = {0}, value = {0};
    int rc = -1;
    if (field_get(items[0], &topic, 1) == 0 && field_get(items[1], &key, 1) == 0
        && field_get(items[2], &value, 0) == 0 && topic.size <= TOPIC_BYTES_MAX
        && key.size <= KEY_BYTES_MAX && value.size <= VALUE_BYTES_MAX
        && !(topic.size == 1 && topic.data[0] < 0x20)) {
        size_t total = varlong_size(topic.size) + topic.size + varlong_size(key.size) + key.size + value.size;
        size_t record = 1 + varlong_size(total) + total;
        if (*used + record > HEADER_BYTES + BATCH_BYTES_MAX) {
            rc = -3;
        } else {
            Py_ssize_t capacity = PyByteArray_GET_SIZE(out);
            rc = 0;
            if ((Py_ssize_t)(*used + record) > capacity) {
                Py_ssize_t grown = *used + record + (capacity >> 1);
                rc = PyByteArray_Resize(out, grown) < 0 ? -2 : 0;
            }
            if (rc == 0) {
                uint8_t *start = (uint8_t *)PyByteArray_AS_STRING(out) + *used, *p = start + 1;
                p = put_varlong(p, total);
                p = put_varlong(p, topic.size);
                memcpy(p, topic.data, topic.size); p += topic.size;
                p = put_varlong(p, key.size);
                memcpy(p, key.data, key.size); p += key.size;
                memcpy(p, value.data, value.size);
                start[0] = crc8(0, start + 1, record - 1);
                *used += record;
            }
        }
    }
    field_drop(&topic); field_drop(&key); field_drop(&value);
    return rc;
}

/* encode(records) -> bytearray: 56 bytes left for the header, then the records. A record that is not
 * acceptable raises IndexError(its index); the caller finds out what is wrong with it. */
static PyObject *native_encode(PyObject *self, PyObject *records)
{
    (void)self;
    PyObject *fast = PySequence_Fast(records, "records must be a list or tuple");
    if (!fast) return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast), used = HEADER_BYTES;
    PyObject *out = PyByteArray_FromStringAndSize(NULL, HEADER_BYTES + 512);
    if (out) memset(PyByteArray_AS_STRING(out), 0, HEADER_BYTES);
    for (Py_ssize_t i = 0; out && i < count; i++) {
        int rc = encode_one(out, &used, PySequence_Fast_GET_ITEM(fast, i));
        if (rc == 0) continue;
        if (rc != -2) {
            PyObject *index = PyLong_FromSsize_t(i);
            PyErr_SetObject(rc == -1 ? PyExc_IndexError : PyExc_OverflowError, index);
            Py_XDECREF(index);
        }
        Py_CLEAR(out);
    }
    Py_DECREF(fast);
    if (out && PyByteArray_Resize(out, used) < 0) Py_CLEAR(out);
    return out;
}

/* ---- walk -------------------------------------------------------------------------------------------- */

/* Long payloads are summed without the GIL; for short ones giving it up would cost more than the sum. */
static uint32_t payload_sum(const uint8_t *payload, uint32_t size)
{
    uint32_t crc;
    if (size < 65536) return crc32c(0, payload, size);
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c(0, payload, size);
    Py_END_ALLOW_THREADS
    return crc;
}

static int range_is_valid(const Py_buffer *buf, Py_ssize_t pos, Py_ssize_t end)
{
    if (0 <= pos && pos <= end && end <= buf->len) return 1;
    PyErr_SetString(PyExc_ValueError, "range outside the buffer");
    return 0;
}

/* walk(buf, pos, end, salt, prev, next, check_payload) -> (batches, pos, prev, next, status, detail)
 * A row per valid batch: (pos, base, count, time, payload_len, producer, sequence, flags, header_crc). */
static PyObject *native_walk(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    Py_ssize_t pos, end;
    unsigned long long next, detail = 0;
    unsigned int salt;
    long long prev;
    int check_payload;
    if (!PyArg_ParseTuple(args, "y*nnILKp", &buf, &pos, &end, &salt, &prev, &next, &check_payload))
        return NULL;
    PyObject *out = NULL, *list = PyList_New(0);
    enum status status = ST_END;
    if (!list) goto done;
    if (!range_is_valid(&buf, pos, end)) goto done;
    const uint8_t *data = buf.buf;
    while (pos < end) {
        Header h;
        status = header_parse(data + pos, end - pos, salt, prev, next, &h);
        if (status == ST_SHORT) { detail = HEADER_BYTES; break; }
        if (status != ST_END) break;
        if ((size_t)(end - pos - HEADER_BYTES) < h.payload_len) {
            status = ST_SHORT;
            detail = HEADER_BYTES + (unsigned long long)h.payload_len;
            break;
        }
        const uint8_t *payload = data + pos + HEADER_BYTES;
        if (check_payload && payload_sum(payload, h.payload_len) != h.payload_crc) {
            status = ST_BAD_PAYLOAD;
            break;
        }
        PyObject *row = Py_BuildValue("(nKIKIKIHI)", pos, h.base, h.count, h.time, h.payload_len, h.producer,
                                      h.sequence, h.flags, h.header_crc);
        if (!row || PyList_Append(list, row) < 0) { Py_XDECREF(row); goto done; }
        Py_DECREF(row);
        pos += HEADER_BYTES + (Py_ssize_t)h.payload_len;
        next += h.count;
        prev = chain_after(&h);
        if (h.flags & FLAG_SEAL) {
            uint64_t following;
            if (seal_next(payload, h.payload_len, &following) < 0) { status = ST_BAD_RECORD; break; }
            status = ST_SEAL;
            detail = following;
            break;
        }
    }
    out = Py_BuildValue("(OnLKiK)", list, pos, prev, next, (int)status, detail);
done:
    Py_XDECREF(list);
    PyBuffer_Release(&buf);
    return out;
}

/* ---- decode ------------------------------------------------------------------------------------------ */

#define TOPIC_CACHE 64
#define TOPICS_COMPARED 8 /* so few topics are compared with each record's before anything is allocated */

typedef struct { PyObject *name; const uint8_t *data; uint32_t size; int wanted; } TopicSlot;

typedef struct {
    uint64_t start, stop;
    PyObject *topics; /* NULL: all */
    int verify, compared; /* compared: number of `names`, -1: there are too many */
    PyObject *names[TOPICS_COMPARED];
    TopicSlot slots[TOPIC_CACHE];
} Selection;

/* Note the topics to compare with; -1 with an exception set. The set keeps them alive. */
static int selection_names(Selection *sel)
{
    sel->compared = -1;
    if (!sel->topics || !PyAnySet_Check(sel->topics)) return 0;
    if (PySet_GET_SIZE(sel->topics) > TOPICS_COMPARED) return 0;
    PyObject *topics = PyObject_GetIter(sel->topics), *topic;
    if (!topics) return -1;
    int count = 0;
    while (count >= 0 && (topic = PyIter_Next(topics))) {
        if (PyBytes_Check(topic)) sel->names[count++] = topic;
        else count = -1;
        Py_DECREF(topic);
    }
    Py_DECREF(topics);
    sel->compared = count;
    return PyErr_Occurred() ? -1 : 0;
}

static inline int topic_is_excluded(const Selection *sel, const Record *r)
{
    for (int i = 0; i < sel->compared; i++)
        if ((uint32_t)PyBytes_GET_SIZE(sel->names[i]) == r->topic_size
            && memcmp(PyBytes_AS_STRING(sel->names[i]), r->topic, r->topic_size) == 0)
            return 0;
    return sel->compared >= 0;
}

static PyObject *name_new(const uint8_t *data, uint32_t size)
{
    PyTypeObject *type = (PyTypeObject *)name_type;
    PyObject *o = type->tp_alloc(type, size);
    if (!o) return NULL;
#if PY_VERSION_HEX >= 0x030B0000
_Py_COMP_DIAG_PUSH
_Py_COMP_DIAG_IGNORE_DEPR_DECLS
    ((PyBytesObject *)o)->ob_shash = -1;
_Py_COMP_DIAG_POP
#else
    ((PyBytesObject *)o)->ob_shash = -1;
#endif
    memcpy(PyBytes_AS_STRING(o), data, size);
    PyBytes_AS_STRING(o)[size] = 0;
    return o;
}

/* Topics repeat: one Name object and one membership test per distinct topic and call. */
static TopicSlot *topic_slot(Selection *sel, const uint8_t *data, uint32_t size)
{
    TopicSlot *slot = &sel->slots[crc32c(0, data, size) % TOPIC_CACHE];
    if (slot->name && slot->size == size && memcmp(slot->data, data, size) == 0) return slot;
    PyObject *name = name_new(data, size);
    if (!name) return NULL;
    int wanted = 1;
    if (sel->topics) {
        PyObject *plain = PyBytes_FromStringAndSize((const char *)data, size);
        wanted = plain ? PySet_Contains(sel->topics, plain) : -1;
        Py_XDECREF(plain);
        if (wanted < 0) { Py_DECREF(name); return NULL; }
    }
    Py_XSETREF(slot->name, name);
    slot->data = data;
    slot->size = size;
    slot->wanted = wanted;
    return slot;
}

static PyObject *record_new(PyObject *topic, const Record *r, uint64_t offset, PyObject *time)
{
    PyTypeObject *type = (PyTypeObject *)record_type;
    PyObject *record = type->tp_alloc(type, 5);
    if (!record) return NULL;
    /* Its items refer to nothing, so it can be in no cycle: the collector need not visit millions of them. */
    if (PyObject_GC_IsTracked(record)) PyObject_GC_UnTrack(record);
    Py_INCREF(topic);
    PyTuple_SET_ITEM(record, 0, topic);
    PyTuple_SET_ITEM(record, 1, name_new(r->key, r->key_size));
    PyTuple_SET_ITEM(record, 2, PyBytes_FromStringAndSize((const char *)r->value, r->value_size));
    PyTuple_SET_ITEM(record, 3, PyLong_FromUnsignedLongLong(offset));
    Py_INCREF(time);
    PyTuple_SET_ITEM(record, 4, time);
    if (!PyTuple_GET_ITEM(record, 1) || !PyTuple_GET_ITEM(record, 2) || !PyTuple_GET_ITEM(record, 3)) {
        Py_DECREF(record);
        return NULL;
    }
    return record;
}

/* Decode records into the list; ST_END, ST_BAD_RECORD, or -1 with an exception set. */
static int records_decode(const uint8_t *p, const uint8_t *end, const Header *h, Selection *sel,
                          PyObject *list)
{
    uint64_t offset = h->base;
    PyObject *time = PyLong_FromUnsignedLongLong(h->time);
    int rc = -1;
    if (!time) return -1;
    while (p < end) {
        const uint8_t *start = p;
        Record r;
        rc = ST_BAD_RECORD;
        p = record_parse(start, end, &r);
        if (!p || (sel->verify && crc8(0, start + 1, p - start - 1) != *start)) goto out;
        if (record_is_control(&r)) {
            uint32_t gap;
            if (r.topic[0] != 1 || !get_varlong(r.value, r.stop, &gap)) goto out;
            offset += gap;
            continue;
        }
        if (r.value_size > VALUE_BYTES_MAX) goto out;
        if (offset >= sel->start && offset < sel->stop && !topic_is_excluded(sel, &r)) {
            rc = -1;
            TopicSlot *slot = topic_slot(sel, r.topic, r.topic_size);
            if (!slot) goto out;
            if (slot->wanted) {
                PyObject *record = record_new(slot->name, &r, offset, time);
                if (!record || PyList_Append(list, record) < 0) { Py_XDECREF(record); goto out; }
                Py_DECREF(record);
            }
        }
        offset++;
    }
    rc = offset == h->base + h->count ? ST_END : ST_BAD_RECORD;
out:
    Py_DECREF(time);
    return rc;
}

/* The slots name topics inside the payload: they must not outlive an expanded one. */
static void topic_slots_clear(Selection *sel)
{
    for (int i = 0; i < TOPIC_CACHE; i++) Py_CLEAR(sel->slots[i].name);
}

static int batch_decode(const uint8_t *payload, const Header *h, Selection *sel, PyObject *list)
{
    if (!(h->flags & FLAG_COMPRESSED)) return records_decode(payload, payload + h->payload_len, h, sel, list);
    PyObject *data = payload_expand(payload, h->payload_len);
    if (!data) return PyErr_Occurred() ? -1 : ST_BAD_RECORD;
    const uint8_t *records = (const uint8_t *)PyBytes_AS_STRING(data);
    topic_slots_clear(sel);
    int rc = records_decode(records, records + PyBytes_GET_SIZE(data), h, sel, list);
    topic_slots_clear(sel);
    Py_DECREF(data);
    return rc;
}

/* read(buf, pos, end, salt, prev, next, start, stop, topics, verify, through_repairs, max_records)
 *   -> (records, pos, prev, next, status, detail)
 * Consumes whole batches from `pos`; `topics` is None or a set of bytes. */
static PyObject *native_read(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    Py_ssize_t pos, end, max_records;
    unsigned long long next, start, stop, detail = 0;
    unsigned int salt;
    long long prev;
    PyObject *topics;
    int verify, through_repairs, collecting = 0;
    if (!PyArg_ParseTuple(args, "y*nnILKKKOppn", &buf, &pos, &end, &salt, &prev, &next, &start, &stop,
                          &topics, &verify, &through_repairs, &max_records))
        return NULL;
    Selection sel;
    memset(&sel, 0, sizeof sel);
    sel.start = start;
    sel.stop = stop;
    sel.topics = topics == Py_None ? NULL : topics;
    sel.verify = verify;
    PyObject *out = NULL, *list = PyList_New(0);
    int status = ST_END;
    if (!list) goto done;
    if (!range_is_valid(&buf, pos, end) || selection_names(&sel) < 0) goto done;
    const uint8_t *data = buf.buf;
    /* Thousands of new records would start the collector again and again, in vain: they are in no cycle. */
    collecting = PyGC_Disable();
    while (pos < end) {
        Header h;
        if (next >= stop) { status = ST_STOP; break; }
        if (PyList_GET_SIZE(list) >= max_records) { status = ST_FULL; break; }
        status = header_parse(data + pos, end - pos, salt, prev, next, &h);
        if (status == ST_SHORT) detail = HEADER_BYTES;
        if (status != ST_END) break;
        if ((size_t)(end - pos - HEADER_BYTES) < h.payload_len) {
            status = ST_SHORT;
            detail = HEADER_BYTES + (unsigned long long)h.payload_len;
            break;
        }
        /* Ignore gaps below `start`: those offsets were not requested. */
        if ((h.flags & FLAG_REPAIR) && !through_repairs && h.count > 0 && next + h.count > start) {
            status = ST_REPAIR;
            detail = h.count;
            break;
        }
        const uint8_t *payload = data + pos + HEADER_BYTES;
        if (payload_sum(payload, h.payload_len) != h.payload_crc) { status = ST_BAD_PAYLOAD; break; }
        if (h.flags & FLAG_SEAL) {
            uint64_t following;
            if (seal_next(payload, h.payload_len, &following) < 0) { status = ST_BAD_RECORD; break; }
            status = ST_SEAL;
            detail = following;
        } else if (!(h.flags & FLAG_REPAIR) && (next + h.count > start || verify)) {
            Py_ssize_t before = PyList_GET_SIZE(list);
            status = batch_decode(payload, &h, &sel, list);
            if (status == -1) goto done;
            if (status != ST_END) { /* nothing of a bad batch is delivered */
                if (PyList_SetSlice(list, before, PyList_GET_SIZE(list), NULL) < 0) goto done;
                break;
            }
        }
        pos += HEADER_BYTES + (Py_ssize_t)h.payload_len;
        next += h.count;
        prev = chain_after(&h);
        if (status == ST_SEAL) break;
    }
    out = Py_BuildValue("(OnLKiK)", list, pos, prev, next, status, detail);
done:
    if (collecting) PyGC_Enable();
    topic_slots_clear(&sel);
    Py_XDECREF(list);
    PyBuffer_Release(&buf);
    return out;
}

#endif
