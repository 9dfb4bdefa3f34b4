"""Damaged files: every cut, every flipped bit, and random destruction are found, named and never passed over."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from crash_tools import Image, image_of, restore, rounds_of, seed_of

import virta
from virta.errors import LogCorruptionError, LogGapError
from virta.log.format.directory import segment_bases, segment_name
from virta.log.limits import SEGMENT_HEADER_BYTES

CONTROL = "control"


@pytest.fixture(autouse=True)
def quiet():
    """Silence thousands of expected warnings."""
    logger = logging.getLogger("virta.log")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Sample(NamedTuple):
    """A small log as a value: a small sealed segment, one with a large record, and the active one."""

    files: Image
    end: int  # of the active segment's data; headroom follows where there is any
    records: dict[int, tuple[bytes, bytes, bytes]]
    controls: list[bytes]  # the control page before each of the last batches
    sealed: str
    middle: str
    active: str

    @property
    def next(self) -> int:
        return len(self.records)


def make_sample(folder: Path, *, headroom: bool = False) -> Sample:
    """With headroom: as it stands while its writer lives."""
    path = folder / "sample"
    controls = []
    with virta.open(path, durability="none", segment_bytes=4096) as log:
        log.append_many([("a", b"k1", b"one"), ("bb", b"", b"two" * 5), ("a", b"k1", b"")])
        log.append("ccc", b"k2", b"three")
        log.append_many([("d", b"x", b"y")] * 2)
        log.append("large", b"", bytes(range(256)) * 15)  # fits into no segment that has something
        log.append_many([("f", b"", b"z")] * 2)
        for number in range(3):
            controls.append((path / CONTROL).read_bytes())
            log.append_many([("e", str(number), bytes([number]) * 11) for _ in range(number + 1)])
        log.flush()
        records = {r.offset: (bytes(r.topic), bytes(r.key), r.value) for r in log.read()}
        names = [segment_name(base) for base in segment_bases(path)]
        files, end = image_of(path), log.segments()[-1].bytes
    if not headroom:
        files = image_of(path)
    assert (len(files[names[-1]]) > end) == headroom
    return Sample(files, end, records, controls, *names)


class Seen(NamedTuple):
    records: dict[int, tuple[bytes, bytes, bytes]]
    error: LogCorruptionError | LogGapError | None


def read_all(path: Path, **options) -> Seen:
    """Everything a fresh read-only handle gets, and the error that ended it."""
    with virta.open(path, read_only=True, visibility="committed") as log:
        return read_from(log, **options)


def read_from(log: virta.Log, **options) -> Seen:
    seen: dict[int, tuple[bytes, bytes, bytes]] = {}
    try:
        for r in log.read(**options):
            assert r.offset not in seen, f"offset {r.offset} twice"
            assert not seen or r.offset > max(seen), "offsets go back"
            seen[r.offset] = (bytes(r.topic), bytes(r.key), r.value)
    except (LogCorruptionError, LogGapError) as exc:
        return Seen(seen, exc)
    return Seen(seen, None)


def assert_true(seen: Seen, sample: Sample) -> None:
    """Whatever was delivered is what was written at that offset."""
    for offset, record in seen.records.items():
        assert sample.records.get(offset) == record, f"a wrong record at {offset}"


def assert_prefix(seen: Seen, sample: Sample) -> None:
    assert_true(seen, sample)
    assert list(seen.records) == list(range(len(seen.records))), "something was passed over"


def assert_found(path: Path, sample: Sample, name: str, at: int) -> None:
    """read() and verify() name the file and a byte range around the damage; nothing wrong is delivered."""
    with virta.open(path, read_only=True, visibility="committed") as log:
        seen = read_from(log)
        problems = log.verify().problems
    assert_prefix(seen, sample)
    assert isinstance(seen.error, LogCorruptionError), f"byte {at} of {name}: read found nothing"
    assert Path(seen.error.segment).name == name
    assert seen.error.byte_from <= at < seen.error.byte_to
    assert seen.error.offset_from == len(seen.records)
    assert problems, f"byte {at} of {name}: verify found nothing"
    assert Path(problems[0].segment).name == name
    assert problems[0].byte_from <= at < problems[0].byte_to
    assert problems[0].reason


def flip(sample: Sample, name: str, at: int, bit: int, *, control: bool) -> Image:
    data = bytearray(sample.files[name])
    data[at] ^= 1 << bit
    files = {**sample.files, name: bytes(data)}
    if not control:
        del files[CONTROL]
    return files


def assert_repairs(path: Path, sample: Sample, damaged: bytes) -> None:
    """repair() keeps the damaged bytes, verify() is clean, lost offsets are explicit and never given again."""
    with virta.open(path, durability="none") as log:
        report = log.repair()
        assert log.recovered or report.problems  # a writer recovers the tail when it opens
        assert log.recovered or report.quarantined
        assert all(Path(kept).exists() for kept in report.quarantined)
        kept = b"".join(file.read_bytes() for file in (path / "quarantine").glob("*.bin"))
        assert damaged in kept
        assert log.verify().problems == []
        assert log.repair().problems == []
    strict = read_all(path)
    assert_prefix(strict, sample)
    loose = read_all(path, on_gap="skip")
    assert loose.error is None
    assert_true(loose, sample)
    lost = sorted(set(sample.records) - set(loose.records))
    inner = [offset for offset in lost if any(o > offset for o in loose.records)]
    if inner or (lost and (path / CONTROL).exists() and CONTROL in sample.files):
        assert isinstance(strict.error, LogGapError)
        assert strict.error.first == lost[0]
        assert strict.error.next > lost[0]
    elif not lost:
        assert strict.error is None
    with virta.open(path, durability="none") as log:
        offset = log.append("new", b"", b"new")
        assert offset not in loose.records
        if not lost or inner:
            assert offset > max(loose.records)
        assert log.verify().problems == []
    after = read_all(path, on_gap="skip")
    assert after.records.pop(int(offset)) == (b"new", b"", b"new")
    assert after.records == loose.records


# --- bits ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("control", [True, False], ids=["control", "no-control"])
@pytest.mark.parametrize("which", ["sealed", "active"])
def test_a_flip_of_any_bit_is_found(memory, which, control):
    """Every single bit of a segment and its header: read and verify name file and place; never a wrong record."""
    sample = make_sample(memory)
    name = getattr(sample, which)
    size = len(sample.files[name])
    path = restore(sample.files, memory / "log")
    for at in range(size):
        for bit in range(8):
            files = flip(sample, name, at, bit, control=control)
            (path / name).write_bytes(files[name])
            if not control:
                (path / CONTROL).unlink(missing_ok=True)
            assert_found(path, sample, name, at)
    (path / name).write_bytes(sample.files[name])
    assert read_all(path) == Seen(sample.records, None)


@pytest.mark.parametrize("control", [True, False], ids=["control", "no-control"])
def test_a_flip_before_headroom_is_found(memory, control):
    """The same where zeros follow: a flip in any byte of the data is found; one in the zeros is, and costs nothing."""
    sample = make_sample(memory, headroom=True)
    name = sample.active
    path = restore(sample.files, memory / "log")
    if not control:
        (path / CONTROL).unlink()
    for at in range(sample.end):
        (path / name).write_bytes(flip(sample, name, at, at % 8, control=True)[name])
        assert_found(path, sample, name, at)
    for at in range(sample.end, len(sample.files[name]), 97):
        (path / name).write_bytes(flip(sample, name, at, at % 8, control=True)[name])
        with virta.open(path, read_only=True, visibility="committed") as log:
            assert log.verify().problems[0].byte_from == sample.end
        assert read_all(path).records == sample.records
    (path / name).write_bytes(sample.files[name])
    assert read_all(path) == Seen(sample.records, None)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["sealed", "active"])
def test_a_flip_in_any_byte_can_be_repaired(memory, either_kernel, which):
    """After repair() of a flip at any byte: clean verify, bytes in quarantine, explicit gap, appends work."""
    sample = make_sample(memory, headroom=which == "active" and either_kernel == "native")
    name = getattr(sample, which)
    step = 1 if either_kernel == "native" else 5  # the same rules, an order slower
    for at in range(0, sample.end if which == "active" else len(sample.files[name]), step):
        files = flip(sample, name, at, at % 8, control=True)
        path = restore(files, memory / "log")
        assert_repairs(path, sample, files[name][at : at + 1])


def test_a_flip_is_skipped_only_on_request(memory):
    """on_corruption='skip' loses exactly the damaged batch, and says so in reader.problems."""
    sample = make_sample(memory)
    name = sample.sealed
    at = sample.files[name].find(b"three")
    path = restore(flip(sample, name, at, 0, control=True), memory / "log")
    with virta.open(path) as log:
        reader = log.read(on_corruption="skip")
        offsets = [record.offset for record in reader]
        assert offsets == [o for o in sample.records if o != 3]
        (problem,) = reader.problems
        assert (problem.offset_from, problem.offset_to) == (3, 4)
        assert problem.byte_from <= at < problem.byte_to


def test_a_damaged_segment_header_is_skipped_only_on_request(memory):
    """A segment whose header is destroyed is skipped as a whole, and reported."""
    sample = make_sample(memory)
    path = restore(flip(sample, sample.sealed, 41, 3, control=True), memory / "log")
    with virta.open(path) as log:
        reader = log.read(on_corruption="skip")
        offsets = [record.offset for record in reader]
        base = int(sample.middle[:20])
        assert offsets == [o for o in sample.records if o >= base]
        assert reader.problems
        assert reader.problems[0].byte_from == 0


# --- truncation ------------------------------------------------------------------------------------------


def cut(sample: Sample, name: str, size: int, control: str) -> Image:
    files = {**sample.files, name: sample.files[name][:size]}
    if control == "lost":
        del files[CONTROL]
    elif control == "stale":
        files[CONTROL] = sample.controls[1]
    return files


@pytest.mark.slow
@pytest.mark.parametrize("control", ["kept", "lost", "stale"])
def test_every_prefix_of_the_active_segment(memory, either_kernel, control):
    """Cut anywhere: what is left is read exactly, published losses are reported, writers continue after them."""
    sample = make_sample(memory)
    name, whole = sample.active, len(sample.files[sample.active])
    promised = {"kept": sample.next, "lost": 0, "stale": sample.next - 5}[control]
    step = 1 if either_kernel == "native" else 5  # the same rules, an order slower
    for size in range(0, whole + 1, step):
        path = restore(cut(sample, name, size, control), memory / "log")
        seen = read_all(path)
        assert_prefix(seen, sample)
        missing = len(seen.records) < promised
        if missing or size < SEGMENT_HEADER_BYTES:
            assert isinstance(seen.error, LogCorruptionError), f"cut to {size}: silent loss"
            assert Path(seen.error.segment).name == name
            assert seen.error.byte_from <= size
        with virta.open(path, read_only=True) as log:
            problems = log.verify().problems
        if size < whole and (missing or size < SEGMENT_HEADER_BYTES):
            assert problems, f"cut to {size}: verify is silent"
            assert Path(problems[0].segment).name == name
        with virta.open(path, durability="none") as log:
            if size < SEGMENT_HEADER_BYTES:
                with pytest.raises(LogCorruptionError):
                    log.append("new", b"", b"new")
                log.repair()
            offset = log.append("new", b"", b"new")
            assert offset >= promised, "an offset that was published was given again"
            assert offset >= len(seen.records)
            assert log.verify().problems == [], f"cut to {size}"
        after = read_all(path, on_gap="skip")
        assert after.error is None
        assert after.records.pop(int(offset)) == (b"new", b"", b"new")
        assert_true(after, sample)
        assert set(seen.records) <= set(after.records)
        strict = read_all(path)
        if missing:
            assert isinstance(strict.error, LogGapError)
            assert strict.error.next >= promised


@pytest.mark.parametrize("control", ["kept", "lost"])
def test_every_prefix_before_headroom(memory, either_kernel, control):
    """Zeros from any byte on, as a torn write leaves them: like a cut there; zeros alone are not reported."""
    sample = make_sample(memory, headroom=True)
    name, whole = sample.active, len(sample.files[sample.active])
    step = 3 if either_kernel == "native" else 23
    for size in [*range(SEGMENT_HEADER_BYTES, sample.end, step), sample.end]:
        files = cut(sample, name, size, control)
        files[name] = files[name].ljust(whole, b"\0")
        path = restore(files, memory / "log")
        seen = read_all(path)
        assert_prefix(seen, sample)
        missing = control == "kept" and len(seen.records) < sample.next
        if missing:
            assert isinstance(seen.error, LogCorruptionError), f"zeros from {size}: silent loss"
        with virta.open(path, durability="group") as log:
            offset = log.append("new", b"", b"new")
            assert offset >= (sample.next if control == "kept" else len(seen.records))
            assert log.verify().problems == [], f"zeros from {size}"
            if size == sample.end:
                assert (seen.error, log.recovered, offset) == (None, [], sample.next)
                assert not (path / "quarantine").exists()
        after = read_all(path, on_gap="skip")
        assert after.error is None
        assert after.records.pop(int(offset)) == (b"new", b"", b"new")
        assert_true(after, sample)
        assert set(seen.records) <= set(after.records)


@pytest.mark.slow
@pytest.mark.parametrize("control", ["kept", "lost"])
def test_every_prefix_of_a_sealed_segment(memory, either_kernel, control):
    """A sealed segment that lost its end is never taken for whole, whatever the cut."""
    sample = make_sample(memory)
    name = sample.sealed
    step = 1 if either_kernel == "native" else 5  # the same rules, an order slower
    for size in range(0, len(sample.files[name]), step):
        path = restore(cut(sample, name, size, control), memory / "log")
        seen = read_all(path)
        assert_prefix(seen, sample)
        assert isinstance(seen.error, LogCorruptionError), f"cut to {size}: silent loss"
        assert Path(seen.error.segment).name == name
        with virta.open(path, read_only=True) as log:
            problems = log.verify().problems
        assert problems
        assert Path(problems[0].segment).name == name
        if size % 7 == 0:
            with virta.open(path, durability="none") as log:
                log.repair()
                assert log.verify().problems == []
            after = read_all(path, on_gap="skip")
            assert after.error is None
            assert_true(after, sample)
            assert set(seen.records) <= set(after.records)
            base = int(sample.middle[:20])
            assert {o for o in sample.records if o >= base} <= set(after.records)


def test_a_deleted_segment_is_reported(memory):
    """A deleted segment file, the newest one included, is a gap and a problem; its offsets are not reused."""
    sample = make_sample(memory)
    for name in (sample.middle, sample.active):
        path = restore({n: data for n, data in sample.files.items() if n != name}, memory / "log")
        seen = read_all(path)
        assert_prefix(seen, sample)
        assert isinstance(seen.error, LogGapError)
        assert seen.error.first == int(name[:20])
        with virta.open(path, read_only=True) as log:
            assert [p.reason for p in log.verify().problems] == ["missing"]
        with virta.open(path, durability="none") as log:
            log.repair()
            assert log.append("new", b"", b"new") == sample.next
            assert log.epoch == 1
            assert log.verify().problems == []
        after = read_all(path, on_gap="skip")
        assert after.records.pop(sample.next) == (b"new", b"", b"new")
        assert_true(after, sample)
        assert len(after.records) > len(seen.records) or name == sample.active


# --- anything --------------------------------------------------------------------------------------


def destroy(rng, sample: Sample, older: Sample) -> tuple[Image, str]:
    """One or two random acts of destruction."""
    files = dict(sample.files)
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice((sample.sealed, sample.middle, sample.active))
        data = bytearray(files[name])
        start = rng.randrange(len(data)) if data else 0
        end = min(len(data), start + rng.choice((1, 8, 64, 512)))
        act = rng.choice(
            ("zero", "noise", "swap", "double", "garbage", "stale", "control", "cut", "flip")
        )
        if act == "zero":
            data[start:end] = bytes(end - start)
        elif act == "noise":
            data[start:end] = rng.randbytes(end - start)
        elif act == "swap":
            middle = rng.randrange(start, end + 1) if end > start else start
            data[start:end] = data[middle:end] + data[start:middle]
        elif act == "double":
            data[end:end] = data[start:end]
        elif act == "garbage":
            data += rng.randbytes(rng.randrange(1, 300))
        elif act == "stale":
            other = older.files.get(name) or sample.files[sample.sealed]
            data += other[SEGMENT_HEADER_BYTES + rng.choice((0, 0, 7)) :]
        elif act == "control":
            files[CONTROL] = rng.choice(
                (bytes(4096), rng.randbytes(4096), files.get(CONTROL, b"")[:64].ljust(4096, b"\1"))
            )
        elif act == "cut":
            del data[start:]
        elif data:
            data[start % len(data)] ^= 1 << rng.randrange(8)
        files[name] = bytes(data)
        done.append(f"{act} {name} {start}-{end}")
    if rng.random() < 0.2:
        files.pop(CONTROL, None)
        done.append("no control")
    return files, ", ".join(done)


@pytest.mark.slow
def test_random_destruction(memory, either_kernel):
    """Whatever is done to the files: never a wrong record, every loss is reported, repair makes the log whole."""
    rng = seed_of("destruction")
    samples = []
    for headroom in (False, True, False):
        samples.append(make_sample(memory, headroom=headroom))
        shutil.rmtree(memory / "sample")
    older = samples.pop()
    for number in range(rounds_of(600 if either_kernel == "native" else 100)):
        sample = samples[number % 2]
        files, what = destroy(rng, sample, older)
        print(number, what)
        path = restore(files, memory / "log")
        strict = read_all(path)
        assert_prefix(strict, sample)
        loose = read_all(path, on_gap="skip", on_corruption="skip")
        assert_true(loose, sample)
        trusted_control = files.get(CONTROL) == sample.files[CONTROL]
        if len(strict.records) < sample.next and trusted_control:
            assert strict.error is not None, "silent loss"
        if set(loose.records) - set(strict.records):
            assert strict.error is not None
        with virta.open(path, durability="none") as log:
            log.repair()
            assert log.verify().problems == []
            offset = log.append("new", b"", b"new")
            if trusted_control:
                assert offset >= sample.next
        after = read_all(path, on_gap="skip")
        assert after.error is None
        assert after.records.pop(int(offset)) == (b"new", b"", b"new")
        assert_true(after, sample)


@pytest.mark.slow
def test_a_tail_of_garbage_or_of_an_older_file_loses_nothing(memory):
    """Bytes behind the end that no writer published are set aside by the next writer; every record stays."""
    rng = seed_of("tails")
    sample = make_sample(memory)
    name = sample.active
    data = sample.files[name]
    first = data.find(b"\x36\x01\x04\x00\x01") - 1
    # Each ends in a byte that is not zero: nothing but zeros would be headroom, which is cut off without a report.
    tails = [rng.randbytes(n - 1) + bytes([rng.randint(1, 255)]) for n in (1, 55, 56, 57, 5000)]
    tails += [
        bytes(100) + b"!",
        data,
        data[first:],
        data[first : first + 60],
        sample.files[sample.sealed],
    ]
    for tail in tails:
        for control in (True, False):
            files = {**sample.files, name: data + tail}
            if not control:
                del files[CONTROL]
            path = restore(files, memory / "log")
            if control:
                assert read_all(path) == Seen(sample.records, None)
            with virta.open(path, durability="none") as log:
                assert log.append("new", b"", b"new") == sample.next
                assert log.recovered, "the writer said nothing about what it cut off"
                assert log.verify().problems == []
                kept = b"".join(p.read_bytes() for p in (path / "quarantine").glob("*.bin"))
                assert kept == tail
            seen = read_all(path)
            assert seen.records.pop(sample.next) == (b"new", b"", b"new")
            assert seen == Seen(sample.records, None)


# --- power loss ------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A log as it was at the cut: files, what was promised, and what was on disk of the active segment."""

    files: Image
    records: dict[int, tuple[bytes, bytes, bytes]]
    durable: int  # every offset below it was acknowledged as durable
    safe: dict[str, int]  # bytes of each segment that were synced
    controls: list[bytes]


