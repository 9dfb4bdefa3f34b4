"""The two engines of the live step: what is native in `virta.views`, and the plain code beside it."""

from __future__ import annotations

import pytest

from virta import native
from virta.views import changes, frames, live_table, view
from virta.views.tables import index, table
from virta.views.tables.key_numbers import PlainKeyNumbers
from virta.views.tables.member_sets import PlainMemberSets
from virta.views.tables.table import RowTable
from virta.views.tables.values import ValueCache


@pytest.fixture(params=["native", "plain"])
def either_step(request, monkeypatch):
    """Run the test with the native live step and again with the plain one."""
    engine = request.param
    core = native.load("virta.views._native") if engine == "native" else None
    if core is None and engine == "native":
        pytest.skip("the native step is not built")
    for module in (frames, changes):
        monkeypatch.setattr(module, "_native", core)
    deliver_all = view.deliver_all_plain if core is None else core.deliver_all
    for module in (view, live_table):
        monkeypatch.setattr(module, "deliver_all", deliver_all)
    monkeypatch.setattr(table, "KeyNumbers", PlainKeyNumbers if core is None else core.KeyNumbers)
    monkeypatch.setattr(index, "MemberSets", PlainMemberSets if core is None else core.MemberSets)
    monkeypatch.setattr(RowTable, "set_rows", getattr(RowTable, f"set_rows_{engine}"))
    monkeypatch.setattr(ValueCache, "put_all", getattr(ValueCache, f"put_all_{engine}"))
    return engine
