"""The spill file reuses freed space."""

from __future__ import annotations

from virta.journal.storage.spill import PIECE_BYTES_MIN, FileSpill


def test_spill_reuses_its_space(tmp_path):
    """Freed pieces are used again, so the file stays as large as it was when fullest."""
    spill = FileSpill(tmp_path)
    for _ in range(50):
        handles = {spill.put(bytes([i]) * (i * 7 + 1)): i for i in range(40)}
        for handle, i in handles.items():
            assert spill.get(handle) == bytes([i]) * (i * 7 + 1)
            spill.drop(handle)

    assert spill.size <= 80 * PIECE_BYTES_MIN
    spill.close()
