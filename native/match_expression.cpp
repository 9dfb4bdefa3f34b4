// Checking and running the programs of computed paths; match_expression.hpp documents them.

#include "match_expression.hpp"

#include <map>

#include "match_index.hpp"

namespace virta {

namespace {

enum Instruction : uint8_t {
    kPushInteger = 1, kPushText, kPushBoolean, kAttribute, kHas, kNot, kNegative, kAndElse, kOrElse,
    kToBoolean, kXor, kSame, kDiffers, kLess, kLessOrSame, kMore, kMoreOrSame, kAdd, kSubtract, kMultiply,
    kDivide, kModulo, kLike, kInList, kInEnd, kCall, kFail,
};

enum Function : uint8_t {
    kCallAbs, kCallBool, kCallConcat, kCallConcatWs, kCallInt, kCallIsBool, kCallIsInt, kCallLeft,
    kCallLength, kCallLower, kCallRight, kCallString, kCallSubstring, kCallTrim, kCallUpper, kCallFunctions,
};

template <class T>
T read(const char*& at) {
    T value;
    memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
}

bool takes(uint8_t function, uint32_t count) {
    switch (function) {
        case kCallConcat:
            return true;
        case kCallConcatWs:
            return count >= 1;
        case kCallLeft:
        case kCallRight:
            return count == 2;
        case kCallSubstring:
            return count == 2 || count == 3;
        default:
            return function < kCallFunctions && count == 1;
    }
}

}  // namespace

uint32_t check_expression(const char* code, size_t length, size_t inputs) {
    const char* at = code;
    const char* end = code + length;
    std::map<size_t, uint32_t> targets;  // position -> depth of the stack there
    uint32_t depth = 0, deepest = 0;
    auto left = [&](size_t bytes) { return static_cast<size_t>(end - at) >= bytes; };
    auto aim = [&](uint32_t target, uint32_t expected) {
        if (target <= static_cast<size_t>(at - code) - 1 || target > length) return false;
        return targets.try_emplace(target, expected).first->second == expected;
    };
    while (true) {
        const auto here = static_cast<size_t>(at - code);
        if (!targets.empty() && targets.begin()->first <= here) {
            if (targets.begin()->first != here || targets.begin()->second != depth) return 0;
            targets.erase(targets.begin());
        }
        if (at == end) break;
        const auto instruction = read<uint8_t>(at);
        uint32_t pops = 0, pushes = 1, skip = 0;
        if (instruction == kPushInteger) {
            skip = 4;
        } else if (instruction == kPushText) {
            if (!left(4)) return 0;
            skip = read<uint32_t>(at);
        } else if (instruction == kPushBoolean) {
            skip = 1;
        } else if (instruction == kAttribute || instruction == kHas) {
            if (!left(1) || read<uint8_t>(at) >= inputs) return 0;
        } else if (instruction == kNot || instruction == kNegative || instruction == kToBoolean) {
            pops = 1;
        } else if (instruction == kAndElse || instruction == kOrElse) {
            if (!left(4) || !depth || !aim(read<uint32_t>(at), depth)) return 0;
            pops = 1, pushes = 0;
        } else if (instruction >= kXor && instruction <= kModulo) {
            pops = 2;
        } else if (instruction == kLike) {
            if (!left(5)) return 0;
            at++;
            const auto size = read<uint32_t>(at);
            if (!left(size) || !LikeCode(at, size).valid()) return 0;
            skip = size;
            pops = 1;
        } else if (instruction == kInList) {
            if (!left(5) || depth < 2) return 0;
            at++;
            if (!aim(read<uint32_t>(at), depth - 1)) return 0;
            pops = 2;
        } else if (instruction == kInEnd) {
            skip = 1;
            pops = 1;
        } else if (instruction == kCall) {
            if (!left(3)) return 0;
            const auto function = read<uint8_t>(at);
            pops = read<uint16_t>(at);
            if (!takes(function, pops)) return 0;
        } else if (instruction != kFail) {
            return 0;
        }
        if (!left(skip) || pops > depth) return 0;
        at += skip;
        depth += pushes - pops;
        deepest = std::max(deepest, depth);
        if (depth > kExpressionStackMax) return 0;
    }
    return targets.empty() && depth == 1 ? deepest : 0;
}

namespace {

constexpr uint8_t kBooleanType = 0, kIntegerType = 1, kTextType = 2;

bool integer_of(const char* text, uint32_t length, int32_t& out) {
    const char* end = text + length;
    const bool negative = length && *text == '-';
    if (length && (*text == '-' || *text == '+')) text++;
    if (text == end) return false;
    while (text < end && *text == '0') text++;
    if (end - text > 10) return false;
    int64_t value = 0;
    for (; text < end; text++) {
        if (*text < '0' || *text > '9') return false;
        value = value * 10 + (*text - '0');
    }
    value = negative ? -value : value;
    if (value < INT32_MIN || value > INT32_MAX) return false;
    out = static_cast<int32_t>(value);
    return true;
}

bool is_word(const char* text, uint32_t length, const char* word) {
    for (uint32_t i = 0; i < length; i++)
        if ((text[i] | 32) != word[i]) return false;
    return word[length] == 0;
}

// White space as Unicode has it, without the separators U+001C to U+001F.
bool is_space(const char* at, const char* end) {
    const auto byte = static_cast<unsigned char>(*at);
    if (byte < 0x80) return byte == ' ' || (byte >= 9 && byte <= 13);
    const ptrdiff_t size = end - at;
    const auto second = size > 1 ? static_cast<unsigned char>(at[1]) : 0;
    if (byte == 0xc2) return second == 0x85 || second == 0xa0;
    const auto third = size > 2 ? static_cast<unsigned char>(at[2]) : 0;
    if (byte == 0xe1) return second == 0x9a && third == 0x80;
    if (byte == 0xe3) return second == 0x80 && third == 0x80;
    if (byte != 0xe2) return false;
    if (second == 0x80)
        return (third >= 0x80 && third <= 0x8a) || third == 0xa8 || third == 0xa9 || third == 0xaf;
    return second == 0x81 && third == 0x9f;
}

}  // namespace

// One run of a program. Methods return false on a CESQL error, and after a failure of a callback.
class ExpressionRun {
  public:
    ExpressionRun(const Expression& expression, Context& context)
        : expression_(expression), context_(context) {
        if (context.values.size() < expression.depth) context.values.resize(expression.depth);
        top_ = context.values.data() - 1;
    }

