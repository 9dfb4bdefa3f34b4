"""Routes that show what the server does: figures, explanations, subscribers, health, webhooks."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
from server_harness import Consumer, event

import virta
from virta.filters import parse
from virta.server.api.observe import explanations


def post(server, path, body):
    return server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})


def until(check, seconds=10.0):
    """Repeat a check until it returns something true; return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
    raise AssertionError("it did not happen in time")


def test_figures_count_what_was_published(server):
    """After a publication a sample says so, with a latency; the history has it too."""
    server.publish("figures", *[event(str(n)) for n in range(20)])

    def seen():
        history = server.request("GET", "/stats/history?step=1").json
        return history if any(history["eventsPerSecond"]) else None

    history = until(seen)
    now = server.request("GET", "/stats").json["now"]

    assert max(history["eventsPerSecond"]) > 0
    assert [v for v in history["p99Ms"] if v is not None]
    assert now["nextOffset"] >= 20
    assert now["diskBytes"] > now["diskFreeBytes"] > 0
    assert server.request("GET", "/stats/history?step=7").code == "invalid-step"


def test_the_stream_of_figures_has_a_frame_a_second(server):
    """Each frame is a later sample."""

    async def two():
        stream = await Consumer.open(server.port, "/stats/stream")
        frames = await stream.frames(3)
        await stream.close()
        return [frame.json["time"] for frame in frames if frame.event == "stats"]

    times = asyncio.run(two())

    assert len(times) == 3
    assert times[0] < times[1] < times[2]


def test_the_time_until_the_disk_is_full(start):
    """Free space divided by the growth of the log in the last minutes; none while it does not grow."""
    with start("--durability", "none", "--journal-port", "none") as server:
        first = server.request("GET", "/stats").json["now"]
        began, number = time.monotonic(), 0
        while (now := server.request("GET", "/stats").json["now"])["fullInSeconds"] is None:
            batch = [event(str(number + n), {"pad": "x" * 1000}) for n in range(50)]
            server.publish("growing", *batch)
            number += 50
            time.sleep(0.05)
            assert time.monotonic() < began + 60
        grown = (now["logBytes"] - first["logBytes"]) / (now["time"] - first["time"])

    assert first["fullInSeconds"] is None
    assert now["fullInSeconds"] == pytest.approx(now["diskFreeBytes"] / grown, rel=0.3)


def test_channels_have_their_rate(server):
    """`GET /channels` says how many events a second a channel gets."""
    server.publish("rated", *[event(f"r{n}") for n in range(50)])

    def busy():
        rows = server.request("GET", "/channels?limit=1000").json["channels"]
        return next((r for r in rows if r["name"] == "rated" and r["eventsPerSecond"] > 0), None)

    assert until(busy)["records"] == 50


EVENT = event("1", {"status": "paid", "total": 69.08})


def test_an_explanation_names_the_condition_that_failed(server):
    """The tree has a verdict at each node, the reasons only what decided."""
    body = {"filter": "status=paid&total=>120", "dialect": "query-string", "event": EVENT}

    found = post(server, "/filters/explain", body).json
    (one,) = found["explanations"]

    assert found["root"] == "event"
    assert not one["matches"]
    assert [child["matches"] for child in one["children"]] == [True, False]
    assert one["reasons"] == ["data.total should be > 120: it is 69.08"]


def test_koncorde_explains_the_data(server):
    """A Koncorde filter sees the document, so its paths begin there."""
    body = {
        "filter": {"equals": {"status": "paid"}},
        "events": [EVENT, event("2", {"status": "x"})],
    }

    found = post(server, "/filters/explain", body).json

    assert found["root"] == "document"
    assert [one["matches"] for one in found["explanations"]] == [True, False]


def test_bad_explanations_are_refused(server):
    """Neither event nor events, an invalid filter, a wrong type."""
    assert post(server, "/filters/explain", {"filter": "a=1"}).code == "invalid-test"
    bad = {"filter": "a>5", "dialect": "query-string", "event": EVENT}
    assert post(server, "/filters/explain", bad).status == 400
    assert post(server, "/filters/explain", {"filter": "", "event": 7}).code == "invalid-body"
    assert server.request("GET", "/filters/explain").status == 405


def test_standing_filters_of_an_event(server):
    """Queries of subscribers, registered filters and nothing else, by the same matcher."""

    async def go():
        paid = await Consumer.open(server.port, "/channels/stand%2Fing?status=paid")
        other = await Consumer.open(server.port, "/channels/stand%2Fing?status=open")
        await paid.connected(), await other.connected()
        post(server, "/filters/stand/ing", {"equals": {"status": "paid"}})
        found = post(server, "/filters/standing", {"channel": "stand/ing", "event": EVENT}).json
        await paid.close(), await other.close()
        return found

    found = asyncio.run(go())

    assert (found["total"], found["matched"]) == (3, 2)
    assert {(one["kind"], one["text"]) for one in found["filters"]} == {
        ("query", "status=paid"),
        ("filter", '{"equals":{"status":"paid"}}'),
    }


