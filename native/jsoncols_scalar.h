/* JSON texts of numbers, dates and times as values; the rules are those of
 * virta/spark/source/typed.py.
 *
 * The common spellings are read here. For the others `LEFT` is returned, and the plain engine decides
 * about the row. */
#ifndef VIRTA_JSONCOLS_SCALAR_H
#define VIRTA_JSONCOLS_SCALAR_H
#include "jsoncols_column.h"

enum fit { FITS, MISFIT, LEFT };

static inline int is_digit(char c) { return (unsigned char)(c - '0') < 10; }

/* FITS for a whole number in JSON's spelling within 64 bits; MISFIT for a fraction or an exponent. */
static enum fit read_integer(const char *s, size_t size, int64_t *value)
{
    const int negative = size && *s == '-';
    uint64_t number = 0;
    size_t i = (size_t)negative;
    if (size - i > 19 || i == size) return MISFIT;
    for (; i < size; i++) {
        if (!is_digit(s[i])) return MISFIT;
        number = number * 10 + (uint64_t)(s[i] - '0'); /* 19 digits fit in 64 bits */
    }
    if (number > (uint64_t)INT64_MAX + (uint64_t)negative) return MISFIT;
    *value = negative ? (int64_t)(0 - number) : (int64_t)number;
    return FITS;
}

/* A number as DECIMAL(precision, scale), rounded half up. Up to 36 digits and small exponents. */
static enum fit read_decimal(const char *s, size_t size, int precision, int scale, __int128 *value)
{
    size_t i = 0;
    int negative = 0, digits = 0, point = -1, exponent = 0;
    unsigned __int128 number = 0;
    if (i < size && s[i] == '-') negative = 1, i++;
    if (i == size || !is_digit(s[i])) return LEFT;
    for (; i < size && (is_digit(s[i]) || (s[i] == '.' && point < 0)); i++) {
        if (s[i] == '.') { point = digits; continue; }
        if (number || s[i] != '0' || point >= 0) digits++;
        if (digits > 36) return LEFT;
        number = number * 10 + (unsigned)(s[i] - '0');
    }
    if (i < size && (s[i] == 'e' || s[i] == 'E')) {
        int64_t given;
        i++;
        if (i < size && s[i] == '+') i++;
        if (size - i > 3 || read_integer(s + i, size - i, &given) != FITS) return LEFT;
        exponent = (int)given;
        i = size;
    }
    if (i != size) return LEFT;
    int shift = scale + exponent - (point < 0 ? 0 : digits - point);
    if (shift > 38) return number ? LEFT : (*value = 0, FITS);
    for (; shift > 0; shift--) {
        if (number > ((unsigned __int128)-1 >> 4) / 10) return number ? LEFT : FITS;
        number *= 10;
    }
    if (shift < -37) number = 0, shift = 0;
    if (shift < 0) {
        unsigned __int128 unit = 1;
        for (; shift < 0; shift++) unit *= 10;
        number = number / unit + (number % unit >= unit - unit / 2);
    }
    unsigned __int128 limit = 1;
    for (int k = 0; k < precision; k++) limit *= 10;
    if (number >= limit) return MISFIT;
    *value = negative ? -(__int128)number : (__int128)number;
    return FITS;
}

static inline int two(const char *s) { return (s[0] - '0') * 10 + (s[1] - '0'); }

static int has_shape(const char *s, const char *shape, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (shape[i] == '0' ? !is_digit(s[i]) : shape[i] != s[i]) return 0;
    return 1;
}

/* Days since 1970 of YYYY-MM-DD, years 2 to 9998: datetime has no more, in any zone. */
static enum fit read_days(const char *s, int64_t *days)
{
    static const int lengths[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    if (!has_shape(s, "0000-00-00", 10)) return LEFT;
    int64_t y = two(s) * 100 + two(s + 2);
    const int m = two(s + 5), d = two(s + 8);
    const int leap = y % 4 == 0 && (y % 100 != 0 || y % 400 == 0);
    if (y < 2 || y > 9998 || m < 1 || m > 12) return LEFT;
    if (d < 1 || d > lengths[m - 1] + (m == 2 && leap)) return LEFT;
    y -= m <= 2;
    const int64_t era = y / 400, yoe = y - era * 400;
    const int64_t doy = (153 * (m + (m > 2 ? -3 : 9)) + 2) / 5 + d - 1;
    *days = era * 146097 + yoe * 365 + yoe / 4 - yoe / 100 + doy - 719468;
    return FITS;
}

/* Nanoseconds since midnight of HH:MM:SS[.f], at most six digits: Spark 4.2 reads no more. */
static enum fit read_clock(const char *s, size_t size, int64_t *nanos)
{
    int64_t fraction = 0, unit = 1000000000;
    if (size < 8 || size > 15 || size == 9 || !has_shape(s, "00:00:00", 8)) return LEFT;
    const int h = two(s), m = two(s + 3), sec = two(s + 6);
    if (h > 23 || m > 59 || sec > 59 || (size > 8 && s[8] != '.')) return LEFT;
    for (size_t i = 9; i < size; i++) {
        if (!is_digit(s[i])) return LEFT;
        unit /= 10;
        fraction += unit * (s[i] - '0');
    }
    *nanos = (h * 3600 + m * 60 + sec) * INT64_C(1000000000) + fraction;
    return FITS;
}

enum zone { NEEDS_ZONE, MAY_HAVE_ZONE, HAS_NO_ZONE };

/* Microseconds since 1970 of YYYY-MM-DDTHH:MM:SS[.f][Z|+HH:MM]; date and time may have a blank between them
 * unless a zone is needed, as RFC 3339 does. */
static enum fit read_time(const char *s, size_t size, enum zone zone, int64_t *micros)
{
    int64_t days, fraction = 0, shift = 0;
    if (size < 19 || read_days(s, &days) != FITS) return LEFT;
    if (s[10] != 'T' && (s[10] != ' ' || zone == NEEDS_ZONE)) return LEFT;
    if (!has_shape(s + 11, "00:00:00", 8)) return LEFT;
    const int h = two(s + 11), m = two(s + 14), sec = two(s + 17);
    if (h > 23 || m > 59 || sec > 59) return LEFT;
    size_t i = 19;
    if (i < size && s[i] == '.') {
        int digits = 0;
        if (++i == size || !is_digit(s[i])) return LEFT;
        for (; i < size && is_digit(s[i]); i++)
            if (digits < 6) fraction = fraction * 10 + (s[i] - '0'), digits++;
        for (; digits < 6; digits++) fraction *= 10;
    }
    if (i == size) {
        if (zone == NEEDS_ZONE) return LEFT;
    } else if (zone == HAS_NO_ZONE) {
        return LEFT;
    } else if (!(size - i == 1 && s[i] == 'Z')) {
        if (size - i != 6 || (s[i] != '+' && s[i] != '-') || !has_shape(s + i + 1, "00:00", 5)) return LEFT;
        const int zh = two(s + i + 1), zm = two(s + i + 4);
        if (zh > 17 || zm > 59) return LEFT;
        shift = (zh * 3600 + zm * 60) * (s[i] == '-' ? -1 : 1);
    }
    *micros = (days * 86400 + h * 3600 + m * 60 + sec - shift) * 1000000 + fraction;
    return FITS;
}
#endif
