"""The invariant of live views under random steps, and changes to the code that it must notice."""

from __future__ import annotations

import json

import pytest
import view_model
from view_model import CHANNEL, Client, Model

from virta.event.row_changes import read_change
from virta.filters import parse
from virta.views import consumer, view
from virta.views.consumer import ViewConsumer
from virta.views.limits import ViewLimits
from virta.views.tables import index, passes, table, table_file
from virta.views.tables.passes import MembershipPass
from virta.views.tables.table import RowTable
from virta.views.tables.table_file import open_table

SEEDS = 45
STEPS = 250
# A change of the code has to be noticed within so many seeds.
MUTANT_SEEDS = 150


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of a few rows and frames, so that every border is met."""
    monkeypatch.setattr(passes, "PIECE_ROWS", 2)
    monkeypatch.setattr(consumer, "PIECE_FRAMES", 2)
    monkeypatch.setattr(table, "INTERNED_MIN", 4)
    monkeypatch.setattr(view, "CANDIDATES_MIN", 2)


def run(seed: int, directory) -> Model:
    for path in directory.glob("*.rows"):
        path.unlink()
    model = Model(seed, directory)
    for _ in range(STEPS):
        model.step()
    model.quiet()
    return model


@pytest.mark.usefixtures("either_step")
@pytest.mark.parametrize("start", range(0, SEEDS, 15))
def test_clients_have_the_result_at_every_quiet_point(start, tmp_path):
    """Random records, views, cuts, restarts, retention and compaction: rows = filter over the newest events."""
    frames = 0
    for seed in range(start, start + 15):
        try:
            frames += run(seed, tmp_path).frames
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert frames > 500  # the model does something


def assert_noticed(tmp_path) -> None:
    """Run seeds until one fails."""
    for seed in range(MUTANT_SEEDS):
        try:
            run(seed, tmp_path)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"no seed below {MUTANT_SEEDS} notices the change")


class Scene:
    """A model with one client, and steps by name."""

    def __init__(self, tmp_path, query: str = "status=paid", **limits: int) -> None:
        self.model = Model(0, tmp_path)
        self.model.limits = ViewLimits(**limits)
        self.model.table = RowTable(CHANNEL, self.model.rule, limits=self.model.limits)
        self.client = Client(parse(query), None)
        self.model.clients = [self.client]

    def put(self, key: str, status: str) -> None:
        """Publish a row, or delete it if the status is empty."""
        event = {"id": "1", "source": "/", "type": "order", "data": {"status": status}}
        value = json.dumps(event).encode() if status else b""
        record = self.model.log.append(CHANNEL, key, value)
        changes = [(record.offset, read_change(record, self.model.rule))]
        for one in self.model.table.apply(changes, self.model.log.next_offset):
            one.deliver()

    def connect(self) -> None:
        self.model.connect(self.client)
        self.model.start_ready()

    def finish(self) -> list[str]:
        """Connect again, and return the rows when everything was read and checked."""
        self.client.cut()
        self.connect()
        self.model.quiet()
        return list(self.client.rows)


def cut_inside_a_flush(tmp_path) -> list[str]:
    """Cut a client after it got a row above its position, which then leaves the result."""
    scene = Scene(tmp_path)
    scene.put("a", "paid")
    scene.finish()
    scene.client.cut()
    scene.put("b", "paid")
    scene.put("c", "paid")
    scene.connect()
    scene.model.pump(scene.client)
    scene.model.read(scene.client, 1)  # `b`; its id is still the position of the resume
    scene.client.cut()
    scene.put("b", "new")
    return scene.finish()


def test_enter_and_leave_are_not_nothing_on_a_resume(monkeypatch, tmp_path):
    """A client that was cut inside a flush has rows above its position: they need a leave."""
    assert cut_inside_a_flush(tmp_path) == ["a", "c"]
    real = ViewConsumer.begin_resume

    def begin(self, touched, position):
        real(self, touched, position)
        for waiting in self._map.values():
            waiting.may_have = waiting.was

    monkeypatch.setattr(ViewConsumer, "begin_resume", begin)
    with pytest.raises(AssertionError):
        cut_inside_a_flush(tmp_path)


def test_an_id_is_not_the_offset_of_the_row(monkeypatch, tmp_path):
    real = ViewConsumer._send_map

    def send(self, frames, values):
        missing = real(self, frames, values)
        for frame in frames:
            if frame.id >= 0 and frame.name in {"enter", "update"}:
                frame.id = frame.offset + 1
        return missing

    monkeypatch.setattr(ViewConsumer, "_send_map", send)
    assert_noticed(tmp_path)


def test_frames_of_a_resume_keep_the_old_position(monkeypatch, tmp_path):
    real = ViewConsumer.begin_resume
    monkeypatch.setattr(
        ViewConsumer,
        "begin_resume",
        lambda self, touched, position: real(self, touched, self.view.table.position),
    )
    assert_noticed(tmp_path)


def test_findings_for_a_row_that_changed_do_not_count(monkeypatch, tmp_path):
    def finish(self, piece):
        for (_, number), found in zip(piece.rows, piece.found, strict=True):
            if number < len(self.table.offsets) and self.table.offsets[number] >= 0:
                self.table.add_members(number, found, self.views)

    monkeypatch.setattr(MembershipPass, "finish", finish)
    assert_noticed(tmp_path)


def test_a_view_that_joins_a_pass_gets_what_it_missed(monkeypatch, tmp_path):
    real = MembershipPass.rest

    def rest(self):
        self._missed = max(0, self._missed - 1)
        return real(self)

    monkeypatch.setattr(MembershipPass, "rest", rest)
    assert_noticed(tmp_path)


def expire_unseen(tmp_path) -> list[str]:
    """Cut a client before it reads that a row expired."""
    scene = Scene(tmp_path)
    scene.put("a", "paid")
    scene.put("b", "paid")
    scene.finish()
    scene.model.log.retain(1)
    scene.model.expire()
    return scene.finish()


def test_a_position_at_an_expiry_is_not_exact(monkeypatch, tmp_path):
    """Without + 1 a client at the very position of the expiry keeps rows that expired."""
    assert expire_unseen(tmp_path) == ["b"]
    real = RowTable.forget
    monkeypatch.setattr(RowTable, "forget", lambda self, exact: real(self, exact - 1))
    with pytest.raises(AssertionError):
        expire_unseen(tmp_path)


def compact_and_rebuild(tmp_path) -> list[str]:
    """Compact a row away that a client has, and rebuild the table without its file."""
    scene = Scene(tmp_path)
    scene.put("a", "paid")
    scene.put("b", "paid")
    scene.finish()
    scene.client.cut()
    scene.put("a", "new")
    scene.model.log.compact(3)
    scene.model.table = open_table(scene.model.log, CHANNEL, scene.model.rule)
    scene.model.views.clear()
    return scene.finish()


def test_a_rebuilt_table_does_not_take_unknown_for_none(monkeypatch, tmp_path):
    """Compaction removed rows that clients have: positions below its end cannot be resumed."""
    assert compact_and_rebuild(tmp_path) == ["b"]
    monkeypatch.setattr(table_file, "compacted_end", lambda log: 0)
    with pytest.raises(AssertionError):
        compact_and_rebuild(tmp_path)


def cut_inside_a_snapshot(tmp_path) -> list[str]:
    """Reset a client, cut it inside the snapshot, and let it connect again."""
    scene = Scene(tmp_path, "", view_pending_max=1)
    for key in "abcd":
        scene.put(key, "new")
    scene.finish()
    scene.client.blocked = True
    scene.put("a", "")
    scene.put("b", "")
    scene.client.blocked = False
    scene.model.pump(scene.client)
    scene.model.read(scene.client, 2)  # `reset` and `snapshot`: it has no rows any more
    scene.model.table.limits = ViewLimits()
    return scene.finish()


def test_a_snapshot_empties_the_id(monkeypatch, tmp_path):
    """A client that is cut inside a snapshot must not resume from before it."""
    assert cut_inside_a_snapshot(tmp_path) == ["c", "d"]
    monkeypatch.setattr(consumer, "EMPTY_ID", consumer.NO_ID)
    with pytest.raises(AssertionError):
        cut_inside_a_snapshot(tmp_path)


def test_numbers_of_views_are_not_used_again(monkeypatch, tmp_path):
    real = index.ViewIndex.remove

    def remove(self, one):
        real(self, one)
        self._numbers = iter([one.number, *range(one.number + 1000, one.number + 2000)])

    monkeypatch.setattr(index.ViewIndex, "remove", remove)
    assert_noticed(tmp_path)


def test_a_tag_has_the_row_filter(monkeypatch, tmp_path):
    """A client that comes back with another token must not resume what the first one could see."""
    real = view_model.view_tag
    monkeypatch.setattr(
        view_model,
        "view_tag",
        lambda *given: real(*given[:4], view.ViewFilter(given[4].own, None, given[4].root)),
    )
    assert_noticed(tmp_path)


def test_a_leave_shows_no_foreign_row(monkeypatch, tmp_path):
    monkeypatch.setattr(view.View, "shows", lambda self, event: True)
    assert_noticed(tmp_path)


def test_waiting_keys_keep_their_place(monkeypatch, tmp_path):
    """A key that waits and changes again must not move behind others with its old first offset."""
    real = ViewConsumer._note

    def note(self, hit):
        waiting = self._map.pop(hit.key, None)
        if waiting is not None:
            self._map[hit.key] = waiting
        real(self, hit)

    monkeypatch.setattr(ViewConsumer, "_note", note)
    assert_noticed(tmp_path)
