"""Helpers that tests import by name."""

from conftest import SMALL_RUN


def overrides_of(folder, *overrides):
    """The overrides of ``small_config`` for a command line, with the run folder at ``folder``."""
    return [*SMALL_RUN, f"trainer.default_local_dir={folder}", *overrides]
