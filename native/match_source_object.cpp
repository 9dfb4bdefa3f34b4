// The common forms of Koncorde's filters and of CloudEvents' filter dialects, both objects. The rules are
// those of virta.filters.koncorde and virta.filters.cloudevents; `bool` is read as Koncorde rewrites it.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "match_source.hpp"

namespace virta {

namespace {

bool one_field(PyObject* object, Text& name, PyObject*& value) {
    PyObject* key;
    return one_member(object, key, value) && utf8(key, name);
}

bool scalar_of(PyObject* object, SourceScalar& out) {
    double number;
    Text text;
    if (object == Py_None) {
        out = SourceScalar();
    } else if (PyBool_Check(object)) {
        out = SourceScalar::of(object == Py_True);
    } else if (PyUnicode_CheckExact(object)) {
        if (!utf8(object, text)) return false;
        out = SourceScalar::of(text);
    } else {
        if (!number_of(object, number)) return false;
        out = SourceScalar::of(number);
    }
    return true;
}

class KoncordeReader {
  public:
    explicit KoncordeReader(Sources& sources) : sources_(sources) {}

    bool read(PyObject* object, bool positive, int depth, SourceForm& out) {
        PyObject *keyword, *value;
        if (depth > kSourceDepthMax || !one_member(object, keyword, value)) return false;
        const Kept kept(object), kept_keyword(keyword), kept_value(value);
        if (is_text(keyword, "equals")) return read_equals(value, positive, out);
        if (is_text(keyword, "and")) return read_list(value, positive, positive, depth, out);
        if (is_text(keyword, "range")) return read_range(value, positive, out);
        if (is_text(keyword, "or")) return read_list(value, positive, !positive, depth, out);
        if (is_text(keyword, "not")) return read(value, !positive, depth + 1, out);
        if (is_text(keyword, "exists")) return read_exists(value, positive, out);
        if (is_text(keyword, "missing")) return read_exists(value, !positive, out);
        if (is_text(keyword, "in")) return read_in(value, positive, out);
        if (is_text(keyword, "ids")) return read_ids(value, positive, out);
        if (is_text(keyword, "bool")) return read_bool(value, positive, depth, out);
        if (positive) {
            if (is_text(keyword, "match")) return read_match(value, keyword, out);
            if (is_text(keyword, "geoDistance") && read_circle(sources_, value, out)) return true;
            if (is_text(keyword, "regexp") && read_regexp(sources_, value, out)) return true;
            if (PyErr_Occurred()) return false;
        }
        return sources_.leaf(keyword, value, positive, out);
    }

  private:
    bool read_list(PyObject* list, bool positive, bool conjunction, int depth, SourceForm& out) {
        std::vector<SourceForm> forms;
        return add_list(list, positive, depth, forms) && join(conjunction, forms, out);
    }

    static bool join(bool conjunction, std::vector<SourceForm>& forms, SourceForm& out) {
        return join_forms(conjunction ? SourceForm::kAnd : SourceForm::kOr, std::move(forms), out);
    }

    bool add_list(PyObject* list, bool positive, int depth, std::vector<SourceForm>& forms) {
        if (!PyList_CheckExact(list)) return false;
        const Py_ssize_t count = PyList_GET_SIZE(list);
        if (count == 0 || count > static_cast<Py_ssize_t>(kSourcePartsMax)) return false;
        forms.reserve(static_cast<size_t>(count));
        for (Py_ssize_t i = 0; i < count && i < PyList_GET_SIZE(list); i++) {
            forms.emplace_back();
            if (!read(PyList_GET_ITEM(list, i), positive, depth + 1, forms.back())) return false;
        }
        return true;
    }

