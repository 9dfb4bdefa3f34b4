"""The HTTP handler: the same journal, in JSON, with problem documents instead of exceptions."""

from __future__ import annotations

import asyncio
import base64
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_support import eventually, slow_node, turns

from virta.journal.serving.commit_loop import CommitLoop
from virta.journal.serving.http import Handler

JOB_KEY = f"h:000:{0:020}:{1:016x}"


class Api:
    def __init__(self, node):
        self.node = node
        self.handler = Handler(node)

    async def __call__(self, method, path, body=None, query="", content_type="application/json"):
        raw = (
            body
            if isinstance(body, bytes)
            else json.dumps(body).encode()
            if body is not None
            else b""
        )
        response = await self.handler.handle(method, f"/journal{path}", query, raw, content_type)
        if "json" in response.content_type:
            return response.status, json.loads(response.body)
        return response.status, response.body


def with_api(tmp_path, use):
    async def run():
        node = CommitLoop(tmp_path)
        await node.start()
        try:
            return await use(Api(node))
        finally:
            await node.stop()

    return asyncio.run(run())


def test_keys(tmp_path):
    """Values are put, read, changed, listed and deleted by key; keys may contain slashes and any bytes."""

    async def use(api):
        for key, value in [
            ("color", "blue"),
            ("a/b", 5),
            ("a%2Fb%20c", 1.5),
            ("flag", False),
            ("void", None),
            ("%ff", {"base64": base64.b64encode(b"\0\xff").decode()}),
        ]:
            status, _ = await api("PUT", f"/keys/{key}", {"value": value})
            assert status == 200
            status, got = await api("GET", f"/keys/{key}")
            assert (status, got["value"], got["persist"]) == (200, value, True)
        assert (await api("POST", "/keys/a/b/add", {"amount": 7}))[1]["result"] == 12
        assert (await api("POST", "/keys/flag/not"))[1]["result"] is True
        await api("POST", "/keys/color/truncate", {"size": 2})
        assert await api("GET", "/keys/color", query="raw") == (200, b"bl")
        assert (await api("POST", "/keys/color/rename", {"to": "hue"}))[0] == 200
        assert (await api("POST", "/keys/hue/link", {"to": "alias"}))[0] == 200
        assert (await api("GET", "/keys/alias"))[1]["value"] == "bl"
        assert (await api("POST", "/keys/alias/unlink"))[1]["result"] is False
        _, page = await api("GET", "/keys", query="prefix=a&count=1")
        assert [item["key"] for item in page["keys"]] == ["a/b"]
        _, page = await api("GET", "/keys", query={"cursor": page["cursor"]})
        assert [item["key"] for item in page["keys"]] == ["a/b c"]
        _, page = await api("GET", "/keys", query="regex=%5Eh")
        assert [item["key"] for item in page["keys"]] == ["hue"]
        assert (await api("DELETE", "/keys/hue"))[1]["deleted"] is True
        assert (await api("GET", "/keys/hue"))[0] == 404
        await api("PUT", "/keys/raw", b"\0\1", "ttl=5&persist=0", "application/octet-stream")
        _, got = await api("GET", "/keys/raw")
        assert (got["type"], got["persist"], got["ttl"]) == ("buffer", False, 5.0)
        assert (await api("PUT", "/keys/raw", {"value": 1, "overwrite": False}))[0] == 409

    with_api(tmp_path, use)


