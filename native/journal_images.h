/* Jobs as the log and snapshots have them; virta/journal/storage/records.py says the same in Python. */
#ifndef VIRTA_JOURNAL_IMAGES_H
#define VIRTA_JOURNAL_IMAGES_H

#include "journal_domains.h"

/* --- images for the log --- */

/* MessagePack, as msgspec writes what virta/journal/storage/records.py gives it. */
static inline uint8_t *sized(uint8_t *p, uint64_t n, int first) /* the shortest of 8, 16, 32 and 64 bits */
{
    if (n <= 0xFF) { *p++ = (uint8_t)first; *p++ = (uint8_t)n; return p; }
    if (n <= 0xFFFF) { *p++ = (uint8_t)(first + 1); return put16(p, (unsigned)n); }
    if (n <= UINT32_MAX) { *p++ = (uint8_t)(first + 2); return put32(p, (uint32_t)n); }
    *p++ = (uint8_t)(first + 3);
    return put64(p, n);
}

static int pack_number(Out *out, PyObject *object)
{
    uint64_t n;
    int sign = time_of(object, &n);
    uint8_t *p = sign < 0 ? NULL : journal_extend(out, 9);
    if (!p) return -1;
    int64_t below = (int64_t)n;
    if (sign && n < 128) *p++ = (uint8_t)n;
    else if (sign) p = sized(p, n, 0xCC);
    else if (below >= -32) *p++ = (uint8_t)below;
    else if (below >= INT8_MIN) { *p++ = 0xD0; *p++ = (uint8_t)below; }
    else if (below >= INT16_MIN) { *p++ = 0xD1; p = put16(p, (unsigned)below & 0xFFFF); }
    else if (below >= INT32_MIN) { *p++ = 0xD2; p = put32(p, (uint32_t)below); }
    else { *p++ = 0xD3; p = put64(p, n); }
    out->size = (size_t)(p - out->data);
    return 0;
}

static int pack_bytes(Out *out, PyObject *bytes)
{
    if (!PyBytes_CheckExact(bytes)) { PyErr_SetString(PyExc_TypeError, "not bytes"); return -1; }
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    uint8_t *p = journal_extend(out, 9 + size);
    if (!p) return -1;
    p = sized(p, size, 0xC4);
    memcpy(p, PyBytes_AS_STRING(bytes), size);
    out->size = (size_t)(p + size - out->data);
    return 0;
}

static int pack_text(Out *out, PyObject *text)
{
    Py_ssize_t size;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    uint8_t *p = utf8 ? journal_extend(out, 9 + (size_t)size) : NULL;
    if (!p) return -1;
    if (size < 32) *p++ = (uint8_t)(0xA0 | size);
    else p = sized(p, (uint64_t)size, 0xD9);
    memcpy(p, utf8, (size_t)size);
    out->size = (size_t)(p + size - out->data);
    return 0;
}

static int pack_byte(Out *out, int byte)
{
    uint8_t *p = journal_extend(out, 1);
    if (p) *p = (uint8_t)byte;
    return p ? 0 : -1;
}

static int pack_truth(Out *out, int truth) { return truth < 0 ? -1 : pack_byte(out, truth ? 0xC3 : 0xC2); }

/* images.job_image of a job that took the place of no other. */
static int pack_job(Out *out, PyObject *job)
{
    static const int numbers_before[] = {J_ID, J_PRIORITY, J_START, J_TIMESTAMP, J_CREATED}, numbers_after[] = {J_UNTIL, J_LEASE, J_REVISION};
    PyObject *payload = field(&job_shape, job, J_PAYLOAD);
    int none = payload == Py_None;
    if (pack_byte(out, 0x9F) < 0 || pack_bytes(out, field(&place_shape, field(&job_shape, job, J_DOMAIN), L_NAME)) < 0) return -1;
    for (int i = 0; i < 5; i++)
        if (pack_number(out, field(&job_shape, job, numbers_before[i])) < 0) return -1;
    if ((none ? pack_byte(out, 0xFF) : pack_number(out, field(&value_shape, payload, V_TYPE))) < 0
        || pack_bytes(out, none ? no_bytes : field(&value_shape, payload, V_DATA)) < 0 || pack_number(out, field(&job_shape, job, J_ATTEMPTS)) < 0
        || pack_text(out, field(&job_shape, job, J_REASON)) < 0 || pack_truth(out, state_of(job) == DEAD) < 0)
        return -1;
    for (int i = 0; i < 3; i++)
        if (pack_number(out, field(&job_shape, job, numbers_after[i])) < 0) return -1;
    return pack_truth(out, PyObject_IsTrue(field(&job_shape, job, J_PERSIST)));
}

enum { TOPIC_KEY_MAX = 1024, ENTRIES_MAX = 3 };

/* The record of a uri of which nothing is left: 1, or -1 with an error. */
static int pack_gone(Out *out, PyObject *uri, PyObject *finished, PyObject *now)
{
    return pack_byte(out, 0x94) < 0 || pack_bytes(out, uri) < 0 || pack_number(out, finished) < 0 || pack_number(out, now) < 0
        || pack_byte(out, 0x90) < 0 ? -1 : 1;
}

