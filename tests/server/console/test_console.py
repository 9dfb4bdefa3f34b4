"""The console in a real Chromium, against a real server."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import sqlite3
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
from console_tab import CHROMIUM, Tab, reconnect
from server_harness import Server, event

from virta import console
from waiting import wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
SCREENS = {
    "overview": "#/",
    "channels": "#/channels",
    "channel": "#/channels/orders?filter=status%3Dpaid%26total%3D%3E120&from=earliest",
    "views": "#/views",
    "view": "#/views/orders?filter=status%3Dpaid",
    "queries": "#/queries",
    "why": "#/why?channel=orders&offset=0&filter=status%3Dpaid",
    "jobs": "#/jobs",
    "webhooks": "#/webhooks",
    "pipelines": "#/pipelines",
    "health": "#/health",
}
READY = {
    "overview": "#channels tr a",
    "channels": "#channels tr a",
    "channel": "#rows tr.pick.yes",
    "views": ".pipe-list a",
    "view": "#rows tr[data-row]",
    "queries": "#queries tr",
    "why": ".answer.yes",
    "jobs": "#jobs tr.pick",
    "webhooks": "#webhooks tr",
    "pipelines": "#pipeline .empty",
    "health": "#checks li",
}


def order(n, status="paid", total=69.08):
    return event(f"o{n}", {"status": status, "total": total, "id": f"o-{n}"}, subject=f"o-{n}")


def post(server, path, body):
    answer = server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    assert answer.status < 300, answer
    return answer.json


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with events, jobs in each state, and one dead job."""
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as server:
        server.publish("orders", order(0), order(1, total=200), order(2, "refunded"))
        server.publish("clicks", event("c1", {"page": "/"}))
        post(server, "/journal/jobs", {"uri": "mail://shop/dies", "payload": '{"order": 1}'})
        for reason in ("ConnectionError: refused", "TimeoutError"):
            (job,) = post(server, "/journal/jobs/next", {})["jobs"]
            post(server, "/journal/jobs/fail", {"key": job["key"], "reason": reason, "delay": 0})
        (job,) = post(server, "/journal/jobs/next", {})["jobs"]
        trace = "Traceback (most recent call last):\n  worker.py:61\n"
        body = {"key": job["key"], "reason": "ValueError: no", "traceback": trace, "dead": True}
        post(server, "/journal/jobs/fail", body)
        post(server, "/journal/jobs", {"uri": "crawl://partner/later", "delay": 3600})
        yield server


@pytest.fixture
def tab(browser, served):
    made = Tab(browser, served)
    yield made
    made.page.close()


