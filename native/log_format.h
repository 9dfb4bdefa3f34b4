/* The log's byte layout (docs/format.md) as C: constants, batch headers, records. No Python in here.
 *
 * All native code that reads segments shares this file, so that "valid" has one meaning. */
#ifndef VIRTA_LOG_FORMAT_H
#define VIRTA_LOG_FORMAT_H

#include "crc.h"

#define TOPIC_BYTES_MAX 1024
#define KEY_BYTES_MAX 1024
#define VALUE_BYTES_MAX (10 * 1024 * 1024)
#define BATCH_BYTES_MAX (64 * 1024 * 1024)
#define HEADER_BYTES 56
#define FLAG_SEAL 1
#define FLAG_REPAIR 2
#define FLAG_COMPRESSED 4
#define TOPIC_COMPRESSED 6

enum status {
    ST_END = 0,         /* every byte given was consumed */
    ST_SHORT = 1,       /* the next batch is not complete: `detail` bytes are needed from `pos` */
    ST_SEAL = 2,        /* the segment ends here; `detail` is the next segment's base offset */
    ST_BAD_HEADER = 3,
    ST_BAD_PAYLOAD = 4,
    ST_BAD_RECORD = 5,
    ST_CHAIN = 6,       /* a valid header that does not follow the batch before it */
    ST_ZERO = 7,        /* zeros where a header should be */
    ST_FULL = 8,        /* `max_records` reached */
    ST_STOP = 9,        /* the `stop` offset reached */
    ST_REPAIR = 10,     /* a repair batch stands at `pos`; `detail` offsets were lost */
};

static inline uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline void put16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static inline void put32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void put64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }

static inline int varlong_size(uint64_t n)
{
    int size = 1;
    while (n >= 0x80) { n >>= 7; size++; }
    return size;
}

static inline uint8_t *put_varlong(uint8_t *p, uint64_t n)
{
    while (n >= 0x80) { *p++ = (uint8_t)(n | 0x80); n >>= 7; }
    *p++ = (uint8_t)n;
    return p;
}

/* At most four bytes (2^28 - 1): no length in a valid file needs more. NULL if it does not end in time. */
static inline const uint8_t *get_varlong(const uint8_t *p, const uint8_t *end, uint32_t *out)
{
    uint32_t n = 0;
    for (int shift = 0; shift < 28 && p < end; shift += 7) {
        uint8_t b = *p++;
        n |= (uint32_t)(b & 0x7F) << shift;
        if (!(b & 0x80)) { *out = n; return p; }
    }
    return NULL;
}

typedef struct {
    uint64_t base, time, producer;
    uint32_t count, payload_len, sequence, prev, payload_crc, header_crc;
    uint16_t flags;
} Header;

static inline int all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++) if (p[i]) return 0;
    return 1;
}

/* Parse and check one header. `prev` < 0 means: do not check the chain. */
static inline enum status header_parse(const uint8_t *p, size_t available, uint32_t salt, int64_t prev,
                                       uint64_t next, Header *h)
{
    static const uint8_t fixed[5] = {0x36, 0x01, 0x04, 0x00, 0x01};
    if (available < HEADER_BYTES) return ST_SHORT;
    if (memcmp(p + 1, fixed, 5) != 0) return all_zero(p, HEADER_BYTES) ? ST_ZERO : ST_BAD_HEADER;
    h->header_crc = get32(p + 52);
    if (crc32c(salt, p + 1, 51) != h->header_crc || crc8(0, p + 1, 55) != p[0]) return ST_BAD_HEADER;
    memcpy(&h->flags, p + 6, 2);
    h->base = get64(p + 8);
    h->time = get64(p + 16);
    h->count = get32(p + 24);
    h->payload_len = get32(p + 28);
    h->producer = get64(p + 32);
    h->sequence = get32(p + 40);
    h->prev = get32(p + 44);
    h->payload_crc = get32(p + 48);
    /* Only a repair batch may be longer: it is padded to cover the bytes it replaces. */
    if (h->payload_len > BATCH_BYTES_MAX && !(h->flags & FLAG_REPAIR)) return ST_BAD_HEADER;
    if (h->base != next || (prev >= 0 && h->prev != (uint32_t)prev)) return ST_CHAIN;
    return ST_END;
}

/* What the batch after this one must name as `prev`; -1: it is not checked, after a repair. */
static inline int64_t chain_after(const Header *h)
{
    return (h->flags & FLAG_REPAIR) ? -1 : (int64_t)h->header_crc;
}

/* The value of a seal batch's only record: u64 next base, u64 bytes. */
static inline int seal_next(const uint8_t *payload, uint32_t size, uint64_t *next)
{
    if (size != 21 || payload[2] != 1 || payload[3] != 0 || payload[4] != 0) return -1;
    *next = get64(payload + 5);
    return 0;
}

typedef struct {
    const uint8_t *topic, *key, *value, *stop;
    uint32_t topic_size, key_size, value_size;
} Record;

/* Parse the record at `p`, checking the limits of topic and key; return its end, NULL if it is no record. */
static inline const uint8_t *record_parse(const uint8_t *p, const uint8_t *end, Record *r)
{
    uint32_t total;
    p = get_varlong(p + 1, end, &total);
    if (!p || total < 2 || (size_t)(end - p) < total) return NULL;
    r->stop = p + total;
    r->topic = get_varlong(p, r->stop, &r->topic_size);
    if (!r->topic || r->topic_size > TOPIC_BYTES_MAX || (size_t)(r->stop - r->topic) < r->topic_size)
        return NULL;
    r->key = get_varlong(r->topic + r->topic_size, r->stop, &r->key_size);
    if (!r->key || r->key_size > KEY_BYTES_MAX || (size_t)(r->stop - r->key) < r->key_size) return NULL;
    r->value = r->key + r->key_size;
    r->value_size = (uint32_t)(r->stop - r->value);
    return r->stop;
}

static inline int record_is_control(const Record *r) { return r->topic_size == 1 && r->topic[0] < 0x20; }

#endif
