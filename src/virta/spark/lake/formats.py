"""
Commit files to the tables of a lake, and list the files of its tables; one class a format.

`committed(table)` is the offset up to which a table has its records: compaction writes the others only. It is kept in
the same commit as the files: in the name of a range (parquet), in a transaction id (Delta), in a property of the
snapshot (Iceberg). So a compaction that is killed at any point and run again writes every record once.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlparse

from virta import files
from virta.errors import VirtaError
from virta.spark.lake.directory import DAY, Lake, LakeError, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from virta.spark.lake.parquet import DataFile

    NewFiles = Mapping[str, tuple[pa.Schema, Sequence[DataFile]]]  # by table

NAMESPACE = "lake"
NEXT = "virta.next-offset"
NO_DELETIONS = "{table} has rows deleted by another program: read it with the format's own reader"


class TableFormat(Protocol):
    """How a format keeps tables."""

    has_day: bool  # whether files have the column `day`

    def committed(self, table: str) -> int | None:
        """Return the offset up to which the table has its records, None if there is no table yet."""

    def commit(self, tables: NewFiles, bounds: tuple[int, int], draft: Path) -> None:
        """Make files visible, those of a table all at once."""

    def files(self, table: str) -> list[str]:
        """Return the paths of a table's files."""


def format_of(lake: Lake) -> TableFormat:
    """
    Return the format of a lake.

    Raises:
        VirtaError: its library is not installed.
    """
    known: dict[str, Callable[[Lake], TableFormat]] = {
        "parquet": ParquetTables,
        "delta": DeltaTables,
        "iceberg": IcebergTables,
    }
    try:
        return known[lake.format](lake)
    except ImportError as error:
        raise VirtaError(
            f"{error.name} is not installed: run `pip install 'virta[{lake.format}]'`",
            code="lake_missing",
        ) from error


def checked_end(path: str | Path, log_id: str, first: int) -> int:
    """
    Return the offset up to which a lake has all records of a log that begins at `first`.

    Raises:
        LakeError: there is no lake, it is another log's, or it lacks records before its end.
    """
    lake = Lake.load(path)
    if lake is None:
        raise LakeError(f"there is no lake in {path}: `virta lake compact` makes one")
    if lake.log not in {None, log_id}:
        raise LakeError(f"{path} is the lake of log {lake.log}, not of {log_id}")
    if lake.next is None or lake.first is None:
        return first
    if lake.first > first:
        raise LakeError(
            f"the lake in {path} begins at offset {lake.first}: it lacks those from {first} on"
        )
    tables = format_of(lake)
    for table, end in lake.tables.items():
        found = tables.committed(table)
        if found is None or found < end:
            raise LakeError(
                f"the table {table} in {path} should end at offset {end}, and"
                f" {'is missing' if found is None else f'ends at {found}'}: restore it"
            )
    return lake.next


class ParquetTables:
    """Ranges: all tables appear together, by one rename."""

    has_day = False

    def __init__(self, lake: Lake) -> None:
        self.lake = lake

    def committed(self, table: str) -> int | None:  # noqa: ARG002 - all tables end at one offset
        return self.lake.next

    def commit(self, tables: NewFiles, bounds: tuple[int, int], draft: Path) -> None:
        del tables  # their files are in the draft
        files.make_directory(draft)
        for folder in sorted(path for path in draft.rglob("*") if path.is_dir()):
            files.sync_directory(folder)
        files.sync_directory(draft)
        draft.rename(self.lake.path / f"range={bounds[0]:020d}-{bounds[1]:020d}")
        files.sync_directory(self.lake.path)

    def _ranges(self) -> list[Path]:
        """Return the directories of the lake as it was loaded: there may be newer ranges by now."""
        end = self.lake.next or 0
        return [folder for _, following, folder in ranges(self.lake.path) if following <= end]

    def files(self, table: str) -> list[str]:
        found = []
        for folder in self._ranges():
            found += sorted(map(str, (folder / table).rglob("*.parquet")))
        return found

    def old_files(self) -> list[str]:
        """Return the files of ranges in the first layout, day=…/topic=…, which have no types."""
        found = []
        for folder in self._ranges():
            for day in sorted(path for path in folder.iterdir() if DAY.fullmatch(path.name)):
                found += sorted(map(str, day.rglob("*.parquet")))
        return found


