// What a text starts with if a regular expression (RE2's syntax) is found in it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace virta {

// Characters: what most values start with finds too much, and an event is looked up under each length in use.
constexpr size_t kStartMin = 3, kStartMax = 16;

// The position behind a class of characters that begins at `at`; `end` if it does not end.
inline const char* skip_class(const char* at, const char* end) {
    at++;
    if (at < end && *at == '^') at++;
    for (bool first = true; at < end; first = false) {
        if (*at == ']' && !first) return at + 1;
        if (*at == '\\') {
            at += 2;
        } else if (*at == '[' && at + 1 < end && at[1] == ':') {
            const void* name_end = memmem(at + 2, static_cast<size_t>(end - at - 2), ":]", 2);
            at = name_end ? static_cast<const char*>(name_end) + 2 : at + 1;
        } else {
            at++;
        }
    }
    return end;
}

// Whether the pattern is alternatives, or may be.
inline bool has_alternatives(const char* at, const char* end) {
    int depth = 0;
    while (at < end) {
        if (*at == '[') {
            at = skip_class(at, end);
            continue;
        }
        if (*at == '\\') {
            if (at + 1 < end && at[1] == 'Q') return true;  // quoted up to \E: not followed here
            at += 2;
            continue;
        }
        depth += *at == '(' ? 1 : *at == ')' ? -1 : 0;
        if (*at == '|' && depth == 0) return true;
        at++;
    }
    return false;
}

// The literal text after `^`, in ASCII, as far as nothing repeats it; empty where there is none, or a short
// one. `pattern` is the flags, NUL and the expression.
inline std::string literal_start(const char* pattern, size_t length) {
    const char* end = pattern + length;
    const char* at = static_cast<const char*>(memchr(pattern, 0, length));
    if (!at) return {};
    // Of the flags only `s` leaves it as it is.
    for (const char* flag = pattern; flag < at; flag++)
        if (*flag != 's') return {};
    at++;
    if (at == end || *at != '^' || has_alternatives(at, end)) return {};
    std::string start;
    for (at++; at < end; at++) {
        char one = *at;
        if (one == '\\' && at + 1 < end && strchr(".+*?()|[]{}^$\\-/", at[1]) && at[1]) {
            one = *++at;
        } else if (one < ' ' || one > '~' || strchr("\\.+*?()|[]{}^$", one)) {
            // `*`, `?` and `{` may leave out the character before them.
            if (strchr("*+?{", one) && one && !start.empty()) start.pop_back();
            break;
        }
        start += one;
    }
    if (start.size() < kStartMin) return {};
    return start.substr(0, kStartMax);
}

}  // namespace virta
