"""Splits of a log whose newest file has headroom: its zeros are nobody's share."""

from __future__ import annotations

import shutil

import pytest

import virta

layout = pytest.importorskip("virta.spark.layout")


@pytest.mark.parametrize("page", ["live", "copied", "lost"])
def test_headroom_is_in_no_split(tmp_path, page):
    """While its writer lives, in a copy, and without a control page: every record once, and not a byte more."""
    root = tmp_path / "log"
    with virta.open(root, segment_bytes=4096) as log:
        for number in range(60):
            log.append("t", "", b"%d" % number * 30)
        end = log.segments()[-1].bytes
        if page != "live":
            shutil.copytree(root, tmp_path / "copy")
            root = tmp_path / "copy"
        if page == "lost":
            (root / "control").unlink()
        plan = layout.Plan(str(root))
        try:
            ends = plan.ends()
            assert (ends.first, ends.end) == (0, 60)
            splits = plan.splits(0, ends.end)
            assert [split.start for split in splits] == [0, *(split.stop for split in splits[:-1])]
            assert splits[-1].stop == 60
            assert splits[-1].end == end
        finally:
            plan.close()
