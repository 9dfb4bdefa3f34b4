// virta.match._core: the index as a Python type. What each method means: src/virta/match/_core.pyi.

#include "match_call.hpp"
#include "match_source.hpp"

using namespace virta;

namespace {

// Ids.

PyObject*& text_place(IndexObject* self, uint32_t filter) {
    auto& texts = *self->texts;
    if (texts.size() <= filter) texts.resize(filter + filter / 4 + 64, nullptr);
    return texts[filter];
}

PyObject* id_text(IndexObject* self, uint32_t filter) {
    PyObject*& known = text_place(self, filter);
    if (!known) {
        static const char digits[] = "0123456789abcdef";
        const char* bytes = (*self->ids)[filter].bytes;
        PyObject* text = PyUnicode_New(64, 127);
        if (!text) return nullptr;
        Py_UCS1* out = PyUnicode_1BYTE_DATA(text);
        for (int i = 0; i < 32; i++) {
            out[2 * i] = static_cast<Py_UCS1>(digits[static_cast<unsigned char>(bytes[i]) >> 4]);
            out[2 * i + 1] = static_cast<Py_UCS1>(digits[bytes[i] & 15]);
        }
        known = text;
    }
    return Py_NewRef(known);
}

// Share the caller's text of an id: made one by one on the first event, 30,000 take 28 ms.
void keep_text(IndexObject* self, uint32_t filter, PyObject* text) {
    PyObject*& known = text_place(self, filter);
    if (!known) known = Py_NewRef(text);
}

PyObject* id_list(IndexObject* self, const uint32_t* filters, size_t count) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(count));
    if (!list) return nullptr;
    const auto& texts = *self->texts;
    for (size_t i = 0; i < count; i++) {
        // Each id is a cache miss for its reference count: prefetch early.
        if (i + 8 < count && filters[i + 8] < texts.size()) __builtin_prefetch(texts[filters[i + 8]], 1);
        PyObject* text = id_text(self, filters[i]);
        if (!text) {
            Py_DECREF(list);
            return nullptr;
        }
        PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), text);
    }
    return list;
}

bool read_digest(PyObject* object, const char*& digest) {
    if (PyBytes_Check(object) && PyBytes_GET_SIZE(object) == 32) {
        digest = PyBytes_AS_STRING(object);
        return true;
    }
    PyErr_SetString(PyExc_ValueError, "an id is 32 bytes");
    return false;
}

int digit_value(Py_UCS1 digit) {
    return digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

// An id as a text of 64 hex digits, in lower case as they are written.
bool read_id(PyObject* text, char* digest) {
    bool ok = PyUnicode_CheckExact(text) && PyUnicode_IS_ASCII(text) && PyUnicode_GET_LENGTH(text) == 64;
    const Py_UCS1* digits = ok ? PyUnicode_1BYTE_DATA(text) : nullptr;
    for (int i = 0; ok && i < 32; i++) {
        const int value = digit_value(digits[2 * i]) * 16 | digit_value(digits[2 * i + 1]);
        digest[i] = static_cast<char>(value);
        ok = value >= 0;
    }
    if (!ok) PyErr_SetString(PyExc_ValueError, "an id is 64 hex digits");
    return ok;
}

// Changes.

}  // namespace

void virta::report_patterns(IndexObject* self) {
    std::vector<Index::PatternChange> changes;
    changes.swap(self->index->pattern_changes);
    for (const auto& change : changes) {
        PyObject* answer = nullptr;
        if (change.what == Index::PatternChange::kAdded) {
            const auto size = static_cast<Py_ssize_t>(change.pattern.size());
            PyObject* text = PyUnicode_DecodeUTF8(change.pattern.data(), size, "surrogatepass");
            if (!text) {  // not written by us, but a program may contain anything
                PyErr_Clear();
                text = PyUnicode_DecodeUTF8(change.pattern.data(), size, "replace");
            }
            if (text)
                answer =
                    PyObject_CallFunction(self->callbacks.patterns, "IIN", change.node, change.number, text);
        } else {
            const bool removed = change.what == Index::PatternChange::kRemoved;
            const long number = removed ? static_cast<long>(change.number) : -1;
            answer = PyObject_CallFunction(self->callbacks.patterns, "IlO", change.node, number, Py_None);
        }
        if (!answer) PyErr_WriteUnraisable(self->callbacks.patterns);
        Py_XDECREF(answer);
    }
}

