"""Databases as settings name them."""

from __future__ import annotations

import pytest

from virta.cdc.sources import CaptureSource, parse_source
from virta.errors import CaptureError


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("sqlite:data/shop.db", ("shop", "sqlite", "data/shop.db")),
        ("sqlite:///srv/my shop.db", ("my_shop", "sqlite", "/srv/my shop.db")),
        ("s=sqlite:/x.db", ("s", "sqlite", "/x.db")),
        ("postgresql://u:p@h:1/bank?sslmode=require",
         ("bank", "postgres", "postgresql://u:p@h:1/bank?sslmode=require")),
        ("b2=postgres://h/bank", ("b2", "postgres", "postgres://h/bank")),
    ],
)  # fmt: skip
def test_forms(text, source):
    assert parse_source(text) == CaptureSource(*source)


@pytest.mark.parametrize(
    "text", ["", "shop.db", "mysql://root:secret@h/db", "a b=sqlite:x", "sqlite:"]
)
def test_anything_else_is_refused_without_its_password(text):
    with pytest.raises(CaptureError, match="it must be sqlite:FILE") as caught:
        parse_source(text)

    assert "secret" not in caught.value.message
