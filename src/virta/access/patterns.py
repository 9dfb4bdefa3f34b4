"""
Patterns over names of channels, streams, job domains and pipelines.

    orders          that name
    orders.*        `*` stands for any characters within one part; parts end at `.`, `/` and `:`
    orders.**       `**` stands for any characters
    **              every name

Matching takes time in proportion to the pattern times the name, whatever they contain.
"""

from __future__ import annotations

from virta.errors import AccessError

PATTERN_CHARS_MAX = 256
SEPARATORS = frozenset("./:")
EVERYTHING = "**"
_ONE, _MANY = "*", "**"
# A part that occurs in no pattern; see `NamePattern.covers`.
_UNLIKELY = "\uffff"


class NamePattern:
    """A compiled pattern."""

    __slots__ = ("_steps", "text")

    def __init__(self, text: str) -> None:
        if not text or len(text) > PATTERN_CHARS_MAX or "\0" in text:
            raise AccessError(
                f"{text[:40]!r} is not a pattern: it has 1 to {PATTERN_CHARS_MAX} characters",
                code="invalid-pattern",
            )
        self.text = text
        self._steps = _steps(text)

    @property
    def is_everything(self) -> bool:
        return self._steps == [_MANY]

    def matches(self, name: str) -> bool:
        """Return whether a name fits the pattern."""
        steps = self._steps
        # The steps that may come next; a star may also be skipped.
        states = _skipping_stars(steps, {0})
        for char in name:
            reached = set()
            for at in states:
                if at == len(steps):
                    continue
                step = steps[at]
                if step == _MANY or (step == _ONE and char not in SEPARATORS):
                    reached.add(at)
                elif step == char:
                    reached.add(at + 1)
            if not reached:
                return False
            states = _skipping_stars(steps, reached)
        return len(steps) in states

    def covers(self, name: str, separator: str = ":") -> bool:
        """Return whether the pattern fits every name below a name, and that name itself or with a separator."""
        # Without `**` a pattern fits names with one number of parts only, so two numbers are enough.
        below = f"{name}{separator}{_UNLIKELY}"
        deeper = f"{below}{separator}{_UNLIKELY}"
        itself = self.matches(name) or self.matches(name + separator)
        return itself and self.matches(below) and self.matches(deeper)


def _steps(text: str) -> list[str]:
    """Split a pattern into characters and stars; three stars or more are two."""
    steps: list[str] = []
    for char in text:
        if char == "*" and steps and steps[-1] in {_ONE, _MANY}:
            steps[-1] = _MANY
        else:
            steps.append(char)
    return steps


def _skipping_stars(steps: list[str], states: set[int]) -> set[int]:
    found = set(states)
    for state in states:
        at = state
        while at < len(steps) and steps[at] in {_ONE, _MANY}:
            at += 1
            found.add(at)
    return found