/* One record: 1, 0 if the Python half has to write it, -1 with an error. */
static int pack_uri(Out *out, PyObject *const *of, PyObject *uri, PyObject *now)
{
    static const int tables[ENTRIES_MAX] = {X_WORKING, X_WAITING, X_DEAD};
    PyObject *kept[ENTRIES_MAX], *finished = PyDict_GetItemWithError(of[X_COMMANDS], uri);
    int count = 0;
    for (int i = 0; i < ENTRIES_MAX; i++) {
        PyObject *job = PyDict_GET_SIZE(of[tables[i]]) ? PyDict_GetItemWithError(of[tables[i]], uri) : NULL;
        if (!job) continue;
        if (field(&job_shape, job, J_REPLACED) != Py_None) return 0;
        PyObject *persist = field(&job_shape, job, J_PERSIST);
        set_field(&job_shape, job, J_LOGGED, Py_NewRef(persist));
        if (persist == Py_True) kept[count++] = job;
    }
    if (PyErr_Occurred() || pack_byte(out, 0x94) < 0 || pack_bytes(out, uri) < 0
        || (finished ? pack_number(out, finished) : pack_byte(out, 0xFF)) < 0 || pack_number(out, now) < 0 || pack_byte(out, 0x90 | count) < 0)
        return -1;
    for (int i = 0; i < count; i++)
        if (pack_job(out, kept[i]) < 0) return -1;
    return 1;
}

/* ([job]) -> a chunk of a snapshot, ["jobs", [uri, image]...], or None: the Python half has to write it */
static PyObject *jobs_chunk(PyObject *self, PyObject *jobs)
{
    (void)self;
    if (!PyList_CheckExact(jobs) || !job_shape.type) return declined();
    Py_ssize_t count = PyList_GET_SIZE(jobs);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *job = PyList_GET_ITEM(jobs, i);
        if (Py_TYPE(job) != job_shape.type || field(&job_shape, job, J_REPLACED) != Py_None) return declined();
    }
    Out out;
    out.data = out.start;
    out.room = sizeof out.start;
    out.size = 0;
    PyObject *kind = PyUnicode_FromString("jobs"), *chunk = NULL;
    int failed = !kind || pack_byte(&out, 0x92) < 0 || pack_text(&out, kind) < 0;
    uint8_t *p = failed ? NULL : journal_extend(&out, 5);
    failed = !p;
    if (p && count < 16) *p++ = (uint8_t)(0x90 | count);
    else if (p && count <= 0xFFFF) { *p++ = 0xDC; p = put16(p, (unsigned)count); }
    else if (p) { *p++ = 0xDD; p = put32(p, (uint32_t)count); }
    if (p) out.size = (size_t)(p - out.data);
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        PyObject *job = PyList_GET_ITEM(jobs, i);
        failed = pack_byte(&out, 0x92) < 0 || pack_bytes(&out, field(&job_shape, job, J_URI)) < 0 || pack_job(&out, job) < 0;
    }
    if (!failed) chunk = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
    if (out.data != out.start) PyMem_Free(out.data);
    Py_XDECREF(kind);
    return chunk;
}

/* (tables, now) -> a record per uri that changed, or None: the Python half has to write them */
static PyObject *job_records(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    if (argc != 2 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != X_FIELDS || !job_shape.type) return declined();
    PyObject *const *of = ((PyTupleObject *)args[0])->ob_item, *uri, *finished, *records = PyList_New(0);
    Out out;
    out.data = out.start;
    out.room = sizeof out.start;
    int written = records ? 1 : -1;
    for (Py_ssize_t at = 0; written > 0 && PyDict_Next(of[X_DIRTY], &at, &uri, &finished);) {
        out.size = 0;
        written = finished == Py_None ? pack_uri(&out, of, uri, args[1]) : pack_gone(&out, uri, finished, args[1]);
        if (written <= 0) break;
        PyObject *key = PyBytes_GET_SIZE(uri) <= TOPIC_KEY_MAX ? Py_NewRef(uri) : PyBytes_FromStringAndSize(PyBytes_AS_STRING(uri), TOPIC_KEY_MAX);
        PyObject *image = PyBytes_FromStringAndSize((const char *)out.data, (Py_ssize_t)out.size);
        PyObject *record = key && image ? PyTuple_Pack(3, job_topic, key, image) : NULL;
        if (!record || PyList_Append(records, record) < 0) written = -1;
        Py_XDECREF(key);
        Py_XDECREF(image);
        Py_XDECREF(record);
    }
    if (out.data != out.start) PyMem_Free(out.data);
    if (written > 0) return records;
    Py_XDECREF(records);
    return declined();
}

/* --- jobs of a snapshot --- */

enum image_field { I_DOMAIN, I_ID, I_PRIORITY, I_START, I_TIMESTAMP, I_CREATED, I_TYPE, I_PAYLOAD, I_ATTEMPTS, I_REASON, I_DEAD, I_UNTIL,
                   I_LEASE, I_REVISION, I_PERSIST, I_FIELDS };