def test_jobs(tmp_path):
    """A job's whole life over HTTP, dead letters and settings included."""

    async def use(api):
        status, _ = await api(
            "POST", "/jobs", {"uri": "http://h/1", "payload": {"n": 1}, "priority": 3}
        )
        assert status == 201
        await api("POST", "/jobs", {"uri": "http://h/2", "delay": 60})
        _, found = await api("POST", "/jobs/next", {"domain": "h", "work_for": 5, "count": 9})
        (job,) = found["jobs"]
        assert (job["uri"], job["payload"], job["attempts"]) == ("http://h/1", '{"n":1}', 0)
        assert (await api("POST", "/jobs/extend", {"key": job["key"], "seconds": 9}))[0] == 200
        assert (await api("POST", "/jobs/give-back", {"key": job["key"]}))[0] == 200
        await api("PUT", "/jobs/domains/h", {"max_attempts": 1})
        assert (await api("GET", "/jobs/domains/h"))[1] == {
            "max_attempts": 1,
            "retry_delay": 1.0,
            "retry_delay_max": 3600.0,
            "deadline": 0.0,
            "mode": "debounce",
            "paused": False,
        }
        _, found = await api("POST", "/jobs/next", {})
        await api("POST", "/jobs/fail", {"key": found["jobs"][0]["key"], "reason": "boom"})
        _, dead = await api("GET", "/jobs", query="state=dead")
        assert [(j["uri"], j["reason"]) for j in dead["jobs"]] == [("http://h/1", "boom")]
        assert (await api("POST", "/jobs/requeue", {"uri": "http://h/1"}))[1] == {"requeued": 1}
        assert (await api("POST", "/jobs/kick", {"domain": "h"}))[1] == {"kicked": 1}
        _, found = await api("POST", "/jobs/next", {"count": 5})
        for job in found["jobs"]:
            assert (await api("POST", "/jobs/done", {"key": job["key"]}))[0] == 200
        assert (await api("POST", "/jobs/done", {"key": job["key"]}))[0] == 404
        _, stats = await api("GET", "/stats")
        assert sum(stats["jobs"].values()) == 0
        assert (await api("GET", "/jobs/show", query="uri=http://h/1"))[0] == 404

    with_api(tmp_path, use)


def test_next_waits(tmp_path):
    """A waiting NEXT is answered when work arrives, or empty when its time is over."""

    async def use(api):
        began = time.monotonic()
        waiting = asyncio.create_task(api("POST", "/jobs/next", {"domain": "h", "wait": 20}))
        await asyncio.sleep(0)
        await api("POST", "/jobs", {"uri": "http://h/1"})
        _, found = await waiting
        assert len(found["jobs"]) == 1
        assert time.monotonic() - began < 10
        _, found = await api("POST", "/jobs/next", {"domain": "none", "wait": 0.05})
        assert found == {"jobs": [], "wake_up": None}

    with_api(tmp_path, use)


