"""Blocks of the index of event ids: the same answers in memory and in the file."""

from __future__ import annotations

import errno
import os
import random
from array import array

import pytest

import virta
from virta.hub.resume import id_blocks, id_index
from virta.hub.resume.id_blocks import FENCE, HASH_MASK, SPAN_BITS, Block, BlockFile
from virta.hub.resume.id_index import IdIndex, IdSearchResult


def numbers(rng, count, hashes):
    """Numbers of records with few different hashes, so that runs of one hash cross the parts of the file."""
    return array("Q", sorted(rng.choice(hashes) | place for place in range(count)))


@pytest.mark.parametrize("count", [1, FENCE - 1, FENCE, FENCE + 1, 5 * FENCE + 3])
def test_a_stored_block_has_the_same_offsets(tmp_path, count):
    """Every hash, present or not, gives the same offsets before and after the block is stored."""
    rng = random.Random(count)
    hashes = [rng.getrandbits(44) << SPAN_BITS for _ in range(3)] + [0, HASH_MASK]
    others = [(value + (1 << SPAN_BITS)) & HASH_MASK for value in hashes]
    file = BlockFile(tmp_path)
    blocks = [Block(7, 7 + count, numbers(rng, count, hashes)) for _ in range(3)]
    before = [[list(block.offsets(value)) for value in hashes + others] for block in blocks]

    for block in blocks:
        block.store(file)

    assert [len(block.entries) for block in blocks] == [0, 0, 0]
    assert [[list(block.offsets(value)) for value in hashes + others] for block in blocks] == before
    assert sum(len(found) for found in before[0]) >= count


def test_dropped_blocks_give_their_place_back(tmp_path, monkeypatch):
    """The file does not grow for ever, and what stays is found after it was written again."""
    monkeypatch.setattr(id_blocks, "DROPPED_BYTES_MAX", 20_000)
    rng = random.Random(1)
    hashes = [value << SPAN_BITS for value in range(50)]
    file = BlockFile(tmp_path)
    blocks, largest = [], 0
    for first in range(0, 100_000, 1000):
        blocks.append(Block(first, first + 1000, numbers(rng, 1000, hashes)))
        expected = list(blocks[-1].offsets(hashes[7]))
        blocks[-1].store(file)
        if len(blocks) > 5:
            file.drop(blocks.pop(0), blocks)
        largest = max(largest, os.fstat(file._open().fileno()).st_size)
        assert list(blocks[-1].offsets(hashes[7])) == expected

    assert largest < 10 * 8000 + 20_000


def test_the_index_finds_the_oldest_in_its_file(tmp_path, monkeypatch):
    """With nearly everything in the file, each id has the offset of its oldest event."""
    monkeypatch.setattr(id_index, "BLOCK_RECORDS_MIN", 50)
    monkeypatch.setattr(id_index, "PART_BYTES", 4096)
    rng = random.Random(2)
    oldest: dict[str, int] = {}
    with virta.open(tmp_path / "log", segment_bytes=16_384, visibility="committed") as log:
        index = IdIndex(log)
        for _ in range(40):
            ids = [str(rng.randrange(2000)) for _ in range(60)]
            start = log.next_offset
            values = [b'{"source":"s","id":"%b"}' % id_.encode() for id_ in ids]
            log.append_many([("c", b"", value) for value in values], durability="none")
            for number, id_ in enumerate(ids):
                oldest.setdefault(id_, start + number)
            for id_ in rng.sample(sorted(oldest), 5):
                found = index.find("c", [("s", id_)], log.next_offset)
                assert found == IdSearchResult(oldest[id_], 0)

        assert sum(len(block.entries) for block in index._blocks) <= 60
        assert [p.name for p in log.path.iterdir() if "tmp" in p.name] == []


def test_a_full_disk_leaves_blocks_in_memory(tmp_path, monkeypatch, caplog):
    """Blocks that cannot be stored are searched in memory, with a warning."""
    monkeypatch.setattr(id_index, "BLOCK_RECORDS_MIN", 50)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(id_blocks, "pwrite", full)
    with virta.open(tmp_path / "log", visibility="committed") as log:
        index = IdIndex(log)
        for first in range(0, 300, 60):
            values = [b'{"source":"s","id":"%d"}' % n for n in range(first, first + 60)]
            log.append_many([("c", b"", value) for value in values], durability="none")
            assert index.find("c", [("s", "3")], log.next_offset) == IdSearchResult(3, 0)

    assert "id_index_in_memory" in caplog.text
