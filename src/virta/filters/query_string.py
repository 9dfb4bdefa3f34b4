"""
The query-string dialect: Thorium's queries, `a=1&/b/c=>5;../type=~com.`

    query        conjunctions joined by `;`: any of them may hold
    conjunction  terms joined by `&`: all of them must hold; none is everything
    term         key `=` value
    key          `name` or `/json/pointer` inside the event's data, `../json/pointer` from its root
    value        nothing, `!` not, `<` `<=` `>` `>=`, `~` starts with, `[` contains, then a literal:
                 a JSON null, boolean, number or string, else the text itself

Splitting comes before percent-decoding. Types never mix, numbers are doubles of which -0.0 is one just
below 0, and a missing value satisfies only `!`. A conjunction takes one range (two bounds of one path and
type) or one prefix, and one equality a path: what breaks these rules is refused with Thorium's code.
A key that looks like an expression of another language (`a>5`, `status == 'paid'`, `{"equals": …}`) is
refused as well; percent-encoded and followed by `=`, any name can be a key.
Where the ancestor's code and its documentation part, this follows the documentation: every term of a
conjunction must hold, whatever stands beside it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, unquote_plus

from virta.errors import FilterError
from virta.filters.evaluate import MISSING, resolve
from virta.filters.filter import Filter
from virta.filters.hints import likely_dialect, looks_like, suggested_term, with_hint
from virta.filters.tree import (
    NOTHING,
    Condition,
    Node,
    ValueRange,
    all_of,
    any_of,
    negate,
)
from virta.filters.values import type_name

if TYPE_CHECKING:
    from virta.filters.tree import Path

# Terms of one conjunction, as Thorium's --max-query-terms has it.
TERMS_MAX = 32

# Characters of a query: sixteen of the longest request lines Thorium took.
QUERY_CHARS_MAX = 65_536

# Conjunctions of a query: about as many as the longest request line can contain.
CONJUNCTIONS_MAX = 1024

# UTF-8 bytes of a string literal: the largest budget Thorium's machines ever measured.
LITERAL_BYTES_MAX = 65_536

# Steps of a pointer: JSON nested deeper is refused where events come in.
POINTER_STEPS_MAX = 1024

INDEX_MAX = 2**31 - 1

# Characters of a refused key or term that a message repeats.
KEY_CHARS_SHOWN = 200

Literal: TypeAlias = bool | float | str | None

# Thorium's sentences: each message starts with one and continues with the details.
SENTENCES = {
    "equality-operator-already-used": "An equality comparison has already been set for this key.",
    "incompatible-types-in-between": "Types must match for combined <, <= and >, >=.",
    "inequality-operator-already-used": "Inequality operator has already been set for this query.",
    "invalid-json-pointer": "Invalid JSON Pointer.",
    "invalid-key": "Unexpected characters in a key.",
    "malformed-percent-escape": "Malformed percent escape.",
    "non-string-for-starts-with": "Starts-with queries must match a string value.",
    "query-too-long": "This query is too long.",
    "string-too-long": "String value is too long.",
    "too-many-conjunctions": "This query has too many conjunctions.",
    "too-many-terms": "This query has too many terms.",
}

_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Characters that an unescaped key cannot contain: quotes, braces, comparisons and blanks belong to other
# languages. Escaped, they are part of the name.
_NO_NAME = re.compile(r"[<>{}\"' \t\r\n]")
# The ends of `a !`, `a >` and `a ` in `a != 5`, `a >= 5` and `a == 5` as a browser encodes them.
_CUT_OPERATOR = re.compile(r"[!<> \t\r\n]\Z")
_BAD_TILDE = re.compile(r"~(?![01])")
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_OPERATOR = re.compile(r"!|<=?|>=?|~|\[|")
_BLANKS = " \t\r\n"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"')
_WORDS: dict[str, Literal] = {"null": None, "true": True, "false": False}


def parse(source: str, *, terms_max: int = TERMS_MAX) -> Filter:
    """
    Return the filter of a raw query string: what follows the first `?` of a URL.

    Raises FilterError with Thorium's `code`, its further members in `members`, and the key as it was
    spelled in `path`.
    """
    if not isinstance(source, str):
        raise with_hint(
            FilterError(f"a query string is a text, got {type(source).__name__}"),
            source,
            "query-string",
        )
    if len(source) > QUERY_CHARS_MAX:
        raise _refused(
            "query-too-long", f"{len(source)} characters: at most {QUERY_CHARS_MAX} are allowed"
        )
    parts = source.split(";")
    if len(parts) > CONJUNCTIONS_MAX:
        raise _refused(
            "too-many-conjunctions", f"{len(parts)}: at most {CONJUNCTIONS_MAX} are allowed"
        )
    return Filter(any_of([_conjunction(part, terms_max) for part in parts]), dialect="query-string")


# Text to terms.


def _conjunction(text: str, terms_max: int) -> Node:
    values_of: dict[str, list[str]] = {}
    for piece in text.removeprefix("?").split("&"):
        key, equals, value = piece.lstrip("=").partition("=")
        if key:
            _check_key(key, equals, value, text)
            values_of.setdefault(_decoded(key), []).append(_decoded(value))
    conjunction = _Conjunction()
    count = 0
    # The first key with an error is reported; of several errors on one key the last.
    for key, values in values_of.items():
        error: FilterError | None = None
        for value in values:
            count += 1
            if count > terms_max:
                raise _refused(
                    "too-many-terms",
                    f"At most {terms_max} are allowed in one conjunction",
                    allowedTerms=terms_max,
                )
            try:
                conjunction.add(key, _path(key), value)
            except FilterError as refused:
                error = refused
        if error is not None:
            raise error
    return conjunction.tree()


def _check_key(key: str, equals: str, value: str, conjunction: str) -> None:
    """
    Refuse a term that is probably not meant as a query string.

    That is a key with a character of `_NO_NAME` as it is, or one that ends in `!` (`a!=5`); a term
    without `=` that has one in any spelling (`a%3E5`); and `a == 5`, `a >= 5` or `a != 5` with escaped
    blanks, whose value starts with a blank or `=`, as no JSON literal does.
    """
    if not _NO_NAME.search(key) and not (equals and key[-1] == "!"):
        if equals and not ("%" in key or "+" in key):
            return
        name = unquote_plus(key)
        if equals:
            if not _CUT_OPERATOR.search(name) or unquote_plus(value[:3])[:1] not in {" ", "="}:
                return
        elif not _NO_NAME.search(name):
            return
    raise _invalid_key(key, f"{key}{equals}{value}", conjunction)


def _invalid_key(key: str, term: str, conjunction: str) -> FilterError:
    shown = key[:KEY_CHARS_SHOWN]
    members: dict[str, Any] = {"key": shown}
    questions = []
    suggestion = suggested_term(term)
    if suggestion is not None and len(suggestion) <= KEY_CHARS_SHOWN:
        members["suggestion"] = suggestion
        questions.append(f"did you mean `{suggestion}`?")
    likely = likely_dialect(unquote_plus(conjunction))
    if likely not in {None, "query-string"}:
        members["likelyDialect"] = likely
        questions.append(looks_like(str(likely)))
    escaped = quote(unquote_plus(shown), safe="/~", errors="surrogatepass")
    advice = " ".join(questions) or f"write `{escaped}=VALUE` for a member of this name"
    return _refused("invalid-key", f"{term[:KEY_CHARS_SHOWN]!r}: {advice}", path=shown, **members)


def _decoded(text: str) -> str:
    bad = _BAD_ESCAPE.search(text)
    if bad is not None:
        escape = text[bad.start() : bad.start() + 3]
        raise _refused(
            "malformed-percent-escape", f"{escape!r}: expected % and two hexadecimal digits"
        )
    return unquote_plus(text, errors="replace")


def plain_key_path(key: str) -> Path | None:
    """Return the path of a key without escapes, None for others and for what is refused."""
    if not key or _NO_NAME.search(key) or key[-1] == "!" or "%" in key or "+" in key:
        return None
    try:
        return _path(key)
    except FilterError:
        return None


def _path(key: str) -> Path:
    if key.startswith("../"):
        root: tuple[str, ...] = ()
        tokens = key[3:].split("/")
    elif key.startswith("/"):
        root = ("data",)
        tokens = key[1:].split("/")
    else:
        return ("data", _step(key))
    bad = _BAD_TILDE.search(key)
    if bad is not None:
        raise _refused(
            "invalid-json-pointer",
            f"{key!r}: write ~ as ~0 and / inside a name as ~1",
            path=key,
        )
    if len(tokens) > POINTER_STEPS_MAX:
        raise _refused(
            "invalid-json-pointer",
            f"{len(tokens)} steps: at most {POINTER_STEPS_MAX} are allowed",
            path=key[:100],
        )
    return root + tuple(_step(t.replace("~1", "/").replace("~0", "~")) for t in tokens)


def _step(name: str) -> str | int:
    """Return a name written as an array index as int (on an object it is a name), other names unchanged."""
    if _INDEX.fullmatch(name) and int(name) <= INDEX_MAX:
        return int(name)
    return name


def _literal(text: str) -> Literal:
    """Return the text as a JSON scalar, or else unchanged, with its blanks and quotes."""
    bare = text.strip(_BLANKS)
    if bare in _WORDS:
        return _WORDS[bare]
    number = _NUMBER.fullmatch(bare)
    if number is not None:
        value = float(bare)  # any length: overflow is infinity
        return value if number[1] or number[2] else value + 0.0  # the integer -0 is plain zero
    if _STRING.fullmatch(bare):
        return str(json.loads(bare))
    return text


# Terms to a tree.


@dataclass(slots=True)
class _Bound:
    """The one range or prefix of a conjunction, as far as it has been read."""

    path: Path
    operator: str  # < <= > >= ~ or between
    literals: dict[str, Literal]


@dataclass(slots=True)
class _Conjunction:
    nodes: list[Node] = field(default_factory=list)
    equal: set[Path] = field(default_factory=set)
    bound: _Bound | None = None

    def add(self, key: str, path: Path, value: str) -> None:
        """Add a term; a refused term changes nothing."""
        if not value:
            # Thorium reads an empty value before operators, so it never counts as a second equality.
            self.equal.add(path)
            self.nodes.append(Condition(path, "eq", ""))
            return
        found = _OPERATOR.match(value)
        assert found is not None, "the pattern has an empty alternative"
        operator = found[0]
        literal = _literal(value[found.end() :])
        if isinstance(literal, str):
            _check_length(literal, key)
        if operator == "":
            self._add_equal(key, path, literal)
        elif operator == "!":
            self.nodes.append(negate(_equals(path, literal)))
        elif operator == "[":
            self.nodes.append(_contains(path, literal))
        else:
            self._add_bound(key, path, operator, literal, value[found.end() :])

    def tree(self) -> Node:
        if self.bound is None:
            return all_of(self.nodes)
        return all_of([*self.nodes, _bounded(self.bound.path, self.bound.literals)])

    def _add_equal(self, key: str, path: Path, literal: Literal) -> None:
        if path in self.equal:
            raise _refused(
                "equality-operator-already-used",
                f"A conjunction may compare {key!r} for equality once",
                path=key,
                key=key,
            )
        self.equal.add(path)
        self.nodes.append(_equals(path, literal))

    def _add_bound(
        self, key: str, path: Path, operator: str, literal: Literal, written: str
    ) -> None:
        bound = self.bound
        if bound is not None and not _pairs(bound, path, operator):
            raise _refused(
                "inequality-operator-already-used",
                f"{operator} on {key!r}: a conjunction may have one range, of at most a lower and"
                f" an upper bound on one path, or one prefix; it has {bound.operator} already",
                keyword=operator,
                path=key,
                operator=bound.operator,
            )
        if operator == "~" and not isinstance(literal, str):
            raise _refused(
                "non-string-for-starts-with",
                f"~{written} on {key!r}: put the prefix in quotes",
                keyword=operator,
                path=key,
                value=written,
            )
        if bound is None:
            self.bound = _Bound(path, operator, {operator: literal})
            return
        (other,) = bound.literals.values()
        if type_name(other) != type_name(literal):
            raise _refused(
                "incompatible-types-in-between",
                f"{key!r} is bounded by a {type_name(other)} and a {type_name(literal)}",
                keyword=operator,
                path=key,
                key=key,
            )
        bound.literals[operator] = literal
        bound.operator = "between"


def _pairs(bound: _Bound, path: Path, operator: str) -> bool:
    """Return whether the operator is the other side of a range that has one side on that path."""
    sides = {bound.operator[0], operator[0]}
    return bound.path == path and sides == {"<", ">"}


def _check_length(literal: str, key: str) -> None:
    size = len(literal.encode("utf-8", "surrogatepass"))
    if size > LITERAL_BYTES_MAX:
        raise _refused(
            "string-too-long",
            f"{size} bytes: at most {LITERAL_BYTES_MAX} are allowed",
            path=key,
            key=key,
        )


def _equals(path: Path, literal: Literal) -> Node:
    if literal == 0 and isinstance(literal, float):
        negative = Condition(path, "negative_zero")
        if _is_negative(literal):
            return negative
        return all_of([Condition(path, "eq", 0), negate(negative)])
    return Condition(path, "eq", literal)


def _contains(path: Path, literal: Literal) -> Node:
    contains = Condition(path, "contains", literal)
    if literal == 0 and isinstance(literal, float):
        zero = ZeroElement(path, negative=_is_negative(literal))
        return all_of([contains, Condition((), "opaque", zero)])
    return contains


def _bounded(path: Path, literals: dict[str, Literal]) -> Node:
    if "~" in literals:
        prefix = literals["~"]
        return Condition(path, "prefix", prefix) if prefix else Condition(path, "type", "string")
    if len(literals) == 1 or any(x is None or x == 0 for x in literals.values()):
        return all_of(_one_bound(path, operator, literal) for operator, literal in literals.items())
    (lower,) = (op for op in literals if op[0] == ">")
    (upper,) = (op for op in literals if op[0] == "<")
    return Condition(
        path, "range", ValueRange(literals[lower], literals[upper], lower == ">", upper == "<")
    )


def _one_bound(path: Path, operator: str, literal: Literal) -> Node:
    """Return the node of a range with one bound."""
    if literal is None:
        return Condition(path, "eq", None) if operator in {"<=", ">="} else NOTHING
    if literal == 0 and isinstance(literal, float):
        return _one_bound_zero(path, operator, negative=_is_negative(literal))
    is_open = len(operator) == 1
    if operator[0] == "<":
        return Condition(path, "range", ValueRange(None, literal, False, is_open))
    return Condition(path, "range", ValueRange(literal, None, is_open, False))


def _one_bound_zero(path: Path, operator: str, *, negative: bool) -> Node:
    """Return the node of a range with the bound zero, where -0.0 is below 0; a tree's ranges treat them as equal."""
    negative_zero = Condition(path, "negative_zero")
    below = Condition(path, "range", ValueRange(None, 0, False, True))
    if operator[0] == "<":
        closed = operator == "<="
        if closed and not negative:
            return Condition(path, "range", ValueRange(None, 0))
        return below if negative and not closed else any_of([below, negative_zero])
    from_zero = Condition(path, "range", ValueRange(0, None))
    if operator == ">" and not negative:
        return Condition(path, "range", ValueRange(0, None, True))
    return (
        from_zero if operator == ">=" and negative else all_of([from_zero, negate(negative_zero)])
    )


def _is_negative(number: float) -> bool:
    return math.copysign(1.0, number) < 0


@dataclass(frozen=True, slots=True)
class ZeroElement:
    """An array has an element that is exactly 0, or exactly -0.0, which `contains` treats as equal."""

    path: Path
    negative: bool

    def evaluate(self, obj: Any) -> bool:
        array = resolve(obj, self.path)
        if array is MISSING or not isinstance(array, list | tuple):
            return False
        return any(
            x == 0
            and isinstance(x, int | float)
            and not isinstance(x, bool)
            and (isinstance(x, float) and _is_negative(x)) is self.negative
            for x in array
        )

    def canonical_json(self) -> Any:
        return {"contains": "-0.0" if self.negative else "0", "path": list(self.path)}


def _refused(
    code: str,
    details: str,
    *,
    keyword: str | None = None,
    path: str | None = None,
    **members: object,
) -> FilterError:
    return FilterError(
        f"{SENTENCES[code]} {details}{'' if details.endswith('?') else '.'}",
        code=code,
        keyword=keyword,
        path=path,
        members=members,
    )
