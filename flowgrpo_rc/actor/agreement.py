"""Agree over all processes, so that all continue or stop at the same place.

A process that stops alone leaves the others waiting in the next collective, which with a sharded transformer is the
next forward pass. A single process needs no ``torch.distributed``.
"""

import torch
from accelerate import PartialState
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
