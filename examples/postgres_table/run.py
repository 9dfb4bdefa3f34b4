"""
PostgreSQL → a table in the browser that changes with the database: capture, live view, a page of 60 lines.

    pip install 'virta[server,cdc,match]'
    python examples/postgres_table/run.py postgresql://app@localhost/shop public.orders 'status=!shipped' 8000

Then open http://127.0.0.1:8000/ and change rows in psql. Ctrl-C stops all of it; ./virta-data is left.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent


class PageHandler(SimpleHTTPRequestHandler):
    """The page's files, and the address of its live view."""

    live_url = ""

    def do_GET(self) -> None:
        if self.path != "/config.json":
            super().do_GET()
            return
        body = json.dumps({"url": self.live_url}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


def main() -> None:
    dsn, table, query, port = sys.argv[1:5]
    pages = ThreadingHTTPServer(("127.0.0.1", int(port)), partial(PageHandler, directory=str(HERE)))
    page = f"http://127.0.0.1:{pages.server_address[1]}"
    command = [sys.executable, "-m", "virta", "serve", "--server-port", "0", "--journal-port", "0"]
    command += ["--cdc", f"shop={dsn}", "--allow-origin", page, "--data-dir", "virta-data"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for line in server.stdout or ():
            if '"listening"' in line:
                PageHandler.live_url = (
                    f"{json.loads(line)['url']}/channels/shop.{table}/live?{query}"
                )
                threading.Thread(target=pages.serve_forever, daemon=True).start()
                print(f"open {page}/", flush=True)
        print("the server ended", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()
        pages.server_close()


if __name__ == "__main__":
    main()