def accessibility(page):
    """Return what axe finds against WCAG 2.2 AA and its best practices."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (1440, "dark"), (375, "light"), (375, "dark")])  # fmt: skip
def test_every_screen_is_clean(browser, served, width, theme):
    """No console error, nothing for axe, nothing wider than the window, one heading."""
    tab = Tab(browser, served, width=width, theme=theme)
    problems = {}
    for name, hash_ in SCREENS.items():
        page = tab.open(hash_)
        page.wait_for_selector(READY[name])
        page.wait_for_selector("#status.good")
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        headings = page.locator("h1").count()
        found = accessibility(page)
        if wide > 0 or headings != 1 or found:
            problems[name] = (wide, headings, found)
    tab.page.close()

    assert problems == {}
    assert tab.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("waiting_for", ["every answer", "/filters/count"])
def test_screens_are_accessible_before_the_answers(browser, served, waiting_for):
    """axe finds nothing while requests are unanswered: on a busy machine people see this, too."""
    problems = {}
    for name, hash_ in SCREENS.items():
        tab = Tab(browser, served, width=375)
        unanswered = []

        def hold(route, request, unanswered=unanswered):
            if request.resource_type in {"fetch", "xhr", "eventsource"} and (
                waiting_for == "every answer" or waiting_for in request.url
            ):
                unanswered.append(route)
            else:
                route.continue_()

        tab.page.route("**/*", hold)
        page = tab.open(hash_)
        page.wait_for_selector("h1" if waiting_for == "every answer" else READY[name])
        found = accessibility(page)
        if found:
            problems[name] = found
        if name == "why":
            assert unanswered
        for route in unanswered:
            route.abort()
        page.close()

    assert problems == {}


@pytest.mark.slow
def test_no_table_scrolls_sideways_on_the_narrowest_phone(browser, served):
    """At 320 px columns go, and what is left fits."""
    tab = Tab(browser, served, width=320)
    wide = {}
    for name, hash_ in SCREENS.items():
        page = tab.open(hash_)
        page.wait_for_selector(READY[name])
        wide[name] = page.evaluate(
            "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth).filter(n => n > 1)"
        )
    tab.page.close()

    assert wide == {name: [] for name in SCREENS}


@pytest.mark.slow
def test_long_names_of_channels_push_no_column_out(browser, tmp_path):
    """At the widths of laptops, too: the name is cut with an ellipsis, the columns after it are seen."""
    with Server(tmp_path, "--durability", "none") as server:
        server.publish("warehouse.public.orders-of-the-present-quarter", order(0))
        wide = {}
        for width in (1024, 1280, 1440):
            page = Tab(browser, server, width=width).open("#/")
            page.wait_for_selector("#channels tr a")
            wide[width] = page.evaluate(
                "document.querySelector('#channels').closest('.scroll').scrollWidth"
                " - document.querySelector('#channels').closest('.scroll').clientWidth"
            )
            page.close()

    assert wide == dict.fromkeys(wide, 0)


def test_the_page_is_strict(served):
    """The policy allows the server's own files only, and no file is missing from the package."""
    index = served.request("GET", "/")

    assert index.status == 200
    assert "default-src 'none'; script-src 'self'" in index.headers["content-security-policy"]
    assert "unsafe" not in index.headers["content-security-policy"]
    assert served.request("GET", "/console/js/main.js").headers["content-type"].startswith("text/javascript")  # fmt: skip
    etag = {"If-None-Match": index.headers["etag"]}
    assert served.request("GET", "/", headers=etag).status == 304
    for path in ("/console/none.js", "/console/../errors.py", "/console/__init__.py"):
        assert served.request("GET", path).status == 404


def test_files_are_small_and_known(served):
    """All files together fit the budget as they are sent, and vendored ones are those that are listed."""
    vendor = Path(console.__file__).parent / "vendor"
    listed = dict(re.findall(r"^\| `(\S+)` .*`([0-9a-f]{64})` \|$", (vendor / "VENDORED.md").read_text(), re.MULTILINE))  # fmt: skip
    sizes = {}
    for path in Path(console.__file__).parent.rglob("*.*"):
        name = path.relative_to(Path(console.__file__).parent).as_posix()
        if path.suffix in {".js", ".css", ".html", ".svg"}:
            answer = served.request("GET", f"/console/{name}", headers={"Accept-Encoding": "gzip"})
            assert gzip.decompress(answer.body) == path.read_bytes()
            sizes[name] = len(answer.body)

    assert sum(sizes.values()) < 150_000
    assert {
        name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in listed
    } == listed
    assert {path.name for path in vendor.iterdir()} - set(listed) == {
        "VENDORED.md",
        "uplot-LICENSE.txt",
    }


def test_a_chart_is_read_by_keys_and_as_a_table(tab, served):
    """Arrow keys show single values; the table has the same ones, newest first."""
    page = tab.open("#/")
    page.wait_for_selector("#c-flow canvas")
    page.focus("#c-flow .plot")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#c-flow .tip:not([hidden])")
    assert "events in" in page.inner_text("#c-flow .tip")

    page.locator(".as-table").first.click()
    page.wait_for_selector("#c-flow .values tbody tr")
    heads = page.locator("#c-flow .values th").all_inner_texts()
    times = page.locator("#c-flow .values td:first-child").all_inner_texts()
    found = accessibility(page)
    page.locator(".as-table").first.click()
    page.wait_for_selector("#c-flow canvas", state="visible")

    assert heads == ["Time", "events in", "deliveries out"]
    assert times == sorted(times, reverse=True)
    assert found == []
    assert tab.errors == []


def test_an_axis_has_room_for_its_values(tab):
    """The longest value of a chart's axis is not cut."""
    page = tab.open("#/")
    page.wait_for_selector(".tile .figure")
    room, wide = page.evaluate(
        """async () => {
            const { axisSize } = await import("/console/js/chart.js");
            const pen = document.createElement("canvas").getContext("2d");
            pen.font = "11px system-ui, sans-serif";
            return [axisSize(["0 ms", "12,000,000 ms"]), pen.measureText("12,000,000 ms").width];
        }"""
    )

    assert room >= wide + 8
    assert tab.errors == []


