"""The files that a command writes into the folder of ``--out``. A different earlier result is kept under a number."""

import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any


def make_folder(root: Path) -> None:
    """Create the folder of ``--out``, before anything is measured.

    Raises:
        ValueError: ``root`` cannot be a folder, or cannot be written to.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"--out: {root} is not a folder; give one, or a name that is free")
    try:
        root.mkdir(parents=True, exist_ok=True)
        # The mode does not bind root, nor describe some network disks, so that writing is tried.
        with tempfile.TemporaryFile(dir=root):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--out: cannot write to {root} ({reason}); give another folder") from error


def write_files(
    root: Path, names: Sequence[str], write: Callable[[Path], object], measured: Callable[[Path], Any]
) -> list[str]:
    """Have ``write`` make the files ``names`` in a folder, and move them to ``root``; returns lines to print.

    Earlier files get a free number where ``measured`` of the first one differs.

    Raises:
        OSError: the disk is full, or the folder is gone; earlier files stay as they are.
    """
    # serve-reward shares this parser and runs where filelock is not installed.
    from flowgrpo_rc.run_folder import RunFolder

    lines = []
    try:
        # Renamed when all are whole, in the same file system, so that a full disk costs no earlier result.
        with tempfile.TemporaryDirectory(dir=root, prefix=".writing-") as name:
            new = Path(name)
            write(new)
            if measured(root / names[0]) != measured(new / names[0]) and _present(root, names):
                number = next(n for n in count(1) if not _present(root, _numbered(names, n)))
                RunFolder(root).set_aside(tuple(names), number)
                kept = ", ".join(_present(root, _numbered(names, number)))
                lines.append(f"The earlier result there says something else; kept as {kept}")
            for file in names:
                os.replace(new / file, root / file)
    except OSError as error:
        raise OSError(f"--out: cannot write the result to {root}: {error}; give another folder") from error
    return [*lines, f"Written: {', '.join(str(root / file) for file in names)}"]


def _numbered(names: Sequence[str], number: int) -> list[str]:
    return [f"{Path(name).stem}.{number}{Path(name).suffix}" for name in names]


def _present(root: Path, names: Sequence[str]) -> list[str]:
    return [str(root / name) for name in names if (root / name).exists()]
