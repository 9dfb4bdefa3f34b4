/* CloudEvents in JSON straight to Arrow columns: attributes, time, extensions, and data of any type.
 *
 * Each value is parsed once by yyjson with its numbers as text, so that an integer is read only where
 * a column wants one and decimals are exact. Only the columns of the plan are made. What is unusual
 * (no JSON, an attribute that is not text, data_base64, odd spellings) is null in every column, and
 * the number of its row is returned: the plain engine, virta/spark/source/events.py, decodes those
 * rows and has the last word about them.
 *
 * The result is an ArrowArray of the C data interface, without a schema: names and types are Spark's. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define YYJSON_DISABLE_WRITER 1
#define YYJSON_DISABLE_UTILS 1
#include "vendor/yyjson/yyjson.c"
#include "jsoncols_variant.h"

#define EVENT_BYTES_MAX (10 * 1024 * 1024)
#define DEPTH_MAX 900
#define EXTENSIONS_MAX 32 /* of one event; more are left to the plain engine */
#define CHILDREN_MAX 4096

struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

enum role { ID, SOURCE, TYPE, SPECVERSION, DATACONTENTTYPE, DATASCHEMA, SUBJECT, TEXTS, TIME = TEXTS,
            EXTENSIONS, DATA, DATA_BINARY, INVALID, RESCUED, ROLES };
static const char *const ATTRIBUTES[] = {
    "id", "source", "type", "specversion", "datacontenttype", "dataschema", "subject", "time",
};

typedef struct {
    Column root; /* a struct of the event columns */
    Column *by_role[ROLES];
    uint8_t *pool; /* yyjson's memory, reused for all values */
    size_t pool_size;
    int64_t misfits;
} Plan;

typedef struct { Plan *plan; Context ctx; int misfit; const char *text; size_t size; } Row;

/* ---- data of a type --------------------------------------------------------------------------------- */

static enum fit fit_value(Row *row, Column *c, yyjson_val *value);

static enum fit fit_integer(Row *row, Column *c, yyjson_val *value)
{
    int64_t number;
    if (!yyjson_is_raw(value)) return MISFIT;
    const char *raw = unsafe_yyjson_get_raw(value);
    if (read_integer(raw, unsafe_yyjson_get_len(value), &number) != FITS) return MISFIT;
    const size_t width = fixed_width(c->kind);
    const int64_t limit = width == 8 ? INT64_MAX : ((int64_t)1 << (8 * width - 1)) - 1;
    if (number > limit || number < -limit - 1) return MISFIT;
    put_fixed(&row->ctx, c, &number, width);
    return FITS;
}

static enum fit fit_real(Row *row, Column *c, yyjson_val *value)
{
    yyjson_val number;
    if (yyjson_is_str(value)) return strchr("NI+-", *unsafe_yyjson_get_str(value)) ? LEFT : MISFIT;
    if (!yyjson_is_raw(value)) return MISFIT;
    const char *raw = unsafe_yyjson_get_raw(value);
    if (!yyjson_read_number(raw, &number, 0, NULL, NULL)) return LEFT;
    double real = yyjson_get_num(&number);
    /* Minus zero is an integer to Spark. */
    if (raw[0] == '-' && raw[1] == '0' && unsafe_yyjson_get_len(value) == 2) real = 0;
    const float single = (float)real;
    if (c->kind == FLOAT) put_fixed(&row->ctx, c, &single, 4);
    else put_fixed(&row->ctx, c, &real, 8);
    return FITS;
}

static enum fit fit_decimal(Row *row, Column *c, yyjson_val *value)
{
    __int128 number;
    if (!yyjson_is_raw(value) && !yyjson_is_str(value)) return MISFIT;
    const char *text = unsafe_yyjson_get_str(value);
    const enum fit fit = read_decimal(text, unsafe_yyjson_get_len(value), c->precision, c->scale, &number);
    if (fit == FITS) put_fixed(&row->ctx, c, &number, 16);
    return fit;
}

static enum fit fit_text(Row *row, Column *c, yyjson_val *value)
{
    if (yyjson_is_ctn(value)) return LEFT;
    if (yyjson_is_bool(value)) {
        const int is_true = unsafe_yyjson_is_true(value);
        put_bytes(&row->ctx, c, is_true ? "true" : "false", is_true ? 4 : 5);
    } else {
        put_bytes(&row->ctx, c, unsafe_yyjson_get_str(value), unsafe_yyjson_get_len(value));
    }
    return FITS;
}

