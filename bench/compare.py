"""
Compare two checkouts of Virta, cell by cell, in alternating rounds.

    python bench/compare.py OLD NEW [--rounds 5] [--seconds 2] [--only log,jobs]

OLD and NEW are directories with a `.venv` (`make setup`). Both run the same workloads (`compare_workloads.py`), by
turns, so that a disturbance of the machine hits both. For each cell: the median of NEW/OLD over the rounds with
the smallest and largest, by rate and by processor time per item. A ratio above 1 means that NEW is better.
Ends with 1 when a median by rate and by processor time are both below `--least`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from compare_workloads import WORKLOADS

HERE = Path(__file__).parent
CELL_S_MAX = 300.0


def measure(checkout: Path, name: str, seconds: float) -> dict[str, float]:
    """Run one workload with a checkout's own interpreter and return its report."""
    command = [checkout / ".venv/bin/python", HERE / "compare_workloads.py", name, str(seconds)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CELL_S_MAX, check=False, cwd=checkout
    )
    if done.returncode:
        sys.exit(f"{name} failed in {checkout}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def compare(old: Path, new: Path, name: str, rounds: int, seconds: float) -> tuple[float, float]:
    """Measure both by turns, print the cell and return the median ratios by rate and processor time."""
    rates, costs, last = [], [], {}
    for number in range(rounds):
        order = (old, new) if number % 2 == 0 else (new, old)
        last = {checkout: measure(checkout, name, seconds) for checkout in order}
        rates.append(last[new]["rate"] / last[old]["rate"])
        costs.append(last[old]["cpu_us"] / max(last[new]["cpu_us"], 1e-9))
    print(
        f"{name:24} {spread(rates):>20} {spread(costs):>20}"
        f" {last[old]['rate']:>13,.0f}/s {last[new]['rate']:>13,.0f}/s",
        flush=True,
    )
    return statistics.median(rates), statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--only", default="", help="cells whose name has one of these, with commas")
    parser.add_argument("--least", type=float, default=0.95, help="smallest ratio that is accepted")
    options = parser.parse_args()
    wanted = options.only.split(",")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" load {os.getloadavg()[0]:.1f}; {options.rounds} rounds of {options.seconds} s"
    )
    print(f"{'cell':24} {'rate NEW/OLD':>20} {'CPU time OLD/NEW':>20} {'OLD':>15} {'NEW':>15}")
    slower = []
    for name in WORKLOADS:
        if any(part in name for part in wanted):
            ratios = compare(
                options.old.absolute(),
                options.new.absolute(),
                name,
                options.rounds,
                options.seconds,
            )
            if max(ratios) < options.least:
                slower.append(name)
    if slower:
        sys.exit(f"below {options.least}: {', '.join(slower)}")


if __name__ == "__main__":
    main()
