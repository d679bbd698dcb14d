"""Rows of a parquet file; damage is reported with the file and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line


def parquet_rows(path: Path, check_columns: Callable[[Sequence[str]], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows, each with its number from 1.

    Args:
        path: an existing file.
        check_columns: called with the names of the columns before any row is read.

    Raises:
        ValueError: the file is no parquet file, is damaged, or holds a value that Python cannot represent.
    """
    import pyarrow
    import pyarrow.parquet

    # The place of the damage decides pyarrow's error: its own classes, an OSError, or a decoder's error.
    damage = (pyarrow.ArrowException, OSError, EOFError, ValueError, OverflowError, MemoryError)
    try:
        # ``read_table`` would also take columns from the names of the folders above.
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except damage as error:
        raise ValueError(f"{path} is not a parquet file ({one_line(error, 200)}); write or copy it again") from error
    with file:
        check_columns(file.schema_arrow.names)
        first = 1
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group)
                table.validate(full=True)
                found = _in_microseconds(table).to_pylist()
            except damage as error:
                raise ValueError(
                    f"{path} is damaged in rows {first} to {first + rows - 1} ({one_line(error, 200)}); copy it again"
                ) from error
            yield from enumerate(found, start=first)
            first += rows


def _in_microseconds(table: Any) -> Any:
    """The table with times in microseconds: pandas writes nanoseconds, which Python's times cannot hold."""
    import pyarrow

    for i, field in enumerate(table.schema):
        kind = field.type
        if getattr(kind, "unit", None) != "ns":
            continue
        if pyarrow.types.is_timestamp(kind):
            coarser = pyarrow.timestamp("us", kind.tz)
        elif pyarrow.types.is_duration(kind):
            coarser = pyarrow.duration("us")
        else:
            coarser = pyarrow.time64("us")
        table = table.set_column(i, field.name, table.column(i).cast(coarser, safe=False))
    return table
