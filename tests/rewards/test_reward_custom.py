"""Loading a user's function by path and name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo_rc.rewards import load_function


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_same_file_twice_is_one_module_and_equal_names_do_not_clash(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write(tmp_path / "a", "def f(*a): return 1\n")
    second = write(tmp_path / "b", "def f(*a): return 2\n")
    assert load_function(first, "f") is load_function(first, "f")
    assert load_function(first, "f")() == 1
    assert load_function(second, "f")() == 2


def test_dataclass_in_the_file_works(tmp_path: Path) -> None:
    """dataclasses look their module up in sys.modules while the file is executed."""
    path = write(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int = 3\ndef f(*a): return A().x\n",
    )
    assert load_function(path, "f")() == 3


def test_not_a_python_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a Python file; its name must end in \.py"):
        load_function(write(tmp_path, "", "mine.txt"), "f")


def test_file_that_raises_is_chained_and_can_be_retried(tmp_path: Path) -> None:
    path = write(tmp_path, "import no_such_module_here\n")
    with pytest.raises(ValueError, match=r"importing .*mine\.py raised ModuleNotFoundError") as caught:
        load_function(path, "f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    path.write_text("def f(): return 5\n")
    assert load_function(path, "f")() == 5


def test_missing_name_lists_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, "from math import sqrt\ndef b(): ...\ndef a(): ...\n")
    with pytest.raises(ValueError, match=r"defines no 'f'; it defines a, b$"):
        load_function(path, "f")
    with pytest.raises(ValueError, match=r"it defines no function$"):
        load_function(write(tmp_path, "x = 1\n", "empty.py"), "f")


def test_not_callable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name: 'f' in .* is a int, which cannot be called"):
        load_function(write(tmp_path, "f = 3\n"), "f")
