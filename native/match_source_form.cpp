// Canonical forms of the common filters: texts, joins of conditions on one path, programs.
// The rules are those of virta.filters.canonical and virta.match.compile.program.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "match_source.hpp"

namespace virta {

namespace {

// "boolean" < "null" < "number" < "string", as scalar_key sorts.
int rank(SourceScalar::Type type) {
    switch (type) {
        case SourceScalar::kFalseType: return 0;
        case SourceScalar::kTrueType: return 1;
        case SourceScalar::kNullType: return 2;
        case SourceScalar::kNumberType: return 3;
        default: return 4;
    }
}

const char* op_name(uint8_t op) {
    switch (op) {
        case kExistsOp: return "exists";
        case kEqualsOp: return "eq";
        case kContainsOp: return "contains";
        case kInOp: return "in";
        case kRangeOp: return "range";
        case kPrefixOp: return "prefix";
        case kSuffixOp: return "suffix";
        default: return "negative_zero";
    }
}

void append_hex(std::string& out, uint32_t unit) {
    static const char digits[] = "0123456789abcdef";
    const char escaped[] = {'\\',
                            'u',
                            digits[unit >> 12 & 15],
                            digits[unit >> 8 & 15],
                            digits[unit >> 4 & 15],
                            digits[unit & 15]};
    out.append(escaped, sizeof escaped);
}

// One character beyond ASCII of well-formed UTF-8; returns its length.
size_t append_beyond_ascii(std::string& out, Text text, size_t at) {
    const auto byte = [&](size_t i) {
        return static_cast<uint32_t>(static_cast<unsigned char>(text[at + i]));
    };
    if (byte(0) < 0xe0) {
        append_hex(out, (byte(0) & 31) << 6 | (byte(1) & 63));
        return 2;
    }
    if (byte(0) < 0xf0) {
        append_hex(out, (byte(0) & 15) << 12 | (byte(1) & 63) << 6 | (byte(2) & 63));
        return 3;
    }
    const uint32_t point = (byte(0) & 7) << 18 | (byte(1) & 63) << 12 | (byte(2) & 63) << 6 | (byte(3) & 63);
    append_hex(out, 0xd800 + ((point - 0x10000) >> 10));
    append_hex(out, 0xdc00 + ((point - 0x10000) & 1023));
    return 4;
}

void append_number(std::string& out, double number) {
    if (number == std::floor(number) && std::fabs(number) <= kExactMax) {
        out += std::to_string(static_cast<long long>(number));
        return;
    }
    if (std::isinf(number)) {
        out += number < 0 ? "-Infinity" : "Infinity";
        return;
    }
    append_digits(out, number);
}

// Sets the text of a literal from its operation and the JSON of its value.
void finish(SourceForm& form, Text value) {
    std::string& text = form.text;
    text.reserve(form.path->text.size() + value.size() + 32);
    if (form.negated) text += "{\"not\":";
    text += "{\"";
    text += op_name(form.op);
    text += "\":[";
    text += form.path->text;
    text += ',';
    text += value;
    text += "]}";
    if (form.negated) text += '}';
}

SourceForm started(const PathRef& path, uint8_t op, bool negated) {
    SourceForm form;
    form.path = path;
    form.op = op;
    form.negated = negated;
    return form;
}

void append_code(SourceForm& form, uint8_t op, Text operand) {
    append_literal_code(form.code, form.negated ? op | kNegatedOp : op, form.path->code, operand);
}

// -1, 0, 1: bounds of one type.
int compare(const SourceScalar& one, const SourceScalar& two) {
    if (one.type == SourceScalar::kNumberType)
        return one.number < two.number ? -1 : one.number > two.number ? 1 : 0;
    const int order = one.text.compare(two.text);
    return order < 0 ? -1 : order > 0 ? 1 : 0;
}

SourceScalar::Type type_of(const SourceBounds& bounds) {
    return (bounds.has_lower ? bounds.lower : bounds.upper).type;
}

void intersect(SourceBounds& one, const SourceBounds& two) {
    if (two.has_lower) {
        const int order = one.has_lower ? compare(two.lower, one.lower) : 1;
        one.lower_open = order > 0    ? two.lower_open
                         : order == 0 ? one.lower_open || two.lower_open
                                      : one.lower_open;
        if (order > 0) one.lower = two.lower;
        one.has_lower = true;
    }
    if (two.has_upper) {
        const int order = one.has_upper ? compare(two.upper, one.upper) : -1;
        one.upper_open = order < 0    ? two.upper_open
                         : order == 0 ? one.upper_open || two.upper_open
                                      : one.upper_open;
        if (order < 0) one.upper = two.upper;
        one.has_upper = true;
    }
}

SourceForm nothing() {
    SourceForm form;
    form.kind = SourceForm::kNothing;
    form.text = "\"nothing\"";
    return form;
}

bool is_within(const SourceBounds& bounds, const SourceScalar& value) {
    if (value.type != type_of(bounds)) return false;
    const int below = bounds.has_lower ? compare(value, bounds.lower) : 1;
    const int above = bounds.has_upper ? compare(value, bounds.upper) : -1;
    return (below > 0 || (below == 0 && !bounds.lower_open)) &&
           (above < 0 || (above == 0 && !bounds.upper_open));
}

// Whether a condition holds for a scalar; `known` is false where the rule for it is not here.
bool holds(const SourceForm& form, const SourceScalar& value, bool& known) {
    switch (form.op) {
        case kExistsOp: return true;
        case kContainsOp: return false;
        case kEqualsOp:
        case kInOp: return std::find(form.values.begin(), form.values.end(), value) != form.values.end();
        case kRangeOp: return is_within(form.bounds, value);
        default: known = false; return false;
    }
}

using Group = std::vector<SourceForm>;

bool has(const Group& group, SourceOp op, bool negated) {
    const auto is_one = [&](const SourceForm& form) { return form.op == op && form.negated == negated; };
    return std::any_of(group.begin(), group.end(), is_one);
}

void become(Group& group, SourceForm&& form) {
    Group joined;
    joined.push_back(std::move(form));
    group = std::move(joined);
}

// A conjunction with an equality: the value decides the rest, but for -0.0, which equals 0.
bool conjoin_value(Group& group) {
    const auto equal = std::find_if(group.begin(), group.end(), [](const SourceForm& form) {
        return form.op == kEqualsOp && !form.negated;
    });
    const SourceScalar value = equal->values[0];
    const bool zero = value.type == SourceScalar::kNumberType && value.number == 0;
    Group kept;
    bool known = true, all = true;
    for (SourceForm& form : group) {
        if (form.op != kNegativeZeroOp) {
            all = holds(form, value, known) != form.negated && all;
        } else if (!form.negated) {
            return false;
        } else if (zero) {
            kept.push_back(std::move(form));
        }
    }
    if (!known) return false;
    if (!all) {
        become(group, nothing());
        return true;
    }
    kept.push_back(std::move(*equal));
    group = std::move(kept);
    return true;
}

// All equalities and lists in a group as one condition.
void merge_values(Group& group, bool negated) {
    std::vector<SourceScalar> values;
    Group others;
    PathRef path;  // of one of them: a condition made in Python has no path for programs
    for (SourceForm& form : group) {
        if ((form.op == kEqualsOp || form.op == kInOp) && form.negated == negated) {
            values.insert(values.end(), form.values.begin(), form.values.end());
            path = form.path;
        } else {
            others.push_back(std::move(form));
        }
    }
    if (!values.empty()) others.push_back(in_form(path, std::move(values), negated));
    group = std::move(others);
}

// All ranges of a group as one; false if their types differ, or what is left is no range.
bool merge_ranges(Group& group) {
    SourceBounds bounds;
    bool found = false;
    Group others;
    PathRef path;
    for (SourceForm& form : group) {
        if (form.op != kRangeOp || form.negated) {
            others.push_back(std::move(form));
        } else if (!found) {
            bounds = form.bounds;
            path = form.path;
            found = true;
        } else if (type_of(form.bounds) != type_of(bounds)) {
            return false;
        } else {
            intersect(bounds, form.bounds);
        }
    }
    group = std::move(others);
    if (!found) return true;
    SourceForm range;
    if (!range_form(path, bounds, false, range)) return false;
    if (range.kind == SourceForm::kNothing) {
        become(group, std::move(range));
        return true;
    }
    const bool is_range = range.op == kRangeOp;
    group.push_back(std::move(range));
    return is_range;
}

// Joins literals of a conjunction that are on one path; false where the rules for it are not here.
bool conjoin(Group& group) {
    size_t wanted = 0;
    for (const SourceForm& form : group) {
        wanted += !form.negated;
        for (const SourceForm& other : group) {
            if (form.negated || !other.negated || other.text != "{\"not\":" + form.text + "}") continue;
            become(group, nothing());
            return true;
        }
    }
    if (has(group, kExistsOp, true)) {  // what is missing fulfils no condition
        const auto is_exists = [](const SourceForm& form) { return form.op == kExistsOp; };
        SourceForm missing = *std::find_if(group.begin(), group.end(), is_exists);
        become(group, wanted ? nothing() : std::move(missing));
        return true;
    }
    if (has(group, kEqualsOp, false)) return conjoin_value(group);
    if (has(group, kInOp, false) || has(group, kNegativeZeroOp, false)) return false;
    if (!merge_ranges(group)) return false;
    if (wanted > 1)
        group.erase(std::remove_if(group.begin(), group.end(),
                                   [](const auto& form) { return form.op == kExistsOp && !form.negated; }),
                    group.end());
    merge_values(group, true);
    return true;
}

bool disjoin(Group& group) {
    for (const SourceForm& form : group)
        if (form.negated || form.op == kExistsOp || form.op == kNegativeZeroOp) return false;
    merge_values(group, false);
    return true;
}

bool share_path(const SourceForm& one, const SourceForm& two) {
    const bool literals = one.kind == SourceForm::kLiteral && two.kind == SourceForm::kLiteral;
    return literals && (one.path == two.path || one.path->text == two.path->text);
}

// Literals on one path become as few as the rules allow.
bool join_paths(SourceForm::Kind kind, std::vector<SourceForm>& forms) {
    bool shared = false;
    for (size_t i = 1; i < forms.size() && !shared; i++)
        for (size_t j = 0; j < i && !shared; j++) shared = share_path(forms[i], forms[j]);
    if (!shared) return true;
    std::vector<SourceForm> done;
    std::vector<bool> used(forms.size());
    for (size_t i = 0; i < forms.size(); i++) {
        if (used[i]) continue;
        std::vector<SourceForm> group;
        for (size_t j = i + 1; j < forms.size(); j++) {
            if (used[j] || !share_path(forms[i], forms[j])) continue;
            used[j] = true;
            group.push_back(std::move(forms[j]));
        }
        group.insert(group.begin(), std::move(forms[i]));
        if (group.size() > 1 && !(kind == SourceForm::kAnd ? conjoin(group) : disjoin(group))) return false;
        for (SourceForm& form : group) done.push_back(std::move(form));
    }
    forms = std::move(done);
    return true;
}

bool has_text(const std::vector<SourceForm>& forms, const std::string& text) {
    return std::any_of(forms.begin(), forms.end(), [&](const auto& form) { return form.text == text; });
}

// The number of conjunctions that distribution makes, at most one more than are allowed.
size_t terms(const SourceForm& form) {
    if (form.kind == SourceForm::kLiteral || form.kind == SourceForm::kNothing) return 1;
    size_t count = form.kind == SourceForm::kAnd ? 1 : 0;
    for (const SourceForm& part : form.parts) {
        count = form.kind == SourceForm::kAnd ? count * terms(part) : count + terms(part);
        if (count > kSourceTermsMax) return kSourceTermsMax + 1;
    }
    return count;
}

using Term = std::vector<const SourceForm*>;

std::vector<Term> distribute(const SourceForm& form) {
    std::vector<Term> out;
    if (form.kind == SourceForm::kLiteral) out.push_back({&form});
    if (form.kind == SourceForm::kLiteral || form.kind == SourceForm::kNothing) return out;
    if (form.kind == SourceForm::kOr) {
        for (const SourceForm& part : form.parts)
            for (Term& term : distribute(part)) out.push_back(std::move(term));
        return out;
    }
    out.emplace_back();
    for (const SourceForm& part : form.parts) {
        const std::vector<Term> tails = distribute(part);
        std::vector<Term> longer;
        for (const Term& head : out)
            for (const Term& tail : tails) {
                longer.push_back(head);
                longer.back().insert(longer.back().end(), tail.begin(), tail.end());
            }
        out = std::move(longer);
    }
    return out;
}

bool is_conjunction(const SourceForm& form) {
    if (form.kind == SourceForm::kLiteral) return true;
    const auto literal = [](const auto& part) { return part.kind == SourceForm::kLiteral; };
    return form.kind == SourceForm::kAnd && std::all_of(form.parts.begin(), form.parts.end(), literal);
}

void append_conjunction(std::string& program, const SourceForm& form) {
    if (form.kind == SourceForm::kLiteral) {
        append_length(program, form.count);
        program += form.code;
        return;
    }
    size_t count = 0;
    for (const SourceForm& part : form.parts) count += part.count;
    append_length(program, count);
    for (const SourceForm& part : form.parts) program += part.code;
}

}  // namespace

bool SourceScalar::operator<(const SourceScalar& other) const {
    if (type != other.type) return rank(type) < rank(other.type);
    return type == kNumberType ? number < other.number : type == kTextType && text < other.text;
}

bool SourceScalar::operator==(const SourceScalar& other) const {
    return type == other.type && number == other.number && text == other.text;
}

void append_length(std::string& out, size_t length) {
    const char bytes[] = {static_cast<char>(length), static_cast<char>(length >> 8),
                          static_cast<char>(length >> 16), static_cast<char>(length >> 24)};
    out.append(bytes, sizeof bytes);
}

void append_json(std::string& out, Text text) {
    out += '"';
    for (size_t i = 0; i < text.size();) {
        const auto byte = static_cast<unsigned char>(text[i]);
        if (byte >= 0x80) {
            i += append_beyond_ascii(out, text, i);
            continue;
        }
        static const char special[] = "\"\\\n\r\t\b\f";
        const char* const found = byte ? std::strchr(special, byte) : nullptr;
        if (found) {
            out += '\\';
            out += "\"\\nrtbf"[found - special];
        } else if (byte < 0x20 || byte == 0x7f) {
            append_hex(out, byte);
        } else {
            out += static_cast<char>(byte);
        }
        i++;
    }
    out += '"';
}

void append_scalar_json(std::string& out, const SourceScalar& value) {
    switch (value.type) {
        case SourceScalar::kNullType: out += "null"; break;
        case SourceScalar::kFalseType: out += "false"; break;
        case SourceScalar::kTrueType: out += "true"; break;
        case SourceScalar::kNumberType: append_number(out, value.number); break;
        default: append_json(out, value.text);
    }
}

void append_scalar_code(std::string& out, const SourceScalar& value) {
    out += static_cast<char>(value.type);
    if (value.type == SourceScalar::kNumberType) append_double(out, value.number);
    if (value.type != SourceScalar::kTextType) return;
    append_length(out, value.text.size());
    out += value.text;
}

void append_literal_code(std::string& out, uint8_t op, Text path, Text operand) {
    out += static_cast<char>(op);
    append_length(out, path.size());
    out += path;
    out += operand;
}

SourceForm literal_form(const PathRef& path, SourceOp op, bool negated) {
    SourceForm form = started(path, op, negated);
    append_code(form, op, {});
    finish(form, "null");
    return form;
}

SourceForm value_form(const PathRef& path, SourceOp op, const SourceScalar& value, bool negated) {
    SourceForm form = started(path, op, negated);
    std::string operand, json;
    append_scalar_code(operand, value);
    append_scalar_json(json, value);
    append_code(form, op, operand);
    finish(form, json);
    if (op == kEqualsOp) form.values.push_back(value);
    return form;
}

SourceForm text_form(const PathRef& path, SourceOp op, Text value, bool negated) {
    SourceForm form = started(path, op, negated);
    std::string operand, json;
    append_length(operand, value.size());
    operand += value;
    append_json(json, value);
    append_code(form, op, operand);
    finish(form, json);
    return form;
}

SourceForm in_form(const PathRef& path, std::vector<SourceScalar> values, bool negated) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    if (values.size() == 1) return value_form(path, kEqualsOp, values[0], negated);
    SourceForm form = started(path, kInOp, negated);
    std::string operand, json = "[";
    append_length(operand, values.size());
    for (const SourceScalar& value : values) {
        append_scalar_code(operand, value);
        if (json.size() > 1) json += ',';
        append_scalar_json(json, value);
    }
    append_code(form, kInOp, operand);
    finish(form, json + "]");
    form.values = std::move(values);
    return form;
}

