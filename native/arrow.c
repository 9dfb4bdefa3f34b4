/* Decode records of a segment straight into Arrow's buffers, and make a sparse index of a segment's batches.
 *
 * Two passes over whole, checked batches: the first counts rows and bytes, the second copies into buffers
 * of the exact size. No Arrow header is needed: an Arrow binary column *is* n+1 int32 offsets and the bytes.
 * docs/format.md has the byte layout; virta/spark/source/arrow_plain.py is the plain engine. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <unistd.h>
#include "log_compressed.h"

#define TOPICS_MAX 64
#define COLUMN_BYTES_MAX 0x7FFFFFFFLL /* Arrow's int32 offsets end here */
#define INDEX_READ_BYTES 4096         /* small batches share a read, large ones are skipped over */

enum column { TOPIC, OFFSET, TIMESTAMP, KEY, VALUE, COLUMNS };

typedef struct {
    uint64_t start, stop, time_from, time_to;
    int topic_count; /* -1: all */
    const uint8_t *topics[TOPICS_MAX];
    Py_ssize_t topic_sizes[TOPICS_MAX];
} Selection;

typedef struct {
    int want;
    int64_t rows, bytes[COLUMNS];
    int32_t *ends[COLUMNS];
    uint8_t *data[COLUMNS];
    int64_t *numbers[COLUMNS];
    PyObject *expanded; /* a list of the records of compressed batches, in order */
    Py_ssize_t expanded_used;
} Output;

/* ---- records ----------------------------------------------------------------------------------------- */

static inline int wanted(const Selection *sel, const Record *r)
{
    if (sel->topic_count < 0) return 1;
    for (int i = 0; i < sel->topic_count; i++)
        if ((Py_ssize_t)r->topic_size == sel->topic_sizes[i] &&
            memcmp(r->topic, sel->topics[i], r->topic_size) == 0)
            return 1;
    return 0;
}

static inline void put_bytes(Output *out, int column, const uint8_t *data, uint32_t size)
{
    if (!out->ends[column]) return;
    memcpy(out->data[column] + out->bytes[column], data, size);
    out->bytes[column] += size;
    out->ends[column][out->rows + 1] = (int32_t)out->bytes[column];
}

/* Count rows (copy = 0) or copy them (copy = 1). Counting finds every malformed record. */
static enum status records_pass(const uint8_t *p, const uint8_t *end, const Header *h, const Selection *sel,
                                Output *out, int copy)
{
    uint64_t offset = h->base;
    while (p < end) {
        Record r;
        p = record_parse(p, end, &r);
        if (!p) return ST_BAD_RECORD;
        if (record_is_control(&r)) {
            uint32_t gap;
            if (r.topic[0] != 1 || !get_varlong(r.value, r.stop, &gap)) return ST_BAD_RECORD;
            offset += gap;
            continue;
        }
        if (r.value_size > VALUE_BYTES_MAX) return ST_BAD_RECORD;
        if (offset >= sel->start && offset < sel->stop && wanted(sel, &r)) {
            if (copy) {
                put_bytes(out, TOPIC, r.topic, r.topic_size);
                put_bytes(out, KEY, r.key, r.key_size);
                put_bytes(out, VALUE, r.value, r.value_size);
                if (out->numbers[OFFSET]) out->numbers[OFFSET][out->rows] = (int64_t)offset;
                if (out->numbers[TIMESTAMP]) out->numbers[TIMESTAMP][out->rows] = (int64_t)h->time;
            } else {
                out->bytes[TOPIC] += r.topic_size;
                out->bytes[KEY] += r.key_size;
                out->bytes[VALUE] += r.value_size;
            }
            out->rows++;
        }
        offset++;
    }
    return offset == h->base + h->count ? ST_END : ST_BAD_RECORD;
}

/* The records of a compressed batch: expanded when they are counted, kept until they are copied. 0: damaged,
 * or an exception is set. */
static int batch_expand(const uint8_t *payload, const Header *h, Output *out, int copy, const uint8_t **p,
                        const uint8_t **end)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *data = NULL;
    if (copy) {
        data = PyList_GET_ITEM(out->expanded, out->expanded_used++);
    } else if (out->expanded || (out->expanded = PyList_New(0))) {
        data = payload_expand(payload, h->payload_len);
        if (data && PyList_Append(out->expanded, data) < 0) Py_CLEAR(data);
        Py_XDECREF(data); /* the list has it */
    }
    if (data) {
        *p = (const uint8_t *)PyBytes_AS_STRING(data);
        *end = *p + PyBytes_GET_SIZE(data);
    }
    PyGILState_Release(gil);
    return data != NULL;
}

