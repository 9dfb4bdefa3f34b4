"""
The durable log: a directory of segments that many processes append to and read, without a daemon.

    log = virta.open("events")
    log.append("orders", "42", b'{"total": 7}')
    for record in log.read("orders"):
        print(record.offset, record.value)

docs/log.md is the guide, docs/format.md the format to the byte.
"""

from __future__ import annotations

from virta.log.aio import AsyncConsumer, AsyncLog, AsyncReader, open_async
from virta.log.consumers.consumer import Consumer, ConsumerInfo
from virta.log.format.damage import Problem
from virta.log.log import Log
from virta.log.opening import open_log as open  # noqa: A004
from virta.log.reader import Reader
from virta.log.record import Appended, Name, Record
from virta.log.seek import SegmentInfo
from virta.log.topics import TopicInfo
from virta.log.upkeep.compaction import CompactionReport
from virta.log.upkeep.retention import Pin, RetentionReport
from virta.log.upkeep.verify import RepairReport, VerifyReport

__all__ = [
    "Appended",
    "AsyncConsumer",
    "AsyncLog",
    "AsyncReader",
    "CompactionReport",
    "Consumer",
    "ConsumerInfo",
    "Log",
    "Name",
    "Pin",
    "Problem",
    "Reader",
    "Record",
    "RepairReport",
    "RetentionReport",
    "SegmentInfo",
    "TopicInfo",
    "VerifyReport",
    "open",
    "open_async",
]
