// The index with what belongs to it in Python, and one call of a matching method.
//
// The GIL protects everything in IndexObject but `index`, which has its own lock. No thread waits for that
// lock while it has the GIL, so a thread that has the lock may always take the GIL.
#pragma once

#include "match_python.hpp"

namespace virta {

constexpr size_t kEventBytesMax = 64u << 20;  // as virta.match.events says, whose error it is
constexpr uint32_t kEventsPerLock = 8;  // how long a reader may make a writer wait
constexpr uint32_t kMovesPerCall = 256;  // conjunctions given a better place after a call

struct IndexObject {
    PyObject_HEAD
    Index* index;
    Ids* ids;
    Callbacks callbacks;
    std::vector<PyObject*>* texts;       // filter -> its id as str, made when first needed
    std::vector<PyObject*>* opaques;     // number -> condition
    std::vector<uint32_t>* opaque_free;
    PyObject* opaque_numbers;            // condition -> number
    std::vector<uint32_t>* retired;      // filters removed while a call may still name them
    uint32_t calls;                      // matching now
    Arena* arena;                        // while an image is made
    void* mapped;                        // where the index lives, unless on the heap
    size_t mapped_bytes;
};

// match_module.cpp
uint32_t add_filter(IndexObject* self, const char* digest, const char* program, size_t length,
                    PyObject* conditions);
bool number_opaques(IndexObject* self, PyObject* conditions, std::vector<uint32_t>& numbers);
void report_patterns(IndexObject* self);

// match_members.cpp
PyObject* index_match_members(IndexObject* self, PyObject* const* args, Py_ssize_t count);

// match_image.cpp
uint32_t enter_filter(IndexObject* self, const char* digest, const char* program, size_t length,
                      const std::vector<uint32_t>& opaques);
void drop_index(IndexObject* self);
PyObject* index_add_flat(IndexObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* index_match_flat(IndexObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* index_begin_image(IndexObject* self, PyObject* object);
PyObject* index_save(IndexObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* index_open(IndexObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* module_code(PyObject* module, PyObject* none);

// Indexes whose lock this thread has. Python code that runs under a lock (a finalizer, at worst) may call
// the same index again; that is an error, not a deadlock.
inline std::vector<const Index*>& locked_indexes() {
    thread_local std::vector<const Index*> indexes;
    return indexes;
}

inline bool reentered(const IndexObject* self) {
    const auto& indexes = locked_indexes();
    if (std::find(indexes.begin(), indexes.end(), self->index) == indexes.end()) return false;
    PyErr_SetString(PyExc_RuntimeError,
                    "a matcher was called from inside its own work, by a finalizer or a callback");
    return true;
}

class WriteGuard {
  public:
    explicit WriteGuard(Index& index) : index_(index) {
        locked_indexes().push_back(&index);
        if (index_.lock.try_write()) return;
        Py_BEGIN_ALLOW_THREADS;
        index_.lock.write();
        Py_END_ALLOW_THREADS;
    }
    ~WriteGuard() {
        index_.lock.end_write();
        locked_indexes().pop_back();
    }

  private:
    Index& index_;
};

class ReadGuard {
  public:
    ReadGuard(Index& index, PythonHooks& hooks) : index_(index) {
        locked_indexes().push_back(&index);
        if (index.lock.try_read()) return;
        const bool had = !hooks.away;
        if (had) hooks.away = PyEval_SaveThread();
        index.lock.read();
        if (had) hooks.take();
    }
    ~ReadGuard() {
        index_.lock.end_read();
        locked_indexes().pop_back();
    }

  private:
    Index& index_;
};

// One call of a matching method: a context, its hooks, and the filters that must not be forgotten meanwhile.
class Call {
  public:
    explicit Call(IndexObject* self)
        : self_(self), context(self->index->take_context()), hooks(self->callbacks, *self->opaques) {
        context->hooks = &hooks;
        hooks.context = context.get();
        self->calls++;
    }
    ~Call() {
        hooks.take();
        hooks.end();
        Index::clear(*context);
        Index& index = *self_->index;
        index.give_context(std::move(context));
        self_->calls--;
        const bool retire = self_->calls == 0 && !self_->retired->empty();
        if ((retire || index.restless()) && index.lock.try_write()) {
            if (retire) retire_all();
            index.redistribute(kMovesPerCall);
            index.lock.end_write();
        }
    }
    void retire_all() {
        for (uint32_t filter : *self_->retired) {
            if (filter < self_->texts->size()) Py_CLEAR((*self_->texts)[filter]);
            self_->index->retire(filter);
        }
        self_->retired->clear();
    }

    // Match under the read lock; context->found holds the answer until the next event. GIL needed.
    bool match_object(PyObject* object) {
        Index::clear(*context);
        objects_.clear();
        hooks.end();
        hooks.begin_object(object);
        if (!Walk<ObjectSource>(*self_->index, *context, objects_).run(object)) {
            PyErr_SetString(PyExc_RecursionError, "event nests too deep");
            return false;
        }
        self_->index->match(*context);
        return !context->failed;
    }

    // As match_object, with or without the GIL; takes it where the bytes need Python.
    bool match_json(const char* text, size_t length, Py_ssize_t position) {
        return match_read(read_json(text, length, position));
    }

    // The root of an event, which stays until the next; null if only Python can read it.
    yyjson_val* read_json(const char* text, size_t length, Py_ssize_t position) {
        Index::clear(*context);
        hooks.end();
        hooks.begin_json(text, length, position);
        return length <= kEventBytesMax ? reader_.parse(text, length) : nullptr;
    }

    // Match the event of read_json.
    bool match_read(yyjson_val* root) {
        if (root) {
            JsonSource source;
            if (Walk<JsonSource>(*self_->index, *context, source).run(root) && !context->clash) {
                self_->index->match(*context);
                return !context->failed;
            }
        }
        // Too large, not JSON, lone surrogates, numbers beyond doubles, duplicate members: Python
        // decides.
        count_asked(kEvents);
        const bool taken = hooks.take();
        PyObject* object = hooks.object();
        Py_XINCREF(object);
        const bool ok = object && match_object(object);
        Py_XDECREF(object);
        hooks.give(taken);
        return ok;
    }

  private:
    IndexObject* self_;
    ObjectSource objects_;
    JsonReader reader_;

  public:
    std::unique_ptr<Context> context;
    PythonHooks hooks;
};

}  // namespace virta
