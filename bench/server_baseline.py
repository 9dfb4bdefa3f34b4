"""
The yardstick of `make bench-server`: the same routes on plain uvicorn + Starlette.

No log, no filters but one equality, a queue per consumer: what one would write in an afternoon. It does
less than the server it stands beside, and the same load is put on both.
"""

from __future__ import annotations

import asyncio
import json
import socket

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute

consumers: dict[str, list[asyncio.Queue]] = {}
streams: dict[str, list[asyncio.Queue]] = {}


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


async def subscribe(socket):
    queue: asyncio.Queue = asyncio.Queue(int(socket.query_params["max_queued"]))
    for stream in socket.query_params.getlist("streams"):
        streams.setdefault(stream.rstrip(":"), []).append(queue)
    await socket.accept()
    while True:
        await socket.send_text(await queue.get())


async def publish(request):
    for message in msgspec.json.decode(await request.body()):
        text = msgspec.json.encode(message).decode()
        parts = message["publish_to"].rstrip(":").split(":")
        for end in range(1, len(parts) + 1):
            for queue in streams.get(":".join(parts[:end]), ()):
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(text)
    return Response(None, 200)


if __name__ == "__main__":
    app = Starlette(
        routes=[
            Route("/channels/{name}", channel, methods=["GET", "POST"]),
            Route("/publish", publish, methods=["POST"]),
            WebSocketRoute("/subscribe", subscribe),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(json.dumps({"message": "listening", "url": url}), flush=True)
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