namespace {

void drop_opaques(IndexObject* self) {
    std::vector<uint32_t> dropped;
    dropped.swap(self->index->opaque_dropped);
    for (uint32_t number : dropped) {
        PyObject* condition = (*self->opaques)[number];
        if (!condition) continue;
        (*self->opaques)[number] = nullptr;
        self->opaque_free->push_back(number);
        if (PyDict_DelItem(self->opaque_numbers, condition) < 0) PyErr_Clear();
        Py_DECREF(condition);
    }
}

}  // namespace

// The numbers of a program's opaque conditions; new ones are entered.
bool virta::number_opaques(IndexObject* self, PyObject* conditions, std::vector<uint32_t>& numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(conditions); i++) {
        PyObject* condition = PyTuple_GET_ITEM(conditions, i);
        PyObject* known = PyDict_GetItemWithError(self->opaque_numbers, condition);
        if (!known && PyErr_Occurred()) return false;
        if (known) {
            numbers.push_back(static_cast<uint32_t>(PyLong_AsUnsignedLong(known)));
            continue;
        }
        uint32_t number = static_cast<uint32_t>(self->opaques->size());
        if (!self->opaque_free->empty()) {
            number = self->opaque_free->back();
            self->opaque_free->pop_back();
        } else {
            self->opaques->push_back(nullptr);
        }
        PyObject* object = PyLong_FromUnsignedLong(number);
        const bool ok = object && PyDict_SetItem(self->opaque_numbers, condition, object) == 0;
        Py_XDECREF(object);
        if (!ok) {
            self->opaque_free->push_back(number);
            return false;
        }
        Py_INCREF(condition);
        (*self->opaques)[number] = condition;
        numbers.push_back(number);
    }
    return true;
}

// The filter's number, 0 with an exception set; one that is known is counted once more.
uint32_t virta::add_filter(IndexObject* self, const char* digest, const char* program, size_t length,
                           PyObject* conditions) {
    if (reentered(self)) return 0;
    self->ids->prefetch(digest);
    __builtin_prefetch(program + 64);
    WriteGuard guard(*self->index);
    uint32_t filter = self->ids->find(digest);
    if (filter) {
        (*self->ids)[filter].users++;
        return filter;
    }
    std::vector<uint32_t> opaques;
    if (!number_opaques(self, conditions, opaques)) return 0;
    filter = enter_filter(self, digest, program, length, opaques);
    if (!self->index->pattern_changes.empty()) report_patterns(self);
    if (!self->index->opaque_dropped.empty()) drop_opaques(self);
    if (!filter) PyErr_SetString(PyExc_ValueError, "not a program of this version");
    return filter;
}

namespace {

PyObject* index_add(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || !PyBytes_Check(args[1]) || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "add(id: str | bytes, program: bytes, opaques: tuple)");
        return nullptr;
    }
    char read[32];
    const char* digest = read;
    const bool is_text = PyUnicode_Check(args[0]);
    if (is_text ? !read_id(args[0], read) : !read_digest(args[0], digest)) return nullptr;
    const auto length = static_cast<size_t>(PyBytes_GET_SIZE(args[1]));
    const uint32_t filter = add_filter(self, digest, PyBytes_AS_STRING(args[1]), length, args[2]);
    if (filter && is_text) keep_text(self, filter, args[0]);
    return filter ? PyLong_FromUnsignedLong(filter) : nullptr;
}

PyObject* index_remove(IndexObject* self, PyObject* object) {
    if (reentered(self)) return nullptr;
    const char* digest;
    if (!read_digest(object, digest)) return nullptr;
    WriteGuard guard(*self->index);
    const uint32_t filter = self->ids->find(digest);
    if (!filter) return PyLong_FromLong(-1);
    const uint32_t left = --(*self->ids)[filter].users;
    if (left) return PyLong_FromUnsignedLong(left);
    {
        Building scope(self->arena);
        self->ids->erase(filter);
        self->index->remove(filter);
    }
    if (!self->index->pattern_changes.empty()) report_patterns(self);
    if (!self->index->opaque_dropped.empty()) drop_opaques(self);
    if (self->calls) {
        self->retired->push_back(filter);
    } else {
        if (filter < self->texts->size()) Py_CLEAR((*self->texts)[filter]);
        Building scope(self->arena);
        self->index->retire(filter);
    }
    return PyLong_FromLong(0);
}

PyObject* index_find(IndexObject* self, PyObject* object) {
    const char* digest;
    if (!read_digest(object, digest)) return nullptr;
    // Writers change the ids under the GIL and the lock; the GIL alone is enough to read them.
    return PyLong_FromUnsignedLong(self->ids->find(digest));
}