bool range_form(const PathRef& path, const SourceBounds& bounds, bool negated, SourceForm& out) {
    const int order = bounds.has_lower && bounds.has_upper ? compare(bounds.lower, bounds.upper) : -1;
    if (order >= 0) {
        const bool one = order == 0 && !bounds.lower_open && !bounds.upper_open;
        out = one ? value_form(path, kEqualsOp, bounds.lower) : nothing();
        return !negated;
    }
    out = started(path, kRangeOp, negated);
    out.bounds = bounds;
    const bool numeric = type_of(bounds) == SourceScalar::kNumberType;
    std::string operand(1, static_cast<char>(bounds.has_lower | bounds.has_upper << 1 |
                                             bounds.lower_open << 2 | bounds.upper_open << 3));
    if (numeric) {
        append_double(operand, bounds.has_lower ? bounds.lower.number : 0);
        append_double(operand, bounds.has_upper ? bounds.upper.number : 0);
    } else {
        append_length(operand, bounds.lower.text.size());
        operand += bounds.lower.text;
        append_length(operand, bounds.upper.text.size());
        operand += bounds.upper.text;
    }
    std::string json = "{";
    const auto side = [&](const char* name, const SourceScalar& bound, bool open) {
        if (json.size() > 1) json += ',';
        json += std::string("\"") + name + "\":";
        append_scalar_json(json, bound);
        if (open) json += std::string(",\"") + name + "_open\":true";
    };
    if (bounds.has_lower) side("lower", bounds.lower, bounds.lower_open);
    if (bounds.has_upper) side("upper", bounds.upper, bounds.upper_open);
    append_code(out, numeric ? kRangeOp : kTextRangeOp, operand);
    finish(out, json + "}");
    return true;
}

