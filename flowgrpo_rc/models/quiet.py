"""Keep what other libraries log from a run's console where the same is said here in one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_errors(*names: str) -> Iterator[None]:
    """Inside, the loggers of these names pass errors on and nothing less.

    By a filter: transformers takes a logger's level for a request to log more.
    """
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
