"""A webhook of the demo: an HTTP server that consents to the subscription and counts what it gets."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHANNEL = "payments"
PATH = "/payments"


class WebhookReceiver:
    """Counts payments."""

    def __init__(self) -> None:
        self.received = 0
        receiver = self

        class PaymentHandler(BaseHTTPRequestHandler):
            def do_OPTIONS(self) -> None:
                self.send_response(200)
                self.send_header("WebHook-Allowed-Origin", "*")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                receiver.received += 1
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), PaymentHandler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="demo-webhook")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{PATH}"

    def subscribe(self, port: int) -> None:
        """Register with the server; subscriptions of earlier demos are removed."""
        for old in json.loads(_request(port, "GET", "/subscriptions")):
            if str(old.get("sink", "")).endswith(PATH):
                _request(port, "DELETE", f"/subscriptions/{old['id']}")
        wanted = {
            "sink": self.url,
            "config": {"channel": CHANNEL, "from": "latest"},
            "types": ["shop.paid"],
        }
        _request(port, "POST", "/subscriptions", wanted)

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _request(port: int, method: str, path: str, body: Any = None) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()
