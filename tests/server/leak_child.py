"""
`virta serve` with the garbage collector off, which counts its objects on request.

Each line on standard input is answered on standard error with one JSON line: `{"objects": {type: count}}` of all
objects that the collector tracks. What a closed connection leaves behind, in a cycle or not, is among them.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections import Counter

from virta.cli import main

gc.disable()
gc.enable = lambda: None  # keep it off


def name_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


def answer_counts():
    for line in sys.stdin:
        found = Counter(map(type, gc.get_objects()))
        objects = {name_of(kind): count for kind, count in found.items()}
        answer = {"objects": objects}
        if wanted := line.strip():
            answer["referrers"] = referrers(wanted)
        print(json.dumps(answer), file=sys.stderr, flush=True)


def referrers(wanted):
    """Return what refers to the first few objects of a type, to read when a test has failed."""
    objects = gc.get_objects()
    found = [one for one in objects if name_of(type(one)) == wanted][-3:]
    shown = []
    for one in found:
        holders = [h for h in gc.get_referrers(one) if h is not objects and h is not found]
        shown.append([f"{name_of(type(h))}: {str(h)[:300]}" for h in holders][:12])
    return shown


threading.Thread(target=answer_counts, daemon=True).start()
main(sys.argv[1:])
