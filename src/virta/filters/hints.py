"""
Suggestions for filters that were probably written in another dialect or language.

A filter that is refused, or that parses but is unlikely to be intended, is often a filter of another
dialect (`{"equals": …}` or `type = 'a'` as a query string) or uses the operators of another language
(`a>5` for `a=>5`). Nothing here decides whether a filter is valid; it only adds to the message.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote, unquote_plus

from virta import jsontext
from virta.errors import FilterError

# A text without any of these characters needs no hint.
_ODD = re.compile(r"'|==|%27|%3d|\b(?:AND|OR|XOR|NOT|LIKE|EXISTS|IN)\b", re.IGNORECASE)

# Characters that are read to find a hint; of longer texts only the start is used.
HINT_CHARS_MAX = 16_384
# Levels of `not` that are followed to find the dialect of an object.
NESTED_NOT_MAX = 7

# Keywords of one JSON dialect that the other does not have; `not` is in both.
_CLOUDEVENTS = frozenset({"exact", "prefix", "suffix", "all", "any", "sql"})
_CESQL_WORD = re.compile(r"'|\b(?:AND|OR|XOR|NOT|LIKE|EXISTS|IN)\b", re.IGNORECASE)
_NAME = r"[^<>=!{}()\"'\s&;]+"
# Matched against one term between separators, so that no backtracking is possible.
_TERM = re.compile(rf"{_NAME}=\S*")
_COMPARISON = re.compile(rf"({_NAME})\s*(==|=|!=|<>|<=|>=|<|>)(.*)", re.DOTALL)
_OPERATORS = {"==": "", "=": "", "!=": "!", "<>": "!"}
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
# A literal that is a JSON scalar or starts like an operator must be quoted to stay a string.
_NEEDS_QUOTES = re.compile(r"[!<>~\[\"\s]|(?:null|true|false|-?[0-9.eE+-]+)\Z|\Z")
# Characters that a suggestion contains unescaped; everything else is percent-encoded.
_PLAIN = "/!<>=~[]\".,:'()*@$?"


def likely_dialect(source: Any) -> str | None:
    """Return the dialect that a filter seems to be written in, or None."""
    if isinstance(source, bytes | bytearray):
        source = bytes(source[:HINT_CHARS_MAX]).decode("utf-8", "replace")
    if not isinstance(source, str):
        return _json_dialect(source)
    text = source.strip()
    if text.startswith(("{", '[{"', "[ {")):
        return _json_dialect(_load_json(text))
    if len(text) > HINT_CHARS_MAX:
        return None
    if _CESQL_WORD.search(text) and _is_expression(text):
        return "cesql"
    terms = [term for term in re.split("[&;]", text) if term]
    return "query-string" if terms and all(map(_TERM.fullmatch, terms)) else None


def doubt(source: str, dialect: str) -> str | None:
    """Return a warning about a filter that parses but is probably not what was meant, or None."""
    if dialect != "query-string" or not _ODD.search(source):
        return None
    likely = likely_dialect(source)
    if likely not in {None, dialect}:
        return f"looks like {likely}"
    for piece in re.split("[&;]", source):
        key, _, value = piece.lstrip("=").partition("=")
        text = unquote_plus(value)
        if text.startswith("=") or re.match(r"[!<>~\[=]*'[^']*'", text):
            better = suggested_term(piece.lstrip("="))
            return f"{key} is compared with the text {text!r}" + (
                f": did you mean `{better}`?" if better else ""
            )
    return None


def suggested_term(piece: str) -> str | None:
    """Return the query-string term that means the same as a comparison such as `a > 5` or `a == 'x'`."""
    found = _COMPARISON.fullmatch(unquote_plus(piece[:HINT_CHARS_MAX]).strip())
    if found is None:
        return None
    name, operator, value = found[1], found[2], found[3].strip()
    if operator in {"==", "="} and value[:1] in {">", "<"}:
        return None  # `a ==> 5` is ambiguous
    quoted = _QUOTED.fullmatch(value)
    if quoted is not None:
        value = quoted[1] if quoted[1] is not None else quoted[2]
        if _NEEDS_QUOTES.match(value):
            value = json.dumps(value, ensure_ascii=False)
    elif not value or re.search(r"\s", value):
        return None  # more than a comparison
    return quote(
        f"{name}={_OPERATORS.get(operator, operator)}{value}", safe=_PLAIN, errors="surrogatepass"
    )


def other_dialect(error: FilterError, source: Any, dialect: str) -> str | None:
    """Return the dialect that a refused filter seems to be of, if it is another and the error does not say so."""
    likely = None if "likelyDialect" in error.members else likely_dialect(source)
    return None if likely == dialect else likely


def with_dialect(error: FilterError, likely: str) -> FilterError:
    """Return the error of a refused filter with the dialect that it seems to be of."""
    return FilterError(
        f"{error.message.rstrip('.')}; {looks_like(likely)}",
        code=error.code,
        keyword=error.keyword,
        path=error.path,
        members={**error.members, "likelyDialect": likely},
    )


def with_hint(error: FilterError, source: Any, dialect: str) -> FilterError:
    """Return the error of a refused filter, with the dialect that it seems to be of if it is another."""
    likely = other_dialect(error, source, dialect)
    return error if likely is None else with_dialect(error, likely)


def looks_like(dialect: str) -> str:
    """Return the part of a message that names the likely dialect."""
    return f'it looks like a filter of another dialect: did you mean dialect "{dialect}"?'


def _json_dialect(source: Any) -> str | None:
    """Return the dialect of an object or a list of objects."""
    if isinstance(source, list | tuple):
        return "cloudevents" if source and isinstance(source[0], dict) else None
    # `not` is in both languages, so its operand decides.
    for _ in range(NESTED_NOT_MAX):
        if not isinstance(source, dict) or "not" not in source:
            break
        source = source["not"]
    if not isinstance(source, dict):
        return None
    return "cloudevents" if _CLOUDEVENTS & source.keys() else "koncorde"


def _load_json(text: str) -> Any:
    """Return the JSON value of a text; an object in broken JSON counts as Koncorde's."""
    start: Any = [{}] if text.startswith("[") else {}
    if len(text) > HINT_CHARS_MAX:
        return start
    try:
        return jsontext.decode(text)
    except ValueError:
        return start


def _is_expression(text: str) -> bool:
    # The dialects import this module for their messages, so it imports them only when called.
    from virta.filters.cesql.parser import parse_expression  # noqa: PLC0415

    try:
        parse_expression(text)
    except FilterError:
        return False
    return True