static enum status batch_pass(const uint8_t *payload, const Header *h, const Selection *sel, Output *out,
                              int copy)
{
    const uint8_t *p = payload, *end = payload + h->payload_len;
    if ((h->flags & FLAG_COMPRESSED) && !batch_expand(payload, h, out, copy, &p, &end)) return ST_BAD_RECORD;
    return records_pass(p, end, h, sel, out, copy);
}

/* A repair batch stands for lost offsets; its payload is padding. */
static inline int batch_selected(const Header *h, const Selection *sel)
{
    return !(h->flags & FLAG_REPAIR) && h->base + h->count > sel->start && h->base < sel->stop &&
           h->time >= sel->time_from && h->time < sel->time_to;
}

typedef struct { Py_ssize_t pos; int64_t prev; uint64_t next, detail; enum status status; } Cursor;

/* Walk batches from the cursor; with `copy` the batches are known to be good up to `limit`. */
static void pass(const uint8_t *data, Py_ssize_t end, uint32_t salt, int through_repairs, int64_t rows_max,
                 int64_t bytes_max, const Selection *sel, Output *out, Cursor *c, int copy)
{
    c->status = ST_END;
    while (c->pos < end) {
        Header h;
        if (c->next >= sel->stop) { c->status = ST_STOP; break; }
        const int64_t size = out->bytes[TOPIC] + out->bytes[KEY] + out->bytes[VALUE];
        if (!copy && out->rows > 0 && (out->rows >= rows_max || size >= bytes_max)) {
            c->status = ST_FULL;
            break;
        }
        c->status = header_parse(data + c->pos, end - c->pos, salt, c->prev, c->next, &h);
        if (c->status == ST_SHORT) { c->detail = HEADER_BYTES; break; }
        if (c->status != ST_END) break;
        /* Ignore gaps below the start: those offsets were not requested. */
        if ((h.flags & FLAG_REPAIR) && !through_repairs && c->next + h.count > sel->start) {
            c->status = ST_REPAIR;
            c->detail = h.count;
            break;
        }
        if ((size_t)(end - c->pos - HEADER_BYTES) < h.payload_len) {
            c->status = ST_SHORT;
            c->detail = HEADER_BYTES + (uint64_t)h.payload_len;
            break;
        }
        const uint8_t *payload = data + c->pos + HEADER_BYTES;
        if (h.flags & FLAG_SEAL) {
            c->pos += HEADER_BYTES + (Py_ssize_t)h.payload_len;
            c->status = ST_SEAL;
            break;
        }
        if (batch_selected(&h, sel)) {
            if (!copy && crc32c(0, payload, h.payload_len) != h.payload_crc) {
                c->status = ST_BAD_PAYLOAD;
                break;
            }
            Output before = *out;
            c->status = batch_pass(payload, &h, sel, out, copy);
            if (c->status != ST_END) {
                before.expanded = out->expanded;
                *out = before;
                break;
            }
        }
        c->pos += HEADER_BYTES + (Py_ssize_t)h.payload_len;
        c->next += h.count;
        c->prev = chain_after(&h);
    }
}

/* ---- output ------------------------------------------------------------------------------------------ */

static int utf8_valid(const uint8_t *p, int64_t n)
{
    const uint8_t *end = p + n;
    while (p < end) {
        if (end - p >= 8 && !(get64(p) & 0x8080808080808080ULL)) { p += 8; continue; }
        uint8_t b = *p++;
        if (b < 0x80) continue;
        int more = b >= 0xC2 && b <= 0xDF ? 1 : (b & 0xF0) == 0xE0 ? 2 : b >= 0xF0 && b <= 0xF4 ? 3 : 0;
        if (!more || end - p < more) return 0;
        uint8_t low = b == 0xE0 ? 0xA0 : b == 0xF0 ? 0x90 : 0x80;
        uint8_t high = b == 0xED ? 0x9F : b == 0xF4 ? 0x8F : 0xBF;
        if (p[0] < low || p[0] > high) return 0;
        for (int i = 1; i < more; i++) if ((p[i] & 0xC0) != 0x80) return 0;
        p += more;
    }
    return 1;
}

