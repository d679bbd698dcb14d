"""Keep what other libraries log from a run's console where the same is said here in one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

IMPORTS = "transformers.utils.import_utils"
"""Says of image processors that pipelines name and nobody here uses that they do without torchvision."""
TOKENIZATION = "transformers.tokenization_utils_base"
"""Warns of texts that are longer than a tokenizer's model reads, without naming them."""
_TALK_OF_LOADING = (
    IMPORTS,
    "diffusers.models.modeling_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.image_processing_auto",
)


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


@contextmanager
def quiet_loading(*libraries: str) -> Iterator[None]:
    """Inside, ``diffusers`` and ``transformers`` show no bars (a run shows one, its own) and no tables of missing
    weights; ``libraries`` names those of the two that are in use."""
    switches = [import_module(f"{library}.utils.logging") for library in libraries]
    for switch in switches:
        switch.disable_progress_bar()
    try:
        with only_errors(*_TALK_OF_LOADING):
            yield
    finally:
        for switch in switches:
            switch.enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
