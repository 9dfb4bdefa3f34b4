"""The tail's address and commands, charts, and the pages beside them, in a real Chromium."""

from __future__ import annotations

import json
import subprocess
import time
from http.client import HTTPConnection
from urllib.parse import quote

import pytest
from console_tab import CHROMIUM, Tab
from server_harness import Server, event

from virta.clock import time_text
from waiting import wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
# What the console copies; a headless page may not read the clipboard.
CLIPBOARD = "if (navigator.clipboard) navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); };"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as server:
        yield server


@pytest.fixture
def tab(browser, served):
    made = Tab(browser, served)
    made.page.add_init_script(CLIPBOARD)
    yield made
    made.page.close()


def ids(page):
    return [json.loads(row)["n"] for row in page.locator("#rows tr.pick").evaluate_all(
        "rows => rows.map(r => JSON.stringify({n: r.querySelector('td:last-child').textContent.trim()}))"
    )]  # fmt: skip


def test_the_command_that_is_copied_gives_the_same_events(tab, served):
    """With the filter and the start of the tail."""
    served.publish("copied", *[event(f"c{n}", {"n": n, "even": n % 2 == 0}) for n in range(6)])
    page = tab.open("#/channels/copied?from=earliest&filter=even%3Dtrue")
    page.wait_for_selector("#rows tr.pick >> nth=5")
    page.click("#curl")
    page.wait_for_function("window.copied")
    command = page.evaluate("window.copied")
    got = subprocess.run(
        ["sh", "-c", f"timeout 3 {command}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    ).stdout

    found = [json.loads(line[5:]) for line in got.splitlines() if line.startswith("data:")]
    assert [one["data"]["n"] for one in found if "data" in one] == [0, 2, 4]
    assert page.locator("#rows tr.yes").count() == 3
    assert tab.errors == []


def test_a_link_opens_the_same_event(browser, tab, served):
    """Channel, filter, start and the selected offset are in the address."""
    served.publish("linked", *[event(f"l{n}", {"n": n}) for n in range(5)])
    page = tab.open("#/channels/linked?from=earliest&filter=n%3D%3E1")
    page.wait_for_selector("#rows tr.yes >> nth=2")
    page.locator("#rows tr.pick", has_text="n 3").click()
    page.wait_for_selector("#p-title:has-text('Offset')")
    title, address = page.inner_text("#p-title"), page.url

    other = Tab(browser, served)
    other.page.goto(address)
    other.page.wait_for_selector(f"#p-title:text-is('{title}')")
    other.page.wait_for_selector(".answer.yes")
    assert other.page.locator("#filter").input_value() == "n=>1"
    other.page.close()


@pytest.mark.parametrize("way", ["offset", "time"])
def test_the_tail_starts_where_it_is_told(tab, served, way):
    """At an offset or a time; nothing before it is shown."""
    channel = f"from-{way}"
    served.publish(channel, event(f"{way}-old", {"n": 1}))
    next_us = (time.time_ns() // 1_000_000 + 1) * 1000  # a page knows milliseconds
    wait_until(lambda: time.time_ns() // 1000 >= next_us, "the next millisecond", pause=0.0005)
    first = served.publish(channel, event(f"{way}-new", {"n": 2}))
    start = time_text(next_us)
    if way == "offset":
        start = first.headers["virta-offset"]
    page = tab.open(f"#/channels/{channel}?from={quote(start)}")
    page.wait_for_selector("#rows tr.pick")
    page.wait_for_timeout(300)

    assert ids(page) == ["n 2"]
    assert page.locator("#start").input_value() == way
    assert tab.errors == []


def test_selected_events_are_published_again(tab, served):
    """`x` selects the row; each gets a new id and keeps the rest."""
    served.publish("again", *[event(f"a{n}", {"n": n}) for n in range(3)])
    page = tab.open("#/channels/again?from=earliest")
    page.wait_for_selector("#rows tr.pick >> nth=2")
    for text in ("n 0", "n 2"):
        page.locator("#rows tr.pick", has_text=text).first.click()
        page.keyboard.press("x")
    assert page.inner_text("#republish") == "Publish 2 again"
    page.click("#republish")
    page.wait_for_selector("#rows tr.pick >> nth=4")

    assert ids(page)[:2] == ["n 2", "n 0"]
    assert ids(page).count("n 1") == 1
    assert tab.errors == []


def test_keys_of_the_tail(tab, served):
    """`j` and `k` move, `w` shows why, Space pauses, `/` goes to the filter, `y` copies the command."""
    served.publish("keyed", *[event(f"k{n}", {"n": n}) for n in range(3)])
    page = tab.open("#/channels/keyed?from=earliest")
    page.wait_for_selector("#rows tr.pick >> nth=2")
    offsets = page.locator("#rows tr.pick").evaluate_all("rows => rows.map(r => r.dataset.offset)")
    chosen = []
    for key in "jjk":
        page.keyboard.press(key)
        page.wait_for_selector("#rows tr[aria-selected=true]")
        chosen.append(page.locator("#rows tr[aria-selected=true]").get_attribute("data-offset"))
    page.keyboard.press("y")
    page.wait_for_function("window.copied")
    page.keyboard.press(" ")
    page.wait_for_selector("#tailstate:text-is('Paused')")
    page.keyboard.press("/")

    assert chosen == [offsets[0], offsets[1], offsets[0]]
    assert page.evaluate("document.activeElement.id") == "filter"
    assert page.evaluate("window.copied").startswith("curl -N ")


def test_why_names_the_standing_filters_and_the_last_day(tab, served):
    """Who else would get the event, and how often the filter matched."""
    served.publish("asked", *[event(f"w{n}", {"status": "paid", "n": n}) for n in range(4)])
    channels = served.request("GET", "/channels?limit=1000").json["channels"]
    first = next(c["firstOffset"] for c in channels if c["name"] == "asked")
    streams = [HTTPConnection("127.0.0.1", served.port) for _ in range(2)]
    for stream, query in zip(streams, ("status=paid", "status=open"), strict=True):
        stream.request("GET", f"/channels/asked?{query}")
        stream.getresponse()
    page = tab.open(f"#/why?channel=asked&offset={first}&filter=n%3D%3E1")
    page.wait_for_selector(".answer.no")
    page.wait_for_selector(".lastday:has-text('2 of 4 events')")

    page.wait_for_selector("#standing code:text-is('status=paid')")
    for stream in streams:
        stream.close()

    assert "data.n is 0" in page.inner_text(".answer")
    assert page.locator("#standing code").count() == 1
    assert page.locator("#why .fails code").first.inner_text() == "data.n"
    assert tab.errors == []


def test_a_selected_time_shows_its_events(tab, served):
    """Dragging over a chart offers the events of the busiest channel from there on."""
    page = tab.open("#/")
    page.wait_for_selector("#channels tr[data-name]")
    page.wait_for_selector("#c-flow canvas")
    box = page.locator("#c-flow .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40, steps=6)
    page.mouse.up()
    page.locator("#c-flow .pick-time").click()
    page.wait_for_url("**/#/channels/*from=20*")
    assert tab.errors == []


SCALES = {
    0.01: [0, 0.1],
    0.3: [0, 0.1, 0.2, 0.3],
    1: [0, 0.2, 0.4, 0.6, 0.8, 1],
    7: [0, 2, 4, 6, 8],
    77: [0, 20, 40, 60, 80],
    100: [0, 20, 40, 60, 80, 100],
    101: [0, 50, 100, 150],
    44_000: [0, 10_000, 20_000, 30_000, 40_000, 50_000],
}


def test_an_axis_ends_above_its_values(tab):
    """It starts at 0, has at most five equal steps, and a line at its top, which no value passes."""
    page = tab.open("#/")
    page.wait_for_selector(".tile .figure")
    found = page.evaluate(
        """async (values) => {
            const { scale } = await import("/console/js/chart.js");
            return values.map((v) => [scale(v), scale(scale(v).at(-1))]);
        }""",
        list(SCALES),
    )

    assert [first for first, _ in found] == list(SCALES.values())
    assert all(first == again for first, again in found)  # an axis as long as its values stays


def test_a_chart_draws_a_line_at_its_top(tab):
    """The highest line of the grid is where the drawing area begins, and it has its value beside it."""
    page = tab.open("#/")
    page.wait_for_selector(".tile .figure")
    top, values = page.evaluate(
        """async () => {
            const { Chart } = await import("/console/js/chart.js");
            const box = document.querySelector("main").appendChild(document.createElement("div"));
            box.style.width = "700px"; box.style.height = "216px";
            const chart = new Chart(box, { series: [{ name: "n", color: "accent" }], label: "n" });
            chart.set([[3, 77, 12]], Date.UTC(2026, 0, 1, 12, 0, 0));
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            const axis = chart.u.axes[1];
            return [chart.u.valToPos(axis._splits.at(-1), "y"), axis._values];
        }"""
    )

    assert top == pytest.approx(0, abs=0.01)
    assert values == ["0", "20", "40", "60", "80"]
    assert tab.errors == []
