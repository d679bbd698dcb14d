"""Rows of a parquet file, with every damage named: file, row and column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgrpo_rc.messages import one_line


def parquet_rows(path: Path, check_columns: Callable[[Sequence[str]], None]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their numbers from 1.

    Args:
        path: an existing file.
        check_columns: called with the names before anything is read.

    Raises:
        ValueError: it is not a parquet file, is damaged or encrypted, names a column twice, or holds a value that
            Python cannot represent.
    """
    import pyarrow
    import pyarrow.parquet

    # What pyarrow raises depends on where the damage strikes: its own classes, OSError, or a decoder's error.
    damage = (pyarrow.ArrowException, OSError, EOFError, ValueError, OverflowError, MemoryError)
    try:
        # Not `read_table`, which would take columns from the names of the folders above.
        file = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
    except damage as error:
        raise ValueError(f"{path} is not a parquet file ({one_line(error, 200)}); write or copy it again") from error
    with file:
        check_columns(names)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{path} has two columns {twice!r}; give each a name of its own")
        first = 1
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group)
                table.validate(full=True)
            except damage as error:
                raise ValueError(
                    f"{path} is damaged in rows {first} to {first + rows - 1} ({one_line(error, 200)}); copy it again"
                ) from error
            columns = {name: _values(path, name, table.column(name), first, damage) for name in names}
            for offset in range(table.num_rows):
                yield first + offset, {name: values[offset] for name, values in columns.items()}
            first += rows


def _values(path: Path, name: str, column: Any, first: int, damage: tuple[type[Exception], ...]) -> list[Any]:
    """The column's values as Python objects; ``first`` is the number of its first row.

    Times are cut to microseconds, the finest that Python's have: pandas writes nanoseconds, whatever the times.
    """
    try:
        return column.cast(_in_microseconds(column.type), safe=False).to_pylist()
    except damage:
        pass
    values = []
    for offset, scalar in enumerate(column):
        try:
            values.append(scalar.as_py())
        except damage as error:
            raise ValueError(
                f"{path}:{first + offset}: {name!r} cannot be read as {column.type} ({one_line(error, 200)}); "
                "correct it or leave the column out"
            ) from error
    return values


def _in_microseconds(kind: Any) -> Any:
    """The type of the same times in microseconds; any other type itself."""
    import pyarrow

    if getattr(kind, "unit", None) != "ns":
        return kind
    if pyarrow.types.is_timestamp(kind):
        return pyarrow.timestamp("us", kind.tz)
    return pyarrow.duration("us") if pyarrow.types.is_duration(kind) else pyarrow.time64("us")
