"""A connection that is lost, refused or ended by the server, as the console shows it, in a real Chromium."""

from __future__ import annotations

import signal

import pytest
from console_tab import CHROMIUM, Tab, reconnect
from server_harness import Server, event

import virta
from virta.access import TokenStore
from virta.access.grants import make_grant
from waiting import wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
ALL = (make_grant(["read", "publish", "admin", "filters"], "**"),)
NO_SYNC = ("--durability", "none", "--journal-port", "none")
JSON = {"Content-Type": "application/cloudevents+json"}


def rows(page):
    """The tail from top to bottom: the number of each event, and the notes between them."""
    return page.locator("#rows tr").evaluate_all(
        "rows => rows.map(r => r.className.includes('note') ? r.textContent : r.querySelector('td:last-child').textContent.replace('n ', '').trim())"
    )


@pytest.mark.slow
def test_what_came_meanwhile_is_counted_in_its_place(browser, tmp_path):
    """The tail resumes by offset; between what was there and what came meanwhile it says how many."""
    server = Server(tmp_path / "data", *NO_SYNC)
    page = Tab(browser, server).open("#/channels/back?from=earliest")
    page.wait_for_selector("#tailstate.good")
    server.publish("back", event("0", {"n": 0}))
    page.wait_for_selector("#rows tr.pick")
    server.stop(signal.SIGKILL)
    page.wait_for_selector(".lost:has-text('No connection since')")
    with virta.open(tmp_path / "data" / "log") as log:  # another writer, meanwhile
        log.append("other", "", b"{}")
    again = Server(tmp_path / "data", *NO_SYNC, "--server-port", server.port)
    again.publish("back", *[event(str(n), {"n": n}) for n in range(1, 8)])
    reconnect(page)
    page.wait_for_selector("#rows tr.note:has-text('Back. 7 events came meanwhile.')", timeout=40_000)  # fmt: skip
    again.publish("back", event("8", {"n": 8}))
    page.wait_for_selector("#rows tr.pick:has-text('n 8')")
    found = rows(page)
    page.fill("#filter", "n=>3")  # draws all rows again
    page.wait_for_selector("#rows tr.yes")
    after = rows(page)
    page.close()
    again.stop()

    assert found == ["8", "7", "6", "5", "4", "3", "2", "1", "Back. 7 events came meanwhile.", "0"]
    assert after == found


@pytest.mark.slow
def test_what_the_log_no_longer_has_is_a_line_in_its_place(browser, tmp_path):
    """Retention has removed what the tail would have got next: the offsets stand between the events."""
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    virta.open(data / "log", segment_bytes=65_536).close()
    server = Server(data, *NO_SYNC)
    tab = Tab(browser, server)
    page = tab.open("#/channels/cut?from=earliest")
    page.wait_for_selector("#tailstate.good")
    server.publish("cut", event("0", {"n": 0}))
    page.wait_for_selector("#rows tr.pick")
    server.stop(signal.SIGKILL)
    page.wait_for_selector(".lost")
    with virta.open(data / "log") as log:
        for _ in range(40):
            log.append("other", "", b"x" * 10_000)
        log.retain(max_bytes=65_536)
        first = log.first_offset
    assert first > 1
    again = Server(data, *NO_SYNC, "--server-port", server.port)
    again.publish("cut", event("1", {"n": 1}))
    reconnect(page)
    page.wait_for_selector("#rows tr.pick:has-text('n 1')", timeout=40_000)
    found = rows(page)
    page.close()
    again.stop()

    assert found[0] == "1"
    assert found[-1] == "0"
    assert f"Not in the log any more: offsets 1 to {first - 1}" in found[1:-1]


def test_a_server_that_stops_says_so(browser, tmp_path):
    """The last frame of the figures is `disconnect`: the line says why there is no connection."""
    server = Server(tmp_path / "data", *NO_SYNC)
    page = Tab(browser, server).open("#/")
    page.wait_for_selector("#status.good")
    server.stop()
    page.wait_for_selector(
        ".lost:has-text('The server is stopping. Reconnecting when it is back.')"
    )
    figures = page.locator(".tile .figure").first
    assert page.evaluate("document.body.dataset.lost") == ""
    assert figures.evaluate("e => getComputedStyle(e).color") == page.locator(".tile .label").first.evaluate("e => getComputedStyle(e).color")  # fmt: skip
    page.close()


def test_nothing_typed_is_lost(browser, tmp_path):
    """Drafts of filters, one for each dialect, and of events are there after the page was loaded again."""
    with Server(tmp_path / "data", *NO_SYNC) as server:
        page = Tab(browser, server).open("#/channels/drafts")
        page.wait_for_selector("#tailstate.good")
        page.fill("#filter", "status=pai&&")
        page.click('#dialect button[value="cesql"]')
        page.fill("#filter", "type = 'or")
        page.click("#publish")
        page.fill("dialog textarea", '{"half": ')
        page.reload()
        page.wait_for_selector("#filter")
        kept = [page.input_value("#filter")]
        page.click('#dialect button[value="cesql"]')
        kept.append(page.input_value("#filter"))
        page.click("#publish")
        kept.append(page.input_value("dialog textarea"))
        page.close()

    assert kept == ["status=pai&&", "type = 'or", '{"half": ']


def test_a_token_that_ends_is_asked_for_again(browser, tmp_path):
    """Before the login no figure is shown as if it were known; after a revocation the page stays and asks."""
    store = TokenStore(tmp_path / "data")
    first, record = store.create(ALL)
    with Server(tmp_path / "data", *NO_SYNC, "--require-token") as server:
        tab = Tab(browser, server)
        page = tab.open("#/")
        page.wait_for_selector("dialog.token")
        shown = page.locator(".tile .figure").all_inner_texts()
        assert "virta token create --all" in page.inner_text("dialog.token")
        page.fill("dialog.token input", first)
        page.click("dialog.token button[type=submit]")
        page.wait_for_selector("#status.good")
        wait_until(lambda: page.locator(".tile .figure").first.inner_text().strip())
        store.revoke(record.prefix)
        page.wait_for_selector("dialog.token:has-text('does not know this token')")
        second, _ = store.create(ALL)
        page.fill("dialog.token input", second)
        page.click("dialog.token button[type=submit]")
        page.wait_for_selector("#status.good")
        assert page.locator("dialog.token").count() == 0
        page.close()

    assert [text.strip() for text in shown] == [""] * 5
