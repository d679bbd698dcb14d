"""Keep log lines of other libraries off a run's console, where this package prints its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

IMPORTS = "transformers.utils.import_utils"
"""Logger that reports a missing torchvision, also for image processors that are not used here."""
TOKENIZATION = "transformers.tokenization_utils_base"
"""Logger that warns of texts longer than a tokenizer's model reads, without naming them."""
_TALK_OF_LOADING = (
    IMPORTS,
    "diffusers.models.modeling_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.image_processing_auto",
)


@contextmanager
def only_errors(*names: str) -> Iterator[None]:
    """Inside, the loggers of these names pass errors on and nothing less."""
    loggers = [logging.getLogger(name) for name in names]

    # A filter, because transformers takes a logger's level for a request to log more.
    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    for logger in loggers:
        logger.addFilter(is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_error)


@contextmanager
def quiet_loading(*libraries: str) -> Iterator[None]:
    """Inside, ``diffusers`` and ``transformers`` show no bars (a run shows one, its own) and no tables of missing
    weights; ``libraries`` names those of the two that are in use."""
    switches = [import_module(f"{library}.utils.logging") for library in libraries]
    # Bars of several processes would overwrite each other on one terminal.
    for switch in switches:
        switch.disable_progress_bar()
    try:
        with only_errors(*_TALK_OF_LOADING):
            yield
    finally:
        for switch in switches:
            switch.enable_progress_bar()