class DeltaTables:
    """Delta Lake by delta-rs: a commit has the files and the transaction id of the log."""

    has_day = False

    def __init__(self, lake: Lake) -> None:
        import deltalake  # noqa: PLC0415 - an extra

        self.lake = lake
        self._delta: Any = deltalake
        self._app = f"virta-lake-{lake.log}"

    def _table(self, table: str) -> Any:
        path = str(self.lake.path / table)
        return self._delta.DeltaTable(path) if self._delta.DeltaTable.is_deltatable(path) else None

    def committed(self, table: str) -> int | None:
        found = self._table(table)
        return None if found is None else found.transaction_version(self._app)

    def commit(self, tables: NewFiles, bounds: tuple[int, int], draft: Path) -> None:
        from deltalake.transaction import (  # noqa: PLC0415 - an extra
            AddAction,
            CommitProperties,
            Transaction,
        )

        for name, (schema, written) in tables.items():
            root = self.lake.path / name
            found = self._table(name) or self._create(root, schema)
            actions = [
                AddAction(
                    path=str(moved.relative_to(root)),
                    size=file.bytes,
                    partition_values={"day": file.day},
                    modification_time=int(moved.stat().st_mtime * 1000),
                    data_change=True,
                    stats=delta_stats(file),
                )
                for file, moved in move_files(written, draft, root)
            ]
            properties = CommitProperties(app_transactions=[Transaction(self._app, bounds[1])])
            found.create_write_transaction(
                actions, "append", found.schema(), ["day"], commit_properties=properties
            )
            sync_newest(root / "_delta_log")

    def _create(self, root: Path, schema: pa.Schema) -> Any:
        import pyarrow as pa  # noqa: PLC0415 - needs the extra anyway

        columns = schema.append(pa.field("day", pa.date32()))
        return self._delta.DeltaTable.create(str(root), columns, partition_by=["day"])

    def files(self, table: str) -> list[str]:
        found = self._table(table)
        if found is None:
            return []
        if "deletionVectors" in (found.protocol().reader_features or ()) and len(
            found.deletion_vectors().read_all() if hasattr(found, "deletion_vectors") else ()
        ):
            raise LakeError(NO_DELETIONS.format(table=table))
        return [local_path(uri) for uri in found.file_uris()]


class IcebergTables:
    """Apache Iceberg by PyIceberg, in a catalog of the lake's own, `catalog.db` (SQLite)."""

    has_day = True  # Iceberg has partition columns in its files

    def __init__(self, lake: Lake) -> None:
        from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415 - an extra

        self.lake = lake
        root = lake.path.resolve()
        files.make_directory(root)
        self._catalog: Any = SqlCatalog(
            "virta", uri=f"sqlite:///{root}/catalog.db", warehouse=root.as_uri()
        )
        self._catalog.engine.dispose()

    @contextmanager
    def _open_catalog(self) -> Iterator[Any]:
        """Yield the catalog; no connection to its file is open afterwards."""
        try:
            yield self._catalog
        finally:
            self._catalog.engine.dispose()

    def _table(self, table: str) -> Any:
        identifier = (NAMESPACE, table)
        with self._open_catalog() as catalog:
            return catalog.load_table(identifier) if catalog.table_exists(identifier) else None

    def committed(self, table: str) -> int | None:
        found = self._table(table)
        if found is None:
            return None
        snapshot = found.current_snapshot()
        while snapshot is not None:  # others may have added snapshots of their own
            if NEXT in snapshot.summary.additional_properties:
                return int(snapshot.summary.additional_properties[NEXT])
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else found.snapshot_by_id(parent)
        return None

    def commit(self, tables: NewFiles, bounds: tuple[int, int], draft: Path) -> None:
        with self._open_catalog() as catalog:
            for name, (_, written) in tables.items():
                root = self.lake.path.resolve() / name
                found = self._table(name) or self._create(catalog, name, root, written)
                moved = [str(path) for _, path in move_files(written, draft, root / "data")]
                found.add_files(moved, {NEXT: str(bounds[1])}, check_duplicate_files=False)
                sync_newest(root / "metadata")
        files.sync_file(self.lake.path / "catalog.db")

    def _create(self, catalog: Any, name: str, root: Path, written: Sequence[DataFile]) -> Any:
        from pyarrow import parquet  # noqa: PLC0415 - needs the extra anyway

        catalog.create_namespace_if_not_exists(NAMESPACE)
        made = catalog.create_table(
            (NAMESPACE, name),
            parquet.read_schema(written[0].path),  # the day included
            location=root.as_uri(),
        )
        with made.update_spec() as spec:
            spec.add_identity("day")
        return made

    def files(self, table: str) -> list[str]:
        found = self._table(table)
        if found is None:
            return []
        tasks = list(found.scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise LakeError(NO_DELETIONS.format(table=table))
        return [local_path(task.file.file_path) for task in tasks]


def move_files(
    written: Sequence[DataFile], draft: Path, target: Path
) -> list[tuple[DataFile, Path]]:
    """Move a draft's files into the table's directory; a commit makes them visible."""
    moved = []
    for file in written:
        # The draft's own name makes the file's unique: a killed compaction may have left some.
        folder = target / f"day={file.day}"
        place = folder / f"{file.offsets[0]:020d}-{draft.name[-8:]}.parquet"
        files.make_directory(folder)
        file.path.rename(place)
        files.sync_directory(folder)
        moved.append((file, place))
    return moved


def delta_stats(file: DataFile) -> str:
    return json.dumps(
        {
            "numRecords": file.rows,
            "minValues": {"offset": file.offsets[0]},
            "maxValues": {"offset": file.offsets[1]},
        }
    )


def sync_newest(folder: Path, count: int = 8) -> None:
    """Make a commit durable: the newest files of a table's metadata, and their names."""
    entries = sorted(
        (entry for entry in os.scandir(folder) if entry.is_file()),
        key=lambda entry: entry.stat().st_mtime_ns,
    )
    for entry in entries[-count:]:
        files.sync_file(entry.path)
    files.sync_directory(folder)


def local_path(uri: str) -> str:
    parsed = urlparse(uri)
    return unquote(parsed.path) if parsed.scheme == "file" else uri