def test_no_time_below_a_chart_is_cut(tab):
    """A time whose label would reach beyond the right edge is left out; the others are drawn whole."""
    page = tab.open("#/")
    page.wait_for_selector(".tile .figure")
    drawn, width = page.evaluate(
        """async () => {
            const { Chart } = await import("/console/js/chart.js");
            const drawn = [], draw = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, ...rest) {
                const half = this.measureText(text).width / 2;
                if (this.textAlign === "center") drawn.push([text, x + half]);
                draw.call(this, text, x, ...rest);
            };
            const box = document.querySelector("main").appendChild(document.createElement("div"));
            box.style.width = "700px"; box.style.height = "216px";
            const chart = new Chart(box, { series: [{ name: "n", color: "accent" }], label: "n" });
            // The last point is on a full minute, where a label belongs.
            chart.set([Array.from({ length: 300 }, (_, i) => i)], Date.UTC(2026, 0, 1, 12, 0, 0));
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            CanvasRenderingContext2D.prototype.fillText = draw;
            return [drawn, box.querySelector("canvas").width];
        }"""
    )

    assert len(drawn) >= 3
    assert [text for text, right in drawn if right > width] == []
    assert tab.errors == []


def test_a_long_standing_filter_does_not_widen_the_panel(browser, served):
    """On a phone it is cut with an ellipsis; the number of filters beside the title stays in view."""
    served.publish("narrow", order(1))
    query = "&".join(f"field-with-a-long-name-{n}=!{n}" for n in range(6))
    stream = HTTPConnection("127.0.0.1", served.port)
    stream.request("GET", f"/channels/narrow?{query}")
    stream.getresponse()
    page = Tab(browser, served, width=375).open("#/channels/narrow?from=earliest")
    page.locator("#rows tr.pick").first.click()
    page.wait_for_selector("#standing code")
    beyond = page.evaluate(
        "[...document.querySelectorAll('#panel-body .section')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    stream.close()
    page.close()

    assert beyond == 0


def test_numbers_move_when_events_flow(tab, served):
    """The tiles and the table of the overview change by themselves."""
    page = tab.open("#/")
    page.wait_for_selector("#status.good")
    numbers = iter(range(1000, 10_000))
    for _ in range(40):
        served.publish("moving", *[event(f"m{next(numbers)}") for _ in range(25)])
        figure = page.locator(".tile .figure span").first.text_content().strip()
        if figure not in {"0", ""}:
            break
        page.wait_for_timeout(100)

    assert figure not in {"0", ""}
    page.wait_for_selector("#channels a:text-is('moving')")
    assert tab.errors == []


def test_the_filter_finds_and_explains(tab, served):
    """A match is marked; an event that does not match says which condition failed."""
    page = tab.open(SCREENS["channel"])
    page.wait_for_selector("#rows tr.pick >> nth=2")
    page.wait_for_selector("#rows tr.yes")

    assert page.locator("#rows tr.yes").count() == 1
    assert "o-1" in page.locator("#rows tr.yes").text_content()
    page.locator("#rows tr.no", has_text="o-0").click()
    page.wait_for_selector(".answer.no")
    assert "data.total is 69.08" in page.locator(".answer").text_content()
    assert page.locator(".why-tree .fails > .node code").all_text_contents() == ["data.total"]
    assert page.locator("#json .hit").all_text_contents() == ['"status"', '"total"']


def test_a_wrong_filter_is_refused_while_the_old_one_runs(tab, served):
    """The message stands under the field, and the marks stay as they were."""
    page = tab.open(SCREENS["channel"])
    page.wait_for_selector("#rows tr.yes")
    page.fill("#filter", "status=paid&total=>1&total=>2&a=<3&b=<4")
    page.wait_for_selector(".field.bad")

    assert page.get_attribute("#filter", "aria-invalid") == "true"
    assert "The filter before it still runs" in page.locator("#verdict").text_content()
    assert page.locator("#rows tr.yes").count() == 1
    page.fill("#filter", "status=refunded")
    page.wait_for_selector("#rows tr.yes:has-text('o-2')")
    assert page.locator("#rows tr.yes").count() == 1
    assert "filter=status%3Drefunded" in page.url


@pytest.mark.parametrize(
    ("dialect", "filter_"),
    [
        ("cesql", "subject = 'o-1'"),
        ("koncorde", '{"range": {"total": {"gt": 120}}}'),
        ("cloudevents", '{"exact": {"subject": "o-1"}}'),
    ],
)
def test_each_dialect_finds_the_event(tab, served, dialect, filter_):
    """The switch keeps a draft for each dialect, and the server decides."""
    page = tab.open("#/channels/orders?from=earliest")
    page.wait_for_selector("#rows tr.pick >> nth=2")
    page.click(f'#dialect button[value="{dialect}"]')
    page.fill("#filter", filter_)
    page.wait_for_selector("#rows tr.no")

    assert page.locator("#rows tr.yes").count() == 1
    assert "o-1" in page.locator("#rows tr.yes").text_content()


def test_pause_and_resume_lose_nothing(tab, served):
    """Events that are published while the tail is paused arrive when it goes on, each once."""
    page = tab.open("#/channels/paused")
    page.wait_for_selector("#tailstate.good")
    served.publish("paused", event("before"))
    page.wait_for_selector("#rows tr.pick")
    page.click("#pause")
    page.wait_for_selector("#tailstate:text-is('Paused')")
    served.publish("paused", *[event(f"p{n}", {"n": n}) for n in range(30)])
    page.wait_for_selector("#held:has-text('30 new, none is lost')")
    assert page.locator("#rows tr.pick").count() == 1
    page.click("#pause")
    page.wait_for_selector("#rows tr.pick >> nth=30")

    shown = page.locator("#rows tr.pick td:last-child").all_text_contents()
    assert [row.replace("n ", "").strip() for row in shown[:30]] == [str(n) for n in reversed(range(30))]  # fmt: skip
    assert len(shown) == 31


def test_publish_from_the_page(tab, served):
    """The form has the last event as its template; the new event appears in the tail."""
    page = tab.open("#/channels/written?from=earliest")
    page.wait_for_selector("#tailstate.good")
    page.click("#publish")
    page.fill("dialog textarea", json.dumps(event("w1", {"by": "hand"})))
    page.click("dialog button[type=submit]")
    page.wait_for_selector("#rows tr.pick:has-text('hand')")
    page.click("#rows tr.pick")
    page.click("#republish")
    page.wait_for_selector("#rows tr.pick >> nth=1")

    assert served.request("GET", "/channels?limit=1000").json["channels"]
    assert tab.errors == []


def test_a_live_view_changes_in_place(tab, served):
    """Rows that match are there; one enters, one changes, one leaves, and the feed says why."""
    served.publish("viewed", order(1, total=10), order(2, "open"))
    page = tab.open("#/views/viewed?filter=status%3Dpaid")
    page.wait_for_selector("#rows tr[data-row='o-1']")
    assert page.locator("#rows tr[data-row]").count() == 1
    served.publish("viewed", order("2b", total=20) | {"subject": "o-2"})
    page.wait_for_selector("#rows tr[data-row='o-2']")
    served.publish("viewed", order("1b", total=11) | {"subject": "o-1"})
    page.wait_for_selector("#rows tr[data-row='o-1'] td:has-text('11')")
    served.publish("viewed", order("1c", "refunded") | {"subject": "o-1"})
    page.wait_for_selector("#rows tr[data-row='o-1']", state="detached")

    kinds = page.locator("#feed .kind").all_text_contents()
    assert kinds == ["leave", "update", "enter"]
    assert "total was 10, is 11" in page.locator("#feed").text_content()
    assert page.locator("#rows tr[data-row]").count() == 1
    assert tab.errors == []


def test_a_live_view_shows_more_rows(tab, served):
    """First 25 by key, then more; a row that leaves makes room for the next in the order."""
    rows = [order(f"{n:03}", total=n) | {"id": f"m{n}"} for n in random.sample(range(120), 120)]
    served.publish("long", *rows)
    page = tab.open("#/views/long?filter=status%3Dpaid")
    shown = page.locator("#rows tr[data-row]")
    page.wait_for_selector("footer:has-text('25 of 120 rows shown')")

    def keys():
        return shown.evaluate_all("rows => rows.map(r => r.dataset.row)")

    wanted = [f"o-{n:03}" for n in range(120)]
    assert keys() == wanted[:25]
    served.publish("long", order("003", "refunded") | {"id": "gone"})
    page.wait_for_selector("#rows tr[data-row='o-003']", state="detached")
    wanted.remove("o-003")
    wait_until(lambda: keys() == wanted[:25])
    page.click("#more-rows")
    assert keys() == wanted[:75]
    page.click("#more-rows")
    assert keys() == wanted
    page.wait_for_selector("#more-rows", state="hidden")
    assert tab.errors == []


def test_a_live_view_counts_its_rows_by_a_field(tab, served):
    """By the first field that repeats its values, or the chosen one, which is in the address; counts follow."""

    def placed(number, country, total, status="paid"):
        made = order(number, status, total=total)
        return made | {"id": f"{number}-{status}", "data": made["data"] | {"country": country}}

    rows = [placed(1, "DE", 10), placed(2, "FI", 20), placed(3, "DE", 12345678901234567890)]
    served.publish("grouped", *rows)
    page = tab.open("#/views/grouped?filter=status%3Dpaid&group=country")
    page.wait_for_selector("#groups .hbar:has-text('DE')")
    assert page.locator("#h-group").text_content() == "Rows by country"
    assert page.locator("#groups .hbar").all_text_contents() == ["DE2", "FI1"]
    assert page.locator("#rows td.num:has-text('12345678901234567890')").count() == 1

    served.publish("grouped", placed(1, "DE", 10, "refunded"))
    wait_until(lambda: page.locator("#groups").text_content() == "DE1FI1")
    page.get_by_label("Field").select_option("total")
    page.get_by_label("Field").blur()
    page.wait_for_selector("#h-group:has-text('Rows by total')")
    assert page.url.endswith("group=total")
    assert tab.errors == []


def test_large_numbers_are_shown_as_they_were_sent(tab, served):
    """A whole number beyond 2^53 keeps its digits."""
    body = (
        '{"specversion":"1.0","type":"t","source":"/s","id":"1","data":{"n":12345678901234567890}}'
    )
    kind = {"Content-Type": "application/cloudevents+json"}
    assert served.request("POST", "/channels/exact", body, kind).status == 202
    page = tab.open("#/channels/exact?from=earliest")
    page.click("#rows tr.pick")
    page.wait_for_selector("#json .n")

    assert page.locator("#json .n").all_text_contents() == ["12345678901234567890"]


def test_kick_requeue_and_pause(tab, served):
    """A delayed job is kicked, a dead one is requeued with its traceback shown, a domain is paused."""
    page = tab.open("#/jobs")
    page.wait_for_selector("#jobs tr:has-text('mail://shop/dies')")
    page.wait_for_selector(".trace:has-text('worker.py:61')")
    assert "ValueError" in page.locator(".trace b").text_content()
    attempts = page.locator(".attempts li").all_text_contents()
    assert [text.split()[1][0] for text in attempts] == ["3", "2", "1"]
    assert "ConnectionError: refused" in attempts[2]
    page.click("#requeue")
    page.wait_for_selector("#jobs .empty:has-text('No dead jobs')")
    page.click("[data-state=delayed]")
    page.wait_for_selector("#jobs tr:has-text('crawl://partner/later')")
    page.click("#kick")
    page.wait_for_selector("#jobs .empty:has-text('No delayed jobs')")
    # Headings, then the figures of one domain: the job that was kicked is ready, and none was done.
    heads = page.locator("table:has(#domains) th").all_text_contents()
    cells = page.locator("#domains tr:has-text('partner') td")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#domains tr')].some((tr) => tr.cells[0].textContent === 'partner' && tr.cells[7].textContent !== 'none')"
    )
    row = dict(zip(heads, cells.all_text_contents(), strict=True))
    assert (row["Ready"], row["Done/s"]) == ("1", "0")
    page.click("button[aria-label='Pause shop']")
    page.wait_for_selector("button[aria-label='Resume shop']")

    shown = served.request("GET", "/journal/jobs/show?uri=crawl://partner/later").json
    assert shown["state"] == "ready"
    assert served.request("GET", "/journal/jobs/domains/shop").json["paused"] is True
    assert tab.errors == []


