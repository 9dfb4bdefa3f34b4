/* Columns under construction: growing buffers in Arrow's layout, one tree of columns per schema.
 *
 * Every append is checked: memory that runs out, or offsets beyond Arrow's int32, leave by `longjmp`.
 * A column can be cut back to an earlier length, which is how a list that does not fit, and a whole
 * row, are taken back. */
#ifndef VIRTA_JSONCOLS_COLUMN_H
#define VIRTA_JSONCOLS_COLUMN_H
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum kind {
    BOOLEAN, INT8, INT16, INT32, INT64, FLOAT, DOUBLE, DECIMAL, STRING, BINARY, DATE, TIMESTAMP,
    TIMESTAMP_NTZ, CLOCK, LIST, MAP, STRUCT, VARIANT, KINDS,
};
enum failure { NO_MEMORY = 1, TOO_LARGE = 2 };

typedef struct { uint8_t *data; size_t size, capacity; } Buffer;

typedef struct Column {
    enum kind kind;
    int precision, scale;
    char *name;
    size_t name_size;
    int child_count;
    struct Column *children;
    int64_t length, nulls;
    Buffer validity, values, ends; /* ends: int32, also of lists and maps */
} Column;

typedef struct { jmp_buf fail; } Context;

static void buffer_reserve(Context *ctx, Buffer *b, size_t more)
{
    if (b->size + more <= b->capacity) return;
    size_t capacity = (b->size + more) * 2 + 64;
    uint8_t *data = realloc(b->data, capacity);
    if (!data) longjmp(ctx->fail, NO_MEMORY);
    b->data = data;
    b->capacity = capacity;
}

static inline void buffer_put(Context *ctx, Buffer *b, const void *data, size_t size)
{
    if (!size) return; /* also of a buffer that has no memory yet */
    buffer_reserve(ctx, b, size);
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

static inline int has_ends(enum kind kind)
{
    return kind == STRING || kind == BINARY || kind == LIST || kind == MAP;
}

static inline size_t fixed_width(enum kind kind)
{
    switch (kind) {
    case INT8: return 1;
    case INT16: return 2;
    case INT32: case FLOAT: case DATE: return 4;
    case INT64: case DOUBLE: case TIMESTAMP: case TIMESTAMP_NTZ: case CLOCK: return 8;
    case DECIMAL: return 16;
    default: return 0;
    }
}

/* Set the last bit of a bitmap of `length` + 1 bits. */
static inline void put_bit(Context *ctx, Buffer *b, int64_t length, int bit)
{
    if ((length & 7) == 0) {
        const uint8_t none = 0;
        buffer_put(ctx, b, &none, 1);
    }
    uint8_t mask = (uint8_t)(1u << (length & 7)), *byte = b->data + (length >> 3);
    *byte = (uint8_t)(bit ? *byte | mask : *byte & ~mask);
}

static inline void put_end(Context *ctx, Column *c, size_t end)
{
    if (end > INT32_MAX) longjmp(ctx->fail, TOO_LARGE);
    if (!c->ends.size) {
        const int32_t zero = 0;
        buffer_put(ctx, &c->ends, &zero, 4);
    }
    const int32_t at = (int32_t)end;
    buffer_put(ctx, &c->ends, &at, 4);
}

/* Mark the value just appended as present. */
static inline void put_present(Context *ctx, Column *c)
{
    put_bit(ctx, &c->validity, c->length, 1);
    c->length++;
}

static inline void put_fixed(Context *ctx, Column *c, const void *value, size_t width)
{
    buffer_put(ctx, &c->values, value, width);
    put_present(ctx, c);
}

static inline void put_bytes(Context *ctx, Column *c, const void *data, size_t size)
{
    buffer_put(ctx, &c->values, data, size);
    put_end(ctx, c, c->values.size);
    put_present(ctx, c);
}

static void put_null(Context *ctx, Column *c)
{
    static const uint8_t zeros[16];
    if (c->kind == STRUCT || c->kind == VARIANT)
        for (int i = 0; i < c->child_count; i++) {
            /* The parts of a VARIANT are never null themselves. */
            if (c->kind == VARIANT) put_bytes(ctx, &c->children[i], zeros, 0);
            else put_null(ctx, &c->children[i]);
        }
    else if (c->kind == LIST || c->kind == MAP) put_end(ctx, c, (size_t)c->children[0].length);
    else if (has_ends(c->kind)) put_end(ctx, c, c->values.size);
    else if (c->kind == BOOLEAN) put_bit(ctx, &c->values, c->length, 0);
    else buffer_put(ctx, &c->values, zeros, fixed_width(c->kind));
    put_bit(ctx, &c->validity, c->length, 0);
    c->length++;
    c->nulls++;
}

/* Forget the values from `length` on, also of children that are ahead of their column. */
static void cut(Column *c, int64_t length)
{
    for (int64_t i = length; i < c->length; i++)
        c->nulls -= !(c->validity.data[i >> 3] >> (i & 7) & 1);
    c->length = length;
    c->validity.size = (size_t)(length + 7) >> 3;
    if (has_ends(c->kind)) {
        int32_t end = 0;
        if (c->ends.size) {
            memcpy(&end, c->ends.data + 4 * length, 4);
            c->ends.size = 4 * (size_t)(length + 1);
        }
        if (c->kind == LIST || c->kind == MAP)
            for (int i = 0; i < c->child_count; i++) cut(&c->children[i], end);
        else c->values.size = (size_t)end;
    } else if (c->kind == STRUCT || c->kind == VARIANT) {
        for (int i = 0; i < c->child_count; i++) cut(&c->children[i], length);
    } else if (c->kind == BOOLEAN) {
        c->values.size = (size_t)(length + 7) >> 3;
    } else {
        c->values.size = fixed_width(c->kind) * (size_t)length;
    }
}

static void buffer_free(Buffer *b)
{
    free(b->data);
    *b = (Buffer){NULL, 0, 0};
}

/* Empty a column and its children. */
static void column_clear(Column *c)
{
    buffer_free(&c->validity);
    buffer_free(&c->values);
    buffer_free(&c->ends);
    c->length = c->nulls = 0;
    for (int i = 0; i < c->child_count; i++) column_clear(&c->children[i]);
}

static void column_free(Column *c)
{
    for (int i = 0; i < c->child_count; i++) column_free(&c->children[i]);
    column_clear(c);
    free(c->children);
    free(c->name);
    c->child_count = 0;
    c->children = NULL;
    c->name = NULL;
}
#endif
