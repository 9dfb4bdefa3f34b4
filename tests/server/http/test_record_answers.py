"""What the server's filters say of odd records is what `virta.event.filter_view` lets everyone see."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

from server_harness import Consumer, Server

import virta
from odd_records import FILTERS, ODD
from virta.event import filter_view, record_event
from virta.filters import parse
from virta.match.events import parse_event

# The channels of queries and of registered filters.
TOPICS = ("odd", "odd/records")


def test_the_server_gives_the_same_answers(tmp_path):
    """Live and from history: a channel's consumers get the records whose view satisfies their filter."""
    with Server(tmp_path / "data", "--durability", "none") as server:
        answers = asyncio.run(_asked(server))
        with virta.open(tmp_path / "data" / "log", read_only=True) as log:
            records = {topic: list(log.read(topics=topic))[:-1] for topic in TOPICS}

    assert {len(found) for found in records.values()} == {len(ODD)}
    for (dialect, text), (live, history) in answers.items():
        filter_ = parse(text, dialect)
        wanted = [
            record_event(record).id
            for record in records[TOPICS[dialect != "query-string"]]
            if filter_.matches(parse_event(filter_view(record, dialect)))
        ]
        assert live == wanted, (dialect, text)
        assert history is None or history == wanted, (dialect, text)


async def _asked(server):
    """For each filter the ids that a live consumer gets, and one of history where it can ask so."""
    last = b'{"source":"s","id":"last one"}'
    paths = {}
    for dialect, text in FILTERS:
        if dialect == "query-string":
            query = quote(text, safe="=&/!~.<>") + ";../id=last+one"
            paths[dialect, text] = f"/channels/odd?{query}"
            continue
        # Each filter with a disjunct for the last event, so that its stream is known to be complete.
        either = {
            "koncorde": f'{{"or":[{text},{{"ids":{{"values":["last one"]}}}}]}}',
            "cesql": f"({text}) OR id = 'last one'",
            "cloudevents": f'{{"any":[{text},{{"exact":{{"id":"last one"}}}}]}}',
        }[dialect]
        source = either if dialect == "cesql" else json.loads(either)
        body = json.dumps({"filter": source, "dialect": dialect})
        id_ = server.request("POST", "/filters/odd/records", body).json["id"]
        paths[dialect, text] = f"/filters/{id_}/events"
    live = {key: await Consumer.open(server.port, path) for key, path in paths.items()}
    for consumer in live.values():
        await consumer.connected()
    with virta.open(server.data_dir / "log") as log:
        for topic in TOPICS:
            log.append_many([(topic, "", value) for value, _ in ODD])
            log.append(topic, "", last)
    found = {}
    for key, consumer in live.items():
        history = None
        if key[0] == "query-string":
            path = paths[key].replace("/odd?", "/odd/from/earliest?")
            old = await Consumer.open(server.port, path)
            await old.connected()
            history = await _until_last(old)
        found[key] = (await _until_last(consumer), history)
    return found


async def _until_last(consumer):
    found = []
    while not found or found[-1] != "last one":
        found.append((await consumer.frame()).json["id"])
    await consumer.close()
    return found[:-1]