def test_recurring(tmp_path):
    """A recurring job is set, runs, is listed under its name and removed."""

    async def use(api):
        cron = {"schedule": "@every 1s", "uri": "http://h/tick"}
        assert (await api("PUT", "/jobs/recurring/tick", cron))[0] == 200
        _, found = await api("POST", "/jobs/next", {"domain": "h", "wait": 10})
        assert [job["uri"] for job in found["jobs"]] == ["http://h/tick"]
        assert (await api("GET", "/jobs/recurring/tick"))[1] == cron
        assert (await api("DELETE", "/jobs/recurring/tick"))[1] == {"deleted": True}
        assert (await api("GET", "/stats"))[1]["recurring"] == 0

    with_api(tmp_path, use)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "unknown-function"),
        ("PATCH", "/keys/k", None, 405, "method-not-allowed"),
        ("GET", "/keys/none", None, 404, "does-not-exist"),
        ("PUT", "/keys/k", b"{", 400, "bad-request"),
        ("PUT", "/keys/k", {"value": 1, "typo": 1}, 400, "bad-request"),
        ("PUT", "/keys/k", {"value": 2**70}, 400, "overflow"),
        ("PUT", "/keys/k", {"value": {"base64": "!"}}, 400, "bad-request"),
        ("PUT", "/keys/k", {"value": "x" * (8 * 1024 * 1024 + 1)}, 413, "too-large"),
        ("PUT", "/keys/k", b"x" * (12 * 1024 * 1024 + 1), 413, "too-large"),
        ("PUT", "/keys/" + "k" * 70_000, {"value": 1}, 413, "too-large"),
        ("POST", "/keys/k/explode", None, 404, "unknown-function"),
        ("POST", "/keys/k/not", None, 404, "does-not-exist"),
        ("POST", "/jobs", {"uri": "nohost"}, 400, "bad-uri"),
        ("POST", "/jobs", {"uri": "http://h/", "priority": 256}, 400, "bad-priority"),
        ("POST", "/jobs", {"uri": "http://h/", "priority": -1}, 400, "bad-priority"),
        ("POST", "/jobs/fly", None, 404, "unknown-function"),
        ("POST", "/jobs/done", {"key": f"h:000:{0:020}:{9:016x}"}, 404, "does-not-exist"),
        ("GET", "/jobs/next", None, 405, "method-not-allowed"),
        ("PUT", "/keys/k", {"value": 1, "expires": 1e300}, 400, "overflow"),
        ("PUT", "/keys/k", {"value": 1, "ttl": -1}, 400, "overflow"),
        ("POST", "/keys/k/add", {"amount": "one"}, 400, "bad-request"),
        ("POST", "/keys/k/truncate", {"size": 1}, 404, "does-not-exist"),
        ("POST", "/keys/k/rename", {"to": "other"}, 404, "does-not-exist"),
        ("POST", "/keys/k/rename", {}, 400, "key-missing"),
        ("POST", "/keys/k/link", {}, 400, "key-missing"),
        ("DELETE", "/keys", None, 405, "method-not-allowed"),
        ("GET", "/keys?count=x", None, 400, "bad-request"),
        ("GET", "/keys?count=-1", None, 400, "bad-request"),
        ("GET", "/keys?count=", None, 400, "bad-request"),
        ("GET", "/jobs?limit=", None, 400, "bad-request"),
        ("GET", "/jobs?limit", None, 400, "bad-request"),
        ("GET", "/jobs?limit=true", None, 400, "bad-request"),
        ("GET", "/jobs?offset=", None, 400, "bad-request"),
        ("DELETE", "/keys/k?complete=", None, 400, "bad-request"),
        ("PUT", "/keys/k?ttl=", {"value": 1}, 400, "bad-request"),
        ("POST", "/jobs/next", {"count": True}, 400, "bad-request"),
        ("POST", "/jobs/next", {"count": ""}, 400, "bad-request"),
        ("POST", "/jobs", {"uri": "http://h/", "priority": False}, 400, "bad-request"),
        ("POST", "/jobs/kick", {"domain": "d", "limit": True}, 400, "bad-request"),
        ("PATCH", "/jobs/domains/d", {"max_attempts": True}, 400, "bad-settings"),
        ("PATCH", "/jobs/domains/d", {"deadline": ""}, 400, "bad-settings"),
        ("GET", "/keys?cursor=zz", None, 400, "bad-cursor"),
        ("GET", "/keys?regex=(", None, 400, "bad-regex"),
        ("POST", "/jobs", {"uri": "http://h/", "delay": 1e300}, 400, "overflow"),
        ("POST", "/jobs", {"uri": "http://h/", "start": -1}, 400, "overflow"),
        ("POST", "/jobs", {"uri": "", "domain": "d"}, 400, "key-missing"),
        ("POST", "/jobs", {"url": "http://h/"}, 400, "bad-request"),
        ("GET", "/jobs?state=odd", None, 400, "bad-settings"),
        ("GET", "/jobs?offset=" + "9" * 30, None, 400, "bad-settings"),
        ("GET", "/jobs/show", None, 400, "key-missing"),
        ("GET", "/jobs/show?uri=none", None, 404, "does-not-exist"),
        ("POST", "/jobs/next", {"work_for": 1e300}, 400, "overflow"),
        ("POST", "/jobs/next", {"count": "all"}, 400, "bad-request"),
        ("POST", "/jobs/done", None, 400, "key-missing"),
        ("POST", "/jobs/extend", {"key": "none"}, 404, "does-not-exist"),
        ("POST", "/jobs/give-back", {"key": "none"}, 404, "does-not-exist"),
        ("POST", "/jobs/fail", {"key": "none"}, 404, "does-not-exist"),
        ("POST", "/jobs/fail", {"key": JOB_KEY, "delay": 1e300}, 400, "bad-settings"),
        ("POST", "/jobs/fail", {"key": JOB_KEY}, 404, "does-not-exist"),
        ("POST", "/jobs/fail", {}, 400, "key-missing"),
        ("POST", "/jobs/done", {"key": "no key of a job"}, 404, "does-not-exist"),
        ("POST", "/jobs/extend", {"key": JOB_KEY, "seconds": -1}, 400, "bad-request"),
        ("POST", "/jobs/next", {"work_for": 0}, 400, "bad-request"),
        ("POST", "/jobs", {"uri": "http://h/", "start": 5, "delay": 5}, 400, "bad-request"),
        ("POST", "/keys/k/truncate", {}, 400, "bad-request"),
        ("POST", "/keys/k", {}, 405, "method-not-allowed"),
        ("DELETE", "/keys/k?complete=maybe", None, 400, "bad-request"),
        ("PUT", "/keys/k?overwrite=0", {"value": 1}, 400, "bad-request"),
        ("PATCH", "/jobs/domains/d", {"paused": 7}, 400, "bad-settings"),
        ("PUT", "/keys/virta:domain:H", {"value": "{}"}, 400, "bad-settings"),
        ("POST", "/jobs/kick", {}, 400, "key-missing"),
        ("POST", "/jobs/kick", {"uri": "none"}, 404, "does-not-exist"),
        ("POST", "/jobs/requeue", {"uri": "none"}, 404, "does-not-exist"),
        ("POST", "/jobs/drop", {"uri": "none"}, 404, "does-not-exist"),
        ("POST", "/jobs/domains/d", None, 405, "method-not-allowed"),
        ("GET", "/jobs/recurring/none", None, 404, "does-not-exist"),
        ("GET", "/stats?domain=none", None, 404, "does-not-exist"),
        ("POST", "/stats", None, 405, "method-not-allowed"),
        ("PUT", "/jobs/domains/d", {"paused": 7}, 400, "bad-settings"),
        ("PUT", "/jobs/recurring/r", {"schedule": "* *", "uri": "http://h/"}, 400, "bad-settings"),
    ],
)
def test_problems(method, path, body, status, code):
    """Wrong requests get their status and code as a problem document."""

    async def use(api):
        where, _, query = path.partition("?")
        return await api(method, where, body, query)

    got, problem = with_api(None, use)
    assert (status, code) == (got, problem["code"])
    assert problem["status"] == status


