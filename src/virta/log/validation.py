"""Check arguments; each error says what is wrong, the value, and what would be right."""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any

from virta.errors import LogError, LogLimitError, LogTypeError
from virta.log.engine import kernel
from virta.log.format.codec import PRODUCER_ANONYMOUS
from virta.log.limits import BATCH_BYTES_MAX, KEY_BYTES_MAX, TOPIC_BYTES_MAX, VALUE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def check_option(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise LogTypeError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def topic_set(topics: str | bytes | Iterable[str | bytes] | None) -> frozenset[bytes] | None:
    """Return the topics as bytes, None for all."""
    if topics is None:
        return None
    if isinstance(topics, str | bytes):
        topics = (topics,)
    return frozenset(_as_bytes(topic) for topic in topics)


def _as_bytes(topic: object) -> bytes:
    if isinstance(topic, str):
        return topic.encode()
    if isinstance(topic, bytes | bytearray | memoryview):
        return bytes(topic)
    raise LogTypeError(f"a topic must be str or bytes, got {type(topic).__name__}: {topic!r:.80}")


def check_producer(producer: object) -> None:
    match producer:
        case (int() as number, int() as sequence) if (
            PRODUCER_ANONYMOUS < number < 1 << 64 and 0 <= sequence < 1 << 32
        ):
            return
    raise LogTypeError(
        f"producer must be (id, sequence) with 2 <= id < 2**64 and 0 <= sequence < 2**32, got {producer!r}"
    )


def encode_records(records: Sequence[Sequence[Any]]) -> bytearray:
    """
    Return a list or tuple of (topic, key, value) records as one batch; dicts and lists are written as JSON.

    Raises:
        LogTypeError, LogLimitError: a record is not acceptable, or the batch is too large or empty.
    """
    try:
        buf = kernel.encode(records)
    except IndexError as exc:
        plain = with_json_values(records)
        if plain is not None:
            return encode_records(plain)
        raise record_error(records[exc.args[0]], exc.args[0], len(records)) from None
    except OverflowError as exc:
        raise LogLimitError(
            f"the batch of {len(records)} records is over {BATCH_BYTES_MAX} bytes at record "
            f"{exc.args[0]}; append it in several batches",
            code="log_batch_too_large",
        ) from None
    if not records:
        raise LogLimitError("a batch needs at least one record, got none", code="log_batch_empty")
    return buf


def with_json_values(records: Sequence[Any]) -> list[Any] | None:
    """
    Return the records with dict and list values encoded as JSON, or None if there are no such values.

    Raises:
        LogTypeError: a value cannot be written as JSON.
    """
    made: list[Any] | None = None
    for index, item in enumerate(records):
        if isinstance(item, tuple | list) and len(item) == 3 and isinstance(item[2], dict | list):
            if made is None:
                made = list(records)
            where = "" if len(records) == 1 else f"record {index} of {len(records)}: "
            made[index] = (item[0], item[1], _json_value(item[2], where))
    return made


def _json_value(value: Any, where: str) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise LogTypeError(
            f"{where}value {reprlib.repr(value)} cannot be written as JSON: {error}"
        ) from error


def record_error(item: Any, index: int, count: int) -> LogError:
    """Return the error for a record that the encoder refused."""
    where = "" if count == 1 else f"record {index} of {count}: "
    if not isinstance(item, tuple | list) or len(item) != 3:
        return LogTypeError(f"{where}a record is (topic, key, value), got {item!r:.80}")
    limits = (TOPIC_BYTES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX)
    for name, field, limit in zip(("topic", "key", "value"), item, limits, strict=True):
        problem = _field_error(where, name, field, limit)
        if problem is not None:
            return problem
    return LogTypeError(
        f"{where}topic {item[0]!r} is one of the one-byte topics below 0x20, which are the log's own"
    )


def _field_error(where: str, name: str, field: object, limit: int) -> LogError | None:
    if isinstance(field, str) and name != "value":
        try:
            field = field.encode()
        except UnicodeEncodeError as exc:
            return LogTypeError(
                f"{where}{name} {field!r:.80} cannot be written as UTF-8: {exc.reason}"
            )
    if isinstance(field, str):
        return LogTypeError(f"{where}value must be bytes, got str {field!r:.80}; encode it first")
    try:
        size = memoryview(field).nbytes  # type: ignore[arg-type]
    except TypeError:
        kinds = "bytes, or a dict or list for JSON" if name == "value" else "str or bytes"
        kind = type(field).__name__
        return LogTypeError(f"{where}{name} must be {kinds}, got {kind} {field!r:.80}")
    if size > limit:
        return LogLimitError(
            f"{where}{name} is {size} bytes long, the limit is {limit}",
            code=f"log_{name}_too_large",
        )
    return None