PyObject* index_count(IndexObject* self, PyObject* object) {
    const char* digest;
    if (!read_digest(object, digest)) return nullptr;
    const uint32_t filter = self->ids->find(digest);
    return PyLong_FromUnsignedLong(filter ? (*self->ids)[filter].users : 0);
}

PyObject* index_id(IndexObject* self, PyObject* object) {
    const unsigned long filter = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return nullptr;
        PyErr_Clear();  // negative or very large: no filter has this number
        Py_RETURN_NONE;
    }
    if (filter > UINT32_MAX || !self->ids->has(static_cast<uint32_t>(filter))) Py_RETURN_NONE;
    return id_text(self, static_cast<uint32_t>(filter));
}

PyObject* index_conditions(IndexObject* self, PyObject*) {
    const auto& opaques = *self->opaques;
    PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(opaques.size()));
    for (size_t i = 0; all && i < opaques.size(); i++)
        PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), Py_NewRef(opaques[i] ? opaques[i] : Py_None));
    return all;
}

PyObject* index_ids(IndexObject* self, PyObject*) {
    std::vector<uint32_t> filters;
    for (uint32_t filter = 1; filter < self->ids->limit(); filter++)
        if (self->ids->has(filter)) filters.push_back(filter);
    return id_list(self, filters.data(), filters.size());
}

// Matching.

PyObject* index_match(IndexObject* self, PyObject* object) {
    if (reentered(self)) return nullptr;
    Call call(self);
    bool ok;
    {
        ReadGuard guard(*self->index, call.hooks);
        self->index->begin(*call.context);
        ok = PyBytes_Check(object)
                 ? call.match_json(PyBytes_AS_STRING(object),
                                   static_cast<size_t>(PyBytes_GET_SIZE(object)), 0)
                 : call.match_object(object);
    }
    return ok ? id_list(self, call.context->found.data(), call.context->found_count) : nullptr;
}

struct Event {
    const char* text;
    size_t length;
    PyObject* object;  // when it is none of bytes
};

bool match_events(IndexObject* self, Call& call, const std::vector<Event>& events, bool native,
                  std::vector<uint32_t>& found, std::vector<uint32_t>& offsets) {
    Index& index = *self->index;
    bool ok = true;
    if (native) call.hooks.away = PyEval_SaveThread();
    for (size_t from = 0; ok && from < events.size(); from += kEventsPerLock) {
        ReadGuard guard(index, call.hooks);
        index.begin(*call.context);
        const size_t to = std::min<size_t>(events.size(), from + kEventsPerLock);
        for (size_t i = from; ok && i < to; i++) {
            const Event& event = events[i];
            ok = event.object ? call.match_object(event.object)
                              : call.match_json(event.text, event.length, static_cast<Py_ssize_t>(i));
            const uint32_t* first = call.context->found.data();
            found.insert(found.end(), first, first + call.context->found_count);
            offsets.push_back(static_cast<uint32_t>(found.size()));
            ok = ok && found.size() < UINT32_MAX;
        }
    }
    call.hooks.take();
    if (!ok && !PyErr_Occurred())
        PyErr_SetString(PyExc_OverflowError,
                        "more than 4294967295 matches in one call: match fewer events at once");
    return ok;
}

void split_lines(const char* text, size_t length, std::vector<Event>& events) {
    const char* end = text + length;
    while (text < end) {
        const char* stop = static_cast<const char*>(memchr(text, '\n', static_cast<size_t>(end - text)));
        if (!stop) stop = end;
        const char* first = text;
        while (first < stop && (*first == ' ' || *first == '\t' || *first == '\r')) first++;
        if (first < stop) events.push_back({first, static_cast<size_t>(stop - first), nullptr});
        text = stop + 1;
    }
}

PyObject* answer(IndexObject* self, bool numbers, const std::vector<uint32_t>& found,
                 const std::vector<uint32_t>& offsets) {
    if (numbers)
        return Py_BuildValue("y#y#", reinterpret_cast<const char*>(found.data()),
                             static_cast<Py_ssize_t>(found.size() * 4),
                             reinterpret_cast<const char*>(offsets.data()),
                             static_cast<Py_ssize_t>(offsets.size() * 4));
    PyObject* lists = PyList_New(static_cast<Py_ssize_t>(offsets.size() - 1));
    for (size_t i = 0; lists && i + 1 < offsets.size(); i++) {
        PyObject* list = id_list(self, found.data() + offsets[i], offsets[i + 1] - offsets[i]);
        if (!list) {
            Py_CLEAR(lists);
            break;
        }
        PyList_SET_ITEM(lists, static_cast<Py_ssize_t>(i), list);
    }
    return lists;
}

