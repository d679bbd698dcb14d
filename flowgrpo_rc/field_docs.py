"""Fields in ``help()`` of a configuration class, each with the text below it in the source.

Python keeps no such text at run time. ``documented_fields`` reads it from the source file when the class's docstring is
read, so that importing a configuration parses nothing. A field with a nested section has the section's docstring.
"""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")

_WIDTH = 100
"""Columns of a line in ``help()``, which a terminal then still indents."""


def documented_fields(cls: type[T]) -> type[T]:
    """Decorator of a dataclass, above ``@dataclass``: its docstring gains a section with every field and its text."""
    cls.__doc__ = _DocstringWithFields(cls.__doc__)  # type: ignore[assignment]  (``type`` calls the descriptor)
    return cls


def field_texts(cls: type) -> dict[str, str]:
    """Field name -> description: the string literal below the field, or for a nested section the first paragraph of
    its docstring.

    Literals are missing where the source file is, as in a frozen program.
    """
    kinds = get_type_hints(cls)
    sections = {field.name: kinds[field.name] for field in fields(cls) if is_dataclass(kinds[field.name])}
    texts = {name: (inspect.getdoc(kind) or "").partition("\n\n")[0] for name, kind in sections.items()}
    # A subclass may describe an inherited field anew, so its text comes last.
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            texts |= _literals_below_fields(base)
    return texts


def _literals_below_fields(cls: type) -> dict[str, str]:
    # A frozen program and an interactive session have no source file.
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return texts


class _DocstringWithFields:
    """The ``__doc__`` of a class, completed when it is read."""

    def __init__(self, summary: str | None) -> None:
        self._summary = inspect.cleandoc(summary or "")

    def __get__(self, instance: object, owner: type) -> str:
        texts = field_texts(owner)
        entries = [_entry(field, texts.get(field.name, "")) for field in fields(owner)]
        section = textwrap.indent("\n".join(entries), "    ")
        return f"{self._summary}\n\nFields:\n{section}\n"


def _entry(field: Field[Any], text: str) -> str:
    """``name: type = default``, and the field's text below it."""
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    default = "" if field.default is MISSING else f" = {field.default!r}"
    described = textwrap.fill(" ".join(text.split()), _WIDTH - 4, break_on_hyphens=False)
    return f"{field.name}: {kind}{default}\n{textwrap.indent(described, '    ')}"
