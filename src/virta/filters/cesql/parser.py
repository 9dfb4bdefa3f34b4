"""
CESQL tokens to a syntax tree, by precedence climbing.

Precedence as in CESQL 1.0.0 section 3.6, tightest first: functions, unary NOT and -, LIKE and IN,
`* / %`, `+ -`, comparisons, then AND, OR and XOR **on one level, left to right**. NOT binds tighter
than a comparison: `NOT a = b` is `(NOT a) = b`.
"""

from __future__ import annotations

from virta.errors import FilterError
from virta.filters.cesql import syntax
from virta.filters.cesql.lexer import Token, parse_error, tokens
from virta.filters.cesql.values import INTEGER_MAX, INTEGER_MIN
from virta.filters.text import PATTERN_CHARS_MAX

LEVELS = {
    **dict.fromkeys(("AND", "OR", "XOR"), 1),
    **dict.fromkeys(("=", "!=", "<>", "<", "<=", ">", ">="), 2),
    **dict.fromkeys(("+", "-"), 3),
    **dict.fromkeys(("*", "/", "%"), 4),
}
_POSTFIX = frozenset({"LIKE", "IN", "NOT"})
_INTEGER_DIGITS_MAX = 64  # any longer is out of range, leading zeros or not; int() stays cheap


def parse_expression(text: str) -> syntax.Expression:
    """Return the syntax tree of an expression; raise FilterError with the place of an error."""
    if not isinstance(text, str):
        raise FilterError(f"a CESQL expression is a text, got {type(text).__name__}", code="parse")
    parser = _Parser(text)
    node = parser.expression(1)
    parser.expect("end")
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokens(text)
        self.position = 0
        self.depth = 0

    # Tokens.

    @property
    def token(self) -> Token:
        return self.tokens[self.position]

    def take(self) -> Token:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def expect(self, kind: str) -> Token:
        if self.token.kind != kind:
            raise self.unexpected("the end or an operator" if kind == "end" else f"{kind!r}")
        return self.take()

    def unexpected(self, wanted: str) -> FilterError:
        token = self.token
        got = "the expression ends" if token.kind == "end" else f"got {token.text!r}"
        return parse_error(f"{got} where {wanted} was expected", self.text, token.at)

    # Expressions.

    def expression(self, level: int) -> syntax.Expression:
        """Return an expression whose operators bind at least as tightly as `level`."""
        self.depth += 1
        if self.depth > syntax.DEPTH_MAX:
            raise syntax.too_deep()
        node = self.operand()
        while (found := LEVELS.get(self.token.kind, 0)) >= level:
            rest = []
            while LEVELS.get(self.token.kind) == found:
                operator = self.take().kind
                rest.append(("!=" if operator == "<>" else operator, self.expression(found + 1)))
            node = syntax.Chain(node, tuple(rest))
        self.depth -= 1
        return node

    def operand(self) -> syntax.Expression:
        """Return an atom with its prefixes, then the LIKE and IN that follow it."""
        node = self.unary()
        while self.token.kind in _POSTFIX:
            negated = self.token.kind == "NOT"
            if negated:
                self.take()
            if self.token.kind == "LIKE":
                self.take()
                node = syntax.Like(node, self.pattern(), negated)
            elif self.token.kind == "IN":
                self.take()
                self.expect("(")
                node = syntax.In(node, self.listed(), negated)
            else:
                raise self.unexpected("LIKE or IN")
        return node

    def pattern(self) -> str:
        if self.token.kind != "string":
            raise self.unexpected("a string literal, the pattern of LIKE,")
        token = self.take()
        if len(token.text) > PATTERN_CHARS_MAX:
            raise parse_error(
                f"LIKE pattern of {len(token.text)} characters: at most {PATTERN_CHARS_MAX} are allowed",
                self.text,
                token.at,
            )
        return token.text

    def unary(self) -> syntax.Expression:
        prefixes = []
        while self.token.kind in {"NOT", "-"} and not self.signed():
            prefixes.append(self.take().kind)
        if len(prefixes) > syntax.DEPTH_MAX:
            raise syntax.too_deep()
        node = self.atom()
        for operator in reversed(prefixes):
            node = syntax.Unary(operator, node)
        return node

    def atom(self) -> syntax.Expression:
        token = self.token
        if token.kind == "integer" or self.signed():
            return self.integer()
        if token.kind == "(":
            self.take()
            node = self.expression(1)
            self.expect(")")
            return node
        if token.kind == "function":
            self.take()
            self.expect("(")
            if self.token.kind == ")":
                self.take()
                return syntax.Call(token.text, ())
            return syntax.Call(token.text, self.listed())
        if token.kind == "EXISTS":
            self.take()
            return syntax.Exists(self.expect("name").text)
        if token.kind not in {"string", "name", "TRUE", "FALSE"}:
            raise self.unexpected("a value")
        self.take()
        if token.kind == "name":
            return syntax.Attribute(token.text)
        return syntax.Literal(token.text if token.kind == "string" else token.kind == "TRUE")

    def signed(self) -> bool:
        """Return whether a sign directly before a number is next: both are one literal."""
        sign = self.token
        if sign.kind not in {"+", "-"}:
            return False
        following = self.tokens[self.position + 1]
        return following.kind == "integer" and following.at == sign.end

    def integer(self) -> syntax.Literal:
        start = self.token.at
        sign = self.take().kind if self.token.kind in {"+", "-"} else ""
        digits = self.take().text
        value = int(sign + digits) if len(digits) <= _INTEGER_DIGITS_MAX else INTEGER_MAX + 1
        if not INTEGER_MIN <= value <= INTEGER_MAX:
            raise parse_error(
                f"integer out of range ({INTEGER_MIN} to {INTEGER_MAX})", self.text, start
            )
        return syntax.Literal(value)

    def listed(self) -> tuple[syntax.Expression, ...]:
        """Return the expressions up to the closing parenthesis; the opening one is already consumed."""
        items = [self.expression(1)]
        while self.token.kind == ",":
            self.take()
            items.append(self.expression(1))
        self.expect(")")
        return tuple(items)