    bool run() {
        const char* code = expression_.code.data();
        const char* at = code;
        const char* end = code + expression_.code.size();
        while (at < end)
            if (!step(code, at)) return false;
        return true;
    }

    const ExpressionValue& result() const { return *top_; }

  private:
    bool step(const char* code, const char*& at) {
        const auto instruction = read<uint8_t>(at);
        switch (instruction) {
            case kPushInteger:
                return push_integer(read<int32_t>(at));
            case kPushText: {
                const auto length = read<uint32_t>(at);
                at += length;
                return push_text(at - length, length);
            }
            case kPushBoolean:
                return push_boolean(read<uint8_t>(at));
            case kAttribute:
                return attribute(read<uint8_t>(at));
            case kHas: {
                const Type type = context_.slots[expression_.inputs[read<uint8_t>(at)]].type;
                return push_boolean(type > kNull);
            }
            case kNot:
                if (top_->type == kIntegerType || !to_boolean(*top_)) return false;
                top_->number = !top_->number;
                return true;
            case kNegative:
                return to_integer(*top_) && set_integer(-static_cast<int64_t>(top_->number));
            case kAndElse:
            case kOrElse: {
                const auto target = read<uint32_t>(at);
                if (!to_boolean(*top_)) return false;
                if (static_cast<bool>(top_->number) == (instruction == kOrElse))
                    at = code + target;
                else
                    top_--;
                return true;
            }
            case kToBoolean:
                return to_boolean(*top_);
            case kLike: {
                const bool negated = read<uint8_t>(at);
                const auto size = read<uint32_t>(at);
                to_text(*top_);
                set_boolean(LikeCode(at, size).matches(top_->text, top_->length) != negated);
                at += size;
                return true;
            }
            case kInList: {
                const bool negated = read<uint8_t>(at);
                const auto target = read<uint32_t>(at);
                ExpressionValue element = *top_--;
                if (!cast(element, top_->type)) return false;
                if (!same(element, *top_)) return true;
                set_boolean(!negated);
                at = code + target;
                return true;
            }
            case kInEnd:
                set_boolean(read<uint8_t>(at));
                return true;
            case kCall: {
                const auto function = read<uint8_t>(at);
                return call(function, read<uint16_t>(at));
            }
            case kFail:
                return false;
            default:
                return binary(instruction);
        }
    }

    bool binary(uint8_t instruction) {
        ExpressionValue& right = *top_--;
        ExpressionValue& left = *top_;
        if (instruction == kXor) {
            if (!to_boolean(left) || !to_boolean(right)) return false;
            return set_boolean(left.number != right.number);
        }
        if (instruction == kSame || instruction == kDiffers) {
            if (!cast(left, right.type)) return false;
            return set_boolean(same(left, right) == (instruction == kSame));
        }
        if (!to_integer(left) || !to_integer(right)) return false;
        const int64_t x = left.number, y = right.number;
        switch (instruction) {
            case kLess:
                return set_boolean(x < y);
            case kLessOrSame:
                return set_boolean(x <= y);
            case kMore:
                return set_boolean(x > y);
            case kMoreOrSame:
                return set_boolean(x >= y);
            case kAdd:
                return set_integer(x + y);
            case kSubtract:
                return set_integer(x - y);
            case kMultiply:
                return set_integer(x * y);
            case kDivide:
                return y && set_integer(x / y);
            default:
                return y && set_integer(x % y);
        }
    }

