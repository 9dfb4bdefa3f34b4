"""Koncorde's answers, recorded: the vectors kept here, and those of its own test suite where they are."""

from __future__ import annotations

import gzip
import json
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SHARED = Path(os.environ.get("VIRTA_SHARED", ROOT.parent / "shared")) / "vectors"


@cache
def kept() -> dict[str, list[dict]]:
    """Vectors of the repository, by kind."""
    with gzip.open(
        ROOT / "tests/vectors/koncorde-vectors.jsonl.gz", "rt", encoding="utf-8"
    ) as lines:
        return _by_kind(lines)


@cache
def suite() -> dict[str, list[dict]] | None:
    """Vectors from Koncorde's own test suite, by kind; None where they are not at hand."""
    path = SHARED / "koncorde-vectors.jsonl"
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as lines:
        return _by_kind(line for line in lines if '"suite-' in line)


def _by_kind(lines) -> dict[str, list[dict]]:
    kinds: dict[str, list[dict]] = {}
    for line in lines:
        vector = json.loads(line)
        kinds.setdefault(vector["kind"], []).append(vector)
    return kinds