bool join_forms(SourceForm::Kind kind, std::vector<SourceForm>&& children, SourceForm& out) {
    std::vector<SourceForm> flat;
    flat.reserve(children.size());
    const auto enter = [&](SourceForm&& form) {
        if (!has_text(flat, form.text)) flat.push_back(std::move(form));
    };
    const auto never = [](const SourceForm& form) { return form.kind == SourceForm::kNothing; };
    for (SourceForm& child : children) {
        if (never(child) && kind == SourceForm::kOr) continue;
        if (child.kind != kind) {
            enter(std::move(child));
            continue;
        }
        for (SourceForm& part : child.parts) enter(std::move(part));
    }
    if (flat.size() > kSourcePartsMax) return false;
    // In a disjunction nothing is left out, in a conjunction it is all.
    if (!std::any_of(flat.begin(), flat.end(), never) && !join_paths(kind, flat)) return false;
    if (flat.empty() || std::any_of(flat.begin(), flat.end(), never)) {
        out = nothing();
        return true;
    }
    // x and (x or y) would be x: not common.
    for (const SourceForm& form : flat)
        for (const SourceForm& part : form.parts)
            if (has_text(flat, part.text)) return false;
    std::sort(flat.begin(), flat.end(), [](const auto& one, const auto& two) { return one.text < two.text; });
    if (flat.size() == 1) {
        out = std::move(flat[0]);
        return true;
    }
    out = SourceForm();
    out.kind = kind;
    out.text = kind == SourceForm::kAnd ? "{\"and\":[" : "{\"or\":[";
    for (const SourceForm& form : flat) {
        if (&form != &flat[0]) out.text += ',';
        out.text += form.text;
    }
    out.text += "]}";
    out.parts = std::move(flat);
    return true;
}

bool program_of(const SourceForm& form, std::string& program) {
    if (is_conjunction(form)) {
        append_length(program, 1);
        append_conjunction(program, form);
        return true;
    }
    if (terms(form) > kSourceTermsMax) return false;
    std::vector<SourceForm> found;
    for (const Term& term : distribute(form)) {
        std::vector<SourceForm> literals;
        for (const SourceForm* literal : term) literals.push_back(*literal);
        SourceForm joined;
        if (!join_forms(SourceForm::kAnd, std::move(literals), joined)) return false;
        if (joined.kind != SourceForm::kNothing && !has_text(found, joined.text))
            found.push_back(std::move(joined));
    }
    append_length(program, found.size());
    for (const SourceForm& one : found) append_conjunction(program, one);
    return true;
}

}  // namespace virta
