"""The chart of a field below the live tail, in a real Chromium."""

from __future__ import annotations

import pytest
from console_tab import CHROMIUM, Tab
from server_harness import Server, event

from waiting import wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def window(number, minute, city, revenue):
    start, end = f"2026-01-02T10:{minute:02}:00.000Z", f"2026-01-02T10:{minute + 1:02}:00.000Z"
    data = {"start": start, "end": end, "city": city, "orders": 1, "revenue": revenue}
    return event(f"w{number}", data)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as server:
        yield server


def values(page):
    """The table of the chart: a row for each time, the newest first."""
    rows = page.locator("#values .values tbody tr")
    return [row.locator("td").all_text_contents()[1:] for row in rows.all()]


@pytest.mark.slow
def test_windows_are_charted_and_follow(browser, served):
    """Results of windows have a line for each group; the newest result of a window counts."""
    served.publish(
        "revenue",
        window(1, 0, "Oslo", 10),
        window(2, 0, "Turku", 20.5),
        window(3, 1, "Oslo", 30),
        window(4, 0, "Oslo", 12),
    )
    tab = Tab(browser, served)
    page = tab.open("#/channels/revenue?from=earliest")
    page.wait_for_selector("#values h2:has-text('revenue by city')")
    assert page.locator("#values .uplot canvas").count() == 1
    page.click("#values .as-table")
    wait_until(lambda: values(page) == [["30", "none"], ["12", "20.5"]])

    served.publish("revenue", window(5, 1, "Turku", -4))
    wait_until(lambda: values(page) == [["30", "-4"], ["12", "20.5"]])
    page.click("#values .as-table")
    assert page.locator("#values .legend").text_content() == "Oslo 30Turku -4"

    page.get_by_label("Field to chart").select_option("orders")
    page.wait_for_selector("#values h2:has-text('orders by city')")
    assert page.url.endswith("chart=orders")
    page.get_by_label("Field to chart").select_option("No chart")
    page.wait_for_selector("#values h2:has-text('Values over time')")
    assert not page.locator("#values .uplot").is_visible()
    assert tab.errors == []
    page.close()


@pytest.mark.slow
def test_other_numbers_are_charted_when_chosen(browser, served):
    """At the time of their event, also from the address; without numbers there is nothing to choose."""
    served.publish("sizes", *[event(f"s{n}", {"n": n, "of": f"k{n}"}) for n in range(8)])
    served.publish("words", event("w", {"word": "x"}))
    tab = Tab(browser, served)
    page = tab.open("#/channels/sizes?from=earliest")
    page.wait_for_selector("#values h2:has-text('Values over time')")
    page = tab.open("#/channels/sizes?from=earliest&chart=n")
    page.wait_for_selector("#values h2:has-text('n by of, the 5 largest of 8')")
    legend = page.locator("#values .legend").text_content()
    assert legend == "k3 3k4 4k5 5k6 6k7 7"
    page = tab.open("#/channels/words?from=earliest")
    page.wait_for_selector("#rows tr.pick")
    assert not page.locator("#values").is_visible()
    assert tab.errors == []
    page.close()