static enum fit fit_time(Row *row, Column *c, yyjson_val *value)
{
    int64_t number = 0;
    enum fit fit = MISFIT;
    const int is_text = yyjson_is_str(value);
    const char *text = is_text || yyjson_is_raw(value) ? unsafe_yyjson_get_str(value) : "";
    const size_t size = *text ? unsafe_yyjson_get_len(value) : 0;
    if (c->kind == CLOCK) {
        if (is_text) fit = read_clock(text, size, &number);
    } else if (c->kind == DATE) {
        if (is_text) fit = size == 10 ? read_days(text, &number) : LEFT;
    } else if (is_text) {
        fit = read_time(text, size, c->kind == TIMESTAMP ? MAY_HAVE_ZONE : HAS_NO_ZONE, &number);
    } else if (c->kind == TIMESTAMP && size) {
        const int64_t most = INT64_MAX / 1000000 - 1;
        fit = read_integer(text, size, &number);
        if (fit == FITS && (number > most || number < -most)) fit = LEFT;
        number *= fit == FITS ? 1000000 : 0;
    }
    if (fit == FITS) put_fixed(&row->ctx, c, &number, fixed_width(c->kind));
    return fit;
}

static enum fit fit_list(Row *row, Column *c, yyjson_val *value)
{
    Column *child = &c->children[0];
    const int64_t start = child->length;
    yyjson_arr_iter items = yyjson_arr_iter_with(value);
    yyjson_val *item;
    if (!yyjson_is_arr(value)) return MISFIT;
    while ((item = yyjson_arr_iter_next(&items))) {
        const enum fit fit = fit_value(row, child, item);
        if (fit == FITS) continue;
        cut(child, start);
        return fit;
    }
    put_end(&row->ctx, c, (size_t)child->length);
    put_present(&row->ctx, c);
    return FITS;
}

static enum fit fit_map(Row *row, Column *c, yyjson_val *value)
{
    Column *pairs = &c->children[0];
    const int64_t start = pairs->length;
    yyjson_obj_iter names = yyjson_obj_iter_with(value);
    yyjson_val *key, *known[64];
    int count = 0;
    if (!yyjson_is_obj(value)) return MISFIT;
    while ((key = yyjson_obj_iter_next(&names))) {
        enum fit fit = count == 64 ? LEFT : FITS;
        for (int i = 0; i < count && fit == FITS; i++)
            if (unsafe_yyjson_equals_strn(known[i], unsafe_yyjson_get_str(key), unsafe_yyjson_get_len(key)))
                fit = LEFT; /* a repeated key: the plain engine keeps the last */
        if (fit == FITS) {
            known[count++] = key;
            put_bytes(&row->ctx, &pairs->children[0], unsafe_yyjson_get_str(key), unsafe_yyjson_get_len(key));
            fit = fit_value(row, &pairs->children[1], yyjson_obj_iter_get_val(key));
        }
        if (fit != FITS) {
            cut(pairs, start);
            return fit;
        }
        put_present(&row->ctx, pairs);
    }
    put_end(&row->ctx, c, (size_t)pairs->length);
    put_present(&row->ctx, c);
    return FITS;
}

static enum fit fit_struct(Row *row, Column *c, yyjson_val *value)
{
    yyjson_obj_iter names = yyjson_obj_iter_with(value);
    yyjson_val *key, *small[32], **found = small;
    enum fit fit = FITS;
    int next = 0;
    if (!yyjson_is_obj(value)) return MISFIT;
    if (c->child_count > 32 && !(found = malloc(sizeof(*found) * (size_t)c->child_count))) return LEFT;
    memset(found, 0, sizeof(*found) * (size_t)c->child_count);
    while ((key = yyjson_obj_iter_next(&names))) {
        const char *name = unsafe_yyjson_get_str(key);
        const size_t size = unsafe_yyjson_get_len(key);
        /* Members mostly come in the order of the fields: begin behind the last hit. */
        for (int i = 0, at = next; i < c->child_count; i++, at++) {
            if (at >= c->child_count) at = 0;
            if (c->children[at].name_size != size || memcmp(c->children[at].name, name, size) != 0) continue;
            found[at] = yyjson_obj_iter_get_val(key);
            next = at + 1;
            break;
        }
    }
    for (int i = 0; i < c->child_count && fit != LEFT; i++) {
        fit = found[i] ? fit_value(row, &c->children[i], found[i]) : FITS;
        if (fit == MISFIT) row->misfit = 1;
        if (fit == MISFIT || !found[i]) put_null(&row->ctx, &c->children[i]);
    }
    if (found != small) free(found);
    if (fit == LEFT) return LEFT;
    put_present(&row->ctx, c);
    return FITS;
}

