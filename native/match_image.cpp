// Filter sets as a whole: many programs from one buffer, many events from one buffer, and images.
//
// An image (see match_memory.hpp) begins with this head; the index, its ids and all they point to follow.
// `mark` identifies the code that wrote it, as another build may lay out memory differently, and the filter
// set; `check` is a hash of all else, since a mapped image is used without further checks.

#include <fcntl.h>
#ifdef __linux__
#include <link.h>
#endif
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "match_call.hpp"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace virta {

namespace {

constexpr char kMagic[8] = {'V', 'I', 'R', 'T', 'A', 'I', 'M', '2'};
constexpr size_t kMarkBytes = 32;
constexpr size_t kBlock = 1u << 18;  // hashed at a time: stays in the cache

// Strings of libstdc++'s old ABI point to an empty one in the library, whose address differs per process.
#if defined(__GLIBCXX__) && !_GLIBCXX_USE_CXX11_ABI
constexpr bool kImages = false;
#else
constexpr bool kImages = true;
#endif

struct Head {
    char magic[8];
    uint64_t base, size, check;
    Index* index;
    Ids* ids;
    char mark[kMarkBytes];
};

// The check of an image in memory, its own word taken for 0.
uint64_t check_of(const char* base, size_t size) {
    uint64_t check = 0;
    for (size_t at = 0; at < size; at += kBlock)
        check = hash_bytes(base + at, std::min(kBlock, size - at), 0, check);
    return check;
}

// The same of a file; `known` is false when it ends too early.
uint64_t check_of_file(int fd, size_t size, bool& known) {
    std::vector<char> block(kBlock);
    uint64_t check = 0;
    for (size_t at = 0; known && at < size; at += kBlock) {
        const size_t wanted = std::min(kBlock, size - at);
        for (size_t have = 0; known && have < wanted;) {
            const ssize_t got = pread(fd, block.data() + have, wanted - have, static_cast<off_t>(at + have));
            if (got > 0) have += static_cast<size_t>(got);
            known = got > 0 || (got < 0 && errno == EINTR);
        }
        if (!at) memset(block.data() + offsetof(Head, check), 0, sizeof(uint64_t));
        check = hash_bytes(block.data(), wanted, 0, check);
    }
    return check;
}

bool is_image(int fd, const char* mark, Head& head) {
    struct stat about;
    if (fstat(fd, &about) < 0 || pread(fd, &head, sizeof head, 0) != sizeof head) return false;
    bool known = memcmp(head.magic, kMagic, sizeof kMagic) == 0 && memcmp(head.mark, mark, kMarkBytes) == 0 &&
                 in_window(reinterpret_cast<void*>(head.base)) && head.base % kArenaBytesMax == 0 &&
                 head.size <= kArenaBytesMax && head.size == static_cast<uint64_t>(about.st_size);
    return known && check_of_file(fd, head.size, known) == head.check && known;
}

struct Buffer {
    Py_buffer view{};
    ~Buffer() {
        if (view.obj) PyBuffer_Release(&view);
    }
    bool get(PyObject* object) { return PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) == 0; }
    size_t size() const { return static_cast<size_t>(view.len); }
    const char* data() const { return static_cast<const char*>(view.buf); }
};

// Whether `ends` are ascending positions in a buffer of `size` bytes.
template <class T>
bool are_ends(const T* ends, size_t count, size_t size) {
    if (!count || ends[0] < 0) return false;
    for (size_t i = 1; i < count; i++)
        if (ends[i] < ends[i - 1]) return false;
    return static_cast<size_t>(ends[count - 1]) <= size;
}

// The address, or null when it is taken or the system has none like it.
void* map_at(uintptr_t base, size_t size, int flags, int fd) {
    void* at = mmap(reinterpret_cast<void*>(base), size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_FIXED_NOREPLACE | flags, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    if (reinterpret_cast<uintptr_t>(at) == base) return at;
    munmap(at, size);  // an old kernel takes the address for a wish
    return nullptr;
}

void replace(IndexObject* self, void* mapped, size_t size, Index* index, Ids* ids) {
    delete self->index;
    delete self->ids;
    self->index = index;
    self->ids = ids;
    self->mapped = mapped;
    self->mapped_bytes = size;
}

bool is_empty(IndexObject* self) {
    if (!self->mapped && !self->ids->live() && !self->calls && self->opaques->empty()) return true;
    PyErr_SetString(PyExc_ValueError, "only an index that was never used can become an image");
    return false;
}

bool read_mark(PyObject* object, const char*& mark) {
    if (PyBytes_Check(object) && PyBytes_GET_SIZE(object) == static_cast<Py_ssize_t>(kMarkBytes)) {
        mark = PyBytes_AS_STRING(object);
        return true;
    }
    PyErr_SetString(PyExc_ValueError, "a mark is 32 bytes");
    return false;
}

}  // namespace

uint32_t enter_filter(IndexObject* self, const char* digest, const char* program, size_t length,
                      const std::vector<uint32_t>& opaques) {
    Building scope(self->arena);
    const uint32_t filter = self->index->add(program, length, opaques.data(), opaques.size());
    if (filter) self->ids->insert(digest, filter);
    return filter;
}

void drop_index(IndexObject* self) {
    if (!self->mapped) {
        delete self->index;
        delete self->ids;
    } else {
        // What was changed since is on the heap; the rest goes with the mapping.
        self->index->~Index();
        self->ids->~Ids();
        munmap(self->mapped, self->mapped_bytes);
    }
    delete self->arena;
}

// add_flat(digests, ends, programs, opaques): ends are int64, opaques {position: conditions}.
PyObject* index_add_flat(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    Buffer digests, ends, programs;
    if (count != 4 || !PyDict_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "add_flat(digests, ends, programs, opaques: dict)");
        return nullptr;
    }
    if (!digests.get(args[0]) || !ends.get(args[1]) || !programs.get(args[2])) return nullptr;
    const size_t filters = digests.size() / 32;
    const auto* at = reinterpret_cast<const int64_t*>(ends.data());
    if (digests.size() % 32 || ends.size() != (filters + 1) * 8 ||
        !are_ends(at, filters + 1, programs.size())) {
        PyErr_SetString(PyExc_ValueError, "digests, ends and programs do not fit together");
        return nullptr;
    }
    PyObject* none = PyTuple_New(0);
    bool ok = none != nullptr;
    for (size_t i = 0; ok && i < filters; i++) {
        PyObject* opaques = none;
        if (PyDict_GET_SIZE(args[3])) {
            PyObject* position = PyLong_FromSize_t(i);
            PyObject* found = position ? PyDict_GetItemWithError(args[3], position) : nullptr;
            Py_XDECREF(position);
            ok = !PyErr_Occurred();
            if (found && PyTuple_Check(found)) opaques = found;
        }
        const char* program = programs.data() + at[i];
        ok = ok && add_filter(self, digests.data() + i * 32, program,
                              static_cast<size_t>(at[i + 1] - at[i]), opaques);
    }
    Py_XDECREF(none);
    return ok ? Py_NewRef(Py_None) : nullptr;
}

