"""A daemon on a real port inside the test's event loop, a clock to set, and a bare connection."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from virta.journal.daemon import JournalServer
from virta.journal.messages import Function, Request
from virta.journal.node import Node
from virta.journal.wire import ReplyParser, encode_request

REPLY_WAIT_S = 10


class Clock:
    """Time as the test says."""

    def __init__(self, now=0):
        self.now = now

    def __call__(self):
        return self.now


class Wire:
    """One connection that sends requests and hears everything."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer
        self.parser = ReplyParser()
        self.heard = []
        self.identifier = 0

    @classmethod
    async def open(cls, address):
        return cls(*await asyncio.open_connection(*address))

    def send(self, request):
        if not request.identifier:
            self.identifier = self.identifier % 0xFFFF + 1
            request.identifier = self.identifier
        self.writer.write(encode_request(request))
        return request.identifier

    async def hear(self, wanted=lambda _: True):
        """The next message that is wanted; others are kept."""
        while True:
            for message in self.heard:
                if wanted(message):
                    self.heard.remove(message)
                    return message
            data = await asyncio.wait_for(self.reader.read(65536), REPLY_WAIT_S)
            if not data:
                raise EOFError
            self.heard += self.parser.feed(data)

    async def ask(self, request):
        identifier = self.send(request)
        return await self.hear(lambda reply: reply.identifier == identifier)

    async def close(self):
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def daemon(directory=None, **options):
    """A started server; `options` are the node's."""
    server = JournalServer(port=0, node=Node(directory, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(server):
    wire = await Wire.open(server.address)
    try:
        yield wire
    finally:
        await wire.close()


def nop():
    return Request(Function.NOP)