@pytest.mark.parametrize("name", ["ttl", "expires"])
@pytest.mark.parametrize("text", ["", "nan", "inf", "true", "1_0", "%205", "1e400", "-1", "x"])
def test_seconds_in_a_query(name, text):
    """Only what is a number of seconds is one; a value that is stored anyway would last for ever."""

    async def use(api):
        status, problem = await api("PUT", "/keys/k", b"v", f"{name}={text}", "text/plain")
        assert (status, problem["code"] in ("bad-request", "overflow")) == (400, True)
        assert (await api("GET", "/keys/k"))[0] == 404
        assert (await api("PUT", "/keys/k", b"v", f"{name}=9e9&persist=0", "text/plain"))[0] == 200

    with_api(None, use)


def test_empty_texts_in_a_query_are_none(tmp_path):
    """As forms send them: only numbers and flags have to say something."""

    async def use(api):
        await api("PUT", "/keys/color", {"value": "blue"})
        await api("POST", "/jobs", {"uri": "http://h/1"})
        query = "prefix=&from=&to=&regex=&cursor="
        assert "color" in [
            row["key"] for row in (await api("GET", "/keys", query=query))[1]["keys"]
        ]
        assert len((await api("GET", "/jobs", query="domain=&state="))[1]["jobs"]) == 1

    with_api(tmp_path, use)


def test_only_jobs_are_done(tmp_path):
    """A key that is not a job's is refused: done, extended or given back, a value stays as it was."""

    async def use(api):
        await api("PUT", "/keys/color", {"value": "blue"})
        for action in ("done", "extend", "give-back", "fail"):
            assert (await api("POST", f"/jobs/{action}", {"key": "color"}))[0] == 404
        assert (await api("GET", "/keys/color"))[1]["value"] == "blue"

    with_api(tmp_path, use)


def test_settings_of_a_domain(tmp_path):
    """One domain in any case; GET shows all settings and makes none, PATCH keeps what it does not name."""

    async def use(api):
        _, settings = await api("GET", "/jobs/domains/h")
        assert settings["max_attempts"] == 25
        await api("PUT", "/jobs/domains/H", {"max_attempts": 3})
        _, settings = await api("PATCH", "/jobs/domains/h", {"paused": True})
        assert (settings["paused"], settings["max_attempts"]) == (True, 3)
        _, listed = await api("GET", "/keys", query="prefix=virta:")
        assert [row["key"] for row in listed["keys"]] == ["virta:domain:h"]
        _, settings = await api("PUT", "/jobs/domains/h", {"paused": True})
        assert settings["max_attempts"] == 25
        assert (await api("DELETE", "/jobs/domains/H"))[1] == {"deleted": True}

    with_api(tmp_path, use)


def test_bytes_survive(tmp_path):
    """Keys, uris and domains that are not UTF-8 come back as base64, and are understood so."""

    async def use(api):
        uri = {"base64": base64.b64encode(b"http://h\xff/1").decode()}
        _, pushed = await api("POST", "/jobs", {"uri": uri})
        assert pushed["uri"] == uri
        _, found = await api("POST", "/jobs/next", {})
        (job,) = found["jobs"]
        assert job["uri"] == uri
        assert (await api("POST", "/jobs/done", {"key": job["key"]}))[1] == {"result": True}
        _, put = await api("PUT", "/keys/%FF%00", b"x", content_type="Text/Plain")
        assert put["key"] == {"base64": "/wA="}
        _, page = await api("GET", "/keys", query="prefix=%FF")
        assert page["keys"] == [{"key": {"base64": "/wA="}, "value": "x"}]
        await api("PUT", "/keys/a", {"value": 1}, content_type="Application/JSON; charset=utf-8")
        assert (await api("GET", "/keys/a"))[1]["value"] == 1

    with_api(tmp_path, use)


