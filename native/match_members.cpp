// One parse for two questions: which filters hold for an event, and what some of its members are.

#include "match_call.hpp"

using namespace virta;

namespace {

constexpr Py_ssize_t kNamesMax = 8;

struct Names {
    Py_ssize_t count = 0;
    const char* texts[kNamesMax];
    size_t lengths[kNamesMax];

    bool read(PyObject* names) {
        if (!PyTuple_Check(names) || PyTuple_GET_SIZE(names) > kNamesMax) {
            PyErr_Format(PyExc_TypeError, "names are a tuple of at most %zd strings", kNamesMax);
            return false;
        }
        for (count = 0; count < PyTuple_GET_SIZE(names); count++) {
            Py_ssize_t length = 0;
            texts[count] = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(names, count), &length);
            if (!texts[count]) return false;
            lengths[count] = static_cast<size_t>(length);
        }
        return true;
    }

    // The root's members by position; of equal names the last counts. Null: absent.
    void find(yyjson_val* root, yyjson_val** found) const {
        for (Py_ssize_t i = 0; i < count; i++) found[i] = nullptr;
        JsonSource().members(root, [&](const char* name, size_t length, yyjson_val* value) {
            for (Py_ssize_t i = 0; i < count; i++)
                if (length == lengths[i] && memcmp(name, texts[i], length) == 0) found[i] = value;
        });
    }
};

bool is_one_line(const char* text, size_t length) {
    return !memchr(text, '\n', length) && !memchr(text, '\r', length);
}

// (how many filters hold, the text of each member or None), or null with an exception.
PyObject* answer_of(uint32_t hits, yyjson_val** members, Py_ssize_t count) {
    PyObject* answer = PyTuple_New(count + 1);
    if (!answer) return nullptr;
    PyObject* number = PyLong_FromUnsignedLong(hits);
    PyTuple_SET_ITEM(answer, 0, number);
    bool ok = number;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* text = Py_None;
        if (yyjson_is_str(members[i]))
            text = PyUnicode_DecodeUTF8(unsafe_yyjson_get_str(members[i]),
                                        static_cast<Py_ssize_t>(unsafe_yyjson_get_len(members[i])), nullptr);
        else
            Py_INCREF(text);
        PyTuple_SET_ITEM(answer, i + 1, text);
        ok = ok && text;
    }
    if (!ok) Py_CLEAR(answer);
    return answer;
}

// The answer for one text; None, as a new reference, unless it is an object on one line that needs no Python
// to be read. Null with an exception, which a filter raised.
PyObject* read_one(Call& call, const Names& names, const char* text, size_t length, Py_ssize_t position) {
    yyjson_val* root = is_one_line(text, length) ? call.read_json(text, length, position) : nullptr;
    if (!yyjson_is_obj(root)) Py_RETURN_NONE;
    yyjson_val* members[kNamesMax];
    names.find(root, members);
    if (!call.match_read(root)) return nullptr;
    return answer_of(call.context->found_count, members, names.count);
}

}  // namespace

// match_members(texts, names): an answer for each text (`read_one`). Keeps the GIL: answers are objects.
PyObject* virta::index_match_members(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    if (reentered(self)) return nullptr;
    Names names;
    if (count != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "match_members(texts: list[bytes], names: tuple[str, ...])");
        return nullptr;
    }
    if (!names.read(args[1])) return nullptr;
    // A callback may change the caller's list.
    PyObject* texts = PyList_AsTuple(args[0]);
    PyObject* answers = texts ? PyList_New(PyTuple_GET_SIZE(texts)) : nullptr;
    if (!answers) {
        Py_XDECREF(texts);
        return nullptr;
    }
    Call call(self);
    const Py_ssize_t size = PyTuple_GET_SIZE(texts);
    bool ok = true;
    for (Py_ssize_t from = 0; ok && from < size; from += kEventsPerLock) {
        ReadGuard guard(*self->index, call.hooks);
        self->index->begin(*call.context);
        for (Py_ssize_t i = from; ok && i < size && i < from + kEventsPerLock; i++) {
            PyObject* text = PyTuple_GET_ITEM(texts, i);
            char* data = nullptr;
            Py_ssize_t length = 0;
            ok = PyBytes_AsStringAndSize(text, &data, &length) == 0;
            PyObject* one = ok ? read_one(call, names, data, static_cast<size_t>(length), i) : nullptr;
            ok = one;
            PyList_SET_ITEM(answers, i, one);
        }
    }
    Py_DECREF(texts);
    if (!ok) Py_CLEAR(answers);
    return answers;
}
