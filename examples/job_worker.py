"""
A job worker: push jobs, work on them, see a failing one retried.

    virta serve &
    python examples/job_worker.py

Each receipt is pushed twice and sent once: a job is known by its uri. One handler fails at its first attempt and is
tried again after a delay.
"""

import argparse
import asyncio

from virta.journal import Client, Worker


async def main(port: int) -> None:
    with Client(port=port) as client:
        for order in ("1001", "1002", "1003", "1002", "1003"):
            client.push(f"mail://example-shop/receipt/{order}", payload=order)

    sent: list[str] = []
    finished = asyncio.Event()
    worker = Worker(port=port, concurrency=2, retry_delay=0.1)

    @worker.handle("example-shop")
    async def send_receipt(job) -> None:  # noqa: ANN001 - a Lease
        order = str(job.payload)
        if order == "1002" and job.attempts == 0:
            raise ConnectionError("the mail server does not answer")
        sent.append(order)
        print(f"sent the receipt of order {order} at attempt {job.attempts + 1}")
        if len(sent) == 3:
            finished.set()

    await asyncio.wait_for(worker.work(finished), 60)
    print(f"{len(sent)} receipts sent, each once: {', '.join(sorted(sent))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8233, help="the journal's port")
    asyncio.run(main(parser.parse_args().port))
