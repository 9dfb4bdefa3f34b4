"""
A webhook: subscribe to paid orders, and receive them by HTTP.

    virta serve --webhook-allow 127.0.0.1 &
    python examples/webhook_receiver.py --events 1 &
    virta publish orders --data '{"status": "paid", "total": 250}'

The server asks for consent first (OPTIONS), then sends one event at a time; an event that is not answered with 2xx is
sent again.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import virta


class Receiver(BaseHTTPRequestHandler):
    """Consents to every origin, prints events, and ends after `wanted` of them."""

    wanted = 1
    received = 0
    done = threading.Event()

    def do_OPTIONS(self) -> None:
        self.send_response(200)
        self.send_header("WebHook-Allowed-Origin", self.headers["WebHook-Request-Origin"])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(f"received {event['type']} {event['id']}: {event['data']}", flush=True)
        self.send_response(204)
        self.end_headers()
        Receiver.received += 1
        if Receiver.received >= Receiver.wanted:
            Receiver.done.set()

    def log_message(self, *_: object) -> None:
        """Print nothing else."""


def main(url: str, events: int) -> None:
    Receiver.wanted = events
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as web, virta.Client(url) as client:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        description = {
            "sink": f"http://127.0.0.1:{web.server_address[1]}/",
            "config": {"channel": "orders"},
            "filters": [{"sql": "type = 'virta.cli' OR EXISTS subject"}],
        }
        body = json.dumps(description).encode()
        made, _ = client.request("POST", "/subscriptions", body)
        print(f"subscribed as {made['id']}", flush=True)
        Receiver.done.wait(120)
        client.request("DELETE", f"/subscriptions/{made['id']}")
        web.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8232")
    parser.add_argument("--events", type=int, default=1, help="end after so many events")
    arguments = parser.parse_args()
    main(arguments.url, arguments.events)
