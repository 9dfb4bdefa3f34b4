"""
`make bench-server`: what one core of the server does, measured from a second process on loopback.

Rows: single POSTs, batches with standing queries, SSE fan-out, many selective queries, WebSocket
fan-out, memory of an idle consumer; for durability none and group; and the same work on a plain
uvicorn + Starlette application (no log, no matcher: a dictionary of queues), as a yardstick; and the
fan-out on other servers (`server_peers.py`), where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from server_peers import PEERS

HERE = Path(__file__).parent
SCENARIOS = {
    # name: (number of consumers, what is reported)
    "posts": (0, "posts_s"),
    "batches": (1000, "events_s"),
    "fanout": (1000, "deliveries_s"),
    "selective": (5000, "events_s"),
    "sockets": (1000, "deliveries_s"),
}
TITLES = {
    "posts": "single POSTs/s (300 bytes, 64 connections)",
    "batches": "batched events/s (100 a batch, 1,000 standing queries)",
    "fanout": "SSE deliveries/s (1,000 consumers, every event to all)",
    "selective": "events/s (5,000 consumers, 5 receive each event)",
    "sockets": "WebSocket deliveries/s (1,000 consumers)",
}


class Target:
    """A server process, pinned to the first core."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        pin(self.process.pid, 0)
        self.port = 0
        for line in self.process.stdout:
            if b'"listening"' in line:
                self.port = int(json.loads(line)["url"].rsplit(":", 1)[1])
                break
        assert self.port, "the server did not start"

    def memory_kib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def cpu_s(self):
        """Processor time so far: what a rate means on a machine that others use too."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.terminate()
        self.process.communicate(timeout=30)


def pin(process, core):
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(process, {core})


def load(scenario, target, seconds, number, key, token=""):
    """Run the load on the second core and read its report; consumers connect before it counts."""
    command = [sys.executable, HERE / "server_load.py", scenario, str(target.port), str(seconds)]
    client = subprocess.Popen(
        [*command, str(number)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"VIRTA_BENCH_TOKEN": token},
    )
    pin(client.pid, 1)
    client.stdout.readline()
    before = target.cpu_s()
    out, _ = client.communicate(timeout=600)
    report = json.loads(out.splitlines()[-1])
    report["cpu_us"] = 1e6 * (target.cpu_s() - before) / (report[key] * seconds)
    return report


def idle_kib(target, number):
    """Memory of one idle consumer."""
    before = target.memory_kib()
    command = [sys.executable, HERE / "server_load.py", "idle", str(target.port), "1", str(number)]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client.stdout.readline()
    after = target.memory_kib()
    client.communicate(b"\n", timeout=30)
    return (after - before) / number


def measure(name, command, seconds, scenarios):
    rows = {}
    for scenario in scenarios:
        target = Target(command())
        try:
            number, key = SCENARIOS[scenario]
            report = load(scenario, target, seconds, number, key)
            rows[scenario] = report
            lost = f", lost {report['lost']}" if report.get("lost") else ""
            print(
                f"{name:>24}  {TITLES[scenario]:<58} {report[key]:>10,.0f}"
                f"   {report['cpu_us']:.2f} µs CPU each"
                f"   p50 {report['p50_ms']:.2f} ms  p99 {report['p99_ms']:.2f} ms{lost}",
                flush=True,
            )
        finally:
            target.stop()
    if "selective" in scenarios:
        target = Target(command())
        try:
            rows["idle_kib"] = idle_kib(target, 2000)
            print(
                f"{name:>24}  {'KiB per idle SSE consumer':<58} {rows['idle_kib']:>10.1f}",
                flush=True,
            )
        finally:
            target.stop()
    return rows


def measure_peers(seconds):
    """The fan-out on other servers, or why a row is missing."""
    rows = {}
    for peer in PEERS:
        try:
            target = peer.start()
        except OSError as error:
            print(f"{peer.name:>24}  skipped: {error}")
            continue
        pin(target.process.pid, 0)
        try:
            report = load(peer.scenario, target, seconds, 1000, "deliveries_s")
        finally:
            target.stop()
        rows[peer.name] = report
        lost = f", lost {report['lost']}" if report.get("lost") else ""
        print(
            f"{peer.name:>24}  {peer.title:<58} {report['deliveries_s']:>10,.0f}"
            f"   {report['cpu_us']:.2f} µs CPU each"
            f"   p50 {report['p50_ms']:.2f} ms  p99 {report['p99_ms']:.2f} ms{lost}",
            flush=True,
        )
    return rows


def print_ratios(results):
    """How many times as fast as the others in this run, by what each scenario counts."""
    baseline, peers = results.get("baseline", {}), results.get("peers", {})
    for durability in (name for name in results if name not in ("baseline", "peers")):
        ours = results[durability]
        for scenario, (_, key) in SCENARIOS.items():
            if scenario not in ours:
                continue
            others = {"uvicorn + Starlette": baseline[scenario]} if scenario in baseline else {}
            if scenario == "fanout":
                others |= peers
            ratios = [
                f"{ours[scenario][key] / other[key]:.2f} times {name}"
                for name, other in others.items()
                if other.get(key)
            ]
            if ratios:
                print(f"# virta, {durability}: {TITLES[scenario]}: {', '.join(ratios)}", flush=True)


def virta_command(durability):
    def command():
        data = tempfile.mkdtemp(prefix="virta-bench-", dir=os.environ.get("VIRTA_BENCH_DIR"))
        flags = ["--server-port", "0", "--data-dir", data, "--durability", durability]
        flags += ["--journal-port", "none"]
        return [sys.executable, "-m", "virta", "serve", *flags]

    return command


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", choices=list(SCENARIOS), action="append")
    parser.add_argument("--durability", action="append")
    parser.add_argument("--no-baseline", action="store_true")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    scenarios = options.only or list(SCENARIOS)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    results = {}
    for durability in options.durability or ["none", "group"]:
        results[durability] = measure(
            f"virta, {durability}", virta_command(durability), options.seconds, scenarios
        )
    if not options.no_baseline:
        baseline = [sys.executable, str(HERE / "server_baseline.py")]
        results["baseline"] = measure(
            "uvicorn + Starlette", lambda: baseline, options.seconds, scenarios
        )
    if "fanout" in scenarios and not options.no_baseline:
        results["peers"] = measure_peers(options.seconds)
    print_ratios(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
