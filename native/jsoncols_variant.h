/* A yyjson value as Spark's VARIANT binary; virta/spark/source/variant.py has the layout.
 *
 * Children are written first, then moved up to make space for their header. Keys get their ids in the
 * order they come, objects sort theirs by bytes; of equal keys the last counts. */
#ifndef VIRTA_JSONCOLS_VARIANT_H
#define VIRTA_JSONCOLS_VARIANT_H
#include "jsoncols_scalar.h"
#include "vendor/yyjson/yyjson.h"

#define KEYS_MAX 256 /* of one variant: keys are found by comparing; the plain engine has no limit */
#define VARIANT_BYTES_MAX (16 * 1024 * 1024 - 1)

typedef struct { const char *name; size_t size; } Key;
typedef struct { Key key; yyjson_val *value; uint32_t index, id, offset; } Member;
typedef struct { Context *ctx; Buffer *out; size_t start; Key keys[KEYS_MAX]; int key_count; } Variant;

static enum fit put_variant(Variant *v, yyjson_val *value);

static inline int width_of(size_t number) { return number <= 0xFF ? 1 : number <= 0xFFFF ? 2 : 3; }

static inline void put_number(uint8_t *p, uint64_t number, int width)
{
    for (int i = 0; i < width; i++) p[i] = (uint8_t)(number >> (8 * i));
}

static inline void put_primitive(Variant *v, int kind, const void *data, size_t size)
{
    const uint8_t header = (uint8_t)(kind << 2);
    buffer_put(v->ctx, v->out, &header, 1);
    buffer_put(v->ctx, v->out, data, size);
}

static enum fit put_variant_number(Variant *v, const char *raw, size_t size)
{
    int64_t number;
    if (read_integer(raw, size, &number) == FITS) {
        const int kind = number == (int8_t)number ? 3 : number == (int16_t)number ? 4 :
                         number == (int32_t)number ? 5 : 6;
        put_primitive(v, kind, &number, (size_t)1 << (kind - 3));
        return FITS;
    }
    yyjson_val parsed;
    if (!yyjson_read_number(raw, &parsed, 0, NULL, NULL) || !yyjson_is_real(&parsed)) return LEFT;
    const double real = unsafe_yyjson_get_real(&parsed);
    put_primitive(v, 7, &real, 8);
    return FITS;
}

static void put_variant_text(Variant *v, const char *text, size_t size)
{
    uint8_t header[5] = {16 << 2};
    if (size <= 63) {
        header[0] = (uint8_t)(size << 2 | 1);
        buffer_put(v->ctx, v->out, header, 1);
    } else {
        put_number(header + 1, size, 4);
        buffer_put(v->ctx, v->out, header, 5);
    }
    buffer_put(v->ctx, v->out, text, size);
}

/* Move what was written from `start` up by `space` bytes and return where the header goes. */
static uint8_t *insert_space(Variant *v, size_t start, size_t space)
{
    buffer_reserve(v->ctx, v->out, space);
    memmove(v->out->data + start + space, v->out->data + start, v->out->size - start);
    v->out->size += space;
    return v->out->data + start;
}

static enum fit put_variant_array(Variant *v, yyjson_val *array)
{
    const size_t count = yyjson_arr_size(array), start = v->out->size;
    uint32_t small[64], *offsets = count < 64 ? small : malloc(sizeof(uint32_t) * (count + 1));
    yyjson_arr_iter items = yyjson_arr_iter_with(array);
    yyjson_val *item;
    size_t i = 0;
    enum fit fit = FITS;
    if (!offsets) return LEFT;
    while (fit == FITS && (item = yyjson_arr_iter_next(&items))) {
        offsets[i++] = (uint32_t)(v->out->size - start);
        fit = put_variant(v, item);
    }
    if (fit == FITS) {
        offsets[count] = (uint32_t)(v->out->size - start);
        const int width = width_of(offsets[count]), large = count > 0xFF, count_width = large ? 4 : 1;
        uint8_t *p = insert_space(v, start, 1 + (size_t)count_width + (count + 1) * (size_t)width);
        *p++ = (uint8_t)(large << 4 | (width - 1) << 2 | 3);
        put_number(p, count, count_width);
        p += count_width;
        for (i = 0; i <= count; i++, p += width) put_number(p, offsets[i], width);
    }
    if (offsets != small) free(offsets);
    return fit;
}

