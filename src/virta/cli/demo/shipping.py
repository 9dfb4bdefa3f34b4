"""Jobs of the demo: each paid order is a job, and a worker ships it after a while; some attempts fail."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from typing import TYPE_CHECKING, Final

from virta.journal import Client, Worker

if TYPE_CHECKING:
    from virta.cli.demo.shop import Shop
    from virta.journal.protocol.commands import Lease

DOMAIN: Final = "shipping.shop"
FAILURES: Final = 0.08
PACK_S_MAX: Final = 2.0
RETRY_S: Final = 2.0


class Shipping:
    """Pushes jobs and works on them in a thread."""

    def __init__(self, port: int) -> None:
        # Failed attempts are part of the demo; the console shows them.
        logging.getLogger("virta.journal.worker").addHandler(logging.NullHandler())
        self._client = Client("127.0.0.1", port)
        self._worker = Worker("127.0.0.1", port, concurrency=4, grace=0, retry_delay=RETRY_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-shipping")

    def push(self, order: int) -> None:
        """Ask for an order to be shipped; asking twice ships it once."""
        self._client.push(f"http://{DOMAIN}/orders/{order}")

    def start(self, shop: Shop) -> None:
        chance = random.Random()  # noqa: S311 - a demo

        @self._worker.handle(DOMAIN)
        async def ship(job: Lease) -> None:
            await asyncio.sleep(chance.uniform(0.1, PACK_S_MAX))
            if chance.random() < FAILURES:
                raise RuntimeError("the box is too small: a larger one is on its way")
            order = int(bytes(job.uri).rpartition(b"/")[2])
            await asyncio.to_thread(shop.ship, order)

        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Give back what is being worked on, and end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._client.close()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await self._worker.work(self._stop)

        asyncio.run(main())