/* A column is valid text when every row is: a sequence may not run from one row into the next. */
static int column_is_text(const Output *out, int column)
{
    const int32_t *ends = out->ends[column];
    for (int64_t i = 0; i < out->rows; i++)
        if (!utf8_valid(out->data[column] + ends[i], ends[i + 1] - ends[i])) return 0;
    return 1;
}

static PyObject *buffer_new(int64_t size, void *slot)
{
    PyObject *o = PyBytes_FromStringAndSize(NULL, size);
    if (o) *(char **)slot = PyBytes_AS_STRING(o);
    return o;
}

/* For each wanted column a bytes object for the numbers, or (offsets, bytes); NULL with an exception set. */
static PyObject *output_allocate(Output *out)
{
    PyObject *columns = PyTuple_New(COLUMNS);
    for (int i = 0; columns && i < COLUMNS; i++) {
        PyObject *column;
        if (!(out->want & (1 << i))) {
            column = Py_NewRef(Py_None);
        } else if (i == OFFSET || i == TIMESTAMP) {
            column = buffer_new(out->rows * 8, &out->numbers[i]);
        } else {
            PyObject *ends = buffer_new((out->rows + 1) * 4, &out->ends[i]);
            PyObject *data = buffer_new(out->bytes[i], &out->data[i]);
            column = ends && data ? PyTuple_Pack(2, ends, data) : NULL;
            Py_XDECREF(ends);
            Py_XDECREF(data);
            if (column) out->ends[i][0] = 0;
        }
        if (column) PyTuple_SET_ITEM(columns, i, column);
        else Py_CLEAR(columns);
    }
    return columns;
}

static int selection_topics(PyObject *topics, Selection *sel)
{
    sel->topic_count = -1;
    if (topics == Py_None) return 0;
    if (!PyTuple_Check(topics) || PyTuple_GET_SIZE(topics) > TOPICS_MAX) {
        PyErr_Format(PyExc_ValueError, "topics must be None or a tuple of at most %d bytes", TOPICS_MAX);
        return -1;
    }
    sel->topic_count = (int)PyTuple_GET_SIZE(topics);
    for (int i = 0; i < sel->topic_count; i++) {
        PyObject *topic = PyTuple_GET_ITEM(topics, i);
        if (!PyBytes_Check(topic)) { PyErr_SetString(PyExc_TypeError, "topics must be bytes"); return -1; }
        sel->topics[i] = (const uint8_t *)PyBytes_AS_STRING(topic);
        sel->topic_sizes[i] = PyBytes_GET_SIZE(topic);
    }
    return 0;
}

/* decode(buf, pos, end, salt, prev, next, start, stop, time_from, time_to, topics, want, text,
 *        through_repairs, rows_max, bytes_max) -> (rows, columns, not_text, pos, prev, next, status, detail)
 * `want` and `text` are masks of columns; `not_text` is the mask of `text` columns with invalid UTF-8. */
