"""
Percolation: many saved searches, and for each new document the searches that it satisfies.

    python examples/percolation.py

The searches are one index: a document is compared with those that could match, not with all of them.
"""

import random
import time

from virta.filters import parse
from virta.match import Matcher

SEARCHES = 50_000
CITIES = [f"city-{n}" for n in range(500)]


def main() -> None:
    rng = random.Random(1)  # noqa: S311 - not for secrets
    matcher = Matcher()
    owners: dict[str, list[int]] = {}
    for owner in range(SEARCHES):
        low = rng.randrange(200, 2000)
        search = {
            "and": [
                {"equals": {"city": rng.choice(CITIES)}},
                {"range": {"rent": {"gte": low, "lt": low + 150}}},
            ]
        }
        # Equal searches of two owners are one filter.
        owners.setdefault(matcher.add(parse(search, dialect="koncorde")), []).append(owner)
    print(f"{SEARCHES:,} saved searches, {len(owners):,} of them distinct")

    flat = {"city": "city-7", "rent": 950, "rooms": 3}
    began = time.perf_counter()
    hits = matcher.match(flat)
    took = time.perf_counter() - began
    notified = sorted(owner for hit in hits for owner in owners[hit])
    print(f"a flat of {flat['rent']} in {flat['city']} satisfies {len(notified)} searches")
    print(f"found in {took * 1e6:,.0f} µs")
    assert all(
        parse({"equals": {"city": "city-7"}}, dialect="koncorde").matches(flat) for _ in hits
    )


if __name__ == "__main__":
    main()