    // Values.

    bool push_integer(int32_t number) {
        *++top_ = {kIntegerType, number, 0, nullptr};
        return true;
    }
    bool push_boolean(bool truth) {
        *++top_ = {kBooleanType, truth, 0, nullptr};
        return true;
    }
    bool push_text(const char* text, uint32_t length) {
        *++top_ = {kTextType, 0, length, text};
        return true;
    }
    bool set_boolean(bool truth) {
        *top_ = {kBooleanType, truth, 0, nullptr};
        return true;
    }
    bool set_integer(int64_t number) {
        if (number < INT32_MIN || number > INT32_MAX) return false;
        *top_ = {kIntegerType, static_cast<int32_t>(number), 0, nullptr};
        return true;
    }
    bool set_text(const char* text, uint32_t length) {
        *top_ = {kTextType, 0, length, text};
        return true;
    }

    static bool to_boolean(ExpressionValue& value) {
        if (value.type == kTextType) {
            const bool truth = value.length == 4 && is_word(value.text, 4, "true");
            if (!truth && !(value.length == 5 && is_word(value.text, 5, "false"))) return false;
            value.number = truth;
        }
        value.number = value.number != 0;
        value.type = kBooleanType;
        return true;
    }
    static bool to_integer(ExpressionValue& value) {
        if (value.type == kTextType && !integer_of(value.text, value.length, value.number)) return false;
        value.type = kIntegerType;
        return true;
    }
    void to_text(ExpressionValue& value) {
        if (value.type == kTextType) return;
        if (value.type == kBooleanType) {
            value.text = value.number ? "true" : "false";
            value.length = value.number ? 4 : 5;
        } else {
            decimal(value, value.number);
        }
        value.type = kTextType;
    }
    void decimal(ExpressionValue& value, int64_t number) {
        const std::string digits = std::to_string(number);
        value.length = static_cast<uint32_t>(digits.size());
        value.text = context_.texts.copy(digits.data(), digits.size());
    }
    bool cast(ExpressionValue& value, uint8_t type) {
        if (type == kBooleanType) return to_boolean(value);
        if (type == kIntegerType) return to_integer(value);
        to_text(value);
        return true;
    }
    static bool same(const ExpressionValue& a, const ExpressionValue& b) {
        if (a.type != kTextType) return a.number == b.number;
        return a.length == b.length && same_bytes(a.text, b.text, a.length);
    }

    bool attribute(uint8_t input) {
        const uint32_t node = expression_.inputs[input];
        const Slot& slot = context_.slots[node];
        switch (slot.type) {
            case kAbsent:
            case kNull:
                return false;
            case kTrue:
            case kFalse:
                return push_boolean(slot.type == kTrue);
            case kString:
                return push_text(slot.text, slot.length);
            case kNumber: {
                const double number = slot.key ? unordered(slot.key) : NAN;
                if (!(std::fabs(number) < 9007199254740992.0) || number != std::floor(number)) break;
                if (number >= INT32_MIN && number <= INT32_MAX)
                    return push_integer(static_cast<int32_t>(number));
                push_text(nullptr, 0);
                decimal(*top_, static_cast<int64_t>(number));
                return true;
            }
            default:
                break;
        }
        return odd_attribute(node, expression_.names[input]);
    }

    // Numbers that are no Integers, arrays and objects: Python writes their text, once an event.
    bool odd_attribute(uint32_t node, const String& name) {
        for (const Context::OddText& known : context_.odd_texts)
            if (known.node == node) return push_text(known.text, known.length);
        std::string text;
        if (!context_.hooks->attribute(name.data(), name.size(), text)) {
            context_.failed = true;
            return false;
        }
        const auto length = static_cast<uint32_t>(text.size());
        context_.odd_texts.push_back({node, length, context_.texts.copy(text.data(), length)});
        return push_text(context_.odd_texts.back().text, length);
    }

    // Functions. The arguments are on the stack; the result takes the place of the first.

