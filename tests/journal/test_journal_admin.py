"""Administration: settings are values, lists and figures."""

from __future__ import annotations

import pytest
from journal_support import CONSOLE_US, Console

from virta.journal.protocol import commands
from virta.journal.protocol.messages import RefusedError

T0 = 1_700_000_000_000_000


def test_settings_are_values():
    """Settings can be set, read, listed and deleted like any value, and are obeyed at once."""
    console = Console()
    console.call(commands.push("http://h/1"))
    console.call(commands.set_("virta:domain:h", '{"paused": true}'))

    assert console.call(commands.next_()).jobs == []
    assert console.call(commands.scan("virta:", "virta;")).items[0][0] == b"virta:domain:h"
    console.call(commands.delete("virta:domain:h"))
    assert len(console.call(commands.next_()).jobs) == 1
    assert console("configure", domain="H", settings={"max_attempts": 2})["max_attempts"] == 2
    assert console("configure", domain="h", settings={"paused": True})["max_attempts"] == 2
    # Daemons from before the setting refuse it; what is at its default need not be stored.
    assert "retry_delay_max" not in console.call(commands.get("virta:domain:h"))
    assert console("configure", domain="h", settings={"retry_delay_max": 9})["retry_delay_max"] == 9
    assert console("configure", domain="h")["retry_delay_max"] == 9
    for bad in ({"deadline": -1}, {"retry_delay": 1e9}, {"mode": "x"}, {"what": 1}):
        with pytest.raises(RefusedError, match="bad-settings"):
            console("configure", domain="h", settings=bad)
    for command in (
        commands.add("virta:n", 1),
        commands.rename("virta:domain:h", "x"),
        commands.link("virta:domain:h", "x"),
        commands.set_("virta:domain:h", "{}", expires=T0 / 1e6 + 5),
    ):
        with pytest.raises(RefusedError):
            console.call(command)


def test_lists_and_figures():
    """Jobs are listed by domain and state, shown one by one, and counted."""
    console = Console()
    for i in range(5):
        console.call(commands.push(f"http://h{i % 2}/{i}", start=T0 / 1e6 + (i > 2)))
    console.call(commands.next_("h0"))

    assert len(console("list")["jobs"]) == 5
    assert len(console("list", domain="h0")["jobs"]) == 3
    assert [j["uri"] for j in console("list", state="working")["jobs"]] == ["http://h0/0"]
    assert len(console("list", limit=2, offset=4)["jobs"]) == 1
    assert console("show", uri="http://h1/1")["state"] == "ready"
    stats = console("stats")
    assert stats["jobs"] == {"delayed": 2, "ready": 2, "held": 0, "working": 1, "dead": 0}
    assert stats["domains_count"] == 2
    for bad in (("show", {"uri": "none"}), ("kick", {"uri": "none"}), ("drop", {"uri": "none"})):
        with pytest.raises(RefusedError, match="does-not-exist"):
            console(bad[0], **bad[1])
    with pytest.raises(RefusedError, match="bad-settings"):
        console("list", state="odd")


def test_figures_of_domains():
    """A domain tells how long its oldest job has been ready and how many were done, also after it was empty."""
    console = Console()
    for at, priority in ((1, 5), (3, 0)):  # the older one is not the next to be reserved
        console.clock.now = CONSOLE_US + at * 1_000_000
        console.call(commands.push(f"http://a/{at}", priority=priority))
    console.clock.now += 4_000_000
    console.call(commands.push("http://b/1"))

    def figures():
        found = {place["domain"]: place for place in console("stats")["domains"]}
        return {name: (one["oldest_ready_seconds"], one["done"]) for name, one in found.items()}

    assert figures() == {"a": (6.0, 0), "b": (0.0, 0)}
    assert len(console.call(commands.next_("a", count=2, remove=True)).jobs) == 2
    (job,) = console.call(commands.next_("b")).jobs
    assert figures() == {"b": (0.0, 0)}
    console.call(commands.done(job.key))
    for uri in ("http://a/4", "http://b/2"):
        console.call(commands.push(uri, delay=60))
    assert figures() == {"a": (0.0, 2), "b": (0.0, 1)}