// match_flat(ends, texts, skip): ends are int32. int32 rows and uint32 filters of all hits, as bytes; an
// event that raises one of `skip` has none.
PyObject* index_match_flat(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    if (reentered(self)) return nullptr;
    Buffer ends, texts;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "match_flat(ends, texts, skip)");
        return nullptr;
    }
    if (!ends.get(args[0]) || !texts.get(args[1])) return nullptr;
    const size_t size = ends.size() / 4;
    const auto* at = reinterpret_cast<const int32_t*>(ends.data());
    if (ends.size() % 4 || !are_ends(at, size, texts.size())) {
        PyErr_SetString(PyExc_ValueError, "ends and texts do not fit together");
        return nullptr;
    }
    const size_t events = size - 1;
    std::vector<int32_t> rows;
    std::vector<uint32_t> filters;
    Call call(self);
    bool ok = true;
    call.hooks.away = PyEval_SaveThread();
    for (size_t from = 0; ok && from < events; from += kEventsPerLock) {
        ReadGuard guard(*self->index, call.hooks);
        self->index->begin(*call.context);
        const size_t to = std::min<size_t>(events, from + kEventsPerLock);
        for (size_t i = from; ok && i < to; i++) {
            const auto length = static_cast<size_t>(at[i + 1] - at[i]);
            if (!call.match_json(texts.data() + at[i], length, static_cast<Py_ssize_t>(i))) {
                const bool taken = call.hooks.take();
                ok = PyErr_ExceptionMatches(args[2]);
                if (ok) PyErr_Clear();
                call.context->failed = false;
                call.context->found_count = 0;
                call.hooks.give(taken);
            }
            const uint32_t* found = call.context->found.data();
            filters.insert(filters.end(), found, found + call.context->found_count);
            rows.insert(rows.end(), call.context->found_count, static_cast<int32_t>(i));
        }
    }
    call.hooks.take();
    if (!ok) return nullptr;
    return Py_BuildValue("y#y#", reinterpret_cast<const char*>(rows.data()),
                         static_cast<Py_ssize_t>(rows.size() * 4),
                         reinterpret_cast<const char*>(filters.data()),
                         static_cast<Py_ssize_t>(filters.size() * 4));
}

