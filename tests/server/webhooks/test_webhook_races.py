"""Webhooks in the moments between two others: consent at the deadline, changes at once, a disk that refuses."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import structlog
from server_harness import DEADLINE_S, event
from test_webhooks import hooks, server, subscribe

from virta.errors import LogError
from virta.hub.delivery import Delivery
from virta.server.access.scan_budget import ScanBudget
from virta.server.webhooks.client import Verdict, WebhookClient
from virta.server.webhooks.consent import Consent, new_callback_key
from virta.server.webhooks.delivery import Webhook
from virta.server.webhooks.owner import Owner
from virta.server.webhooks.subscriptions import Webhooks
from waiting import turns

__all__ = ["hooks", "server"]  # fixtures

DESCRIPTION = {"sink": "http://127.0.0.1:1/", "config": {"channel": "c"}}


class Registry:
    """Records what is to be kept, or refuses."""

    def __init__(self):
        self.calls = []
        self.refuses = False

    def _note(self, what):
        if self.refuses:
            raise LogError("no space left", code="log_disk_full")
        self.calls.append(what)

    def keep_cursor(self, id_, offset):
        self._note(("cursor", id_, offset))

    def keep_subscription(self, id_, record):
        self._note(("keep", id_, record["config"]["channel"]))

    def drop_subscription(self, id_):
        self._note(("drop", id_))


async def forever(_):
    await asyncio.Event().wait()


@pytest.fixture
def service():
    """What webhooks need of a service; its log has nothing to deliver."""
    config = SimpleNamespace(
        webhook_timeout_ms=1000, webhook_origin="virta", webhook_callback_url=None,
        webhook_consent_ms=60_000, webhook_allow=("127.0.0.1/32",),
    )  # fmt: skip
    made = SimpleNamespace(
        config=config, registry=Registry(), hub=SimpleNamespace(position=0, wait_past=forever),
        logger=structlog.get_logger("test"), auth=SimpleNamespace(credentials=None), tracing=None,
        scans=ScanBudget(1),
    )  # fmt: skip
    made.webhooks = Webhooks(made)
    yield made
    made.webhooks.outbound.stop()


def running(service, consent=None, id_="one"):
    hook = Webhook(service, id_, DESCRIPTION, 0, consent or Consent())
    service.webhooks._run(hook)
    return hook


def test_consent_at_the_deadline_counts(service):
    """A callback that comes when the time is up, and learns that the sink is active, is not forgotten."""

    async def scenario():
        hook = Webhook(service, "one", DESCRIPTION, 0, Consent(expires=time.time() - 1))
        waiting = asyncio.ensure_future(hook._wait_for_consent())
        await turns(2)  # it waits, its time is up, and the timeout is not yet delivered
        hook.grant(None)
        await waiting
        return hook.state

    assert asyncio.run(scenario()) == "active"


def test_a_subscription_deleted_while_its_consent_is_kept_stays_deleted(service):
    """What is written last is what was decided last, however long the disk takes for each."""
    registry, keep = service.registry, service.registry.keep_subscription
    begun, dropped, drop = threading.Event(), threading.Event(), registry.drop_subscription

    def slow(id_, record):
        begun.set()
        dropped.wait(0.3)  # longer than the other one takes, if it does not wait for this one
        keep(id_, record)

    def noticed(id_):
        drop(id_)
        dropped.set()

    registry.keep_subscription, registry.drop_subscription = slow, noticed

    async def scenario():
        key, key_hash = new_callback_key()
        running(service, Consent(key_hash=key_hash, expires=time.time() + 60))
        confirming = asyncio.ensure_future(service.webhooks.confirm("one", key, None))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        assert await service.webhooks.unsubscribe("one")
        await confirming
        await service.webhooks.stop()

    asyncio.run(scenario())

    assert registry.calls == [("keep", "one", "c"), ("drop", "one")]


def test_a_replacement_that_cannot_be_kept_leaves_the_old_one(service, monkeypatch):
    """The owner gets an error, and what was subscribed goes on."""

    async def agreed(self, hook, callback):
        hook.grant(None)

    monkeypatch.setattr(Webhooks, "_handshake", agreed)

    async def scenario():
        old = running(service)
        await turns()
        service.registry.refuses = True
        with pytest.raises(LogError):
            await service.webhooks.replace("one", DESCRIPTION | {"source": "s"}, None, Owner())
        service.registry.refuses = False
        assert service.webhooks.hooks == {"one": old}
        await turns()
        assert not old.task.done()
        await service.webhooks.stop()

    asyncio.run(scenario())


def test_a_full_disk_does_not_keep_the_rest_from_stopping(service):
    """A place that cannot be kept costs repeats, not the end of everything behind it."""

    async def scenario():
        tasks = [running(service, id_=id_).task for id_ in ("one", "two")]
        await turns()
        service.registry.refuses = True
        await service.webhooks.stop()
        return [task.done() for task in tasks]

    assert asyncio.run(scenario()) == [True, True]


def test_a_dropped_subscription_waits_for_no_answer(service):
    """Deleting one cuts its request off and closes the connection."""
    begun = threading.Event()

    class Slow:
        closed = False

        async def deliver(self, *_):
            begun.set()
            await asyncio.Event().wait()

        async def close(self):
            Slow.closed = True

    async def scenario():
        hook = Webhook(service, "one", DESCRIPTION, 0, Consent())
        hook._client = Slow()

        async def send(_):
            await hook._send(Delivery("c", "s", "1", b"{}", 0, 0))

        hook._deliver_new = send
        task = asyncio.ensure_future(hook.run(None))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        hook.deleted = True
        task.cancel()
        await asyncio.wait_for(asyncio.wait([task]), DEADLINE_S)
        assert hook._request.cancelled()
        await asyncio.wrap_future(service.webhooks.outbound.submit(asyncio.sleep(0)))
        assert Slow.closed

    asyncio.run(scenario())


def test_an_idle_connection_that_the_sink_closed_costs_no_attempt(service):
    """It is found out by using it; the event goes out on a new one at once."""
    closed, heard = threading.Event(), []

    def answer(listening):
        for _ in range(2):
            connection, _ = listening.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            closed.set()

    outbound = service.webhooks.outbound
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        answering = threading.Thread(target=answer, args=(listening,))
        answering.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        sink = WebhookClient(url, {}, DEADLINE_S, "virta", "POST", service.webhooks.resolver)
        first = outbound.submit(sink.deliver(b"")).result(DEADLINE_S)
        assert closed.wait(DEADLINE_S)
        second = outbound.submit(sink.deliver(b"")).result(DEADLINE_S)
        outbound.submit(sink.close()).result(DEADLINE_S)
        if second.verdict is not Verdict.DELIVERED:
            socket.create_connection(listening.getsockname()).close()
        answering.join()

    assert [first.verdict, second.verdict] == [Verdict.DELIVERED] * 2
    assert len(heard) == 2


def test_a_subscription_is_there_while_it_is_replaced(server, hooks):
    """A request for it while the old sink is still answering finds it, and can delete it."""
    old, new = hooks(), hooks()
    path = f"/subscriptions/{subscribe(server, old, 'there').json['id']}"
    asked = threading.Event()
    new.when_asked = lambda _: asked.set()
    old.answering.clear()
    server.publish("there", event("1"))
    assert old.ids(1) == ["1"]
    body = json.dumps({"sink": new.url, "config": {"channel": "there"}})
    answers = []
    putting = threading.Thread(target=lambda: answers.append(server.request("PUT", path, body)))
    putting.start()
    assert asked.wait(DEADLINE_S)

    seen = {server.request("GET", path).status for _ in range(20)}
    deleted = server.request("DELETE", path).status
    old.answering.set()
    putting.join()

    assert (seen, deleted) == ({200}, 204)
    assert answers[0].status == 404
    assert server.request("GET", path).status == 404