def test_a_count_is_exact_on_a_small_log(server):
    """Matches, all events of the channel, and bins that sum up to the matches."""
    server.publish("counted", *[event(f"c{n}", {"n": n}) for n in range(30)])
    body = {"channel": "counted", "filter": "n=>=20", "dialect": "query-string", "bins": 12}

    found = post(server, "/filters/count", body).json

    assert (found["exact"], found["events"], found["matched"], found["error"]) == (True, 30, 10, 0)
    assert (len(found["bins"]), sum(found["bins"])) == (12, 10)


@pytest.mark.parametrize("seconds_max", [30, 0], ids=["all-windows", "one-window"])
def test_a_count_on_a_large_log_is_an_estimate(tmp_path, monkeypatch, seconds_max):
    """Beyond the limit windows are sampled; the truth is within the error, also when all matches are neighbours."""
    rows = explanations.SCAN_RECORDS_MAX + 20_000
    monkeypatch.setattr(explanations, "COUNT_S_MAX", seconds_max)
    with virta.open(tmp_path, durability="none") as log:
        for start in range(0, rows, 1_000):
            values = [msg(n) for n in range(start, start + 1_000)]
            log.append_many([("big", b"", value) for value in values])
        found = explanations.counted(log, "big", parse("n=<7000", "query-string"), 86_400, 48)

    assert not found.exact
    assert abs(found.events - rows) <= rows * 0.05
    assert abs(found.matched - 7000) <= found.error
    assert (found.error < 7000) == (seconds_max > 0)


@pytest.mark.parametrize(
    ("windows", "low", "high"),
    [
        ([(500, 500)] * 7, 1, 1),  # too few
        ([(0, 0)] * 96, 1, 1),  # no event of the channel
        ([(500, 0)] * 96, 3 / 48_000, 3 / 48_000),
        ([(500, 50), (500, 51)] * 48, 0.0002, 0.0004),  # alike: as good as exact
        ([(500, 500)] * 48 + [(500, 0)] * 48, 0.1, 0.15),  # half of the windows: about 1 / sqrt(96)
        ([(1, 1), (1, 0)] * 4, 0.4, 0.5),
    ],
)
def test_the_error_of_an_estimate_comes_from_how_windows_differ(windows, low, high):
    """Not from the number of events in them, which are no independent sample."""
    assert low <= explanations.share_error(windows) <= high


def msg(n):
    return json.dumps(event(str(n), {"n": n})).encode()


def test_subscribers_are_listed_and_disconnected(server):
    """A query with its client; a disconnected one gets the reason as its last frame."""

    async def go():
        consumer = await Consumer.open(server.port, "/channels/listed?a=1")
        await consumer.connected()
        server.publish("listed", event("1", {"a": 1}), event("2", {"a": 2}))
        await consumer.frame()
        page = server.request("GET", "/subscribers?channel=listed").json
        (query,) = page["queries"]
        (client,) = query["clients"]
        answer = server.request("DELETE", f"/subscribers/{client['id']}")
        rest = await consumer.rest()
        await consumer.close()
        return query, client, answer, rest

    query, client, answer, rest = asyncio.run(go())

    assert (query["query"], query["subscribers"], query["matched"]) == ("a=1", 1, 1)
    assert (client["transport"], client["sent"], client["waitingBytes"]) == ("sse", 1, 0)
    assert client["address"].startswith("127.0.0.1:")
    assert answer.status == 204
    assert [frame.event for frame in rest] == ["disconnect"]
    assert rest[0].json["reason"] == "disconnected"
    assert server.request("DELETE", "/subscribers/none").status == 404


