"""The VARIANT encoder: the native engine equals the plain one, and Spark's Python reads both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pyspark.sql.types import VariantVal

from virta.errors import EventError
from virta.jsontext import DEPTH_MAX
from virta.spark.source import variant
from virta.spark.source.variant import encode_plain, variant_pair

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    lambda children: (
        st.lists(children, max_size=5) | st.dictionaries(st.text(max_size=5), children, max_size=5)
    ),
    max_leaves=30,
)


def encode_variant(value):
    return dict(zip(("value", "metadata"), variant_pair(value), strict=True))


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_both_engines_write_the_same_bytes(value):
    """Byte for byte, for any JSON value."""
    if variant.encode_native is None:
        pytest.skip("the native encoder is not built")

    assert variant.encode_native(value) == encode_plain(value)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_sparks_reader_reads_it_back(value):
    """Spark's own Python decoder gives the value back; integers beyond 64 bits as doubles."""
    written = encode_variant(value)

    def rounded(item):
        if isinstance(item, int) and not isinstance(item, bool) and not -(2**63) <= item < 2**63:
            return float(item)
        if isinstance(item, list):
            return [rounded(one) for one in item]
        return {k: rounded(v) for k, v in item.items()} if isinstance(item, dict) else item

    assert VariantVal(written["value"], written["metadata"]).toPython() == rounded(value)


@pytest.mark.parametrize(
    "value",
    [
        {f"key{i}": i for i in range(300)},
        list(range(70_000)),
        {"": {"": {"": ""}}},
        {"a" * 70_000: 1},
        "x" * 100_000,
        [{"k": [1, {"k": 2}]}] * 300,
    ],
    ids=["many-keys", "long-list", "empty-keys", "long-key", "long-text", "shared-keys"],
)
def test_wide_values(value):
    """Counts, offsets and ids of two and three bytes."""
    written = encode_variant(value)

    assert VariantVal(written["value"], written["metadata"]).toPython() == value
    if variant.encode_native is not None:
        assert variant.encode_native(value) == encode_plain(value)


@pytest.mark.parametrize("value", [[1] * 9_000_000, {"a": "x" * 17_000_000}], ids=["list", "text"])
def test_what_is_too_large_is_refused(value):
    """Spark's limit is a clear error, not a broken row."""
    with pytest.raises(EventError, match="over the limit of a VARIANT"):
        encode_variant(value)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"k": inner}])
def test_values_as_deep_as_the_data_of_an_event(wrap):
    """An event nests `DEPTH_MAX` levels, its data one less: in both engines that is no invalid event."""
    value = 7
    for _ in range(DEPTH_MAX - 1):
        value = wrap(value)

    written = encode_plain(value)

    assert variant_pair(value) == written
    assert len(written[0]) > DEPTH_MAX


def test_deep_values_are_refused():
    """Nesting that no stack holds is a clear error."""
    value = []
    for _ in range(100_000):
        value = [value]

    with pytest.raises(EventError, match="nested too deeply"):
        encode_variant(value)


def test_lone_surrogates_become_replacement_characters():
    """JSON can spell what UTF-8 cannot hold."""
    written = encode_variant(json.loads('{"\\ud800": "a\\udc00b"}'))

    assert VariantVal(written["value"], written["metadata"]).toPython() == {"�": "a�b"}
