"""Texts of errors, as messages quote them."""


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The text of ``error`` in a line, cut to ``limit`` characters; its type where it has no text."""
    return printable(str(error))[:limit] or type(error).__name__


def printable(text: str) -> str:
    """``text`` in a line without control characters: the words of a server may hold a terminal's escape codes."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def reason(error: OSError) -> str:
    """The system's words for what went wrong, without the file's name, which a message already has."""
    return error.strerror or str(error)