    // must, and not any of must_not, and any of should, and not all of should_not.
    bool read_bool(PyObject* object, bool positive, int depth, SourceForm& out) {
        if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) == 0) return false;
        std::vector<SourceForm> forms;
        Py_ssize_t at = 0, seen = 0;
        PyObject *key, *value;
        while (PyDict_Next(object, &at, &key, &value)) {
            if (!PyUnicode_CheckExact(key) || ++seen > 4) return false;
            const Kept kept(key), kept_value(value);
            if (is_text(key, "must")) {
                if (!add_list(value, positive, depth + 1, forms)) return false;
                continue;
            }
            const bool not_any = is_text(key, "must_not"), not_all = is_text(key, "should_not");
            if (!not_any && !not_all && !is_text(key, "should")) return false;
            const bool sign = positive != (not_any || not_all);
            std::vector<SourceForm> inner;
            forms.emplace_back();
            if (!add_list(value, sign, depth + 2, inner) ||
                !join(not_all ? sign : !sign, inner, forms.back()))
                return false;
        }
        return join(positive, forms, out);
    }

    bool read_equals(PyObject* value, bool positive, SourceForm& out) {
        Text name;
        SourceScalar scalar;
        if (!one_field(value, name, value) || !scalar_of(value, scalar)) return false;
        const PathRef path = sources_.path('f', name);
        if (path) out = value_form(path, kEqualsOp, scalar, !positive);
        return path != nullptr;
    }

    bool read_in(PyObject* value, bool positive, SourceForm& out) {
        Text name;
        return one_field(value, name, value) && one_of(name, value, positive, out);
    }

    bool read_ids(PyObject* value, bool positive, SourceForm& out) {
        Text name;
        return one_field(value, name, value) && name == "values" && one_of("_id", value, positive, out);
    }

