// virta.match._core.Sources: filters of the common forms from their source; see _core.pyi.

#include <new>

#include "match_source.hpp"

namespace virta {

namespace {

// A tuple's str and bytes; false for None, and with an exception for others.
bool read_path(PyObject* answer, SourcePath& out) {
    if (answer == Py_None) return false;
    const char *text, *code;
    Py_ssize_t text_size, code_size;
    if (!PyArg_ParseTuple(answer, "s#y#", &text, &text_size, &code, &code_size)) return false;
    out.text.assign(text, static_cast<size_t>(text_size));
    out.code.assign(code, static_cast<size_t>(code_size));
    return !out.code.empty();
}

}  // namespace

PathRef Sources::path(char kind, Text name) {
    std::string key(1, kind);
    key += name;
    if (const PathRef* known = paths_.find(key)) return *known;
    PyObject* answer = PyObject_CallFunction(path_, "s#s#", &kind, Py_ssize_t{1}, name.data(),
                                             static_cast<Py_ssize_t>(name.size()));
    if (!answer) return nullptr;
    auto path = std::make_shared<SourcePath>();
    const bool usable = read_path(answer, *path);
    Py_DECREF(answer);
    if (PyErr_Occurred()) return nullptr;
    PathRef result = usable ? PathRef(path) : PathRef();
    paths_.put(key, result);
    return result;
}

// Null for what RE2 does not accept, and with an exception set.
PatternRef Sources::pattern(Text pattern, Text flags) {
    if (flags.find('\0') != Text::npos) return nullptr;  // it separates the two in the key
    std::string key(flags);
    key += '\0';
    key += pattern;
    const bool remembered = key.size() <= kSourcePatternBytesMax;
    const PatternRef* known = remembered ? patterns_.find(key) : nullptr;
    if (known) return *known;
    PyObject* answer =
        PyObject_CallFunction(pattern_, "s#s#", pattern.data(), static_cast<Py_ssize_t>(pattern.size()),
                              flags.data(), static_cast<Py_ssize_t>(flags.size()));
    if (!answer) return nullptr;
    const char *text, *operand;
    Py_ssize_t text_size, operand_size;
    PatternRef result;
    auto found = std::make_shared<SourcePattern>();
    if (answer != Py_None &&
        PyArg_ParseTuple(answer, "s#by#", &text, &text_size, &found->op, &operand, &operand_size)) {
        found->text.assign(text, static_cast<size_t>(text_size));
        found->operand.assign(operand, static_cast<size_t>(operand_size));
        result = found;
    }
    Py_DECREF(answer);
    if (PyErr_Occurred()) return nullptr;
    if (remembered) patterns_.put(key, result);
    return result;
}

bool Sources::leaf(PyObject* keyword, PyObject* value, bool positive, SourceForm& out) {
    PyObject* answer =
        PyObject_CallFunctionObjArgs(leaf_, keyword, value, positive ? Py_True : Py_False, nullptr);
    if (!answer) return false;
    auto path = std::make_shared<SourcePath>();
    const char *path_text, *text, *code;
    Py_ssize_t path_size, text_size, code_size;
    unsigned int count = 0;
    const bool given = answer != Py_None && PyArg_ParseTuple(answer, "s#s#y#I", &path_text, &path_size, &text,
                                                             &text_size, &code, &code_size, &count);
    if (given) {
        path->text.assign(path_text, static_cast<size_t>(path_size));
        out = SourceForm();
        out.path = path;
        out.negated = !positive;
        out.text.assign(text, static_cast<size_t>(text_size));
        out.code.assign(code, static_cast<size_t>(code_size));
        out.count = count;
    }
    Py_DECREF(answer);
    return given;
}

namespace {

struct SourcesObject {
    PyObject_HEAD Sources* sources;
    PyObject* path;
    PyObject* pattern;
    PyObject* leaf;
};

int sources_init(SourcesObject* self, PyObject* arguments, PyObject*) {
    PyObject *path, *pattern, *leaf;
    if (!PyArg_ParseTuple(arguments, "OOO", &path, &pattern, &leaf)) return -1;
    if (self->sources) {
        PyErr_SetString(PyExc_RuntimeError, "initialised twice");
        return -1;
    }
    self->path = Py_NewRef(path);
    self->pattern = Py_NewRef(pattern);
    self->leaf = Py_NewRef(leaf);
    try {
        self->sources = new Sources(path, pattern, leaf);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

int sources_traverse(SourcesObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->path);
    Py_VISIT(self->pattern);
    Py_VISIT(self->leaf);
    return 0;
}

int sources_clear(SourcesObject* self) {
    Py_CLEAR(self->path);
    Py_CLEAR(self->pattern);
    Py_CLEAR(self->leaf);
    return 0;
}

void sources_dealloc(SourcesObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    sources_clear(self);
    delete self->sources;
    type->tp_free(self);
    Py_DECREF(type);
}

bool read_source(Sources& sources, Text dialect, PyObject* source, SourceForm& form) {
    if (dialect == "koncorde") return read_koncorde(sources, source, form);
    if (dialect == "cloudevents") return read_cloudevents(sources, source, form);
    Text text;
    if (!PyUnicode_CheckExact(source) ||
        PyUnicode_GET_LENGTH(source) > static_cast<Py_ssize_t>(kSourceBytesMax))
        return false;
    if (!utf8(source, text) || text.size() > kSourceBytesMax || text.find('\0') != Text::npos) return false;
    if (dialect == "query-string") return read_query_string(sources, text, form);
    return dialect == "cesql" && read_cesql(sources, text, form);
}

PyObject* sources_compile(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
    auto* self = reinterpret_cast<SourcesObject*>(object);
    Text dialect;
    if (count != 2 || !self->path || !PyUnicode_Check(arguments[0]) || !utf8(arguments[0], dialect)) {
        PyErr_SetString(PyExc_TypeError, "compile takes a dialect and a source");
        return nullptr;
    }
    try {
        SourceForm form;
        std::string program;
        if (!read_source(*self->sources, dialect, arguments[1], form) || !program_of(form, program)) {
            if (PyErr_Occurred()) return nullptr;
            Py_RETURN_NONE;
        }
        return Py_BuildValue("s#y#", form.text.data(), static_cast<Py_ssize_t>(form.text.size()),
                             program.data(), static_cast<Py_ssize_t>(program.size()));
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyMethodDef sources_methods[] = {
    {"compile", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(sources_compile)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot sources_slots[] = {
    {Py_tp_methods, sources_methods},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_init, reinterpret_cast<void*>(sources_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(sources_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(sources_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(sources_clear)},
    {0, nullptr},
};

}  // namespace

PyType_Spec sources_spec = {"virta.match._core.Sources", sizeof(SourcesObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, sources_slots};

}  // namespace virta