/* Append a value to a column. MISFIT appends nothing; LEFT may leave columns uneven: the row is cut then. */
static enum fit fit_value(Row *row, Column *c, yyjson_val *value)
{
    if (c->kind == VARIANT) return fit_variant(&row->ctx, c, value);
    if (yyjson_is_null(value)) {
        put_null(&row->ctx, c);
        return FITS;
    }
    switch (c->kind) {
    case BOOLEAN:
        if (!yyjson_is_bool(value)) return MISFIT;
        put_bit(&row->ctx, &c->values, c->length, unsafe_yyjson_is_true(value));
        put_present(&row->ctx, c);
        return FITS;
    case INT8: case INT16: case INT32: case INT64: return fit_integer(row, c, value);
    case FLOAT: case DOUBLE: return fit_real(row, c, value);
    case DECIMAL: return fit_decimal(row, c, value);
    case STRING: return fit_text(row, c, value);
    case BINARY: return yyjson_is_str(value) ? LEFT : MISFIT;
    case DATE: case TIMESTAMP: case TIMESTAMP_NTZ: case CLOCK: return fit_time(row, c, value);
    case LIST: return fit_list(row, c, value);
    case MAP: return fit_map(row, c, value);
    case STRUCT: return fit_struct(row, c, value);
    default: return LEFT;
    }
}

/* ---- an event --------------------------------------------------------------------------------------- */

/* The text of the value behind a key, in the event's own bytes; 0 if the key is not spelled plainly. */
static size_t span_of(const Row *row, const yyjson_doc *doc, yyjson_val *key, const char **start)
{
    const size_t at = (size_t)(unsafe_yyjson_get_str(key) - doc->str_pool), size = unsafe_yyjson_get_len(key);
    const char *p = row->text + at + size, *end = row->text + row->size;
    if (at + size >= row->size || *p != '"' || memcmp(row->text + at, "data", size) != 0) return 0;
    p++;
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r' || *p == ':')) p++;
    *start = p;
    for (int depth = 0, is_first = 1; p < end; is_first = 0) {
        if (!is_first && depth == 0 && strchr(",]} \t\n\r", *p)) break;
        const char c = *p++;
        if (c == '"') {
            for (; p < end && *p != '"'; p++)
                if (*p == '\\') p++;
            p++;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            depth--;
        } else {
            continue;
        }
        if (depth == 0) break;
    }
    return p <= end ? (size_t)(p - *start) : 0;
}

static enum fit put_data(Row *row, const yyjson_doc *doc, yyjson_val *key, yyjson_val *value)
{
    Column *c = row->plan->by_role[DATA], *rescued = row->plan->by_role[RESCUED];
    const char *text = NULL;
    if (c && c->kind == STRING && value && yyjson_is_ctn(value)) {
        const size_t size = span_of(row, doc, key, &text);
        if (!size) return LEFT;
        put_bytes(&row->ctx, c, text, size);
    } else if (c) {
        const enum fit fit = value ? fit_value(row, c, value) : FITS;
        if (fit == LEFT) return LEFT;
        if (fit == MISFIT) row->misfit = 1;
        if (fit == MISFIT || !value) put_null(&row->ctx, c);
    }
    row->plan->misfits += row->misfit;
    if (!rescued) return FITS;
    if (!row->misfit) {
        put_null(&row->ctx, rescued);
        return FITS;
    }
    const size_t size = span_of(row, doc, key, &text);
    if (!size) return LEFT;
    put_bytes(&row->ctx, rescued, text, size);
    return FITS;
}

static enum fit put_extensions(Row *row, Column *c, yyjson_val **keys, int count)
{
    Column *pairs = &c->children[0];
    for (int i = 0; i < count; i++) {
        yyjson_val *value = yyjson_obj_iter_get_val(keys[i]);
        const char *name = unsafe_yyjson_get_str(keys[i]);
        const size_t size = unsafe_yyjson_get_len(keys[i]);
        int64_t number;
        for (int k = 0; k < i; k++)
            if (unsafe_yyjson_equals_strn(keys[k], name, size)) return LEFT;
        if (yyjson_is_raw(value)) {
            const char *raw = unsafe_yyjson_get_raw(value);
            if (!strncmp(raw, "-0", 2)) return LEFT;
            if (read_integer(raw, unsafe_yyjson_get_len(value), &number) != FITS) return LEFT;
        } else if (!yyjson_is_str(value) && !yyjson_is_bool(value)) {
            return LEFT;
        }
        put_bytes(&row->ctx, &pairs->children[0], name, size);
        if (fit_text(row, &pairs->children[1], value) != FITS) return LEFT;
        put_present(&row->ctx, pairs);
    }
    put_end(&row->ctx, c, (size_t)pairs->length);
    put_present(&row->ctx, c);
    return FITS;
}

