"""The registry: filters, subscriptions and cursors that survive a restart."""

from __future__ import annotations

import stat

import pytest

import virta
from virta.errors import FilterError, HubError, LogWriteError
from virta.hub import registry as module
from virta.hub.registry import Registry


@pytest.fixture
def log():
    """The log of `registry`, before it is opened and after."""
    return RegistryLog()


class RegistryLog:
    def __init__(self):
        self.log = None
        self.fails = False

    def open(self, path, **options):
        self.log = virta.open(path, **options)
        return self

    def append(self, *arguments, **options):
        if self.fails:
            raise LogWriteError("disk full")
        return self.log.append(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.log, name)


@pytest.fixture
def registry(tmp_path, log):
    made = Registry(tmp_path / "registry", open_log=log.open)
    yield made
    made.close()


def again(registry, tmp_path):
    """The same registry after a restart."""
    registry.close()
    return Registry(tmp_path / "registry")


def test_filters_survive_a_restart(registry, tmp_path):
    """Ids stay what clients were given, in every dialect."""
    sources = [({"equals": {"a": 1}}, "koncorde"), ("a=1", "query-string"), ("type = 'x'", "cesql")]
    ids = {registry.register("i", "c", source, dialect)["id"] for source, dialect in sources}
    removed = registry.register("i", "c", "b=2", "query-string")["id"]
    registry.remove(removed)

    restarted = again(registry, tmp_path)

    assert set(restarted.ids("i", "c")) == ids
    assert restarted.get(removed) is None
    assert len(restarted) == 3
    restarted.close()


def test_a_filter_is_registered_once(registry):
    """The second time the answer says so, and nothing is written."""
    first = registry.register("i", "c", {"equals": {"a": 1}}, "koncorde")
    second = registry.register("i", "c", {"equals": {"a": 1}}, "koncorde")

    assert first["diff"] is not False
    assert second == {"id": first["id"], "diff": False}


def test_dialects_see_the_event_or_its_document(registry):
    """Koncorde sees the data of an event, the others the event."""
    document = registry.register("i", "c", {"equals": {"a": 1}}, "koncorde")["id"]
    event = registry.register("i", "c", "type = 't' AND a = 1", "cesql")["id"]
    happened = {"id": "1", "source": "s", "type": "t", "a": 1, "data": {"a": 1}}

    assert set(registry.test_event("i", "c", happened)) == {document, event}
    assert registry.test_event("i", "c", happened | {"data": {}}) == [event]
    assert registry.test_document("i", "c", {"a": 1}, None) == [document]


def test_a_numeric_id_is_a_text(registry):
    """An event whose id is a number is tested like the same event published."""
    id_ = registry.register("i", "c", {"ids": {"values": ["7"]}}, "koncorde")["id"]

    assert registry.test_event("i", "c", {"id": 7, "source": "s", "data": {}}) == [id_]


@pytest.mark.parametrize(("index", "collection"), [("a/b", "c"), ("a", "b/c")])
def test_names_have_no_slash(registry, index, collection):
    """The channel of a collection is `index/collection`: a slash would be ambiguous."""
    with pytest.raises(FilterError, match="slash"):
        registry.register(index, collection, "a=1", "query-string")


def test_the_number_of_filters_is_limited(registry, monkeypatch):
    """The next one is refused with a code, and an existing one stays."""
    monkeypatch.setattr(module, "REGISTERED_MAX", 1)
    id_ = registry.register("i", "c", "a=1", "query-string")["id"]
    with pytest.raises(HubError) as refused:
        registry.register("i", "c", "a=2", "query-string")

    assert refused.value.code == "too-many-filters"
    assert registry.ids("i", "c") == [id_]


def test_a_filter_that_cannot_be_stored_is_not_registered(registry, log):
    """The answer is the log's error, and the filter matches nothing."""
    log.fails = True
    with pytest.raises(LogWriteError):
        registry.register("i", "c", {"equals": {"a": 1}}, "koncorde")
    log.fails = False

    assert registry.test_document("i", "c", {"a": 1}, None) == []
    assert registry.register("i", "c", {"equals": {"a": 1}}, "koncorde")["diff"] is not False


def test_a_stored_filter_that_no_longer_parses_is_left_out(registry, log, tmp_path, caplog):
    """The server starts without it and says so."""
    bad = b'{"index":"i","collection":"c","dialect":"koncorde","filter":{"nonsense":1}}'
    log.append(module.FILTERS_TOPIC, "x" * 64, bad)
    good = registry.register("i", "c", "a=1", "query-string")["id"]

    restarted = again(registry, tmp_path)

    assert restarted.ids("i", "c") == [good]
    assert "filter_unreadable" in caplog.text
    restarted.close()


def test_subscriptions_and_cursors_survive_a_restart(registry, tmp_path):
    """The last value counts; a dropped subscription takes its cursor with it."""
    for id_ in ("one", "two"):
        registry.keep_subscription(id_, {"sink": f"http://{id_}"})
        registry.keep_cursor(id_, 1)
    registry.keep_cursor("one", 7)
    registry.keep_subscription("one", {"sink": "http://changed"})
    registry.drop_subscription("two")

    restarted = again(registry, tmp_path)

    assert restarted.subscriptions == {"one": {"sink": "http://changed"}}
    assert restarted.cursors == {"one": 7}
    restarted.close()


def test_only_the_owner_can_read_it(registry, tmp_path):
    """Subscriptions contain secrets: also files of an older, more open version are closed."""
    directory = tmp_path / "registry"
    registry.keep_subscription("one", {"sink": "http://secret"})
    registry.close()
    directory.chmod(0o755)
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(0o644)

    Registry(directory).close()

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir() if file.is_file()}
    assert modes == {0o600}


def test_removing_what_is_not_there(registry, log):
    """It returns False and writes nothing."""
    before = log.next_offset

    assert registry.remove("0" * 64) is False
    assert log.next_offset == before