def test_keys_and_palette(tab):
    """`g c` goes to the channels, Ctrl K finds a channel, `?` lists the keys, `t` changes the theme."""
    page = tab.open("#/")
    page.wait_for_selector("#status.good")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/#/channels")
    page.wait_for_selector("h1:has-text('Channels')")  # opening a screen closes dialogs
    page.keyboard.press("Control+k")
    page.wait_for_selector("#places li:has-text('orders')")
    page.keyboard.type("orders")
    page.keyboard.press("Enter")
    page.wait_for_url("**/#/channels/orders**")
    page.wait_for_selector("#rows")
    page.keyboard.press("?")
    page.wait_for_selector("dialog .keys")
    page.keyboard.press("Escape")
    page.keyboard.press("t")

    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.slow
def test_a_lost_connection_is_shown_and_healed(browser, tmp_path):
    """Pill and line while the server is away; the tail resumes without a gap when it is back."""
    server = Server(tmp_path / "data", "--durability", "none")
    tab = Tab(browser, server)
    page = tab.open("#/channels/lost")
    page.wait_for_selector("#tailstate.good")
    server.publish("lost", event("1"))
    page.wait_for_selector("#rows tr.pick")
    server.stop()
    page.wait_for_selector("#status:has-text('Reconnecting')")
    page.wait_for_selector(".lost:has-text('No connection since')")
    assert page.locator("#publish").is_disabled()
    with Server(tmp_path / "data", "--durability", "none", "--server-port", server.port) as again:
        again.publish("lost", event("2"))
        reconnect(page)
        page.wait_for_selector("#rows tr.pick >> nth=1", timeout=40_000)
        page.wait_for_selector("#status.good")
        assert page.locator(".lost").count() == 0
        page.close()