    bool one_of(Text name, PyObject* list, bool positive, SourceForm& out) {
        if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) == 0) return false;
        const Py_ssize_t count = PyList_GET_SIZE(list);
        if (count > 1024) return false;
        std::vector<SourceScalar> values(static_cast<size_t>(count));
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject* item = PyList_GET_ITEM(list, i);
            if (!PyUnicode_CheckExact(item) || !scalar_of(item, values[static_cast<size_t>(i)])) return false;
        }
        const PathRef path = sources_.path('f', name);
        if (path) out = in_form(path, std::move(values), !positive);
        return path != nullptr;
    }

    bool read_exists(PyObject* value, bool positive, SourceForm& out) {
        Text text;
        if (PyDict_CheckExact(value) && (!one_field(value, text, value) || text != "field")) return false;
        if (!PyUnicode_CheckExact(value) || !utf8(value, text) || text.empty()) return false;
        if (text.find('\\') != Text::npos || text[0] == '[' || text.size() > 1024) return false;
        const size_t bracket = text.find('[');
        if (bracket == Text::npos) {
            const PathRef path = sources_.path('f', text);
            if (path) out = literal_form(path, kExistsOp, !positive);
            return path != nullptr;
        }
        // name["text"]: an element of an array.
        const Text raw = text.substr(bracket);
        if (raw.size() < 4 || raw[1] != '"' || raw.substr(raw.size() - 2) != "\"]") return false;
        const Text element = raw.substr(2, raw.size() - 4);
        for (char c : element)
            if (c == '"' || static_cast<unsigned char>(c) < 0x20) return false;
        const PathRef path = sources_.path('f', text.substr(0, bracket));
        if (path) out = value_form(path, kContainsOp, SourceScalar::of(element), !positive);
        return path != nullptr;
    }

    bool read_range(PyObject* value, bool positive, SourceForm& out) {
        Text name;
        if (!one_field(value, name, value) || !PyDict_CheckExact(value)) return false;
        SourceBounds bounds;
        Py_ssize_t at = 0;
        PyObject *key, *bound;
        while (PyDict_Next(value, &at, &key, &bound)) {
            Text op;
            double number;
            if (!PyUnicode_CheckExact(key) || !utf8(key, op) || !number_of(bound, number)) return false;
            if (op != "gt" && op != "gte" && op != "lt" && op != "lte") return false;
            const bool lower = op[0] == 'g';
            bool& has = lower ? bounds.has_lower : bounds.has_upper;
            if (has) return false;
            has = true;
            (lower ? bounds.lower : bounds.upper) = SourceScalar::of(number);
            (lower ? bounds.lower_open : bounds.upper_open) = op.size() == 2;
        }
        if (!bounds.has_lower && !bounds.has_upper) return false;
        if (bounds.has_lower && bounds.has_upper && !(bounds.lower < bounds.upper)) return false;
        const PathRef path = sources_.path('f', name);
        return path && range_form(path, bounds, !positive, out);
    }

    // Scalars, and objects and arrays of scalars; the rest is evaluated whole.
    bool read_match(PyObject* value, PyObject* keyword, SourceForm& out) {
        if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) == 0) return false;
        std::vector<SourceForm> forms;
        Py_ssize_t at = 0;
        PyObject *key, *pattern;
        while (PyDict_Next(value, &at, &key, &pattern)) {
            Text name;
            if (!PyUnicode_CheckExact(key) || !utf8(key, name)) return false;
            const Kept kept(key), kept_pattern(pattern);
            const bool compound = PyDict_CheckExact(pattern) || PyList_CheckExact(pattern);
            SourceScalar scalar;
            forms.emplace_back();
            if (compound ? !match_compound(name, pattern, forms.back()) : !scalar_of(pattern, scalar))
                return PyDict_GET_SIZE(value) == 1 && !PyErr_Occurred() &&
                       sources_.leaf(keyword, value, true, out);
            if (compound) continue;
            const PathRef path = sources_.path('f', name);
            if (!path) return false;
            forms.back() = value_form(path, kEqualsOp, scalar);
        }
        return join_forms(SourceForm::kAnd, std::move(forms), out);
    }

    bool match_compound(Text name, PyObject* pattern, SourceForm& out) {
        const PathRef path = sources_.path('f', name);
        if (!path) return false;
        std::string json;
        out = SourceForm();
        out.path = path;
        if (PyDict_CheckExact(pattern) ? !match_object(pattern, json, out) : !match_array(pattern, json, out))
            return false;
        out.text = "{\"match\":[" + path->text + "," + json + "]}";
        return true;
    }

    static bool match_object(PyObject* pattern, std::string& json, SourceForm& out) {
        std::vector<std::pair<Text, SourceScalar>> members;
        Py_ssize_t at = 0;
        PyObject *key, *value;
        while (PyDict_Next(pattern, &at, &key, &value)) {
            members.emplace_back();
            if (!PyUnicode_CheckExact(key) || !utf8(key, members.back().first)) return false;
            if (!scalar_of(value, members.back().second)) return false;
        }
        if (members.empty() || members.size() > kSourcePartsMax) return false;
        std::sort(members.begin(), members.end(), [](auto& one, auto& two) { return one.first < two.first; });
        for (const auto& [name, value] : members) {
            json += json.empty() ? '{' : ',';
            append_json(json, name);
            json += ':';
            append_scalar_json(json, value);
            std::string path = out.path->code + "N", operand;
            append_length(path, name.size());
            path += name;
            append_scalar_code(operand, value);
            append_literal_code(out.code, kEqualsOp, path, operand);
        }
        out.count = static_cast<uint32_t>(members.size());
        json += '}';
        return true;
    }

    static bool match_array(PyObject* pattern, std::string& json, SourceForm& out) {
        const Py_ssize_t count = PyList_GET_SIZE(pattern);
        if (count == 0 || count > static_cast<Py_ssize_t>(kSourcePartsMax)) return false;
        std::vector<SourceScalar> scalars(static_cast<size_t>(count));
        for (size_t i = 0; i < scalars.size(); i++) {
            if (!scalar_of(PyList_GET_ITEM(pattern, static_cast<Py_ssize_t>(i)), scalars[i])) return false;
            for (size_t j = 0; j < i; j++)
                if (scalars[j] == scalars[i]) return false;
            json += json.empty() ? '[' : ',';
            append_scalar_json(json, scalars[i]);
            std::string operand;
            append_scalar_code(operand, scalars[i]);
            append_literal_code(out.code, kContainsOp, out.path->code, operand);
        }
        out.count = static_cast<uint32_t>(count);
        json += ']';
        return true;
    }

    Sources& sources_;
};

