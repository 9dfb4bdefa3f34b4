"""All live views of a process over a real log and hub: sharing, limits with names, upkeep, failures, resumes."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_support import HubStack

import virta
from virta.errors import ViewError
from virta.event.row_changes import KeyRule
from virta.filters import parse
from virta.hub import event_batch
from virta.hub.delivery import Delivery
from virta.views import live_table, live_views
from virta.views.limits import ViewLimits
from virta.views.live_table import LiveTable
from virta.views.live_views import LiveViews
from virta.views.tables import table_file
from virta.views.tables.passes import MembershipPass, ResumePass
from virta.views.tables.table import RowTable
from virta.views.view import ViewFilter
from waiting import turns, until

RULE = KeyRule()
PAID = ViewFilter(parse("status=paid"))


def event(id_, key, **data):
    made = {"id": str(id_), "source": "/s", "type": "order", "data": data}
    return made | ({"subject": key} if key else {})


class Sink:
    """Collects frames and pumps by itself, as a connection does."""

    blocked = False

    def __init__(self):
        self.frames = []
        self.error = None

    def write_frames(self, frames, payloads):
        self.frames += frames

    def wants_pump(self, consumer):
        asyncio.get_running_loop().call_soon(consumer.pump)

    def failed(self, error):
        self.error = error

    def names(self):
        frames, self.frames = self.frames, []
        return [(frame.name, frame.key) if frame.key else frame.name for frame in frames]


class Stack:
    """A log, a hub and the live views over them."""

    def __init__(self, path, limits, directory):
        self.base = HubStack(path / "log")
        self.executor = ThreadPoolExecutor(2)
        self.views = LiveViews(
            self.base.log, self.base.hub, self.executor, directory=directory, limits=limits
        )
        self.base.hub.rows = self.views
        self.views.start()

    async def publish(self, *events, channel="orders"):
        done = asyncio.get_running_loop().create_future()
        drafts = [
            Delivery(channel, one["source"], one["id"], virta.event.Event(**one).to_line())
            for one in events
        ]
        self.base.publisher.submit(drafts, done.set_result)
        assert await asyncio.wait_for(done, 60) is None

    async def connect(self, filter_=PAID, *, since=None, rule=RULE, channel="orders"):
        """Open a view and attach a consumer; return (sink, consumer)."""
        live, view = await self.views.open(channel, rule, filter_)
        sink = Sink()
        consumer = await self.views.attach(live, view, sink, since)
        consumer.pump()
        return sink, consumer

    async def close(self):
        await self.views.stop()
        await self.base.close()
        self.executor.shutdown()


def run(scenario, tmp_path, *, directory=None, **limits):
    async def whole():
        stack = Stack(tmp_path, ViewLimits(**limits), directory)
        try:
            async with asyncio.timeout(60):
                return await scenario(stack)
        finally:
            await stack.close()

    return asyncio.run(whole())


@pytest.fixture
def quick_upkeep(monkeypatch):
    monkeypatch.setattr(live_views, "UPKEEP_S", 0.01)


class TestSharing:
    """What consumers have in common is done once."""

    def test_equal_filters_are_one_view_of_one_table(self, tmp_path):
        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            first, second = [await stack.views.open("orders", RULE, PAID) for _ in range(2)]
            other = await stack.views.open("orders", RULE, ViewFilter(parse("status=new")))
            keyed = await stack.views.open("orders", KeyRule("/data/status"), PAID)
            assert first == second
            assert other[0] is first[0]
            assert keyed[0] is not first[0]
            assert stack.views.statistics() == {
                "tables": 2, "rows": 2, "views": 3, "consumers": 0, "unkeyed": 0,
            }  # fmt: skip

        run(scenario, tmp_path)

    def test_views_that_open_together_share_one_table_and_one_pass(self, tmp_path, monkeypatch):
        passes, tables = [], []
        real = MembershipPass.__init__
        monkeypatch.setattr(
            MembershipPass,
            "__init__",
            lambda self, table, views: passes.append(len(views)) or real(self, table, views),
        )
        build = live_views.open_table
        monkeypatch.setattr(
            live_views, "open_table", lambda *a, **k: tables.append(1) or build(*a, **k)
        )

        async def scenario(stack):
            await stack.publish(*[event(n, str(n), n=n) for n in range(40)])
            filters = [ViewFilter(parse(f"n={n}")) for n in range(40)]
            found = await asyncio.gather(*[stack.connect(one) for one in filters])
            for n, (sink, _) in enumerate(found):
                assert sink.names() == ["snapshot", ("row", str(n)), "live"]

        run(scenario, tmp_path)
        assert len(tables) == 1
        assert sum(passes) == 40
        assert len(passes) <= 3

    def test_a_pass_waits_for_views_that_come_one_after_the_other(self, tmp_path, monkeypatch):
        """For no longer than it takes: of a small table it does not wait, and those that are late need another."""
        passes, by_case = [], []
        real = MembershipPass.__init__
        monkeypatch.setattr(
            MembershipPass,
            "__init__",
            lambda self, table, views: passes.append(len(views)) or real(self, table, views),
        )
        monkeypatch.setattr(live_table, "GATHER_S", 0.0)  # a turn of the loop

        async def scenario(stack):
            await stack.publish(*[event(n, str(n), n=n) for n in range(40)])
            await stack.connect()  # builds the table
            for row_s in (60.0, 0.0):
                monkeypatch.setattr(live_table, "PASS_ROW_S", row_s)
                passes.clear()
                opened = []
                for n in range(8):
                    filter_ = ViewFilter(parse(f"n={n};n={100 + row_s}"))
                    opened.append(asyncio.ensure_future(stack.connect(filter_)))
                    await turns()
                for n, (sink, _) in enumerate(await asyncio.gather(*opened)):
                    assert sink.names() == ["snapshot", ("row", str(n)), "live"]
                by_case.append(list(passes))

        run(scenario, tmp_path)
        assert by_case[0] == [8]
        assert len(by_case[1]) > 1

    @pytest.mark.usefixtures("either_step")
    @pytest.mark.skipif(not event_batch._native, reason="event batches need the native module")
    def test_batches_of_events(self, tmp_path):
        """Each table gets every event of a batch once, by its own rule."""

        async def scenario(stack):
            await stack.publish(event(0, "a", id=7, status="paid"))
            by_subject, _ = await stack.connect()
            by_id, _ = await stack.connect(rule=KeyRule("/data/id"))
            events = [event(n, f"k{n}", id=n % 3, status="paid") for n in range(1, 20)]
            events += [event(20, "k1"), event(21, "k2") | {"data": None}, event(22, None, id=1)]
            batch = event_batch.split_batch(
                "orders", json.dumps(events).encode(), 0, events_max=99, event_bytes_max=9999
            )
            done = asyncio.get_running_loop().create_future()
            stack.base.publisher.submit(batch, done.set_result)
            await done
            frames = [(f.name, f.key, f.offset) for f in by_subject.frames][3:]
            assert frames[:19] == [("enter", f"k{n}", n) for n in range(1, 20)]
            assert frames[19:] == [("leave", "k1", 20), ("leave", "k2", 21)]
            assert [f.key for f in by_id.frames if f.name == "update"] == [
                str(n % 3) for n in range(4, 20)
            ]
            # What a table knows already, from the log, is not applied again.
            [live] = [one for one in stack.views.channels["orders"] if not one.table.rule.steps]
            values = batch.values()
            stack.views.append_batch("orders", batch.offset + len(values) - 2, [values[0]] * 3)
            assert [offset for offset, _ in live.changes] == [live.table.position]

        run(scenario, tmp_path)

    def test_consumers_that_resume_together_share_one_pass(self, tmp_path, monkeypatch):
        monkeypatch.setattr(live_table, "RESUME_AT_ONCE", 0)
        runs = []
        real = ResumePass.run
        monkeypatch.setattr(ResumePass, "run", lambda *a: runs.append(1) or real(*a))

        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"), event(2, "b", status="paid"))
            _, consumer = await stack.connect()
            at = consumer.position
            await stack.publish(event(3, "a", status="new"), event(4, "c", status="paid"))
            found = await asyncio.gather(*[stack.connect(since=at) for _ in range(20)])
            for sink, _ in found:
                assert sink.names() == [("leave", "a"), ("enter", "c"), "live"]

        run(scenario, tmp_path)
        assert len(runs) <= 2

    def test_a_short_resume_needs_no_thread(self, tmp_path, monkeypatch):
        """A view that has stood since the position: the ring has it all."""

        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            _, consumer = await stack.connect()
            at = consumer.position
            await stack.publish(event(2, "a", status="new"))
            live, view = await stack.views.open("orders", RULE, PAID)
            monkeypatch.setattr(live, "_run", None)
            sink = Sink()
            (await stack.views.attach(live, view, sink, at)).pump()
            assert sink.names() == [("leave", "a"), "live"]

        run(scenario, tmp_path)


class TestFeed:
    """What is published, by whomever, reaches tables and views once."""

    def test_own_events_and_those_of_other_processes(self, tmp_path):
        async def scenario(stack):
            sink, _ = await stack.connect()
            assert sink.names() == ["snapshot", "live"]
            await stack.publish(event(1, "a", status="paid"))
            with virta.open(tmp_path / "log") as other:
                other.append("orders", "b", event(2, "x", status="paid"))
                other.append("orders", "b", event(2, "x", status="new"))  # a repeat for subscribers
                await until(lambda: len(sink.frames) >= 3)
            assert sink.names() == [("enter", "a"), ("enter", "b"), ("leave", "b")]

        run(scenario, tmp_path)

    def test_other_channels_do_not_count_but_move_the_position(self, tmp_path):
        async def scenario(stack):
            sink, consumer = await stack.connect()
            sink.names()
            await stack.publish(event(1, "a", status="paid"), channel="others")
            assert sink.names() == []
            assert consumer.position == 1

        run(scenario, tmp_path)

    def test_events_between_the_build_and_the_first_step_are_not_missed(self, tmp_path):
        """A table is built while events are published."""

        async def scenario(stack):
            await stack.publish(*[event(n, str(n), status="paid") for n in range(50)])

            async def more():
                for n in range(50, 150):
                    await stack.publish(event(n, str(n), status="paid"))

            writing = asyncio.ensure_future(more())
            sink, consumer = await stack.connect()
            await writing
            await until(lambda: consumer.idle)
            assert {f.key for f in sink.frames if f.key} == {str(n) for n in range(150)}
            assert len([f for f in sink.frames if f.key]) == 150

        run(scenario, tmp_path)


class TestLimits:
    """Each has a name, and its refusal says it."""

    def test_tables(self, tmp_path):
        async def scenario(stack):
            await stack.views.table("a", RULE)
            with pytest.raises(ViewError, match="raise view_tables_max") as error:
                await stack.views.table("b", RULE)
            assert error.value.code == "too-many-views"
            await stack.views.table("a", RULE)

        run(scenario, tmp_path, view_tables_max=1)

    def test_filters(self, tmp_path):
        async def scenario(stack):
            await stack.views.open("a", RULE, PAID)
            with pytest.raises(ViewError, match="raise view_filters_max") as error:
                await stack.views.open("b", RULE, ViewFilter(parse("x=1")))
            assert error.value.code == "too-many-views"
            await stack.views.open("a", RULE, PAID)  # an equal one stands

        run(scenario, tmp_path, view_filters_max=1)

    def test_rows_of_a_table_that_is_built(self, tmp_path):
        """A refusal leaves nothing behind: after some rows are deleted it works."""

        async def scenario(stack):
            await stack.publish(*[event(n, str(n)) for n in range(3)])
            for _ in range(2):
                with pytest.raises(ViewError, match="raise view_rows_max"):
                    await stack.views.open("orders", RULE, PAID)
            assert stack.views.statistics()["tables"] == 0

        run(scenario, tmp_path, view_rows_max=2)

    def test_rows_of_a_table_that_stands(self, tmp_path):
        """Its consumers are notified why; publishing goes on."""

        async def scenario(stack):
            sink, _ = await stack.connect()
            await stack.publish(*[event(n, str(n)) for n in range(3)])
            assert sink.error.code == "too-many-rows"
            assert stack.views.statistics()["tables"] == 0
            await stack.publish(event(9, "9"))

        run(scenario, tmp_path, view_rows_max=2)

    @pytest.mark.parametrize("channel", ["meta", "$virta/streams"])
    def test_the_servers_own_channels_have_no_rows(self, tmp_path, channel):
        async def scenario(stack):
            with pytest.raises(ViewError, match="the server's own") as error:
                await stack.views.table(channel, RULE)
            assert error.value.code == "no-rows"

        run(scenario, tmp_path)


class TestUpkeep:
    """Filters and tables without users are dropped, files are written, expired rows leave."""

    def test_a_filter_lingers_beyond_its_last_consumer(self, tmp_path, quick_upkeep):
        async def scenario(stack):
            _, consumer = await stack.connect()
            live = stack.views.channels["orders"][0]
            used_at = live.used_at
            await until(lambda: live.used_at > used_at)  # upkeep has seen it: it has a consumer
            assert live.views
            consumer.close()
            await until(lambda: not live.views)
            assert live.table.index.views == {}
            assert stack.views.channels  # the table stays

        run(scenario, tmp_path, view_linger_s=0.0)

    def test_an_idle_table_is_saved_and_dropped(self, tmp_path, quick_upkeep):
        files = tmp_path / "views"

        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            _, consumer = await stack.connect()
            consumer.close()
            await until(lambda: not stack.views.channels)
            assert len(list(files.glob("*.rows"))) == 1
            sink, _ = await stack.connect()
            assert sink.names() == ["snapshot", ("row", "a"), "live"]

        run(scenario, tmp_path, directory=files, view_linger_s=0.0, view_idle_s=0.0)

    def test_a_table_is_saved_from_time_to_time_and_at_the_end(self, tmp_path, quick_upkeep):
        files = tmp_path / "views"

        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            await stack.connect()
            await until(lambda: list(files.glob("*.rows")))
            await stack.publish(event(2, "b", status="paid"))

        run(scenario, tmp_path, directory=files, view_save_s=0.0)
        with virta.open(tmp_path / "log") as log:
            path = table_file.table_path(files, "orders", RULE)
            table = table_file.load_table(path, log, "orders", RULE)
            assert set(table.keys) == {"a", "b"}
            assert table.position == log.next_offset

    def test_a_file_that_cannot_be_written_is_a_warning(self, tmp_path, caplog):
        files = tmp_path / "views"
        files.write_text("not a directory")

        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            await stack.connect()

        run(scenario, tmp_path, directory=files)
        assert "table_file_not_written channel=orders" in caplog.text

    def test_compaction_ends_a_table_with_a_pointer_as_key(
        self, tmp_path, quick_upkeep, monkeypatch
    ):
        """Compaction knows record keys only: rows may be missing from then on."""

        async def scenario(stack):
            await stack.publish(event(1, "a", id=7))
            keyed, _ = await stack.connect(rule=KeyRule("/data/id"))
            usual, _ = await stack.connect()
            monkeypatch.setattr(table_file, "compacted_end", lambda log: 1)
            await until(lambda: keyed.error)
            assert keyed.error.code == "view-key-compacted"
            assert usual.error is None
            with pytest.raises(ViewError, match="leave \\$key out"):
                await stack.connect(rule=KeyRule("/data/id"))

        run(scenario, tmp_path)

    def test_rows_that_retention_removed_leave(self, tmp_path, quick_upkeep, monkeypatch):
        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"), event(2, "b", status="paid"))
            sink, _ = await stack.connect()
            sink.names()
            monkeypatch.setattr(type(stack.base.log), "first_offset", property(lambda _: 1))
            await until(lambda: sink.frames)
            assert [(f.name, f.key, f.reason) for f in sink.frames] == [("leave", "a", "expired")]

        run(scenario, tmp_path)

    def test_unkeyed_records_stay_counted_when_a_table_ends(self, tmp_path, quick_upkeep):
        async def scenario(stack):
            await stack.publish(event(1, "a"), event(2, ""))
            _, consumer = await stack.connect()
            consumer.close()
            await until(lambda: not stack.views.channels)
            assert stack.views.statistics()["unkeyed"] == 1

        run(scenario, tmp_path, view_linger_s=0.0, view_idle_s=0.0)

    def test_a_table_that_somebody_opens_stays(self, tmp_path, monkeypatch):
        """Upkeep runs when the table is built and who asked for it has not gone on."""

        async def scenario(stack):
            build = stack.views._build

            async def build_and_keep(*arguments):
                live = await build(*arguments)
                await stack.views.keep_once()
                return live

            monkeypatch.setattr(stack.views, "_build", build_and_keep)
            sink, consumer = await stack.connect()
            await stack.publish(event(1, "a", status="paid"))
            assert sink.names() == ["snapshot", "live", ("enter", "a")]
            consumer.close()
            await stack.views.keep_once()
            assert not stack.views.channels

        run(scenario, tmp_path, view_linger_s=0.0, view_idle_s=0.0)

    def test_a_table_that_ends_while_it_is_saved_is_dropped_once(self, tmp_path, monkeypatch):
        """Another table was built for the channel meanwhile."""

        async def scenario(stack):
            save = stack.views._save
            _, consumer = await stack.connect()
            consumer.close()
            (live,) = stack.views._live()
            built = []

            async def save_and_replace(one):
                await save(one)
                if one is live and not built:
                    stack.views._drop(live, ViewError("gone", code="internal-failure"))
                    built.append(await stack.views.table(live.table.channel, live.table.rule))

            live.views.clear()
            monkeypatch.setattr(stack.views, "_save", save_and_replace)
            await stack.views.keep_once()
            assert built
            assert await stack.views.table(live.table.channel, live.table.rule) is built[0]

        run(scenario, tmp_path, view_linger_s=0.0, view_idle_s=0.0)

    def test_a_filter_that_somebody_resumes_stays(self, tmp_path, monkeypatch):
        """Upkeep runs while what changed since the position is looked for."""
        touched = LiveTable.touched

        async def scenario(stack):
            async def touched_and_keep(live, view, position):
                await stack.views.keep_once()
                return await touched(live, view, position)

            await stack.publish(event(1, "a", status="paid"))
            monkeypatch.setattr(LiveTable, "touched", touched_and_keep)
            sink, _ = await stack.connect(since=1)
            await stack.publish(event(2, "b", status="paid"))
            assert sink.names() == ["live", ("enter", "b")]

        run(scenario, tmp_path, view_linger_s=0.0)

    def test_a_table_that_ends_while_somebody_resumes_is_a_refusal(self, tmp_path, monkeypatch):
        touched = LiveTable.touched

        async def scenario(stack):
            async def touched_and_fail(live, view, position):
                found = await touched(live, view, position)
                stack.views._drop(live, ViewError("gone", code="internal-failure"))
                return found

            await stack.publish(event(1, "a", status="paid"))
            monkeypatch.setattr(LiveTable, "touched", touched_and_fail)
            with pytest.raises(ViewError, match="gone"):
                await stack.connect(since=1)

        run(scenario, tmp_path)


class TestFailures:
    """A failure of one view is reported to its consumers; everything else goes on."""

    def test_a_step_that_fails_ends_its_table_only(self, tmp_path, monkeypatch, caplog):
        async def scenario(stack):
            broken, _ = await stack.connect()
            other, _ = await stack.connect(channel="others")
            real = RowTable.apply

            def apply(self, changes, position):
                if self.channel == "orders":
                    raise RuntimeError("disk on fire")
                return real(self, changes, position)

            with monkeypatch.context() as patch:
                patch.setattr(RowTable, "apply", apply)
                await stack.publish(event(1, "a", status="paid"))
                await stack.publish(event(2, "b", status="paid"), channel="others")
            assert broken.error.code == "internal-failure"
            assert other.names()[-1] == ("enter", "b")
            again, _ = await stack.connect()
            assert again.names() == ["snapshot", ("row", "a"), "live"]

        run(scenario, tmp_path)
        assert "view_step_failed channel=orders" in caplog.text

    def test_a_pass_that_fails_is_a_refusal(self, tmp_path, monkeypatch, caplog):
        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            await stack.views.table("orders", RULE)

            def fail(_):
                raise OSError("no")

            with monkeypatch.context() as patch:
                patch.setattr(MembershipPass, "prepare", fail)
                with pytest.raises(ViewError, match="reading the rows failed: no") as error:
                    await stack.connect()
            assert error.value.code == "view-pass-failed"
            sink, _ = await stack.connect()
            assert sink.names() == ["snapshot", ("row", "a"), "live"]

        run(scenario, tmp_path)
        assert "view_pass_failed" in caplog.text

    def test_a_channel_without_keys_is_refused(self, tmp_path):
        async def scenario(stack):
            await stack.publish(event(1, ""))
            with pytest.raises(ViewError) as error:
                await stack.views.open("orders", RULE, PAID)
            assert error.value.code == "view-unkeyed"

        run(scenario, tmp_path)


class TestResume:
    """Positions: of the past, of the future, of nowhere."""

    def test_a_position_beyond_the_log_is_unknown(self, tmp_path):
        async def scenario(stack):
            await stack.publish(event(1, "a", status="paid"))
            sink, _ = await stack.connect(since=99)
            assert sink.frames[0].data == {"reason": "unknown-position"}
            assert sink.names()[1:] == ["snapshot", ("row", "a"), "live"]

        run(scenario, tmp_path)

    def test_a_position_before_the_ring_is_a_gap(self, tmp_path):
        async def scenario(stack):
            await stack.publish(*[event(n, str(n), status="paid") for n in range(5)])
            sink, _ = await stack.connect(since=1)
            assert sink.frames[0].data == {"reason": "gap"}
            sink, _ = await stack.connect(since=4)
            assert sink.names() == [("enter", "4"), "live"]

        run(scenario, tmp_path, view_ring=2)

    def test_after_a_restart_kinds_are_right(self, tmp_path):
        """Another process: the view has not stood since the position, so rows before it are read again."""
        files = tmp_path / "views"

        async def first(stack):
            await stack.publish(*[event(key, key, status="paid") for key in "abc"])
            _, consumer = await stack.connect()
            return consumer.position

        position = run(first, tmp_path, directory=files)
        with virta.open(tmp_path / "log") as log:
            log.append("orders", "", event(4, "a", status="new"))
            log.append("orders", "", event(5, "b", status="paid"))
            log.append("orders", "", event(6, "d", status="paid"))
            log.append("orders", "", event(7, "e", status="new"))

        async def second(stack):
            sink, _ = await stack.connect(since=position)
            return sink.names()

        wanted = [("leave", "a"), ("update", "b"), ("enter", "d"), "live"]
        assert run(second, tmp_path, directory=files) == wanted
        assert run(second, tmp_path) == wanted  # without the file
