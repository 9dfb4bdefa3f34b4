// The common forms of query strings and of CESQL. The rules are those of virta.filters.query_string and
// virta.filters.cesql; what they refuse, or read in a way not written here, is not a common form.

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

#include "match_source.hpp"

namespace virta {

namespace {

constexpr size_t kTermsMax = 32;  // of a conjunction in a query string

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

Text stripped(Text text) {
    while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
    while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
    return text;
}

// Whether a text is a JSON number; `whole` if it has neither fraction nor exponent.
bool is_number(Text text, bool& whole) {
    size_t at = !text.empty() && text[0] == '-';
    const auto digits = [&] {
        const size_t start = at;
        while (at < text.size() && is_digit(text[at])) at++;
        return at - start;
    };
    const bool zero = at < text.size() && text[at] == '0';
    const size_t count = digits();
    if (count == 0 || (zero && count > 1)) return false;
    whole = at == text.size();
    if (at < text.size() && text[at] == '.') {
        at++;
        if (!digits()) return false;
    }
    if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
        at++;
        if (at < text.size() && (text[at] == '+' || text[at] == '-')) at++;
        if (!digits()) return false;
    }
    return at == text.size();
}

// Query strings.

// A value with its escapes decoded; false for a bad escape and for bytes beyond ASCII.
bool decoded(Text text, std::string& out) {
    const auto hex = [](char c) {
        return is_digit(c)            ? c - '0'
               : c >= 'a' && c <= 'f' ? c - 'a' + 10
               : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                      : -1;
    };
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '+') {
            out += ' ';
        } else if (text[i] != '%') {
            out += text[i];
        } else {
            if (i + 2 >= text.size()) return false;
            const int high = hex(text[i + 1]), low = hex(text[i + 2]);
            if (high < 0 || low < 0 || high > 7) return false;
            out += static_cast<char>(high << 4 | low);
            i += 2;
        }
    }
    return true;
}

