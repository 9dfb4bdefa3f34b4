#include "match_python.hpp"

namespace virta {

bool PythonHooks::search(uint32_t node, const char* text, uint32_t length, uint32_t from, void* numbers) {
    count_asked(kRegexps);
    const bool taken = take();
    auto& found = *static_cast<std::vector<uint32_t>*>(numbers);
    bool ok = false;
    PyObject* string = PyUnicode_DecodeUTF8(text, length, "surrogatepass");
    PyObject* answer = string ? PyObject_CallFunction(callbacks_.search, "IOI", node, string, from) : nullptr;
    PyObject* list = answer ? PySequence_Fast(answer, "search must return a sequence of numbers") : nullptr;
    if (list) {
        ok = true;
        for (Py_ssize_t i = 0; ok && i < PySequence_Fast_GET_SIZE(list); i++) {
            const unsigned long number = PyLong_AsUnsignedLong(PySequence_Fast_GET_ITEM(list, i));
            ok = !PyErr_Occurred();
            if (ok) found.push_back(static_cast<uint32_t>(number));
        }
    }
    Py_XDECREF(list);
    Py_XDECREF(answer);
    Py_XDECREF(string);
    give(taken);
    return ok;
}

bool PythonHooks::opaque(uint32_t number, bool& holds) {
    count_asked(kConditions);
    const bool taken = take();
    bool ok = false;
    PyObject* root = object();
    PyObject* answer =
        root ? PyObject_CallFunctionObjArgs(callbacks_.holds, opaques_[number], root, nullptr) : nullptr;
    if (answer) {
        const int truth = PyObject_IsTrue(answer);
        ok = truth >= 0;
        holds = truth > 0;
        Py_DECREF(answer);
    }
    give(taken);
    return ok;
}

// The value at a node as a new reference, null with an exception.
PyObject* PythonHooks::value_at(uint32_t node) {
    const void* ref = context->slots[node].ref;
    if (!json_) return Py_NewRef(static_cast<PyObject*>(const_cast<void*>(ref)));
    size_t length = 0;
    char* text = yyjson_val_write(static_cast<const yyjson_val*>(ref), 0, &length);
    if (!text) return PyErr_NoMemory();
    PyObject* value = PyObject_CallFunction(callbacks_.parse, "y#n", text, static_cast<Py_ssize_t>(length),
                                            position_);
    free(text);
    return value;
}

// The UTF-8 of a callback's answer, which is released.
bool PythonHooks::copy_text(PyObject* answer, std::string& text) {
    if (!answer) return false;
    PyObject* encoded = PyUnicode_AsEncodedString(answer, "utf-8", "surrogatepass");
    Py_DECREF(answer);
    if (!encoded) return false;
    text.assign(PyBytes_AS_STRING(encoded), static_cast<size_t>(PyBytes_GET_SIZE(encoded)));
    Py_DECREF(encoded);
    return true;
}

bool PythonHooks::attribute(const char* name, size_t length, std::string& text) {
    count_asked(kAttributes);
    const bool taken = take();
    PyObject* root = object();
    PyObject* string =
        root ? PyUnicode_DecodeUTF8(name, static_cast<Py_ssize_t>(length), "surrogatepass") : nullptr;
    const bool ok =
        string &&
        copy_text(PyObject_CallFunctionObjArgs(callbacks_.attribute, root, string, nullptr), text);
    Py_XDECREF(string);
    give(taken);
    return ok;
}

bool PythonHooks::fold(bool upper, const char* text, size_t length, std::string& folded) {
    count_asked(kCases);
    const bool taken = take();
    PyObject* string = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), "surrogatepass");
    const bool ok =
        string && copy_text(PyObject_CallMethod(string, upper ? "upper" : "lower", nullptr), folded);
    Py_XDECREF(string);
    give(taken);
    return ok;
}

bool PythonHooks::text(uint32_t node, std::string& text) {
    count_asked(kTexts);
    const bool taken = take();
    PyObject* value = value_at(node);
    const bool ok = value && copy_text(PyObject_CallFunctionObjArgs(callbacks_.text, value, nullptr), text);
    Py_XDECREF(value);
    give(taken);
    return ok;
}

bool PythonHooks::contains(uint32_t node, const char* pattern, bool& known, bool& holds) {
    const void* ref = context->slots[node].ref;
    if (json_) {
        JsonSource source;
        PatternTest<JsonSource> test(source);
        holds = test.contains(pattern, JsonSource::ref(ref));
        known = !test.exhausted();
    } else {
        ObjectSource source;
        PatternTest<ObjectSource> test(source);
        holds = test.contains(pattern, ObjectSource::ref(ref));
        known = !test.exhausted();
    }
    return true;
}

bool PythonHooks::point(uint32_t node, bool& found, double& lat, double& lon) {
    count_asked(kPoints);
    const bool taken = take();
    PyObject* value = value_at(node);
    PyObject* answer = value ? PyObject_CallFunctionObjArgs(callbacks_.point, value, nullptr) : nullptr;
    Py_XDECREF(value);
    bool ok = answer != nullptr;
    found = false;
    if (answer && answer != Py_None) {
        found = ok = PyArg_ParseTuple(answer, "dd", &lat, &lon);
    }
    Py_XDECREF(answer);
    give(taken);
    return ok;
}

}  // namespace virta
