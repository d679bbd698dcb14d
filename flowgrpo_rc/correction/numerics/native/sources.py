"""What the extension was built from: `hatch_build.py` compiles the digest in, and an import compares."""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str | None:
    """Of the C sources; None in a wheel, which ships none."""
    files = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] if files else None