// The literal of a term; false for strings with escapes and for -0.0, which have rules of their own.
bool literal_of(Text text, SourceScalar& out) {
    const Text bare = stripped(text);
    bool whole = false;
    if (bare == "null") {
        out = SourceScalar();
    } else if (bare == "true" || bare == "false") {
        out = SourceScalar::of(bare == "true");
    } else if (is_number(bare, whole)) {
        const double number = PyOS_string_to_double(std::string(bare).c_str(), nullptr, nullptr);
        if (number == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
        if (number == 0 && std::signbit(number) && !whole) return false;
        out = SourceScalar::of(number);
    } else if (bare.size() >= 2 && bare.front() == '"' && bare.back() == '"') {
        const Text inner = bare.substr(1, bare.size() - 2);
        for (char c : inner)
            if (c == '\\' || c == '"' || static_cast<unsigned char>(c) < 0x20) return false;
        out = SourceScalar::of(inner);
    } else {
        out = SourceScalar::of(text);
    }
    return true;
}

bool is_zero(const SourceScalar& value) {
    return value.type == SourceScalar::kNumberType && value.number == 0;
}

class QueryConjunction {
  public:
    explicit QueryConjunction(Sources& sources) : sources_(sources) {}

    bool add(Text piece) {
        const size_t equals = piece.find('=');
        if (equals == Text::npos || equals == 0) return false;
        const Text key = piece.substr(0, equals);
        if (key.find_first_of("%+") != Text::npos || key.back() == '!') return false;
        const PathRef path = sources_.path('q', key);
        std::string value;
        return path && decoded(piece.substr(equals + 1), value) && add_term(path, value);
    }

    bool finish(SourceForm& out) {
        if (bound_ && !add_bound()) return false;
        return join_forms(SourceForm::kAnd, std::move(forms_), out);
    }

  private:
    bool add_term(const PathRef& path, Text value) {
        char op = value.empty() ? '\0' : value[0];
        bool open = true;
        if (op && !std::strchr("!<>~[", op)) op = '\0';
        if (op) value.remove_prefix(1);
        if ((op == '<' || op == '>') && !value.empty() && value[0] == '=') {
            open = false;
            value.remove_prefix(1);
        }
        SourceScalar literal;
        if (!literal_of(value, literal)) return false;
        if (op == '<' || op == '>' || op == '~') return bind(path, op, open, literal);
        return compare(path, op, literal);
    }

    bool compare(const PathRef& path, char op, const SourceScalar& literal) {
        if (op != '\0') {  // ! and [
            if (is_zero(literal)) return false;
            forms_.push_back(value_form(path, op == '[' ? kContainsOp : kEqualsOp, literal, op == '!'));
            return true;
        }
        // A second equality of one path is refused, or not, by its spelling.
        for (const SourceForm& form : forms_)
            if (form.op == kEqualsOp && !form.negated && form.path->text == path->text) return false;
        forms_.push_back(value_form(path, kEqualsOp, literal));
        if (is_zero(literal)) add_not_negative(path);
        return true;
    }

    // 0 is not -0.0 in a query string.
    void add_not_negative(const PathRef& path) {
        forms_.push_back(literal_form(path, kNegativeZeroOp, true));
    }

    bool bind(const PathRef& path, char op, bool open, const SourceScalar& literal) {
        const bool text = literal.type == SourceScalar::kTextType;
        if (!text && literal.type != SourceScalar::kNumberType) return false;
        if (op == '~') {
            if (bound_ || !text || literal.text.empty()) return false;
            bound_ = path;
            prefix_ = literal.text;
            is_prefix_ = true;
            return true;
        }
        const bool lower = op == '>';
        if (bound_ &&
            (is_prefix_ || bound_->text != path->text || (lower ? bounds_.has_lower : bounds_.has_upper) ||
             (lower ? bounds_.upper : bounds_.lower).type != literal.type))
            return false;
        bound_ = path;
        (lower ? bounds_.lower : bounds_.upper) = literal;
        (lower ? bounds_.lower_open : bounds_.upper_open) = open;
        (lower ? bounds_.has_lower : bounds_.has_upper) = true;
        return true;
    }

    bool add_bound() {
        if (is_prefix_) {
            forms_.push_back(text_form(bound_, kPrefixOp, prefix_));
            return true;
        }
        // Below zero is -0.0 too, and it is not at or above zero.
        if (bounds_.has_upper && bounds_.upper_open && is_zero(bounds_.upper)) return false;
        SourceForm range;
        if (!range_form(bound_, bounds_, false, range)) return false;
        forms_.push_back(std::move(range));
        if (bounds_.has_lower && !bounds_.lower_open && is_zero(bounds_.lower)) add_not_negative(bound_);
        return true;
    }

    Sources& sources_;
    std::vector<SourceForm> forms_;
    PathRef bound_;
    bool is_prefix_ = false;
    std::string prefix_;
    SourceBounds bounds_;
};

// CESQL.

struct Token {
    enum Kind { kEnd, kWord, kSymbol, kString, kBad } kind = kEnd;
    Text text;
};

bool same_word(Text word, const char* upper) {
    if (word.size() != std::strlen(upper)) return false;
    for (size_t i = 0; i < word.size(); i++) {
        const char c = word[i];
        if ((c >= 'a' && c <= 'z' ? c - 32 : c) != upper[i]) return false;
    }
    return true;
}

bool is_keyword(Text word) {
    for (const char* keyword : {"AND", "OR", "XOR", "NOT", "LIKE", "EXISTS", "IN", "TRUE", "FALSE"})
        if (same_word(word, keyword)) return true;
    return false;
}

// Comparisons joined by AND, or equalities of one attribute joined by OR.
class CesqlReader {
  public:
    CesqlReader(Sources& sources, Text source) : sources_(sources), source_(source) { take(); }

    bool read(SourceForm& out) {
        std::vector<SourceForm> forms;
        const char* joint = nullptr;
        for (;;) {
            std::string name;
            if (forms.size() > kSourcePartsMax || !comparison(name, forms)) return false;
            if (token_.kind == Token::kEnd) break;
            const char* found = same_word(token_.text, "AND")  ? "AND"
                                : same_word(token_.text, "OR") ? "OR"
                                                               : nullptr;
            if (token_.kind != Token::kWord || !found || (joint && joint != found)) return false;
            joint = found;
            take();
        }
        const bool any = joint && joint[0] == 'O';
        // An operand of OR may have a problem, unless all compare the text of one attribute.
        if (any && (equalities_ != forms.size() || !on_one_attribute(forms))) return false;
        return join_forms(any ? SourceForm::kOr : SourceForm::kAnd, std::move(forms), out);
    }

  private:
    static bool on_one_attribute(const std::vector<SourceForm>& forms) {
        for (const SourceForm& form : forms)
            if (form.op != kEqualsOp || form.path->code[0] == 'C' || form.path->text != forms[0].path->text)
                return false;
        return true;
    }

    void take() {
        while (at_ < source_.size() && is_blank(source_[at_])) at_++;
        token_ = Token();
        if (at_ == source_.size()) return;
        const size_t start = at_;
        const char c = source_[at_];
        if (is_word(c)) {
            while (at_ < source_.size() && is_word(source_[at_])) at_++;
            token_ = {Token::kWord, source_.substr(start, at_ - start)};
        } else if (c == '\'' || c == '"') {
            const size_t end = source_.find(c, start + 1);
            const Text inner = end == Text::npos ? Text() : source_.substr(start + 1, end - start - 1);
            if (end == Text::npos || inner.find('\\') != Text::npos) {
                token_ = {Token::kBad, {}};
                return;
            }
            at_ = end + 1;
            token_ = {Token::kString, inner};
        } else if (std::strchr("=<>!(),-+", c)) {
            at_++;
            if (at_ < source_.size()) {
                const char next = source_[at_];
                if ((next == '=' && (c == '<' || c == '>' || c == '!')) || (c == '<' && next == '>')) at_++;
            }
            token_ = {Token::kSymbol, source_.substr(start, at_ - start)};
        } else {
            token_ = {Token::kBad, {}};
        }
    }

    bool is_symbol(const char* symbol) const {
        return token_.kind == Token::kSymbol && token_.text == symbol;
    }

    // A name that is no keyword, function or number, in lower case.
    bool name(std::string& out) {
        if (token_.kind != Token::kWord || is_keyword(token_.text)) return false;
        bool digits = true;
        for (char c : token_.text) {
            if (c == '_') return false;
            digits = digits && is_digit(c);
            out += c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
        }
        take();
        return !digits && !is_symbol("(");
    }

    bool integer(long long& out) {
        bool negative = false;
        if (is_symbol("-") || is_symbol("+")) {
            negative = token_.text == "-";
            if (at_ == source_.size() || !is_digit(source_[at_])) return false;
            take();
        }
        if (token_.kind != Token::kWord || token_.text.size() > 10) return false;
        out = 0;
        for (char c : token_.text) {
            if (!is_digit(c)) return false;
            out = out * 10 + (c - '0');
        }
        out = negative ? -out : out;
        take();
        return out >= INT_MIN && out <= INT_MAX;
    }

    bool comparison(std::string& subject, std::vector<SourceForm>& forms) {
        if (token_.kind == Token::kWord && same_word(token_.text, "EXISTS")) {
            take();
            return name(subject) && exists(subject, forms);
        }
        if (!name(subject)) return false;
        const Token op = token_;
        take();
        if (op.kind == Token::kWord) {
            if (same_word(op.text, "LIKE")) return like(subject, forms);
            return same_word(op.text, "IN") && in(subject, forms);
        }
        if (op.kind != Token::kSymbol || !std::strchr("=<>!", op.text[0]) || op.text == "!") return false;
        const bool differs = op.text == "!=" || op.text == "<>";
        if (token_.kind == Token::kString) {
            if (op.text != "=" && !differs) return false;
            const Text text = token_.text;
            take();
            return differs ? differ(subject, text, forms) : equal(subject, text, forms);
        }
        long long bound = 0;
        return integer(bound) && integers(subject, op.text, bound, forms);
    }

    bool exists(Text subject, std::vector<SourceForm>& forms) {
        for (const char* required : {"id", "source", "specversion", "type"})
            if (subject == required) return false;
        return present(subject, {SourceScalar()}, forms);
    }

    // The attribute is set, and none of these values (null among them).
    bool present(Text subject, std::vector<SourceScalar> values, std::vector<SourceForm>& forms) {
        const PathRef path = sources_.path('a', subject);
        if (!path) return false;
        forms.push_back(literal_form(path, kExistsOp));
        forms.push_back(in_form(path, std::move(values), true));
        return true;
    }

    bool equal(Text subject, Text text, std::vector<SourceForm>& forms) {
        equalities_++;
        forms.emplace_back();
        return text_equals(sources_, subject, text, false, forms.back());
    }

    bool differ(Text subject, Text text, std::vector<SourceForm>& forms) {
        SourceForm same;
        if (!text_equals(sources_, subject, text, true, same)) return false;
        std::vector<SourceScalar> values{SourceScalar()};
        const bool plain = same.path->code[0] != 'C';
        if (plain) values.insert(values.end(), same.values.begin(), same.values.end());
        if (!present(subject, std::move(values), forms)) return false;
        if (!plain) forms.push_back(std::move(same));
        return true;
    }

    bool like(Text subject, std::vector<SourceForm>& forms) {
        if (token_.kind != Token::kString) return false;
        const Text pattern = token_.text;
        take();
        const size_t first = pattern.find('%');
        if (pattern.find('_') != Text::npos || pattern.size() > 1024) return false;
        if (first == Text::npos) return equal(subject, pattern, forms);
        if (pattern.size() == 1 || pattern.find('%', first + 1) != Text::npos) return false;
        forms.emplace_back();
        if (first == pattern.size() - 1)
            return text_starts(sources_, subject, pattern.substr(0, first), forms.back());
        return first == 0 && text_ends(sources_, subject, pattern.substr(1), forms.back());
    }

    bool integers(Text subject, Text op, long long bound, std::vector<SourceForm>& forms) {
        const PathRef path = sources_.path('i', subject);
        if (!path) return false;
        if (op == "=") {
            forms.push_back(value_form(path, kEqualsOp, SourceScalar::of(static_cast<double>(bound))));
            return true;
        }
        if (bound - 1 <= INT_MIN || bound + 1 >= INT_MAX) return false;
        if (op == "!=" || op == "<>") {
            std::vector<SourceForm> sides{integers_from(path, false, bound - 1),
                                          integers_from(path, true, bound + 1)};
            forms.emplace_back();
            return join_forms(SourceForm::kOr, std::move(sides), forms.back());
        }
        const bool lower = op[0] == '>';
        forms.push_back(integers_from(path, lower, bound + (op.size() > 1 ? 0 : lower ? 1 : -1)));
        return true;
    }

    static SourceForm integers_from(const PathRef& path, bool lower, long long bound) {
        SourceBounds bounds;
        (lower ? bounds.has_lower : bounds.has_upper) = true;
        (lower ? bounds.lower : bounds.upper) = SourceScalar::of(static_cast<double>(bound));
        SourceForm form;
        range_form(path, bounds, false, form);
        return form;
    }

    // Literals of one type: Integers, or texts that are the text of nothing else.
    bool in(Text subject, std::vector<SourceForm>& forms) {
        if (!is_symbol("(")) return false;
        const PathRef path = sources_.path('a', subject);
        std::vector<SourceScalar> values;
        do {
            take();
            if (token_.kind == Token::kString) {
                if (!is_plain_text(token_.text) || (!values.empty() && integers_)) return false;
                integers_ = false;
                values.push_back(SourceScalar::of(token_.text));
                take();
                continue;
            }
            long long number = 0;
            if ((!values.empty() && !integers_) || !integer(number)) return false;
            integers_ = true;
            values.push_back(SourceScalar::of(static_cast<double>(number)));
            values.push_back(SourceScalar::of(number != 0));
            values.push_back(SourceScalar::of(Text(std::to_string(number))));
        } while (is_symbol(","));
        if (!path || !is_symbol(")")) return false;
        take();
        // A tree has `in` even for one value.
        forms.push_back(in_form(path, std::move(values)));
        return true;
    }

    static bool is_plain_text(Text text) {
        return !text.empty() && !is_digit(text[0]) && !std::strchr("+-[{", text[0]) &&
               !same_word(text, "TRUE") && !same_word(text, "FALSE") && text != "Infinity" && text != "NaN";
    }

    Sources& sources_;
    Text source_;
    size_t at_ = 0;
    Token token_;
    bool integers_ = false;  // the list of an IN
    size_t equalities_ = 0;  // comparisons of an attribute with a text
};

const Text kTextWords[] = {"true", "false", "Infinity", "-Infinity", "NaN"};

bool begins(Text text, Text start) { return text.substr(0, start.size()) == start; }
bool finishes(Text text, Text end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Whether a text is that of a 32-bit integer as it is written.
bool is_written_integer(Text text, double& number) {
    const size_t sign = !text.empty() && text[0] == '-';
    const Text digits = text.substr(sign);
    if (digits.empty() || digits.size() > 10 || (digits[0] == '0' && text.size() > 1)) return false;
    long long value = 0;
    for (char c : digits) {
        if (!is_digit(c)) return false;
        value = value * 10 + (c - '0');
    }
    value = sign ? -value : value;
    number = static_cast<double>(value);
    return value >= INT_MIN && value <= INT_MAX;
}

}  // namespace

bool text_equals(Sources& sources, Text name, Text text, bool negated, SourceForm& out) {
    const bool is_true = text == "true";
    double number = 0;
    std::vector<SourceScalar> values{SourceScalar::of(text)};
    bool others = false;
    if (is_true || text == "false") {
        values.push_back(SourceScalar::of(is_true));
    } else if (is_written_integer(text, number)) {
        values.push_back(SourceScalar::of(number));
    } else {
        for (const Text word : kTextWords) others = others || text == word;
        const size_t sign = !text.empty() && text[0] == '-';
        others = others || (text.size() > sign && is_digit(text[sign]));
        others = others || (!text.empty() && (text[0] == '[' || text[0] == '{'));
    }
    const PathRef path = sources.path(others ? 't' : 'a', name);
    if (!path) return false;
    out = in_form(path, std::move(values), negated);
    return true;
}

bool text_starts(Sources& sources, Text name, Text text, SourceForm& out) {
    bool others = text.empty() || is_digit(text[0]) || std::strchr("-[{", text[0]);
    for (const Text word : kTextWords) others = others || begins(word, text);
    const PathRef path = sources.path(others ? 't' : 'a', name);
    if (!path || text.empty()) return false;
    out = text_form(path, kPrefixOp, text);
    return true;
}

bool text_ends(Sources& sources, Text name, Text text, SourceForm& out) {
    bool others = text.empty() || is_digit(text.back()) || std::strchr("]}", text.back());
    for (const Text word : kTextWords) others = others || finishes(word, text);
    const PathRef path = sources.path(others ? 't' : 'a', name);
    if (!path || text.empty()) return false;
    out = text_form(path, kSuffixOp, text);
    return true;
}

bool read_query_string(Sources& sources, Text source, SourceForm& out) {
    if (source.empty() || source[0] == '?') return false;
    std::vector<SourceForm> conjunctions;
    for (size_t start = 0; start <= source.size();) {
        const size_t end = std::min(source.find(';', start), source.size());
        if (conjunctions.size() == kSourceTermsMax || end == start || source[start] == '?') return false;
        QueryConjunction conjunction(sources);
        size_t count = 0;
        while (start <= end) {
            const size_t stop = std::min(source.find('&', start), end);
            if (++count > kTermsMax || !conjunction.add(source.substr(start, stop - start))) return false;
            start = stop + 1;
        }
        conjunctions.emplace_back();
        if (!conjunction.finish(conjunctions.back())) return false;
    }
    return join_forms(SourceForm::kOr, std::move(conjunctions), out);
}

bool read_cesql(Sources& sources, Text source, SourceForm& out) {
    return CesqlReader(sources, source).read(out);
}

}  // namespace virta