def make_run(rng, folder: Path) -> Run:
    path = folder / "run"
    shutil.rmtree(path, ignore_errors=True)
    durable, controls = 0, []
    safe: dict[str, int] = {}
    with virta.open(path, durability="none", segment_bytes=rng.choice((4096, 65536))) as log:
        for _ in range(rng.randrange(1, 25)):
            level = rng.choice(("none", "none", "group", "fsync"))
            batch = [
                ("t", str(rng.randrange(9)), rng.randbytes(rng.choice((0, 20, 300, 3000))))
                for _ in range(rng.choice((1, 1, 2, 10)))
            ]
            done = log.append_many(batch, durability=level)
            if rng.random() < 0.5:
                controls.append((path / CONTROL).read_bytes())
            if level != "none":
                durable = done + done.count
                active = segment_name(segment_bases(path)[-1])
                safe[active] = log.segments()[-1].bytes
        for base in segment_bases(path)[:-1]:  # sealed is durable
            safe[segment_name(base)] = (path / segment_name(base)).stat().st_size
        active = segment_bases(path)[-1]
        durable = max(durable, active)
        safe.setdefault(segment_name(active), SEGMENT_HEADER_BYTES)
        records = {r.offset: (bytes(r.topic), bytes(r.key), r.value) for r in log.read()}
        files = image_of(path)  # with its headroom
    return Run(files, records, durable, safe, [bytes(4096), *controls])


