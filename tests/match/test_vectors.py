"""Recorded answers: Koncorde's own, on its vectors and on the benchmark's ten thousand filters."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from virta.errors import FilterError
from virta.filters import parse
from virta.match import Matcher

ROOT = Path(__file__).parent.parent.parent
VECTORS = ROOT / "tests" / "vectors" / "koncorde-vectors.jsonl.gz"
BENCH = Path(os.environ.get("VIRTA_SHARED", ROOT.parent / "shared")) / "vectors" / "match-bench"


def koncorde_cases():
    if not VECTORS.exists():
        return []
    with gzip.open(VECTORS, "rt") as file:
        return [case for line in file if (case := json.loads(line))["kind"] == "match"]


def test_koncorde_vectors(engine):
    """All of a vector's filters in one index give, for each document, what the evaluator gives."""
    cases = koncorde_cases()
    if not cases:
        pytest.skip(f"no vectors in {VECTORS}")
    checked = 0
    for case in cases:
        filters = []
        for source in case["filters"]:
            try:
                filters.append(parse(source, "koncorde"))
            except FilterError:
                continue  # refused on purpose; the filters' own tests list these
        matcher = Matcher(engine=engine)
        matcher.add_many(filters)
        for entry in case["documents"]:
            document = entry["doc"] | ({"_id": entry["docId"]} if entry.get("docId") else {})
            wanted = {f.id for f in filters if f.matches(document)}
            assert set(matcher.match(document)) == wanted, (case["id"], document)
            assert set(matcher.match(json.dumps(document))) == wanted, (case["id"], document)
            checked += len(filters)
    assert checked > 20_000


@pytest.mark.slow
def test_benchmark_answers(engine):
    """Ten thousand filters, two thousand documents: Koncorde's answers, without its known mistakes."""
    if not BENCH.exists():
        pytest.skip(f"no workload in {BENCH}")
    quirks = set(json.loads((BENCH / "quirk-lines-10k.json").read_text()))
    filters, answers = (
        [json.loads(line) for line in (BENCH / name).read_text().splitlines()]
        for name in ("filters-10k.jsonl", "answers-10k.jsonl")
    )
    documents = (BENCH / "docs-2k.jsonl").read_bytes().splitlines()
    matcher = Matcher(engine=engine)
    lines: dict[str, list[int]] = {}
    for line, id_ in enumerate(matcher.add_many(parse(f, "koncorde") for f in filters)):
        lines.setdefault(id_, []).append(line)
    count = len(documents) if engine == "native" else 200

    for document, answer in zip(documents[:count], answers, strict=False):
        wanted = [line for line in answer if line not in quirks]
        for event in (document, json.loads(document)):
            found = (line for id_ in matcher.match(event) for line in lines[id_])
            assert sorted(line for line in found if line not in quirks) == wanted