PyObject* index_match_many(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    if (reentered(self)) return nullptr;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "match_many(events, numbers: bool)");
        return nullptr;
    }
    const int numbers = PyObject_IsTrue(args[1]);
    if (numbers < 0) return nullptr;
    std::vector<Event> events;
    Py_buffer buffer{};
    PyObject* list = nullptr;
    bool native = true;
    if (PyObject_CheckBuffer(args[0])) {
        if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0) return nullptr;
        split_lines(static_cast<const char*>(buffer.buf), static_cast<size_t>(buffer.len), events);
    } else {
        list = PySequence_Fast(args[0], "events must be bytes or a sequence");
        if (!list) return nullptr;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
            PyObject* item = PySequence_Fast_GET_ITEM(list, i);
            if (PyBytes_Check(item)) {
                events.push_back({PyBytes_AS_STRING(item), static_cast<size_t>(PyBytes_GET_SIZE(item)),
                                  nullptr});
            } else {
                events.push_back({nullptr, 0, item});
                native = false;
            }
        }
    }
    // A caller may change its list meanwhile: keep references to its items.
    for (const Event& event : events) Py_XINCREF(event.object);
    PyObject* kept = list && native ? PySequence_Tuple(list) : nullptr;
    PyObject* result = nullptr;
    if (!list || !native || kept) {
        std::vector<uint32_t> found, offsets{0};
        Call call(self);
        if (match_events(self, call, events, native, found, offsets))
            result = answer(self, numbers, found, offsets);
    }
    for (const Event& event : events) Py_XDECREF(event.object);
    Py_XDECREF(kept);
    Py_XDECREF(list);
    if (buffer.obj) PyBuffer_Release(&buffer);
    return result;
}

PyObject* index_stats(IndexObject* self, PyObject*) {
    if (reentered(self)) return nullptr;
    WriteGuard guard(*self->index);
    const Stats s = self->index->stats();
    const std::pair<const char*, size_t> entries[] = {
        {"filters", s.filters},
        {"indexed", s.indexed},
        {"verified", s.verified},
        {"scanned", s.scanned},
        {"conjunctions", s.conjunctions},
        {"unindexed", s.always},
        {"atoms", s.atoms},
        {"conditions", s.conditions},
        {"python_conditions", s.opaque},
        {"paths", s.paths},
        {"buckets", s.buckets},
        {"regexps", s.regexps},
        {"redistributed", s.redistributed},
        {"bytes_terms", s.bytes_terms},
        {"bytes_places", s.bytes_places},
        {"bytes_records", s.bytes_records},
        {"bytes_paths", s.bytes_paths},
        {"bytes_contexts", s.bytes_contexts},
        {"bytes_ids", self->ids->bytes() + self->texts->capacity() * sizeof(PyObject*)},
    };
    PyObject* result = PyDict_New();
    for (const auto& [name, size] : entries) {
        PyObject* number = result ? PyLong_FromSize_t(size) : nullptr;
        if (!number || PyDict_SetItemString(result, name, number) < 0) Py_CLEAR(result);
        Py_XDECREF(number);
    }
    return result;
}

Py_ssize_t index_length(PyObject* object) { return reinterpret_cast<IndexObject*>(object)->ids->live(); }

// The type.

int index_init(IndexObject* self, PyObject* args, PyObject* keywords) {
    static const char* names[] = {"search", "patterns",  "point", "holds",
                                  "parse",  "attribute", "text",  nullptr};
    Callbacks given;
    if (self->index ||
        !PyArg_ParseTupleAndKeywords(args, keywords, "OOOOOOO", const_cast<char**>(names), &given.search,
                                     &given.patterns, &given.point, &given.holds, &given.parse,
                                     &given.attribute, &given.text)) {
        if (self->index) PyErr_SetString(PyExc_RuntimeError, "an index is made once");
        return -1;
    }
    for (PyObject* callback : given.all()) Py_INCREF(callback);
    self->callbacks = given;
    self->opaque_numbers = PyDict_New();
    if (!self->opaque_numbers) return -1;
    self->index = new Index();
    self->ids = new Ids();
    self->texts = new std::vector<PyObject*>();
    self->opaques = new std::vector<PyObject*>();
    self->opaque_free = new std::vector<uint32_t>();
    self->retired = new std::vector<uint32_t>();
    return 0;
}

