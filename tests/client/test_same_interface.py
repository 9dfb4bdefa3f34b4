"""The two clients have one shape: the same names, arguments, results and errors."""

from __future__ import annotations

import inspect
import re

import pytest

from virta import client
from virta.client import aio, sync

PAIRS = [
    (client.Client, client.AsyncClient),
    (client.Subscription, client.AsyncSubscription),
    (client.LiveRows, client.AsyncLiveRows),
    (client.StreamSubscription, client.AsyncStreamSubscription),
    (sync.Filters, aio.AsyncFilters),
]
# How the protocols of blocking and asynchronous code are spelled.
ASYNC_NAMES = {
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
    "__iter__": "__aiter__",
    "__next__": "__anext__",
}
# Methods that send nothing themselves are not awaited.
AT_ONCE = {"subscribe", "live", "subscribe_streams", "events", "__iter__"}


def methods(kind):
    """The methods that users call, by name."""
    protocol = {*ASYNC_NAMES, *ASYNC_NAMES.values()}
    return {
        name: value
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") or name in protocol
    }


def blocking(annotation):
    """An annotation as the blocking client would write it."""
    return re.sub(r"\bAsync(?=[A-Z])", "", str(annotation)).replace("ssl_module", "ssl")


def described(function):
    signature = inspect.signature(function)
    parameters = [
        (p.name, p.kind, p.default, blocking(p.annotation)) for p in signature.parameters.values()
    ]
    return parameters, blocking(signature.return_annotation)


@pytest.mark.parametrize(("plain", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_one_shape(plain, awaited):
    """Every method of one is a method of the other, with the same signature."""
    ours, theirs = methods(plain), methods(awaited)
    theirs.pop("aclose", None)  # what `contextlib.aclosing` calls

    assert {ASYNC_NAMES.get(name, name) for name in ours} == set(theirs)
    for name, function in ours.items():
        other = theirs[ASYNC_NAMES.get(name, name)]
        assert described(function) == described(other), name
        assert inspect.iscoroutinefunction(other) == (name not in AT_ONCE), name


def test_clients_are_made_alike():
    """The same address, token, timeout and trust make either."""
    assert described(client.Client)[0] == described(client.AsyncClient)[0]


@pytest.mark.parametrize(("plain", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_attributes(plain, awaited):
    """What is a property of one is a property of the other."""

    def properties(kind):
        return {name for name, _ in inspect.getmembers(kind, lambda v: isinstance(v, property))}

    assert properties(plain) == properties(awaited)


def test_public_names():
    """The package shows what its methods return."""
    for name in client.__all__:
        assert getattr(client, name).__module__.startswith("virta.client")