static PyObject *arrow_decode(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer buf;
    Py_ssize_t pos, end;
    unsigned int salt;
    long long prev, rows_max, bytes_max;
    unsigned long long next, start, stop, time_from, time_to;
    PyObject *topics, *columns = NULL, *result = NULL;
    int want, text, through_repairs, not_text = 0;
    Selection sel;
    Output out = {0};
    if (!PyArg_ParseTuple(args, "y*nnILKKKKKOiipLL", &buf, &pos, &end, &salt, &prev, &next, &start, &stop,
                          &time_from, &time_to, &topics, &want, &text, &through_repairs, &rows_max,
                          &bytes_max))
        return NULL;
    sel.start = start; sel.stop = stop; sel.time_from = time_from; sel.time_to = time_to;
    if (selection_topics(topics, &sel) < 0) goto done;
    if (pos < 0 || end > buf.len || pos > end || bytes_max > COLUMN_BYTES_MAX - BATCH_BYTES_MAX) {
        PyErr_SetString(PyExc_ValueError, "range outside the buffer, or bytes_max over the limit");
        goto done;
    }
    out.want = want;
    Cursor first = {pos, prev, next, 0, ST_END}, second = first;
    Py_BEGIN_ALLOW_THREADS
    pass(buf.buf, end, salt, through_repairs, rows_max, bytes_max, &sel, &out, &first, 0);
    Py_END_ALLOW_THREADS
    if (PyErr_Occurred()) goto done;
    columns = output_allocate(&out);
    if (!columns) goto done;
    int64_t rows = out.rows;
    out.rows = 0;
    memset(out.bytes, 0, sizeof out.bytes);
    Py_BEGIN_ALLOW_THREADS
    pass(buf.buf, first.pos, salt, through_repairs, rows_max, bytes_max, &sel, &out, &second, 1);
    for (int i = 0; i < COLUMNS; i++)
        if ((want & text & (1 << i)) && out.ends[i] && !column_is_text(&out, i)) not_text |= 1 << i;
    Py_END_ALLOW_THREADS
    if (out.rows != rows) {
        PyErr_SetString(PyExc_RuntimeError, "the buffer changed while it was decoded");
        goto done;
    }
    result = Py_BuildValue("(LOinLKiK)", (long long)rows, columns, not_text, first.pos, (long long)first.prev,
                           (unsigned long long)first.next, (int)first.status,
                           (unsigned long long)first.detail);
done:
    Py_XDECREF(out.expanded);
    Py_XDECREF(columns);
    PyBuffer_Release(&buf);
    return result;
}

/* ---- index ------------------------------------------------------------------------------------------- */

/* index(fd, pos, end, salt, prev, next, stop, step) -> (entries, pos, prev, next, status, detail, last_time)
 * entries: (pos, base, time) of a batch at least every `step` bytes, up to the offset `stop`: later batches
 * may not be published yet. Only headers are read and checked. */
static PyObject *arrow_index(PyObject *self, PyObject *args)
{
    (void)self;
    int fd;
    long long pos, end, prev, step, noted = -1, from = 0;
    unsigned int salt;
    unsigned long long next, stop, detail = 0, last_time = 0;
    if (!PyArg_ParseTuple(args, "iLLILKKL", &fd, &pos, &end, &salt, &prev, &next, &stop, &step)) return NULL;
    uint8_t chunk[INDEX_READ_BYTES];
    ssize_t have = 0;
    enum status status = ST_END;
    PyObject *entries = PyList_New(0);
    if (!entries) return NULL;
    while (pos < end && next < stop) {
        if (pos < from || pos + HEADER_BYTES > from + have) {
            size_t size = end - pos < INDEX_READ_BYTES ? (size_t)(end - pos) : INDEX_READ_BYTES;
            do have = pread(fd, chunk, size, pos); while (have < 0 && errno == EINTR);
            if (have < 0) { Py_DECREF(entries); return PyErr_SetFromErrno(PyExc_OSError); }
            from = pos;
        }
        Header h;
        status = header_parse(chunk + (pos - from), (size_t)(from + have - pos), salt, prev, next, &h);
        if (status == ST_SHORT) { detail = HEADER_BYTES; break; }
        if (status != ST_END) break;
        if (end - pos - HEADER_BYTES < (long long)h.payload_len) {
            status = ST_SHORT;
            detail = HEADER_BYTES + (unsigned long long)h.payload_len;
            break;
        }
        if (noted < 0 || pos - noted >= step) {
            PyObject *entry = Py_BuildValue("(LKK)", pos, (unsigned long long)h.base,
                                            (unsigned long long)h.time);
            if (!entry || PyList_Append(entries, entry) < 0) {
                Py_XDECREF(entry);
                Py_DECREF(entries);
                return NULL;
            }
            Py_DECREF(entry);
            noted = pos;
        }
        last_time = h.time;
        pos += HEADER_BYTES + (long long)h.payload_len;
        next += h.count;
        prev = chain_after(&h);
        if (h.flags & FLAG_SEAL) { status = ST_SEAL; break; }
    }
    return Py_BuildValue("(NLLKiKK)", entries, pos, prev, next, (int)status, detail, last_time);
}

static PyMethodDef methods[] = {
    {"decode", arrow_decode, METH_VARARGS, "Whole batches to Arrow buffers."},
    {"set_decompress", native_set_decompress, METH_O, "set_decompress(function)"},
    {"index", arrow_index, METH_VARARGS, "A sparse index of a segment's batches, from their headers."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_arrow", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__arrow(void)
{
    crc_init();
    return PyModule_Create(&module);
}
