/* One lookup in a topic index file (docs/format.md, 6.1). virta/log/format/topic_table.py has the same in
 * Python. The GIL is released meanwhile. */
#ifndef VIRTA_LOG_TOPIC_INDEX_H
#define VIRTA_LOG_TOPIC_INDEX_H

#include "log_topics.h"

#define INDEX_HEADER_BYTES 64
#define PLACE_BYTES 12

typedef struct {
    int fd, broken; /* broken: errno of a failed read */
    uint64_t end;   /* bytes of the file */
    const char *damage;
    uint8_t *places;
    uint64_t size; /* of the places */
} IndexLookup;

/* Read a part of the file into new memory; NULL with `broken` or `damage` set. */
static uint8_t *index_read(IndexLookup *at, uint64_t pos, uint64_t size)
{
    if (pos > at->end || size > at->end - pos) {
        at->damage = "a position is outside the index";
        return NULL;
    }
    uint8_t *data = malloc(size + 1); /* never 0 */
    ssize_t got = data ? pread(at->fd, data, size, (off_t)pos) : -1;
    if (got == (ssize_t)size) return data;
    if (got < 0) at->broken = data ? errno : ENOMEM;
    else at->damage = "the index is cut off";
    free(data);
    return NULL;
}

static int index_read32(IndexLookup *at, uint64_t pos, uint32_t count, uint32_t *out)
{
    uint8_t *data = index_read(at, pos, 4 * (uint64_t)count);
    if (!data) return -1;
    memcpy(out, data, 4 * (size_t)count);
    free(data);
    return 0;
}

/* Unsigned LEB128 of up to 64 bits; NULL if it does not end in time. */
static const uint8_t *get_number(const uint8_t *p, const uint8_t *end, uint64_t *out)
{
    *out = 0;
    for (int shift = 0; p < end && shift < 64; shift += 7) {
        uint8_t byte = *p++;
        *out |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return p;
    }
    return NULL;
}

static void index_places(IndexLookup *at, uint32_t salt, uint32_t buckets, uint64_t pos, uint64_t count,
                         uint32_t crc)
{
    uint32_t start;
    if (index_read32(at, INDEX_HEADER_BYTES + 4 * (uint64_t)buckets, 1, &start) < 0) return;
    at->size = count > at->end ? at->end + 1 : count * PLACE_BYTES;
    at->places = index_read(at, pos > at->end ? at->end + 1 : start + pos, at->size);
    if (at->places && crc32c(salt, at->places, at->size) != crc)
        at->damage = "the places of a topic are damaged";
}

static void index_search(IndexLookup *at, uint32_t salt, uint32_t buckets, const uint8_t *topic,
                         uint32_t size)
{
    uint32_t number = crc32c(0, topic, size) & (buckets - 1), bounds[2];
    if (index_read32(at, INDEX_HEADER_BYTES + 4 * (uint64_t)number, 2, bounds) < 0) return;
    uint64_t length = bounds[1] < bounds[0] ? at->end + 1 : bounds[1] - bounds[0];
    uint8_t *bucket = index_read(at, bounds[0], length);
    if (!bucket) return;
    const uint8_t *p = bucket + 4, *end = bucket + length;
    if (length < 4 || crc32c(crc32c(salt, (uint8_t *)&number, 4), p, length - 4) != get32(bucket)) {
        at->damage = "a bucket of topics is damaged";
        p = end;
    }
    while (p < end) {
        uint64_t name, numbers[8];
        p = get_number(p, end, &name);
        const uint8_t *found = p;
        p = p && name <= (uint64_t)(end - p) ? p + name : NULL;
        for (int i = 0; p && i < 8; i++) p = get_number(p, end, &numbers[i]);
        if (!p || end - p < 4) {
            at->damage = "a row of a topic is damaged";
            break;
        }
        if (name == size && memcmp(found, topic, size) == 0) {
            index_places(at, salt, buckets, numbers[6], numbers[7], get32(p));
            break;
        }
        p += 4;
    }
    free(bucket);
}

/* find_places(fd, end, salt, buckets, topic) -> bytes; ValueError: the index is damaged. */
static PyObject *native_find_places(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long end;
    unsigned int salt, buckets;
    const char *topic;
    Py_ssize_t size;
    IndexLookup at = {0};
    if (!PyArg_ParseTuple(args, "iKIIy#", &at.fd, &end, &salt, &buckets, &topic, &size)) return NULL;
    at.end = end;
    Py_BEGIN_ALLOW_THREADS
    index_search(&at, salt, buckets, (const uint8_t *)topic, (uint32_t)size);
    Py_END_ALLOW_THREADS
    PyObject *out = NULL;
    if (at.broken) {
        errno = at.broken;
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (at.damage) {
        PyErr_SetString(PyExc_ValueError, at.damage);
    } else {
        out = PyBytes_FromStringAndSize((const char *)at.places, at.places ? (Py_ssize_t)at.size : 0);
    }
    free(at.places);
    return out;
}

#endif