def test_a_token_with_few_rights_sees_what_it_may(browser, tmp_path):
    """Its channel works, the rest says what the token may not do; nothing of other channels is shown."""

    def create(*rights):
        command = [
            sys.executable,
            "-m",
            "virta",
            "token",
            "create",
            "--data-dir",
            tmp_path / "data",
        ]
        return subprocess.run([*command, *rights], capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip

    full, limited = create("--all"), create("--read", "orders")
    with Server(tmp_path / "data", "--durability", "none", "--require-token") as server:
        kind = {"Content-Type": "application/cloudevents+json", "Authorization": f"Bearer {full}"}
        for channel in ("orders", "secrets"):
            answer = server.request("POST", f"/channels/{channel}", json.dumps(order(1)), kind)
            assert answer.status == 202
        tab = Tab(browser, server)
        page = tab.open("#/channels/orders?from=earliest&filter=status%3Dpaid")
        page.fill("dialog.token input", limited)
        page.click("dialog.token button[type=submit]")
        page.wait_for_selector("#rows tr.yes")
        page.wait_for_selector("#status:has-text('Limited')")
        page.evaluate("location.hash = '/channels/secrets?from=earliest'")
        page.wait_for_selector("#rows .empty:has-text('may not')")
        page.evaluate("location.hash = '/channels'")
        page.wait_for_selector("#channels a:text-is('orders')")
        names = page.locator("#channels a").all_text_contents()
        page.close()

    assert names == ["orders"]


def test_a_server_with_tokens_asks_for_one(browser, tmp_path):
    """The files need no token, the API does; after logging in everything works, streams too."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-many-characters\n")
    tokens.chmod(0o600)
    with Server(tmp_path / "data", "--durability", "none", "--token-file", tokens) as server:
        tab = Tab(browser, server)
        page = tab.open("#/")
        page.wait_for_selector("dialog.token")
        page.fill("dialog.token input", "a-token-of-many-characters")
        page.click("dialog.token button[type=submit]")
        page.wait_for_selector("#status.good")
        page.wait_for_selector(".tile .figure")
        assert page.locator("dialog.token").count() == 0
        page.close()


def test_health_shows_captured_databases(browser, tmp_path):
    """How far each capture is behind, and what its slot makes the database keep."""
    db = sqlite3.connect(tmp_path / "shop.db")
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    db.commit()
    db.close()
    with Server(tmp_path / "data", "--cdc", f"sqlite:{tmp_path / 'shop.db'}") as server:
        tab = Tab(browser, server)
        page = tab.open("#/health")
        row = page.locator("#captures tr", has_text="running")
        row.wait_for()
        assert row.locator("td").first.inner_text() == "shop sqlite"
        assert "0 changes" in row.inner_text()
        assert tab.errors == []
        tab.page.close()
