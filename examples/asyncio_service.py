"""
An asyncio service: for each paid order write an invoice, exactly once, also over restarts.

    virta serve &
    python examples/asyncio_service.py --events 2 &
    virta publish orders --data '{"status": "paid", "total": 250}'

The id of an invoice is made of that of its order, so a repeat after a crash is recognised and dropped by the server.
The place to continue from is a key in the journal.
"""

import argparse
import asyncio
import json

import virta

PLACE = "invoices.place"
JSON = {"Content-Type": "application/json"}


async def main(url: str, events: int) -> None:
    async with virta.AsyncClient(url) as client:
        stored, _ = await client.request("GET", f"/journal/keys?prefix={PLACE}")
        place = stored["keys"][0]["value"] if stored["keys"] else None
        start = {"last_event_id": place} if place else {"start": "earliest"}
        done = 0
        async with client.subscribe("orders", "status=paid", **start) as orders:
            async for received in orders:
                order = received.event
                invoice = {
                    "specversion": "1.0",
                    "type": "invoice",
                    "source": "/invoices",
                    "id": f"{order.source} {order.id}",
                    "data": {"order": order.id, "amount": order.data["total"]},
                }
                written = await client.publish("invoices", invoice)
                place = json.dumps({"value": received.id}).encode()
                await client.request("PUT", f"/journal/keys/{PLACE}", place, JSON)
                print(f"invoice for {order.data['total']} at offset {written.offset}", flush=True)
                done += 1
                if done == events:
                    return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8232")
    parser.add_argument("--events", type=int, default=0, help="end after so many; 0 never ends")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.events))