static int by_key(const void *a, const void *b)
{
    const Member *x = a, *y = b;
    const size_t size = x->key.size < y->key.size ? x->key.size : y->key.size;
    const int order = memcmp(x->key.name, y->key.name, size);
    if (order) return order;
    if (x->key.size != y->key.size) return x->key.size < y->key.size ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

static inline int same_key(const Key *a, const Key *b)
{
    return a->size == b->size && memcmp(a->name, b->name, a->size) == 0;
}

/* The id of a key in the variant's dictionary, -1 when there are too many. */
static int key_id(Variant *v, const Key *key)
{
    for (int i = 0; i < v->key_count; i++)
        if (same_key(&v->keys[i], key)) return i;
    if (v->key_count == KEYS_MAX) return -1;
    v->keys[v->key_count] = *key;
    return v->key_count++;
}

/* Sort the members of an object, keep the last of equal keys and give them ids.
 * Returns the number kept, -1 for too many keys. */
static int sort_members(Variant *v, yyjson_val *object, Member *members)
{
    yyjson_obj_iter names = yyjson_obj_iter_with(object);
    yyjson_val *key;
    int count = 0, kept = 0;
    while ((key = yyjson_obj_iter_next(&names))) {
        members[count] = (Member){{unsafe_yyjson_get_str(key), unsafe_yyjson_get_len(key)},
                                  yyjson_obj_iter_get_val(key), (uint32_t)count, 0, 0};
        count++;
    }
    qsort(members, (size_t)count, sizeof(Member), by_key);
    for (int i = 0; i < count; i++) {
        if (i + 1 < count && same_key(&members[i].key, &members[i + 1].key)) continue;
        members[kept] = members[i];
        const int id = key_id(v, &members[kept].key);
        if (id < 0) return -1;
        members[kept++].id = (uint32_t)id;
    }
    return kept;
}

static enum fit put_variant_object(Variant *v, yyjson_val *object)
{
    const size_t given = yyjson_obj_size(object), start = v->out->size;
    Member small[24], *members = given <= 24 ? small : malloc(sizeof(Member) * given);
    enum fit fit = FITS;
    uint32_t id_max = 0;
    if (!members) return LEFT;
    const int count = given > KEYS_MAX ? -1 : sort_members(v, object, members);
    if (count < 0) fit = LEFT;
    for (int i = 0; i < count && fit == FITS; i++) {
        members[i].offset = (uint32_t)(v->out->size - start);
        if (members[i].id > id_max) id_max = members[i].id;
        fit = put_variant(v, members[i].value);
    }
    if (fit == FITS) {
        const size_t data = v->out->size - start;
        const int width = width_of(data), id_width = width_of(id_max), large = count > 0xFF;
        const size_t n = (size_t)count, count_width = large ? 4 : 1;
        uint8_t *p = insert_space(v, start, 1 + count_width + n * (size_t)id_width + (n + 1) * (size_t)width);
        *p++ = (uint8_t)(large << 6 | (id_width - 1) << 4 | (width - 1) << 2 | 2);
        put_number(p, n, (int)count_width);
        p += count_width;
        for (int i = 0; i < count; i++, p += id_width) put_number(p, members[i].id, id_width);
        for (int i = 0; i < count; i++, p += width) put_number(p, members[i].offset, width);
        put_number(p, data, width);
    }
    if (members != small) free(members);
    return fit;
}

static enum fit put_variant(Variant *v, yyjson_val *value)
{
    if (v->out->size - v->start > VARIANT_BYTES_MAX / 2) return LEFT;
    switch (unsafe_yyjson_get_type(value)) {
    case YYJSON_TYPE_STR:
        put_variant_text(v, unsafe_yyjson_get_str(value), unsafe_yyjson_get_len(value));
        return FITS;
    case YYJSON_TYPE_RAW:
        return put_variant_number(v, unsafe_yyjson_get_raw(value), unsafe_yyjson_get_len(value));
    case YYJSON_TYPE_BOOL: put_primitive(v, unsafe_yyjson_is_true(value) ? 1 : 2, "", 0); return FITS;
    case YYJSON_TYPE_NULL: put_primitive(v, 0, "", 0); return FITS;
    case YYJSON_TYPE_ARR: return put_variant_array(v, value);
    case YYJSON_TYPE_OBJ: return put_variant_object(v, value);
    default: return LEFT;
    }
}

/* The dictionary: header, count, offsets, then the keys in the order of their ids. */
static void put_dictionary(Variant *v, Buffer *out)
{
    size_t total = 0, offset = 0, count = (size_t)v->key_count;
    for (int i = 0; i < v->key_count; i++) total += v->keys[i].size;
    const int width = width_of(total > count ? total : count);
    const size_t head = 1 + (size_t)width * (count + 2);
    buffer_reserve(v->ctx, out, head + total);
    uint8_t *p = out->data + out->size, *text = p + head;
    *p++ = (uint8_t)(1 | (width - 1) << 6);
    put_number(p, count, width);
    p += width;
    for (int i = 0; i < v->key_count; i++, p += width) {
        put_number(p, offset, width);
        memcpy(text + offset, v->keys[i].name, v->keys[i].size);
        offset += v->keys[i].size;
    }
    put_number(p, offset, width);
    out->size += head + total;
}

/* Append a VARIANT to its column: the children are `value` and `metadata`. */
static enum fit fit_variant(Context *ctx, Column *c, yyjson_val *value)
{
    Column *body = &c->children[0], *dictionary = &c->children[1];
    Variant v = {.ctx = ctx, .out = &body->values, .start = body->values.size};
    if (put_variant(&v, value) != FITS || body->values.size - v.start > VARIANT_BYTES_MAX) {
        body->values.size = v.start;
        return LEFT;
    }
    put_dictionary(&v, &dictionary->values);
    put_end(ctx, body, body->values.size);
    put_present(ctx, body);
    put_end(ctx, dictionary, dictionary->values.size);
    put_present(ctx, dictionary);
    put_present(ctx, c);
    return FITS;
}
#endif
