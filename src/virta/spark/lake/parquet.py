"""
Parquet files of bounded size: rows of one table, one file or more a day, in the order of offsets, zstd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from virta import files

if TYPE_CHECKING:
    from datetime import date
    from pathlib import Path

FILE_BYTES_MAX = 128 * 1024 * 1024
ROW_GROUP_BYTES = 32 * 1024 * 1024  # in memory: what a reader skips or reads as a whole


@dataclass(frozen=True)
class DataFile:
    """A finished file; offsets and times (microseconds) are the smallest and largest in it."""

    path: Path
    day: str
    rows: int
    bytes: int
    offsets: tuple[int, int]
    times: tuple[int, int]


class TableWriter:
    """
    Writes the rows of one table to files under `directory`; `close` syncs and returns them.

    With `has_day`, files have the column `day`; without it, only their directory tells.
    A file has at most about `bytes_max`, plus the row group that passes it.
    """

    def __init__(
        self, directory: Path, schema: pa.Schema, *, bytes_max: int, has_day: bool
    ) -> None:
        self.directory = directory
        self.schema = schema.append(pa.field("day", pa.date32())) if has_day else schema
        self.has_day = has_day
        self.bytes_max = bytes_max
        self.buffered = 0
        self._rows: list[pa.RecordBatch] = []
        self._day: date | None = None
        self._writer: pq.ParquetWriter | None = None
        self._sink: pa.NativeFile | None = None
        self._groups: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
        self._paths: list[Path] = []
        self._done: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows in the order of offsets."""
        days = batch.column("timestamp").cast(pa.date32())
        for day in pc.unique(days).to_pylist():
            part = batch.filter(pc.equal(days, pa.scalar(day, pa.date32())))
            if day != self._day:
                self._end_file()
                self._day = day
            if self.has_day:
                column = pa.array([day] * part.num_rows, pa.date32())
                part = pa.RecordBatch.from_arrays([*part.columns, column], schema=self.schema)
            self._rows.append(part)
            self.buffered += part.nbytes
            if self.buffered >= ROW_GROUP_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is buffered, and end a file that is large enough."""
        self._write_group()
        if self._sink is not None and self._sink.tell() >= self.bytes_max:
            self._end_file()

    def _write_group(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            self._begin_file()
        assert self._writer is not None
        table = pa.Table.from_batches(self._rows, self.schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        offsets = table["offset"]
        times = table["timestamp"].cast(pa.int64())
        self._groups.append((table.num_rows, bounds(offsets), bounds(times)))
        self._rows, self.buffered = [], 0

    def close(self) -> list[DataFile]:
        """Finish, sync and return the files."""
        self._end_file()
        return self._done

    def _begin_file(self) -> None:
        assert self._day is not None
        folder = self.directory / f"day={self._day.isoformat()}"
        files.make_directory(folder)
        path = folder / f"{len(self._paths):05d}.parquet"
        self._paths.append(path)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pq.ParquetWriter(self._sink, self.schema, compression="zstd")

    def _end_file(self) -> None:
        self._write_group()
        if self._writer is None:
            return
        assert self._sink is not None
        assert self._day is not None
        self._writer.close()
        self._sink.close()
        self._writer = self._sink = None
        path = self._paths[-1]
        files.sync_file(path)
        rows, offsets, times = zip(*self._groups, strict=True)
        self._groups = []
        self._done.append(
            DataFile(
                path=path,
                day=self._day.isoformat(),
                rows=sum(rows),
                bytes=path.stat().st_size,
                offsets=(min(low for low, _ in offsets), max(high for _, high in offsets)),
                times=(min(low for low, _ in times), max(high for _, high in times)),
            )
        )


def bounds(column: pa.ChunkedArray) -> tuple[int, int]:
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]
