"""
The yardstick of `make bench-server`: the same routes on plain uvicorn + Starlette.

No log, no filters but one equality, a queue per consumer: what one would write in an afternoon.
"""

from __future__ import annotations

import asyncio
import json
import socket

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

consumers: dict[str, list[asyncio.Queue]] = {}


async def channel(request):
    name = request.path_params["name"]
    if request.method == "GET":
        key = f"{name}?{request.url.query}"
        queue: asyncio.Queue = asyncio.Queue(1000)
        consumers.setdefault(key, []).append(queue)

        async def stream():
            yield b"event: connect\ndata: {}\n\n"
            while True:
                yield await queue.get()

        return StreamingResponse(stream(), media_type="text/event-stream")
    body = await request.body()
    events = msgspec.json.decode(body)
    for event in events if isinstance(events, list) else [events]:
        frame = b"event: data\nid: %b\ndata: %b\n\n" % (
            event["id"].encode(),
            msgspec.json.encode(event),
        )
        for key in (f"{name}?", f"{name}?key={event['data']['key']}"):
            for queue in consumers.get(key, ()):
                if not queue.full():
                    queue.put_nowait(frame)
    return JSONResponse({"code": "accepted"}, 202)


if __name__ == "__main__":
    app = Starlette(routes=[Route("/channels/{name}", channel, methods=["GET", "POST"])])
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(json.dumps({"message": "listening", "url": url}), flush=True)
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
