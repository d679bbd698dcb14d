"""Runs a page of the documentation or a notebook as a reader would, and holds what it prints against what is shown.

How a page's blocks are read:

- a block whose title is a file name is written to that file;
- ``python`` blocks without a title run one after the other, in one scope;
- of ``bash`` blocks the commands that start with ``flowgrpo-rc`` run; an exit code other than 0 stands in a comment
  behind the command, ``# exit code 3``;
- a ``text`` block without a title shows what the block before it prints. ``...`` stands for anything, and a number with
  a decimal point may differ by one in its last digit, for the sake of machines that round differently. Numbers of
  training differ by more: with ``digits=False`` any number will do, and the test checks what the page claims of it.
"""

import contextlib
import io
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

_BLOCK = re.compile(r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)
_DECIMAL = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.]*\w)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str
    line: int
    """The line at which its text begins, counted from 1."""


def blocks(page):
    """The fenced blocks of ``docs/PAGE``, in order."""
    source = (DOCS / page).read_text()
    found = _BLOCK.finditer(source)
    return [Block(m["language"], m["title"], m["text"], source.count("\n", 0, m.start("text")) + 1) for m in found]


def cells(notebook):
    """The code cells of a notebook; one that begins with ``%%bash`` is commands. Their lines are counted from 1."""
    found = json.loads(notebook.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    return [Block("bash" if text.startswith("%%bash") else "python", None, text, 1) for text in sources]


def run_page(page, folder, monkeypatch, only=slice(None), *, digits=True):
    """Run ``docs/PAGE``, or ``only`` some of its blocks, in ``folder``; returns the scope of its Python blocks."""
    return run_blocks(blocks(page)[only], f"docs/{page}", folder, monkeypatch, digits=digits)


def run_blocks(found, name, folder, monkeypatch, *, digits=True):
    """Run the blocks of a page ``name`` in ``folder``; returns the scope of its Python blocks."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    scope = {"__name__": "page"}
    printed = ""
    for block in found:
        where = f"{name}:{block.line}"
        if block.title is not None:
            (Path(folder) / block.title).write_text(block.text)
        elif block.language == "python":
            printed = _run_python(block, where, scope)
        elif block.language == "bash":
            printed = _run_commands(block, where)
        elif block.language == "text":
            assert_shown(block.text, printed, where, digits=digits)
    return scope


def _run_python(block, where, scope):
    """The block's output. Its lines have their numbers in the page, for tracebacks."""
    code = compile("\n" * (block.line - 1) + block.text, where, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, scope)
    return out.getvalue()


def _run_commands(block, where):
    """The output of the block's ``flowgrpo-rc`` commands."""
    from flowgrpo_rc.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        for line in block.text.replace("\\\n", " ").splitlines():
            if not line.startswith("flowgrpo-rc "):
                continue
            command, _, comment = line.partition("#")
            expected = re.search(r"exit code (\d+)", comment)
            code = main(shlex.split(command)[1:])
            assert code == int(expected[1] if expected else 0), (where, line, out.getvalue())
    return out.getvalue()


def assert_shown(shown, printed, where, *, digits=True):
    """Compare the output that a page shows with the one that was ``printed``."""
    pattern, numbers = "", []
    for part in re.split(f"({_DECIMAL.pattern}|\\.\\.\\.|\\s+)", shown.strip()):
        if part == "...":
            pattern += ".*?"
        elif part.isspace():
            pattern += r"\s+"
        elif _DECIMAL.fullmatch(part):
            pattern += f"({_DECIMAL.pattern})"
            numbers.append(part)
        else:
            pattern += re.escape(part)
    match = re.fullmatch(pattern, printed.strip(), re.S)
    assert match, f"{where} shows\n{shown}\nbut this is printed\n{printed}"
    if not digits:
        return
    for expected, got in zip(numbers, match.groups(), strict=True):
        digits, _, exponent = expected.partition("e")
        last_place = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        assert abs(float(got) - float(expected)) < 1.5 * last_place, f"{where} shows {expected}, but {got} is printed"