    bool call(uint8_t function, uint32_t count) {
        if (function == kCallConcat) return concat(false, count);
        if (function == kCallConcatWs) return concat(true, count);
        top_ -= count - 1;
        ExpressionValue value = *top_;
        switch (function) {
            case kCallBool:
                return to_boolean(*top_);
            case kCallInt:
                return to_integer(*top_);
            case kCallString:
                to_text(*top_);
                return true;
            case kCallIsBool:
                return set_boolean(to_boolean(value));
            case kCallIsInt:
                return set_boolean(to_integer(value));
            case kCallAbs:
                return to_integer(value) && set_integer(std::abs(static_cast<int64_t>(value.number)));
            default:
                break;
        }
        to_text(value);
        const char* end = value.text + value.length;
        switch (function) {
            case kCallLength:
                return set_integer(count_chars(value.text, value.length));
            case kCallLower:
            case kCallUpper:
                return fold(value, function == kCallUpper);
            case kCallTrim: {
                const char* from = value.text;
                while (from < end && is_space(from, end)) from = next_char(from, end);
                while (end > from && is_space(previous_char(end, from), end)) end = previous_char(end, from);
                return set_text(from, static_cast<uint32_t>(end - from));
            }
            default:
                return part(function, value, count);
        }
    }

    bool part(uint8_t function, const ExpressionValue& value, uint32_t count) {
        if (!to_integer(top_[1]) || (count == 3 && !to_integer(top_[2]))) return false;
        const int64_t size = count_chars(value.text, value.length);
        int64_t from = 0, length = top_[1].number;
        if (function == kCallSubstring) {
            const int64_t position = top_[1].number;
            length = count == 3 ? top_[2].number : INT32_MAX;
            if (position < -size || position > size) return false;
            from = position > 0 ? position - 1 : size + position;
            if (position == 0 && length >= 0) return set_text("", 0);
        }
        if (length < 0) return false;
        if (function == kCallRight) from = std::max<int64_t>(0, size - length);
        const char* end = value.text + value.length;
        const char* first = value.text;
        while (from--) first = next_char(first, end);
        const char* last = first;
        while (length-- && last < end) last = next_char(last, end);
        return set_text(first, static_cast<uint32_t>(last - first));
    }

    bool concat(bool delimited, uint32_t count) {
        if (!count) return push_text("", 0);
        top_ -= count - 1;
        size_t bytes = 0, chars = 0;
        for (uint32_t i = 0; i < count; i++) {
            to_text(top_[i]);
            const size_t times = delimited && i == 0 ? std::max<uint32_t>(count, 2) - 2 : 1;
            bytes += times * top_[i].length;
            chars += times * count_chars(top_[i].text, top_[i].length);
        }
        if (chars > kTextCharsMax) return false;
        char* out = context_.texts.take(bytes);
        char* at = out;
        for (uint32_t i = delimited; i < count; i++) {
            if (delimited && i > 1) at = append(at, top_[0]);
            at = append(at, top_[i]);
        }
        return set_text(out, static_cast<uint32_t>(at - out));
    }
    static char* append(char* at, const ExpressionValue& value) {
        memcpy(at, value.text, value.length);
        return at + value.length;
    }

    bool fold(const ExpressionValue& value, bool upper) {
        if (is_ascii(value.text, value.length)) {
            if (value.length > kTextCharsMax) return false;
            char* out = context_.texts.take(value.length);
            for (uint32_t i = 0; i < value.length; i++) {
                const char c = value.text[i];
                const bool letter = upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z';
                out[i] = letter ? static_cast<char>(c ^ 32) : c;
            }
            return set_text(out, value.length);
        }
        for (const Context::Folded& known : context_.folded)
            if (known.upper == upper && known.length == value.length &&
                memcmp(known.text, value.text, value.length) == 0)
                return known.valid && set_text(known.result, known.result_length);
        std::string text;
        if (!context_.hooks->fold(upper, value.text, value.length, text)) {
            context_.failed = true;
            return false;
        }
        const auto length = static_cast<uint32_t>(text.size());
        const char* result = context_.texts.copy(text.data(), length);
        const bool valid = count_chars(result, length) <= kTextCharsMax;
        context_.folded.push_back({value.text, result, value.length, length, upper, valid});
        return valid && set_text(result, length);
    }

    const Expression& expression_;
    Context& context_;
    ExpressionValue* top_;
};

void Index::compute_paths(Context& context) const {
    const size_t reached = context.touched.size();
    for (size_t i = 0; i < reached; i++) {
        const Node& node = paths.nodes[context.touched[i]];
        if (!(node.needs & kNeedComputed)) continue;
        for (uint32_t computed : node.extra->dependents) compute_path(context, computed);
    }
    for (uint32_t computed : paths.untriggered) compute_path(context, computed);
}

void Index::compute_path(Context& context, uint32_t id) const {
    ExpressionRun run(*paths.nodes[id].extra->expression, context);
    if (context.failed || !run.run()) return;
    const ExpressionValue& value = run.result();
    Slot& slot = context.slots[id];
    if (value.type == kTextType) {
        slot.type = kString;
        slot.text = value.text;
        slot.length = value.length;
    } else if (value.type == kBooleanType) {
        slot.type = value.number ? kTrue : kFalse;
    } else {
        slot.type = kNumber;
        slot.key = ordered(value.number);
    }
    context.touched.push_back(id);
}

}  // namespace virta
