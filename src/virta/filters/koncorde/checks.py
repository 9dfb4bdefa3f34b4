"""
Koncorde's checks of a filter's parts, in its order and with its messages.

An error names the keyword being read and the path to it: keywords and fields joined with dots, array
positions left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from virta.errors import FilterError
from virta.filters.text import number_text, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable


class Place:
    """
    A position in a filter: the keyword being read, and the names on the path to it.

    A chain of parents: most positions never become part of a message.
    """

    __slots__ = ("depth", "keyword", "name", "parent")

    def __init__(
        self, parent: Place | None = None, name: str = "", keyword: str | None = None
    ) -> None:
        self.parent = parent
        self.name = name
        self.keyword = keyword
        self.depth: int = 0 if parent is None else parent.depth + 1

    def enter(self, keyword: str) -> Place:
        """Return the place of a keyword inside this one."""
        return Place(self, keyword, keyword)

    def at(self, name: str) -> Place:
        """Return the place of a field or an attribute of the keyword being read."""
        return Place(self, name, self.keyword)

    @property
    def path(self) -> str | None:
        names: list[str] = []
        place: Place | None = self
        while place is not None and place.parent is not None:
            names.append(place.name)
            place = place.parent
        return ".".join(reversed(names)) if names else None

    def refuse(self, text: str, *, code: str | None = None, keyword: str | None = None) -> NoReturn:
        path = self.path
        message = text if path is None else f'"{path}": {text}'
        raise FilterError(message, code=code, keyword=keyword or self.keyword, path=path)


def check_object(value: Any, place: Place) -> dict[str, Any]:
    if not isinstance(value, dict):
        place.refuse("must be an object")
    if not all(isinstance(name, str) for name in value):
        place.refuse("must be an object whose names are strings")
    return value


def check_non_empty_object(value: Any, place: Place) -> dict[str, Any]:
    if not check_object(value, place):
        place.refuse("must be a non-empty object")
    return check_object(value, place)


def check_properties(
    value: Any, place: Place, count: int, required: Iterable[str] = ()
) -> dict[str, Any]:
    """Return an object, checked to have exactly `count` members, the required ones among them."""
    members = check_object(value, place)
    if len(members) != count:
        noun = "property" if count == 1 else "properties"
        place.refuse(f"expected object to have exactly {count} {noun}, got {len(members)}")
    check_required(members, place, required)
    return members


def check_required(members: dict[str, Any], place: Place, required: Iterable[str]) -> None:
    for name in required:
        if name not in members:
            place.refuse(f'the property "{name}" is missing')


def check_allowed(members: dict[str, Any], place: Place, allowed: tuple[str, ...]) -> None:
    for name in members:
        if name not in allowed:
            place.refuse(f'"{name}" is not an allowed attribute (allowed: {",".join(allowed)})')


def check_one_field(value: Any, place: Place) -> tuple[str, Any]:
    """Return the name and value of the single member of an object."""
    if type(value) is not dict or len(value) != 1:
        value = check_properties(value, place, 1)
    ((name, member),) = value.items()
    if not isinstance(name, str):
        check_object(value, place)
    return name, member


def check_text(value: Any, place: Place) -> str:
    if not isinstance(value, str):
        place.refuse("must be a string")
    if not value:
        place.refuse("cannot be empty")
    return value


def check_array(value: Any, place: Place) -> list[Any]:
    if not isinstance(value, list):
        place.refuse("must be an array")
    return value


def check_texts(value: Any, place: Place) -> list[str]:
    if not check_array(value, place):
        place.refuse("cannot be empty")
    if not all(isinstance(item, str) for item in value):
        place.refuse('must hold only values of type "string"')
    return check_array(value, place)


def check_filters(value: Any, place: Place) -> list[dict[str, Any]]:
    """Return the operands of `and` or `or`."""
    if not check_array(value, place):
        place.refuse("cannot be empty")
    if not all(isinstance(item, dict) and item for item in value):
        place.refuse("can only contain non-empty objects")
    return check_array(value, place)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def script_text(value: Any) -> str:
    """Return a value for a message, as JavaScript's `${value}` writes it."""
    return text_of(value)


def script_json(value: Any) -> str:
    """Return JSON as JSON.stringify writes it, for messages. Recursion is bounded by the filter's depth."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{_quoted(k)}:{script_json(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(script_json, value))}]"
    if is_number(value):
        return number_text(value)
    return _quoted(value)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
