/* Scan JSON without building values: for hot loops that want a few members of an object and its end.
 *
 * Invariant: what is accepted is JSON that every reader of ours accepts. Anything uncommon (line ends,
 * lone surrogates, long numbers, deep nesting, errors) is not accepted: a plain reader has to look at
 * it. Texts are not checked to be UTF-8; `wide` says whether that is left to do. */
#ifndef VIRTA_JSON_SCAN_H
#define VIRTA_JSON_SCAN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define DEPTH_MAX 60             /* of an event; every JSON reader accepts that */
#define NUMBER_CHARS_MAX 40      /* with an exponent of two digits that is within a double */

typedef struct { const uint8_t *at, *end; int wide; } Text; /* wide: has a byte beyond ASCII */
typedef struct { const uint8_t *at; uint32_t size; } Span;

/* All of these return 0 if the text is not of the expected form. */

static inline void skip_space(Text *t)
{
    while (t->at < t->end && (*t->at == ' ' || *t->at == '\t')) t->at++;
}

static inline int read_char(Text *t, uint8_t c)
{
    if (t->at == t->end || *t->at != c) return 0;
    t->at++;
    return 1;
}

/* Skip to the next quote, backslash, control character or the end; set `wide` for bytes beyond ASCII. */
static inline void skip_plain(Text *t)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), last = _mm_set1_epi8(0x1F);
    while (t->end - t->at >= 16) {
        __m128i some = _mm_loadu_si128((const __m128i *)t->at);
        __m128i ends = _mm_or_si128(_mm_cmpeq_epi8(some, quote), _mm_cmpeq_epi8(some, slash));
        ends = _mm_or_si128(ends, _mm_cmpeq_epi8(_mm_min_epu8(some, last), some));
        unsigned stop = (unsigned)_mm_movemask_epi8(ends), wide = (unsigned)_mm_movemask_epi8(some);
        if (stop) {
            unsigned n = (unsigned)__builtin_ctz(stop);
            t->wide |= (wide & ((1u << n) - 1)) != 0;
            t->at += n;
            return;
        }
        t->wide |= wide != 0;
        t->at += 16;
    }
#endif
    for (; t->at < t->end && *t->at != '"' && *t->at != '\\' && *t->at >= 0x20; t->at++)
        t->wide |= *t->at >= 0x80;
}

/* Read four hexadecimal digits; -1 if they are not. */
static int hex4(Text *t)
{
    int value = 0;
    if (t->end - t->at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = *t->at++, lower = c | 32;
        int digit = c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* Skip what follows a backslash; surrogates only in pairs. */
static int skip_escape(Text *t)
{
    if (t->at == t->end) return 0;
    switch (*t->at++) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return 1;
    case 'u':
        break;
    default:
        return 0;
    }
    int unit = hex4(t);
    if (unit < 0 || (unit & 0xFC00) == 0xDC00) return 0;
    if ((unit & 0xFC00) != 0xD800) return 1;
    return read_char(t, '\\') && read_char(t, 'u') && (hex4(t) & ~0x3FF) == 0xDC00;
}

/* Skip the rest of a string after its opening quote. */
static inline int skip_string(Text *t)
{
    for (;;) {
        skip_plain(t);
        if (t->at == t->end) return 0;
        uint8_t c = *t->at++;
        if (c == '"') return 1;
        if (c != '\\' || !skip_escape(t)) return 0;
    }
}

/* Read a string without escapes; the span is the text between its quotes. */
static inline int read_text(Text *t, Span *span)
{
    if (!read_char(t, '"')) return 0;
    span->at = t->at;
    skip_plain(t);
    span->size = (uint32_t)(t->at - span->at);
    return read_char(t, '"');
}

/* Read the name of a member without escapes, and the colon after it. */
static inline int read_name(Text *t, Span *name)
{
    skip_space(t);
    if (!read_text(t, name)) return 0;
    skip_space(t);
    if (!read_char(t, ':')) return 0;
    skip_space(t);
    return 1;
}

static inline size_t skip_digits(Text *t)
{
    const uint8_t *first = t->at;
    while (t->at < t->end && *t->at >= '0' && *t->at <= '9') t->at++;
    return (size_t)(t->at - first);
}

static int skip_number(Text *t)
{
    const uint8_t *first = t->at;
    (void)read_char(t, '-');
    if (!read_char(t, '0') && !skip_digits(t)) return 0;
    if (read_char(t, '.') && !skip_digits(t)) return 0;
    if (t->at < t->end && (*t->at | 32) == 'e') {
        t->at++;
        if (!read_char(t, '+')) (void)read_char(t, '-');
        size_t digits = skip_digits(t);
        if (digits < 1 || digits > 2) return 0;
    }
    return t->at - first <= NUMBER_CHARS_MAX;
}

static int skip_word(Text *t, const char *word, size_t size)
{
    if ((size_t)(t->end - t->at) < size || memcmp(t->at, word, size) != 0) return 0;
    t->at += size;
    return 1;
}

/* Skip a string, a number or a literal. */
static inline int skip_scalar(Text *t)
{
    if (t->at == t->end) return 0;
    switch (*t->at) {
    case '"': t->at++; return skip_string(t);
    case 't': return skip_word(t, "true", 4);
    case 'f': return skip_word(t, "false", 5);
    case 'n': return skip_word(t, "null", 4);
    default: return skip_number(t);
    }
}

static inline int skip_name(Text *t)
{
    skip_space(t);
    if (!read_char(t, '"') || !skip_string(t)) return 0;
    skip_space(t);
    return read_char(t, ':');
}

/* Skip any value. `objects` has a bit for each open bracket: whether it is a brace. */
static int skip_value(Text *t)
{
    uint64_t objects = 0;
    int depth = 0;
    for (;;) {
        skip_space(t);
        if (t->at == t->end) return 0;
        int brace = *t->at == '{';
        if (brace || *t->at == '[') {
            if (depth == DEPTH_MAX) return 0;
            t->at++;
            skip_space(t);
            objects = objects << 1 | (uint64_t)brace;
            depth++;
            if (t->at < t->end && *t->at != (brace ? '}' : ']')) {
                if (brace && !skip_name(t)) return 0;
                continue;
            }
        } else if (!skip_scalar(t)) {
            return 0;
        }
        while (depth) { /* after a value: its container continues or ends */
            skip_space(t);
            if (read_char(t, ',')) {
                if (objects & 1 && !skip_name(t)) return 0;
                break;
            }
            if (!read_char(t, objects & 1 ? '}' : ']')) return 0;
            objects >>= 1;
            depth--;
        }
        if (!depth) return 1;
    }
}

#define IS(span, text) ((span).size == sizeof(text) - 1 && memcmp((span).at, text, sizeof(text) - 1) == 0)

/* The scan does not check UTF-8: decode a text that is not ASCII. */
static int is_utf8(const uint8_t *first, const uint8_t *end)
{
    PyObject *text = PyUnicode_DecodeUTF8((const char *)first, end - first, NULL);
    if (!text) PyErr_Clear();
    Py_XDECREF(text);
    return text != NULL;
}

#endif