def cut_power(rng, run: Run) -> Image:
    """What the disk may contain after a power cut: unsynced pages there, zero, or not at all."""
    files = dict(run.files)
    for name, safe in run.safe.items():
        data = bytearray(files[name])
        at = safe
        while at < len(data):
            end = min(len(data), (at // 512 + 1) * 512)
            if rng.random() < 0.4:
                data[at:end] = bytes(end - at)
            at = end
        if rng.random() < 0.6:
            del data[rng.randrange(safe, len(data) + 1) :]
        files[name] = bytes(data)
    choice = rng.randrange(4)
    page = bytearray(rng.choice(run.controls) if choice == 0 else files[CONTROL])
    page[8:16] = rng.randbytes(8)  # the machine has booted since
    files[CONTROL] = bytes(4096) if choice == 1 else bytes(page)
    if choice == 2:
        del files[CONTROL]
    for name in [n for n in files if n.endswith(".pidx") and rng.random() < 0.3]:
        del files[name]
    return files


@pytest.mark.slow
def test_power_loss(memory, either_kernel):
    """Pages after the last sync kept, zeroed or cut, any control page: nothing acknowledged as durable is lost."""
    rng = seed_of("power")
    torn = whole = 0
    for _ in range(rounds_of(400 if either_kernel == "native" else 40)):
        run = make_run(rng, memory)
        path = restore(cut_power(rng, run), memory / "log")
        if rng.random() < 0.5:  # a reader before any writer
            seen = read_all(path, on_gap="skip")
            assert set(range(run.durable)) <= set(seen.records)
            assert all(run.records[o] == r for o, r in seen.records.items())
        with virta.open(path) as log:
            offset = log.append("new", b"", b"new")
            torn, whole = torn + bool(log.recovered), whole + (not log.recovered)
            assert offset >= run.durable
            assert log.verify().problems == []
            assert log.append("new", b"", b"newer") == offset + 1
        seen = read_all(path, on_gap="skip")
        assert seen.error is None
        assert seen.records.pop(int(offset)) == (b"new", b"", b"new")
        assert seen.records.pop(offset + 1) == (b"new", b"", b"newer")
        assert all(run.records[o] == r for o, r in seen.records.items()), "a wrong record"
        assert set(range(run.durable)) <= set(seen.records), "a durable record is lost"
    print(f"power: {torn} torn, {whole} whole")
    assert torn


def test_compaction_waits_for_what_replaces(memory):
    """Compaction drops an old value only when the newer one is on disk: a power cut never takes both."""
    path = memory / "log"
    with virta.open(path, durability="none", segment_bytes=4096) as log:
        log.append("t", b"k", b"old")
        for _ in range(3):
            log.append("t", b"", bytes(1500))
        log.append("t", b"k", b"new")
        assert log.durable_offset <= 4
        log.compact()
        assert values_of(log, b"k") == [b"old", b"new"]

        for _ in range(3):
            log.append("t", b"", bytes(1500))
        assert log.durable_offset > 4
        log.compact()
        assert values_of(log, b"k") == [b"new"]


def values_of(log, key):
    return [bytes(record.value) for record in log.read(visibility="committed") if record.key == key]
