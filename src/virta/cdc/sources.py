"""
Databases to capture as settings name them: `sqlite:FILE`, `postgresql://…`, each with `NAME=` before it or without.

    shop=sqlite:data/shop.db      bank=postgresql://app@db.example.com/bank
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from virta.cdc.state import NAME_MAX, check_name
from virta.errors import CaptureError

SOURCES_MAX: Final = 64
_FORM: Final = re.compile(r"(?:([A-Za-z0-9_-]+)=)?(sqlite:|postgres(?:ql)?://)(.+)", re.DOTALL)


class CaptureSource(msgspec.Struct, frozen=True):
    """One database; `where` is a file or a DSN, which may have a password."""

    name: str
    kind: str  # sqlite or postgres
    where: str


def parse_source(text: str) -> CaptureSource:
    """
    Return the database that a text names.

    Raises:
        CaptureError: it is neither form, or its name cannot be used.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        shown = text.partition("@")[2] if "@" in text else text  # no password in messages
        raise CaptureError(
            f"cdc is …{shown[:80]!r}: it must be sqlite:FILE or postgresql://user@host/database, or one of these "
            "after NAME=",
            code="capture_source_invalid",
        )
    name, scheme, rest = found.groups()
    if scheme == "sqlite:":
        path = rest.removeprefix("//") if rest.startswith("///") else rest
        source = CaptureSource(
            name or _name(path.rpartition("/")[2].partition(".")[0]), "sqlite", path
        )
    else:
        database = unquote(urlsplit(scheme + rest).path.lstrip("/"))
        source = CaptureSource(name or _name(database or "postgres"), "postgres", scheme + rest)
    check_name(source.name)
    return source


def _name(text: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in text)[
        :NAME_MAX
    ]
