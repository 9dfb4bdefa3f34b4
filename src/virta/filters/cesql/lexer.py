"""
CESQL text to tokens.

Keywords and names are case-insensitive and get one spelling. Signs are separate tokens: the parser decides
whether `-1` is a literal or a subtraction, so `4-1` works as well as `4 - 1`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from virta.errors import FilterError

# Characters of an expression. A list of several hundred ids fits; parsing the worst stays under 50 ms.
EXPRESSION_CHARS_MAX = 16_384

KEYWORDS = frozenset({"AND", "OR", "XOR", "NOT", "LIKE", "EXISTS", "IN", "TRUE", "FALSE"})

_TOKEN = re.compile(
    r"""
      (?P<word>[A-Za-z0-9_]+)
    | (?P<symbol><=|>=|<>|!=|[=<>()+\-*/%,])
    | (?P<string>'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")
    """,
    re.VERBOSE | re.DOTALL,
)
_BLANKS = re.compile(r"[ \t\r\n]*")
_ATTRIBUTE = re.compile(r"[A-Za-z0-9]+")
_FUNCTION = re.compile(r"[A-Za-z][A-Za-z_]*")


@dataclass(frozen=True, slots=True)
class Token:
    """
    `kind` is integer, string, name, function, end, or the keyword or symbol itself.

    A name is lower-case, a function upper-case, a string unquoted; `at` counts characters from 0.
    """

    kind: str
    text: str
    at: int
    end: int


def parse_error(message: str, expression: str, at: int) -> FilterError:
    """Return a FilterError that shows the place."""
    around = expression[max(0, at - 20) : at + 20]
    return FilterError(f"{message} at character {at + 1}, near {around!r}", code="parse")


def tokens(expression: str) -> list[Token]:
    """Return all tokens and an end token; raise FilterError at an invalid character."""
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise FilterError(
            f"expression of {len(expression)} characters: at most {EXPRESSION_CHARS_MAX} are allowed",
            code="too_long",
        )
    found: list[Token] = []
    at = _skip_blanks(expression, 0)
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise _stray_character(expression, at)
        end = match.end()
        following = _skip_blanks(expression, end)
        if match.lastgroup == "word":
            call = expression[following : following + 1] == "("
            found.append(_word_token(expression, match[0], at, call=call))
        elif match.lastgroup == "symbol":
            found.append(Token(match[0], match[0], at, end))
        else:
            found.append(Token("string", _unquote(match[0]), at, end))
        at = following
    found.append(Token("end", "", at, at))
    return found


def quote(text: str) -> str | None:
    """Return the text as a string literal, None if no literal can express it."""
    for mark in "'\"":
        literal = mark + text.replace(mark, "\\" + mark) + mark
        match = _TOKEN.fullmatch(literal)
        if match is not None and _unquote(literal) == text:
            return literal
    return None


def _skip_blanks(expression: str, at: int) -> int:
    match = _BLANKS.match(expression, at)
    assert match is not None
    return match.end()


def _word_token(expression: str, word: str, at: int, *, call: bool) -> Token:
    end = at + len(word)
    upper = word.upper()
    if word.isdigit():
        return Token("integer", word, at, end)
    if upper in KEYWORDS:
        return Token(upper, upper, at, end)
    if call:
        if _FUNCTION.fullmatch(word) is None:
            raise parse_error(
                f"{word!r} is no function name (letters and underscores)", expression, at
            )
        return Token("function", upper, at, end)
    if _ATTRIBUTE.fullmatch(word) is None:
        raise parse_error(
            f"{word!r} is no attribute name (letters and digits only)", expression, at
        )
    return Token("name", word.lower(), at, end)


def _unquote(literal: str) -> str:
    """Return the text of a literal: only its own quote is escaped, every other backslash stays."""
    mark = literal[0]
    body = literal[1:-1]
    if "\\" not in body:
        return body
    return re.sub(r"\\(.)", lambda m: m[1] if m[1] == mark else m[0], body, flags=re.DOTALL)


def _stray_character(expression: str, at: int) -> FilterError:
    char = expression[at]
    if char in "'\"":
        return parse_error(f"string opened with {char} is not closed", expression, at)
    return parse_error(f"unexpected character {char!r}", expression, at)