int index_traverse(IndexObject* self, visitproc visit, void* arg) {
    for (PyObject* callback : self->callbacks.all()) Py_VISIT(callback);
    Py_VISIT(self->opaque_numbers);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

int index_clear(IndexObject* self) {
    const auto callbacks = self->callbacks.all();
    self->callbacks = Callbacks();
    for (PyObject* callback : callbacks) Py_XDECREF(callback);
    Py_CLEAR(self->opaque_numbers);
    return 0;
}

void index_dealloc(IndexObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    index_clear(self);
    if (self->texts)
        for (PyObject* text : *self->texts) Py_XDECREF(text);
    if (self->opaques)
        for (PyObject* condition : *self->opaques) Py_XDECREF(condition);
    drop_index(self);
    delete self->texts;
    delete self->opaques;
    delete self->opaque_free;
    delete self->retired;
    type->tp_free(self);
    Py_DECREF(type);
}

// Memory running out inside the core becomes MemoryError, not the end of the process.
template <PyObject* (*method)(IndexObject*, PyObject*)>
PyObject* one(PyObject* self, PyObject* argument) {
    try {
        return method(reinterpret_cast<IndexObject*>(self), argument);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

template <PyObject* (*method)(IndexObject*, PyObject* const*, Py_ssize_t)>
PyObject* many(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    try {
        return method(reinterpret_cast<IndexObject*>(self), arguments, count);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

template <class F>
PyCFunction as_method(F function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef index_methods[] = {
    {"add", as_method(many<index_add>), METH_FASTCALL, nullptr},
    {"remove", one<index_remove>, METH_O, nullptr},
    {"find", one<index_find>, METH_O, nullptr},
    {"count", one<index_count>, METH_O, nullptr},
    {"id", one<index_id>, METH_O, nullptr},
    {"ids", one<index_ids>, METH_NOARGS, nullptr},
    {"match", one<index_match>, METH_O, nullptr},
    {"conditions", one<index_conditions>, METH_NOARGS, nullptr},
    {"add_flat", as_method(many<index_add_flat>), METH_FASTCALL, nullptr},
    {"match_flat", as_method(many<index_match_flat>), METH_FASTCALL, nullptr},
    {"begin_image", one<index_begin_image>, METH_O, nullptr},
    {"save", as_method(many<index_save>), METH_FASTCALL, nullptr},
    {"open", as_method(many<index_open>), METH_FASTCALL, nullptr},
    {"match_many", as_method(many<index_match_many>), METH_FASTCALL, nullptr},
    {"match_members", as_method(many<index_match_members>), METH_FASTCALL, nullptr},
    {"stats", one<index_stats>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

template <class F>
void* as_slot(F function) {
    return reinterpret_cast<void*>(function);
}

PyType_Slot index_slots[] = {
    {Py_tp_methods, index_methods},
    {Py_tp_new, as_slot(PyType_GenericNew)},
    {Py_tp_init, as_slot(index_init)},
    {Py_tp_dealloc, as_slot(index_dealloc)},
    {Py_tp_traverse, as_slot(index_traverse)},
    {Py_tp_clear, as_slot(index_clear)},
    {Py_mp_length, as_slot(index_length)},
    {0, nullptr},
};

PyType_Spec index_spec = {"virta.match._core.Index", sizeof(IndexObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          index_slots};

int module_exec(PyObject* module) {
    for (PyType_Spec* spec : {&index_spec, &sources_spec}) {
        PyObject* type = PyType_FromModuleAndSpec(module, spec, nullptr);
        const int failed = type ? PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) : -1;
        Py_XDECREF(type);
        if (failed) return failed;
    }
    return 0;
}

PyObject* module_python_calls(PyObject*, PyObject*) {
    PyObject* result = PyDict_New();
    for (size_t kind = 0; result && kind < kAskedKinds; kind++) {
        PyObject* number = PyLong_FromUnsignedLongLong(asked_of_python[kind].load(std::memory_order_relaxed));
        if (!number || PyDict_SetItemString(result, kAskedNames[kind], number) < 0) Py_CLEAR(result);
        Py_XDECREF(number);
    }
    return result;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, as_slot(module_exec)}, {0, nullptr}};

PyMethodDef module_methods[] = {
    {"code", module_code, METH_NOARGS, nullptr},
    {"python_calls", module_python_calls, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_core", "The native index of virta.match.", 0, module_methods, module_slots,
    nullptr,
    nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModuleDef_Init(&module_definition); }