def test_health_says_what_and_where(start, tmp_path):
    """Dead jobs by domain, a pipeline that cannot be used with its reason; one is not "1 jobs"."""
    (tmp_path / "vat.toml").write_text("[pipeline]\nname = 7\n")

    def health(server):
        checks = server.request("GET", "/health").json["checks"]
        return {check["name"]: check["text"] for check in checks}

    def bury(server, uri):
        server.request("POST", "/journal/jobs", json.dumps({"uri": uri}))
        (job,) = server.request("POST", "/journal/jobs/next", b"{}").json["jobs"]
        body = {"key": job["key"], "reason": "no", "dead": True}
        assert server.request("POST", "/journal/jobs/fail", json.dumps(body)).status == 200

    with start("--pipelines", str(tmp_path / "vat.toml"), "--journal-port", "0") as server:
        before = health(server)
        bury(server, "mail://mail.shop/1")
        one = health(server)["jobs"]
        bury(server, "mail://mail.shop/2")
        bury(server, "bill://invoices.shop/1")
        three = health(server)["jobs"]
        died_by = time.time()
    time.sleep(1.1)
    with start("--journal-port", "0", data_dir=tmp_path / "data") as again:
        restored = health(again)["jobs"]
        seconds = time.time() - died_by

    assert 1 <= int(restored.split("the last died ")[1].split(" s")[0]) <= seconds + 1
    assert "jobs" not in before
    assert before["pipelines"].startswith("1 pipeline failed or cannot be used: vat, ")
    assert "vat.toml:1: " in before["pipelines"]
    assert re.fullmatch(r"1 dead job: 1 in mail\.shop; the last died \d+ s ago", one)
    assert three.startswith("3 dead jobs: 2 in mail.shop, 1 in invoices.shop; the last died ")


def test_health_and_verify(server):
    """Checks with a state and a sentence each, worst first; verifying finds no damage."""
    server.publish("verified", event("1"))
    found = server.request("GET", "/health").json

    assert {check["name"] for check in found["checks"]} >= {"log", "disk", "tokens"}
    order = ["wrong", "warning", "ok"]
    states = [order.index(check["state"]) for check in found["checks"]]
    assert states == sorted(states)
    assert found["state"] == found["checks"][0]["state"]
    assert found["segments"][0]["nextOffset"] > 0
    assert found["segmentsTotal"] == len(found["segments"]) == 1
    assert found["versions"]["virta"]
    assert server.request("POST", "/health/verify").json["ok"] is True


@pytest.fixture
def sink():
    """A webhook that refuses events until its `accepts` is set."""

    class Hook(BaseHTTPRequestHandler):
        def do_OPTIONS(self):
            self.send_response(200)
            self.send_header("WebHook-Allowed-Origin", "*")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if web.accepts:
                web.received.append(json.loads(body))
            self.send_response(204 if web.accepts else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    web.accepts, web.received = False, []
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    yield web
    web.shutdown()
    thread.join()
    web.server_close()


def test_dead_letters_are_shown_and_redelivered(start, sink):
    """What a sink refused is listed with its reason, and delivered when the sink accepts again."""
    server = start("--webhook-allow", "127.0.0.1")
    address = f"http://127.0.0.1:{sink.server_address[1]}/"
    made = post(server, "/subscriptions", {"sink": address, "config": {"channel": "w"}}).json
    path = f"/subscriptions/{made['id']}"
    server.publish("w", event("1", {"a": 1}))
    letters = until(lambda: server.request("GET", f"{path}/dead-letters").json["deadLetters"])
    tested = post(server, f"{path}/test", {}).json
    sink.accepts = True
    again = post(server, f"{path}/redeliver", {"offsets": [letters[0]["offset"], 0]}).json

    assert (letters[0]["reason"], letters[0]["event"]["id"]) == ("status 400", "1")
    assert tested == {"delivered": False, "reason": "status 400"}
    assert [one["delivered"] for one in again["results"]] == [True, False]
    assert [received["id"] for received in sink.received] == ["1"]
    assert post(server, f"{path}/test", {}).json["delivered"] is True
    assert sink.received[-1]["type"] == "virta.webhook.test"
    assert server.request("GET", "/subscriptions/none/dead-letters").status == 404


def test_recurring_jobs_are_listed_with_their_next_runs(server):
    """Five runs each and those of the next hour, in order; the payload of a job is shown."""
    body = json.dumps({"schedule": "@every 5m", "uri": "rates://shop/refresh"})
    server.request("PUT", "/journal/jobs/recurring/rates", body)
    server.request("PUT", "/journal/jobs/recurring/daily", body.replace("@every 5m", "@daily"))
    daily, found = server.request("GET", "/journal/jobs/recurring").json["recurring"]
    post(server, "/journal/jobs", {"uri": "mail://shop/1", "payload": "hello", "delay": 60})
    shown = server.request("GET", "/journal/jobs/show?uri=mail://shop/1").json

    assert (found["name"], found["schedule"]) == ("rates", "@every 5m")
    steps = {after - run for run, after in pairwise(found["next"])}
    assert (len(found["next"]) in {12, 13, 14}, steps) == (True, {300_000_000})
    assert found["next"][-1] - found["next"][0] >= 55 * 60_000_000
    assert (daily["name"], len(daily["next"])) == ("daily", 5)
    assert (shown["payload"], shown["max_attempts"]) == ("hello", 25)