// begin_image(number): what is added from now on goes into an arena; False when there is no place for it.
PyObject* index_begin_image(IndexObject* self, PyObject* object) {
    const unsigned long number = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred() || !is_empty(self)) return nullptr;
    const uintptr_t base = kWindow + number % kArenas * kArenaBytesMax;
    auto arena = std::make_unique<Arena>(reinterpret_cast<char*>(base),
                                         sizeof(Head) + 64 - sizeof(Head) % 64);
    void* at = kImages ? map_at(base, kArenaBytesMax, MAP_ANONYMOUS | MAP_NORESERVE, -1) : nullptr;
    if (!at) Py_RETURN_FALSE;
    self->arena = arena.release();
    Building scope(self->arena);
    Index* index = new (self->arena->take(sizeof(Index))) Index();
    replace(self, at, kArenaBytesMax, index, new (self->arena->take(sizeof(Ids))) Ids());
    Py_RETURN_TRUE;
}

// save(fd, mark): the image, once all filters are in and before anything was matched.
PyObject* index_save(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    const char* mark;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "save(file, mark: bytes)");
        return nullptr;
    }
    if (!read_mark(args[1], mark)) return nullptr;
    const int fd = PyObject_AsFileDescriptor(args[0]);
    if (fd < 0) return nullptr;
    if (!self->arena || self->calls || !self->index->is_fresh()) {
        PyErr_SetString(PyExc_ValueError, "an image is saved after begin_image and before the first match");
        return nullptr;
    }
    const size_t size = self->arena->used();
    char* base = self->arena->base();
    Head* head = new (base) Head{};
    memcpy(head->magic, kMagic, sizeof kMagic);
    memcpy(head->mark, mark, kMarkBytes);
    head->base = reinterpret_cast<uintptr_t>(base);
    head->size = size;
    head->index = self->index;
    head->ids = self->ids;
    bool ok = true;
    Py_BEGIN_ALLOW_THREADS;
    head->check = check_of(base, size);
    for (size_t at = 0; ok && at < size;) {
        const ssize_t wrote = write(fd, base + at, std::min<size_t>(size - at, 64u << 20));
        if (wrote > 0) at += static_cast<size_t>(wrote);
        ok = wrote > 0 || (wrote < 0 && errno == EINTR);
    }
    Py_END_ALLOW_THREADS;
    return ok ? Py_NewRef(Py_None) : PyErr_SetFromErrno(PyExc_OSError);
}

// open(fd, mark, opaques): map the image in a file. None if it is not an intact one with this mark; False if
// its address range is in use.
PyObject* index_open(IndexObject* self, PyObject* const* args, Py_ssize_t count) {
    const char* mark;
    if (count != 3 || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "open(file, mark: bytes, conditions: tuple)");
        return nullptr;
    }
    if (!read_mark(args[1], mark) || !is_empty(self)) return nullptr;
    const int fd = PyObject_AsFileDescriptor(args[0]);
    if (fd < 0) return nullptr;
    Head head;
    if (!is_image(fd, mark, head)) Py_RETURN_NONE;
    void* at = kImages ? map_at(head.base, head.size, 0, fd) : nullptr;
    if (!at) Py_RETURN_FALSE;
    replace(self, at, head.size, head.index, head.ids);
    std::vector<uint32_t> numbers;
    if (!number_opaques(self, args[2], numbers)) return nullptr;
    self->index->report_all_patterns();
    report_patterns(self);
    Py_RETURN_TRUE;
}

// code(): the bytes of this module as loaded, which its file may no longer have; b"" where unknown.
PyObject* module_code(PyObject*, PyObject*) {
    std::string code;
#ifdef __linux__
    auto add = [](dl_phdr_info* info, size_t, void* into) {
        const auto here = reinterpret_cast<uintptr_t>(&module_code);
        const ElfW(Phdr)* end = info->dlpi_phdr + info->dlpi_phnum;
        const bool ours = std::any_of(info->dlpi_phdr, end, [&](const ElfW(Phdr)& part) {
            return part.p_type == PT_LOAD && here - (info->dlpi_addr + part.p_vaddr) < part.p_memsz;
        });
        for (const ElfW(Phdr)* part = info->dlpi_phdr; ours && part < end; part++)
            if (part->p_type == PT_LOAD && (part->p_flags & (PF_R | PF_W)) == PF_R)
                static_cast<std::string*>(into)->append(
                    reinterpret_cast<const char*>(info->dlpi_addr + part->p_vaddr), part->p_filesz);
        return static_cast<int>(ours);
    };
    dl_iterate_phdr(add, &code);
#endif
    return PyBytes_FromStringAndSize(code.data(), static_cast<Py_ssize_t>(code.size()));
}

}  // namespace virta
