"""The journal's commands as methods, for whoever can carry one out and wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from virta.journal.protocol import commands

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.protocol.commands import Command

P = ParamSpec("P")
T = TypeVar("T")


def _sync(
    build: Callable[P, Command[T]],
) -> Callable[Concatenate[Calls, P], T]:
    def method(self: Calls, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(build(*args, **kwargs))

    method.__doc__ = build.__doc__
    return method


class Calls:
    """The commands as methods that block; subclasses say how one is carried out."""

    def call(self, command: Command[T]) -> T:
        """Carry out one command; its result, or RefusedError."""
        raise NotImplementedError

    set = _sync(commands.set_)
    get = _sync(commands.get)
    details = _sync(commands.details)
    scan = _sync(commands.scan)
    search = _sync(commands.search)
    more = _sync(commands.more)
    delete = _sync(commands.delete)
    add = _sync(commands.add)
    invert = _sync(commands.invert)
    truncate = _sync(commands.truncate)
    lock = _sync(commands.lock)
    unlock = _sync(commands.unlock)
    rename = _sync(commands.rename)
    link = _sync(commands.link)
    unlink = _sync(commands.unlink)
    ping = _sync(commands.ping)
    push = _sync(commands.push)
    next = _sync(commands.next_)
    done = _sync(commands.done)
    extend = _sync(commands.extend)
    give_back = _sync(commands.give_back)
    fail = _sync(commands.fail)
    admin = _sync(commands.admin)