def test_methods(tmp_path):
    """A method that is not there is answered with those that are; HEAD is GET."""

    async def use(api):
        answer = await api.handler.handle("PATCH", "/journal/keys/k")
        assert (answer.status, answer.allow) == (405, "GET, PUT, DELETE")
        assert (await api.handler.handle("GET", "/journal/jobs/done")).allow == "POST"
        await api("PUT", "/keys/k", {"value": 1})
        assert (await api.handler.handle("HEAD", "/journal/keys/k")).status == 200

    with_api(tmp_path, use)


def test_a_number_that_add_makes_is_kept(tmp_path):
    """One that was not there is on disk like any value; one that is in memory stays there."""

    async def use(api):
        assert (await api("POST", "/keys/new/add", {"amount": 5}))[1]["result"] == 5
        assert (await api("GET", "/keys/new"))[1]["persist"] is True
        assert (await api("POST", "/keys/f/add", {"amount": 1.5}))[1]["result"] == 1.5
        await api("PUT", "/keys/here", {"value": 1, "persist": False})
        await api("POST", "/keys/here/add", {})
        assert (await api("GET", "/keys/here"))[1]["persist"] is False

    with_api(tmp_path, use)


def test_pages_of_another_size(tmp_path):
    """A page after a cursor has as many keys as it is asked for."""

    async def use(api):
        for number in range(6):
            await api("PUT", f"/keys/k{number}", {"value": number})
        _, page = await api("GET", "/keys", query="count=1")
        _, page = await api("GET", "/keys", query=f"count=3&cursor={page['cursor']}")
        return [row["value"] for row in page["keys"]]

    assert with_api(tmp_path, use) == [1, 2, 3]


def test_a_client_that_disconnects_gets_no_job(tmp_path):
    """A client that left is handed nothing: the job stays for one that is there."""

    async def use(api):
        left = asyncio.Event()
        body = json.dumps({"domain": "h", "wait": 20}).encode()
        waiting = asyncio.create_task(
            api.handler.handle("POST", "/journal/jobs/next", "", body, disconnected=left)
        )
        engine = api.node.engine
        await eventually(lambda: engine.handled)  # nothing was there, so it waits
        left.set()
        await asyncio.wait_for(waiting, 5)
        await api("POST", "/jobs", {"uri": "http://h/1"})
        # One that leaves at that very time gives it back.
        await api.handler.handle("POST", "/journal/jobs/next", "", body, disconnected=left)
        return (await api("GET", "/jobs/show", query="uri=http://h/1"))[1]

    job = with_api(tmp_path, use)
    assert (job["state"], job["attempts"]) == ("ready", 0)


@given(
    st.sampled_from(["GET", "PUT", "POST", "DELETE"]),
    st.text(max_size=30),
    st.text(max_size=30),
    st.binary(max_size=60),
)
def test_any_request_is_answered(method, path, query, body):
    """Whatever is asked, the answer is a response."""

    async def run():
        node = CommitLoop()
        await node.start()
        handler = Handler(node)
        for base in ("", "/journal/", "/journal/keys/", "/journal/jobs/", "/journal/jobs/domains/"):
            response = await handler.handle(method, base + path, query, body)
            assert 200 <= response.status < 600
        await node.stop()

    asyncio.run(run())


def test_an_add_by_http_is_one_step(tmp_path):
    """A DELETE that comes before the sum is on disk is after it, and leaves no number that is not kept."""

    async def run():
        async with slow_node(tmp_path) as (running, gate):
            handler = Handler(running)
            path = "/journal/keys/n"
            adding = asyncio.create_task(
                handler.handle("POST", f"{path}/add", "", b'{"amount": 5}')
            )
            await eventually(gate.reached.is_set)
            deleting = asyncio.create_task(handler.handle("DELETE", path))
            await turns()
            gate.open.set()
            sums = json.loads((await adding).body)["result"]
            deleted = json.loads((await deleting).body)["deleted"]
            return sums, deleted, running.engine.store.live(b"n", 0)

    assert asyncio.run(run()) == (5, True, None)
