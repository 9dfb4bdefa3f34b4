#include "match_python.hpp"

namespace virta {

bool PythonHooks::search(uint32_t node, const char* text, uint32_t length, uint32_t from, void* numbers) {
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

bool PythonHooks::point(uint32_t node, bool& found, double& lat, double& lon) {
    const bool taken = take();
    const void* ref = context->slots[node].ref;
    PyObject* value = nullptr;
    if (json_) {
        size_t length = 0;
        char* text = yyjson_val_write(static_cast<const yyjson_val*>(ref), 0, &length);
        value = text ? PyObject_CallFunction(callbacks_.parse, "y#n", text, static_cast<Py_ssize_t>(length),
                                             position_)
                     : PyErr_NoMemory();
        free(text);
    } else {
        value = static_cast<PyObject*>(const_cast<void*>(ref));
        Py_INCREF(value);
    }
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
