"""Agree over all processes, so that all continue or stop at the same place.

A process that stops alone leaves the others waiting in the next collective, which with a sharded transformer is the
next forward pass. A single process needs no ``torch.distributed``.
"""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor


def on_any_process(flag: Tensor | bool) -> bool:
    """True if ``flag``, one boolean, is true on any process. Collective: every process must call."""
    state = PartialState()
    if state.num_processes == 1:
        return bool(flag)
    # NCCL reduces integers, not booleans.
    found = torch.as_tensor(flag, device=state.device).int()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)


def rows_in_words(rows: list[int]) -> tuple[int, str]:
    """Count and list the rows that all processes name. Collective: every process must call.

    Each process numbers the rows of its own share of the batch, so with several processes the text names the process.
    """
    if PartialState().num_processes == 1:
        return len(rows), f"rows {rows[:8]}"
    shares = gather_object([rows])
    # The first eight rows are enough to find a pattern; a whole batch would bury the remedy.
    named = [f"rows {share[:8]} of process {number}" for number, share in enumerate(shares) if share]
    return sum(map(len, shares)), ", ".join(named)
