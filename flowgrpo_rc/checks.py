"""Small checks that many modules share; each error names the field, the value and the remedy."""

from collections.abc import Mapping, Sequence


def choice(field: str, value: object, options: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``options``."""
    if value not in options:
        names = ("null" if option is None else str(option) for option in options)
        raise ValueError(f"{field}: got {value!r}; choose one of {', '.join(names)}")


def path(field: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field}: got {value!r}; give a path, as text")


def show(value: object) -> str:
    """A value as a message quotes it, shortened where it is long; null is spelled as in YAML."""
    if isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key}: {show(item)}' for key, item in list(value.items())[:9])}}}"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(show(item) for item in value[:9])}]"
    else:
        text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