/* The job of an image (a new reference); NULL without an error if it is not one that simply waits. */
static PyObject *waiting_job(PyObject *const *of, PyObject *uri, PyObject **image, uint64_t *id, uint64_t *start)
{
    uint64_t priority, timestamp, created, until, lease, attempts, revision;
    int none = PyLong_Check(image[I_TYPE]) && PyLong_AsLong(image[I_TYPE]) < 0;
    if (!is_key(uri) || !PyBytes_CheckExact(image[I_DOMAIN]) || !PyBytes_CheckExact(image[I_PAYLOAD]) || !PyUnicode_CheckExact(image[I_REASON])
        || image[I_DEAD] != Py_False || !PyBool_Check(image[I_PERSIST]) || !number(image[I_ID], INT64_MAX, id)
        || !number(image[I_PRIORITY], PRIORITY_MAX, &priority) || !number(image[I_START], UINT64_MAX, start)
        || !number(image[I_TIMESTAMP], UINT64_MAX, &timestamp) || !number(image[I_CREATED], UINT64_MAX, &created)
        || !number(image[I_UNTIL], 0, &until) || !number(image[I_LEASE], 0, &lease) || !number(image[I_ATTEMPTS], UINT32_MAX, &attempts)
        || !number(image[I_REVISION], UINT64_MAX, &revision) || PyDict_Contains(of[X_WORKING], uri))
        return NULL;
    PyObject *place = Py_XNewRef(PyDict_GetItemWithError(of[X_DOMAINS], image[I_DOMAIN])), *job = NULL;
    if (!place && !PyErr_Occurred()) place = PyObject_CallMethodOneArg(of[X_SCHEDULE], s_domain, image[I_DOMAIN]);
    PyObject *value_args[] = {image[I_TYPE], image[I_PAYLOAD]};
    PyObject *value = none ? Py_NewRef(Py_None) : PyObject_Vectorcall((PyObject *)value_shape.type, value_args, V_FIELDS, NULL);
    if (place && value) {
        /* Times that are the same are one number in memory. */
        PyObject *stamp_o = image[I_TIMESTAMP], *args[] = {
            uri, place, image[I_ID], image[I_PRIORITY], *start == timestamp ? stamp_o : image[I_START], stamp_o,
            created == timestamp ? stamp_o : image[I_CREATED], value, image[I_PERSIST], image[I_ATTEMPTS], image[I_REASON], Py_True};
        job = PyObject_Vectorcall((PyObject *)job_shape.type, args, 12, NULL);
        if (job && revision) set_field(&job_shape, job, J_REVISION, Py_NewRef(image[I_REVISION]));
    }
    Py_XDECREF(place);
    Py_XDECREF(value);
    return job;
}

/* (tables, [[uri, image]], first, now) -> the first item that is for the Python half */
static PyObject *restore_jobs(PyObject *self, PyObject *const *args, Py_ssize_t argc)
{
    (void)self;
    uint64_t now, next, id, start;
    if (argc != 4 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != X_FIELDS || !PyList_CheckExact(args[1])
        || !number(args[3], INT64_MAX, &now))
        return PyErr_Format(PyExc_TypeError, "restore_jobs takes tables, items, a place and a time");
    PyObject *const *of = ((PyTupleObject *)args[0])->ob_item, *next_o = PyObject_GetAttr(of[X_JOBS], s_next_id);
    int failed = !number(next_o, INT64_MAX, &next);
    Py_XDECREF(next_o);
    Py_ssize_t at = PyLong_AsSsize_t(args[2]);
    for (; !failed && at >= 0 && at < PyList_GET_SIZE(args[1]); at++) {
        PyObject *item = PyList_GET_ITEM(args[1], at), *image = PyList_CheckExact(item) && PyList_GET_SIZE(item) == 2 ? PyList_GET_ITEM(item, 1) : NULL;
        if (!image || !PyList_CheckExact(image) || PyList_GET_SIZE(image) != I_FIELDS) break;
        PyObject *uri = PyList_GET_ITEM(item, 0), *job = waiting_job(of, uri, ((PyListObject *)image)->ob_item, &id, &start);
        if (!job) break;
        failed = PyDict_SetItem(of[X_WAITING], uri, job) < 0 || PyDict_SetItem(of[X_BY_ID], field(&job_shape, job, J_ID), job) < 0
            || enter(field(&job_shape, job, J_DOMAIN), job, start <= now ? READY : DELAYED) < 0;
        if (id >= next && id >> ID_RANGE_SHIFT == next >> ID_RANGE_SHIFT) next = id + 1;
        Py_DECREF(job);
    }
    if (failed || PyErr_Occurred() || !(next_o = PyLong_FromUnsignedLongLong(next))) return NULL;
    failed = PyObject_SetAttr(of[X_JOBS], s_next_id, next_o) < 0;
    Py_DECREF(next_o);
    return failed ? NULL : PyLong_FromSsize_t(at);
}

#endif
