"""What fuzzers share: rounds with a seed each until the time is up, and the seed of the one that failed."""

from __future__ import annotations

import argparse
import time


def repeat(description, one_round):
    """Call `one_round` with a new seed each time, or with the one that is given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, help="run this seed only")
    args = parser.parse_args()
    seed = int(time.time()) * 1000 if args.seed is None else args.seed
    end = time.monotonic() + args.seconds
    rounds = 0
    while True:
        try:
            one_round(seed + rounds)
        except BaseException:
            print(f"failed: repeat with --seed {seed + rounds}")
            raise
        rounds += 1
        if args.seed is not None or time.monotonic() > end:
            break
    print(f"{rounds} rounds, no difference")
