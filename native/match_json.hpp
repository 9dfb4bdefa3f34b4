// Events as JSON bytes, read by yyjson.
#pragma once

#include "match_event.hpp"
#include "vendor/yyjson/yyjson.h"

namespace virta {

class JsonSource {
  public:
    using Ref = yyjson_val*;

    static Ref ref(const void* handle) { return static_cast<Ref>(const_cast<void*>(handle)); }

    Value read(Ref value) const {
        Value out;
        out.ref = value;
        switch (yyjson_get_type(value)) {
            case YYJSON_TYPE_NULL:
                out.type = kNull;
                break;
            case YYJSON_TYPE_BOOL:
                out.type = unsafe_yyjson_get_bool(value) ? kTrue : kFalse;
                break;
            case YYJSON_TYPE_NUM:
                out.type = kNumber;
                out.number = yyjson_get_num(value);
                out.negative_zero = yyjson_is_real(value) && out.number == 0 && std::signbit(out.number);
                break;
            case YYJSON_TYPE_STR:
                out.type = kString;
                out.text = unsafe_yyjson_get_str(value);
                out.length = static_cast<uint32_t>(unsafe_yyjson_get_len(value));
                break;
            case YYJSON_TYPE_ARR:
                out.type = kArray;
                break;
            case YYJSON_TYPE_OBJ:
                out.type = kObject;
                break;
            default:
                out.type = kOther;
        }
        return out;
    }

    template <class F>
    void members(Ref object, F&& f) const {
        size_t count = unsafe_yyjson_get_len(object);
        yyjson_val* key = unsafe_yyjson_get_first(object);
        for (; count; count--) {
            yyjson_val* value = key + 1;
            f(unsafe_yyjson_get_str(key), static_cast<uint32_t>(unsafe_yyjson_get_len(key)), value);
            key = unsafe_yyjson_get_next(value);
        }
    }

    template <class F>
    void elements(Ref array, F&& f) const {
        size_t count = unsafe_yyjson_get_len(array);
        yyjson_val* value = unsafe_yyjson_get_first(array);
        for (; count; count--) {
            if (!f(value)) return;
            value = unsafe_yyjson_get_next(value);
        }
    }
};

// A parsed document and the memory it is parsed into, kept for the next.
class JsonReader {
  public:
    JsonReader() = default;
    JsonReader(const JsonReader&) = delete;
    JsonReader& operator=(const JsonReader&) = delete;
    ~JsonReader() { yyjson_doc_free(document_); }

    // The root, or null: not JSON that yyjson takes, or nested too deeply.
    yyjson_val* parse(const char* text, size_t length) {
        yyjson_doc_free(document_);
        document_ = nullptr;
        const yyjson_alc* allocator = nullptr;
        const size_t wanted = yyjson_read_max_memory_usage(length, 0);
        if (wanted <= kKeptMax) {
            if (buffer_.size() < wanted) buffer_.resize(wanted * 2);
            yyjson_alc_pool_init(&pool_, buffer_.data(), buffer_.size());
            allocator = &pool_;
        }
        // Without the INSITU flag yyjson does not write to the text.
        document_ = yyjson_read_opts(const_cast<char*>(text), length, 0, allocator, nullptr);
        yyjson_val* root = yyjson_doc_get_root(document_);
        return root && too_deep(root) ? nullptr : root;
    }

  private:
    // A value is followed by its members, then by its next sibling, so one pass finds the depth.
    bool too_deep(yyjson_val* root) const {
        if (yyjson_doc_get_val_count(document_) <= kDepthMax) return false;
        const yyjson_val* ends[kDepthMax];
        size_t depth = 0;
        yyjson_val* end = root + yyjson_doc_get_val_count(document_);
        for (yyjson_val* value = root; value < end; value++) {
            while (depth && value >= ends[depth - 1]) depth--;
            if (!unsafe_yyjson_is_ctn(value)) continue;
            if (depth == kDepthMax) return true;
            ends[depth++] = unsafe_yyjson_get_next(value);
        }
        return false;
    }

    static constexpr size_t kDepthMax = 900;  // as virta.jsontext
    static constexpr size_t kKeptMax = 4 << 20;
    std::vector<char> buffer_;
    yyjson_alc pool_{};
    yyjson_doc* document_ = nullptr;
};

}  // namespace virta