static int role_of(const char *name, size_t size)
{
    for (int i = 0; i <= TIME; i++)
        if (name[0] == ATTRIBUTES[i][0] && strlen(ATTRIBUTES[i]) == size &&
            !memcmp(name, ATTRIBUTES[i], size)) return i;
    return size == 4 && !memcmp(name, "data", 4) ? DATA : -1;
}

static enum fit put_event(Row *row, const yyjson_doc *doc, yyjson_val *root)
{
    Plan *plan = row->plan;
    yyjson_obj_iter names = yyjson_obj_iter_with(root);
    yyjson_val *key, *found[ROLES] = {NULL}, *extensions[EXTENSIONS_MAX], *data_key = NULL;
    int count = 0;
    if (!yyjson_is_obj(root)) return LEFT;
    while ((key = yyjson_obj_iter_next(&names))) {
        const char *name = unsafe_yyjson_get_str(key);
        const size_t size = unsafe_yyjson_get_len(key);
        const int role = size ? role_of(name, size) : -1;
        yyjson_val *value = yyjson_obj_iter_get_val(key);
        if (role == DATA) {
            data_key = key;
        } else if (role >= 0) {
            if (!yyjson_is_str(value)) return LEFT;
        } else {
            if (size == 11 && !memcmp(name, "data_base64", 11)) return LEFT;
            if (count == EXTENSIONS_MAX) return LEFT;
            extensions[count++] = key;
            continue;
        }
        found[role] = value;
    }
    if (!found[ID] || !found[SOURCE]) return LEFT;
    for (int i = 0; i < TEXTS; i++) {
        Column *c = plan->by_role[i];
        if (!c) continue;
        if (!found[i] || !unsafe_yyjson_get_len(found[i])) put_null(&row->ctx, c);
        else put_bytes(&row->ctx, c, unsafe_yyjson_get_str(found[i]), unsafe_yyjson_get_len(found[i]));
    }
    if (plan->by_role[TIME]) {
        int64_t micros;
        if (!found[TIME]) put_null(&row->ctx, plan->by_role[TIME]);
        else if (read_time(unsafe_yyjson_get_str(found[TIME]), unsafe_yyjson_get_len(found[TIME]), NEEDS_ZONE,
                           &micros) != FITS) return LEFT;
        else put_fixed(&row->ctx, plan->by_role[TIME], &micros, 8);
    }
    if (plan->by_role[DATA_BINARY]) put_null(&row->ctx, plan->by_role[DATA_BINARY]);
    if (plan->by_role[INVALID]) put_null(&row->ctx, plan->by_role[INVALID]);
    if (plan->by_role[EXTENSIONS] &&
        put_extensions(row, plan->by_role[EXTENSIONS], extensions, count) != FITS) return LEFT;
    return put_data(row, doc, data_key, found[DATA]);
}

static int nests_too_much(const char *text, size_t size, const yyjson_doc *doc)
{
    size_t brackets = 0;
    if (doc->val_read <= DEPTH_MAX) return 0;
    for (size_t i = 0; i < size; i++) brackets += (text[i] == '[') + (text[i] == '{');
    return brackets > DEPTH_MAX;
}

/* Decode one value into the columns; 0 if it is left to the plain engine, with a row of nulls. */
static int put_row(Row *row, const char *text, size_t size)
{
    Plan *plan = row->plan;
    const yyjson_read_flag flags = YYJSON_READ_NUMBER_AS_RAW;
    enum fit fit = LEFT;
    row->misfit = 0;
    row->text = text;
    row->size = size;
    const int64_t misfits = plan->misfits;
    if (size && size <= EVENT_BYTES_MAX) {
        const size_t need = yyjson_read_max_memory_usage(size, flags);
        if (need > plan->pool_size) {
            free(plan->pool);
            plan->pool_size = 0;
            if (!(plan->pool = malloc(need * 2))) longjmp(row->ctx.fail, NO_MEMORY);
            plan->pool_size = need * 2;
        }
        yyjson_alc alc;
        yyjson_alc_pool_init(&alc, plan->pool, plan->pool_size);
        yyjson_doc *doc = yyjson_read_opts((char *)(uintptr_t)text, size, flags, &alc, NULL);
        if (doc && !nests_too_much(text, size, doc)) fit = put_event(row, doc, doc->root);
    }
    if (fit == FITS) {
        put_present(&row->ctx, &plan->root);
        return 1;
    }
    plan->misfits = misfits;
    for (int i = 0; i < plan->root.child_count; i++) cut(&plan->root.children[i], plan->root.length);
    for (int i = 0; i < plan->root.child_count; i++) put_null(&row->ctx, &plan->root.children[i]);
    put_present(&row->ctx, &plan->root);
    return 0;
}
#include "jsoncols_module.h"
