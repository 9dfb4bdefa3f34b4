"""Ship a log in a loop until killed: `ship_child.py LOG URL SEED`."""

from __future__ import annotations

import random
import sys

import virta
from virta.tier import Shipper, TierStore


def main() -> None:
    path, url, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    with virta.open(path) as log, Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
        print("started", flush=True)
        while True:
            shipper.ship()
            if rng.random() < 0.3:
                shipper.collect_garbage(now=True)
            if rng.random() < 0.3:
                log.retain(max_bytes=rng.randrange(20_000))


if __name__ == "__main__":
    main()