class CloudEventsReader {
  public:
    explicit CloudEventsReader(Sources& sources) : sources_(sources) {}

    bool read(PyObject* object, bool positive, int depth, SourceForm& out) {
        PyObject *keyword, *value;
        if (depth > kSourceDepthMax || !one_member(object, keyword, value)) return false;
        const Kept kept(object), kept_keyword(keyword), kept_value(value);
        if (is_text(keyword, "exact")) return read_texts('e', value, positive, out);
        if (is_text(keyword, "prefix")) return read_texts('p', value, positive, out);
        if (is_text(keyword, "suffix")) return read_texts('s', value, positive, out);
        if (is_text(keyword, "all")) return read_list(value, positive, positive, depth, out);
        if (is_text(keyword, "any")) return read_list(value, positive, !positive, depth, out);
        if (is_text(keyword, "not")) return read(value, !positive, depth + 1, out);
        Text text;
        if (!is_text(keyword, "sql") || !positive || !PyUnicode_CheckExact(value) || !utf8(value, text))
            return false;
        return text.size() <= kSourceBytesMax && text.find('\0') == Text::npos &&
               read_cesql(sources_, text, out);
    }

    bool read_list(PyObject* list, bool positive, bool conjunction, int depth, SourceForm& out) {
        if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) == 0) return false;
        std::vector<SourceForm> forms;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
            if (forms.size() == kSourcePartsMax) return false;
            forms.emplace_back();
            if (!read(PyList_GET_ITEM(list, i), positive, depth + 1, forms.back())) return false;
        }
        return join_forms(conjunction ? SourceForm::kAnd : SourceForm::kOr, std::move(forms), out);
    }

  private:
    // Attributes and texts, all of which must hold.
    bool read_texts(char kind, PyObject* object, bool positive, SourceForm& out) {
        if (!PyDict_CheckExact(object) || PyDict_GET_SIZE(object) == 0) return false;
        std::vector<SourceForm> forms;
        Py_ssize_t at = 0;
        PyObject *key, *value;
        while (PyDict_Next(object, &at, &key, &value)) {
            const Kept kept(key), kept_value(value);
            Text name, text;
            if (!PyUnicode_CheckExact(key) || !utf8(key, name) || !PyUnicode_CheckExact(value) ||
                !utf8(value, text))
                return false;
            if (text.empty() || text.size() > kSourceBytesMax || text.find('\0') != Text::npos) return false;
            forms.emplace_back();
            if (!compare(kind, name, text, positive, forms.back())) return false;
        }
        return join_forms(positive ? SourceForm::kAnd : SourceForm::kOr, std::move(forms), out);
    }

    bool compare(char kind, Text name, Text text, bool positive, SourceForm& out) {
        if (kind == 'e') return text_equals(sources_, name, text, !positive, out);
        if (!(kind == 'p' ? text_starts : text_ends)(sources_, name, text, out)) return false;
        if (!positive) out = text_form(out.path, static_cast<SourceOp>(out.op), text, true);
        return true;
    }

    Sources& sources_;
};

}  // namespace

bool read_koncorde(Sources& sources, PyObject* source, SourceForm& out) {
    return KoncordeReader(sources).read(source, true, 1, out);
}

bool read_cloudevents(Sources& sources, PyObject* source, SourceForm& out) {
    CloudEventsReader reader(sources);
    if (PyList_CheckExact(source)) return reader.read_list(source, true, true, 0, out);
    return reader.read(source, true, 1, out);
}

}  // namespace virta
