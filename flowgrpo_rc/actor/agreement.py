"""What one process finds and all must know of, so that all go on, or stop, at the same place.

A process that stopped by itself would leave the others waiting in the next collective, and with a sharded transformer
that is its next forward. One process, without ``torch.distributed``, agrees with itself.
"""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor


def on_any_process(flag: Tensor | bool) -> bool:
    """Whether ``flag``, one boolean, is true on some process; every process must ask."""
    state = PartialState()
    if state.num_processes == 1:
        return bool(flag)
    found = torch.as_tensor(flag, device=state.device).int()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)


def rows_in_words(rows: list[int]) -> tuple[int, str]:
    """How many rows all processes name, and which; every process must ask.

    With several processes each one's rows are those of its own share of the batch, so that its number is told, too.
    """
    if PartialState().num_processes == 1:
        return len(rows), f"rows {rows[:8]}"
    shares = gather_object([rows])
    named = [f"rows {share[:8]} of process {number}" for number, share in enumerate(shares) if share]
    return sum(map(len, shares)), ", ".join(named)
