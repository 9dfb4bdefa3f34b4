"""The journal's commands as methods, written once for the blocking and the awaited callers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

from virta.journal.protocol import commands

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from virta.journal.protocol.commands import Command

P = ParamSpec("P")
T = TypeVar("T")


class _Method(Generic[P, T]):
    """What `_method` returns, for type checkers: the result itself, or an awaitable of it."""

    @overload
    def __get__(self, caller: BlockingMethods, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, caller: AwaitedMethods, owner: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, caller: Any, owner: type) -> Any:
        raise NotImplementedError


def _method(build: Callable[P, Command[T]]) -> _Method[P, T]:
    @functools.wraps(build)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self.call(build(*args, **kwargs))

    method.__name__ = build.__name__.rstrip("_")
    return cast("_Method[P, T]", method)


class _Methods:
    set = _method(commands.set_)
    get = _method(commands.get)
    details = _method(commands.details)
    scan = _method(commands.scan)
    search = _method(commands.search)
    more = _method(commands.more)
    delete = _method(commands.delete)
    add = _method(commands.add)
    invert = _method(commands.invert)
    truncate = _method(commands.truncate)
    lock = _method(commands.lock)
    unlock = _method(commands.unlock)
    rename = _method(commands.rename)
    link = _method(commands.link)
    unlink = _method(commands.unlink)
    ping = _method(commands.ping)
    push = _method(commands.push)
    next = _method(commands.next_)
    done = _method(commands.done)
    extend = _method(commands.extend)
    give_back = _method(commands.give_back)
    fail = _method(commands.fail)
    admin = _method(commands.admin)


class BlockingMethods(_Methods):
    """Each command as a method that returns its result; a subclass carries the commands out."""

    def call(self, command: Command[T]) -> T:
        """Carry out one command; return its result or raise RefusedError."""
        raise NotImplementedError


class AwaitedMethods(_Methods):
    """Each command as a method that returns an awaitable of its result."""

    async def call(self, command: Command[T]) -> T:
        """Carry out one command; return its result or raise RefusedError."""
        raise NotImplementedError
