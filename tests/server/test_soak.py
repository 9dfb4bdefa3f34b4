"""Many idle consumers and a steady stream of events: nothing lost, memory flat, latency told."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from server_harness import BATCH, Consumer, shut

CONSUMERS = 500
EVENTS_PER_S = 1000
SECONDS = float(os.environ.get("VIRTA_SOAK_S", "15"))
# Allocators keep some of what they were given; a leak of one event a delivery would be far more.
GROWTH_KIB_MAX = 16 * 1024


def memory_kib(pid):
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


@pytest.mark.slow
def test_soak(start):
    """Each event has one hearer among all consumers; every one is heard, and the server does not grow."""
    flags = ["--durability", "none", "--idempotency-expiration-ms", 2000, "--journal-port", "none"]
    server = start(*flags)

    async def scenario():
        latencies = []
        heard = 0

        async def listen(number):
            nonlocal heard
            consumer = await Consumer.open(server.port, f"/channels/soak?key={number}")
            await consumer.connected()
            ready.release()
            while (made := await consumer.frame()).event != "disconnect":
                if made.event == "data":
                    heard += 1
                    latencies.append(time.time() - made.json["data"]["at"])
            await consumer.close()

        ready = asyncio.Semaphore(0)
        listening = [asyncio.ensure_future(listen(n)) for n in range(CONSUMERS)]
        for _ in range(CONSUMERS):
            await ready.acquire()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent, sizes = 0, []
        began = time.monotonic()
        while time.monotonic() - began < SECONDS:
            events = [
                {"source": "s", "id": str(n), "data": {"key": n % CONSUMERS, "at": time.time()}}
                for n in range(sent, sent + EVENTS_PER_S // 20)
            ]
            body = json.dumps(events).encode()
            head = f"POST /channels/soak HTTP/1.1\r\nHost: x\r\nContent-Type: {BATCH}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            assert b" 202 " in await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(19)
            sent += len(events)
            sizes.append(memory_kib(server.process.pid))
            await asyncio.sleep(max(0.0, began + sent / EVENTS_PER_S - time.monotonic()))
        await shut(writer)
        await asyncio.to_thread(server.stop)
        await asyncio.gather(*listening)
        return sent, heard, sizes, sorted(latencies)

    sent, heard, sizes, latencies = asyncio.run(scenario())

    p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    print(f"{sent} events, p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, {sizes[-1]} KiB")
    assert heard == sent
    assert sizes[-1] - sizes[len(sizes) // 2] < GROWTH_KIB_MAX
