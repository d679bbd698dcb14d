"""The processes of a launch, as far as the launcher's environment variables describe them."""

import os

_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Variables in which launchers put a process's number."""
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which they put the number of processes."""


def has_peers() -> bool:
    """True if a launcher started this process as one of several."""
    return "LOCAL_RANK" in os.environ or any(os.environ.get(name, "1") != "1" for name in _SIZES)


def rank() -> int:
    """The number of this process; known before accelerate is imported. A number without a launcher, left over in the
    environment, does not count; accelerate ignores it too."""
    return int(next((os.environ[name] for name in _RANKS if name in os.environ), "0")) if has_peers() else 0


def report_to_launcher(error: BaseException) -> None:
    """Write ``error`` where ``torchrun`` looks for the first failure, which its report then shows. ``torchrun`` ends
    the other processes. This is what its decorator ``@record`` does for an exception that travels to the top, which
    those of the command line do not."""
    # Imported here: other launchers do not read the file, and torch is slow to import.
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
