"""Paths of the files that are shipped: beside the package in a checkout, inside it in an installed wheel."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
ASSET_PREFIX = "asset:"
LFS_POINTER = b"version https://git-lfs"
"""First bytes of the text that a checkout has in place of a Git LFS file that was not downloaded."""


def shipped(folder: str) -> Path:
    """The shipped folder ``configs`` or ``assets``.

    Raises:
        FileNotFoundError: the installation lacks it.
    """
    # The wheel first: its parent is site-packages, where another package may have such a folder.
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / folder).is_dir():
            return parent / folder
    raise FileNotFoundError(f"this installation of flowgrpo_rc lacks its folder {folder!r}; reinstall it")


def resolve_asset(path: str) -> str:
    """``asset:NAME`` becomes the shipped file or folder of that name, and ``~`` the home folder.

    Raises:
        FileNotFoundError: no such asset; lists the shipped ones.
    """
    if not path.startswith(ASSET_PREFIX):
        return os.path.expanduser(path)
    assets = shipped("assets")
    target = assets / path.removeprefix(ASSET_PREFIX)
    if not target.exists():
        names = ", ".join(f"{ASSET_PREFIX}{p.name}" for p in sorted(assets.iterdir()))
        raise FileNotFoundError(f"{path} is not shipped with flowgrpo_rc; shipped: {names}")
    return str(target)


def cache_folder() -> Path:
    """Folder of files that a user's runs share and can make again: ``$FLOWGRPO_RC_CACHE``, or ``flowgrpo_rc`` in
    ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("FLOWGRPO_RC_CACHE")
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "flowgrpo_rc"
    return folder.expanduser()
