// Circles and regular expressions of Koncorde's filters in their usual spellings; `false` leaves a
// condition to virta.filters.koncorde, which reads all of them.

#include <cctype>
#include <cmath>

#include "match_source.hpp"

namespace virta {

namespace {

constexpr size_t kDistanceDigitsMax = 15;  // doubles represent these integers exactly
constexpr double kLatitudeMax = 90;
constexpr char kCircle = 1;  // as virta.match.compile.program writes shapes

// Digits and `m` or `km`.
bool read_metres(PyObject* text, double& out) {
    Text distance;
    if (!PyUnicode_CheckExact(text) || !utf8(text, distance)) return false;
    size_t digits = 0;
    long long whole = 0;
    while (digits < distance.size() && std::isdigit(static_cast<unsigned char>(distance[digits]))) {
        if (digits == kDistanceDigitsMax) return false;
        whole = whole * 10 + (distance[digits++] - '0');
    }
    const Text unit = distance.substr(digits);
    if (digits == 0 || (unit != "m" && unit != "km")) return false;
    out = static_cast<double>(whole) * (unit == "m" ? 1.0 : 1000.0);
    return true;
}

// {"lat": number, "lon": number}.
bool read_centre(PyObject* object, double& lat, double& lon) {
    if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) != 2) return false;
    Py_ssize_t at = 0, seen = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &at, &key, &value)) {
        if (!PyUnicode_CheckExact(key)) return false;
        double number;
        if (!number_of(value, number) || !std::isfinite(number)) return false;
        if (is_text(key, "lat"))
            lat = number + 0.0;  // -0.0 is 0.0
        else if (is_text(key, "lon"))
            lon = number + 0.0;
        else
            return false;
        seen++;
    }
    return seen == 2 && std::fabs(lat) <= kLatitudeMax;
}

// A pattern, or {"value": pattern, "flags": flags}.
bool read_pattern(PyObject* object, Text& pattern, Text& flags) {
    if (PyUnicode_CheckExact(object)) return utf8(object, pattern);
    if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) > 2) return false;
    bool found = false;
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &at, &key, &value)) {
        if (!PyUnicode_CheckExact(key) || !PyUnicode_CheckExact(value)) return false;
        const bool is_value = is_text(key, "value");
        if ((!is_value && !is_text(key, "flags")) || !utf8(value, is_value ? pattern : flags)) return false;
        found = found || is_value;
    }
    return found;
}

}  // namespace

bool number_of(PyObject* object, double& out) {
    if (PyFloat_CheckExact(object)) {
        out = PyFloat_AS_DOUBLE(object);
        return !std::isnan(out);
    }
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    out = static_cast<double>(value);
    return !overflow && std::fabs(out) <= kExactMax;
}

bool read_circle(Sources& sources, PyObject* value, SourceForm& out) {
    if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != 2) return false;
    PyObject *key, *member, *field = nullptr, *centre = nullptr;
    double numbers[3];  // latitude, longitude, radius
    bool has_distance = false;
    Py_ssize_t at = 0;
    while (PyDict_Next(value, &at, &key, &member)) {
        if (!PyUnicode_CheckExact(key)) return false;
        if (is_text(key, "distance")) {
            if (!read_metres(member, numbers[2])) return false;
            has_distance = true;
        } else {
            field = key;
            centre = member;
        }
    }
    Text name;
    if (!has_distance || !field || !utf8(field, name) || !read_centre(centre, numbers[0], numbers[1]))
        return false;
    const Kept kept(field);
    const PathRef path = sources.path('f', name);
    if (!path) return false;
    out = SourceForm();
    out.path = path;
    std::string operand(1, kCircle);
    append_length(operand, 3);
    out.text = "{\"geo_distance\":[" + path->text;
    const char* const names[] = {",{\"lat\":", ",\"lon\":", ",\"radius\":"};
    for (int i = 0; i < 3; i++) {
        out.text += names[i];
        append_digits(out.text, numbers[i]);
        append_double(operand, numbers[i]);
    }
    out.text += "}]}";
    append_literal_code(out.code, kPointOp, path->code, operand);
    return true;
}

bool read_regexp(Sources& sources, PyObject* value, SourceForm& out) {
    PyObject *field, *given;
    Text name, text, flags;
    if (!one_member(value, field, given) || !utf8(field, name)) return false;
    const Kept kept(field), kept_given(given);
    if (!read_pattern(given, text, flags)) return false;
    const std::string pattern_text(text), flags_text(flags);  // callbacks may change the source
    const PathRef path = sources.path('f', name);
    const PatternRef pattern = path ? sources.pattern(pattern_text, flags_text) : nullptr;
    if (!pattern) return false;
    out = SourceForm();
    out.path = path;
    out.text = "{\"regexp\":[" + path->text + "," + pattern->text + "]}";
    append_literal_code(out.code, pattern->op, path->code, pattern->operand);
    return true;
}

}  // namespace virta
