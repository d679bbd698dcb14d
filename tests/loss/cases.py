"""The modes of the loss, and the few lines that its tests share."""

import torch

F64 = torch.float64
EXACT = {"rtol": 0, "atol": 0}
MODES = {
    "decoupled": {},
    "bypass ppo_clip": {"bypass_mode": True},
    "bypass reinforce": {"bypass_mode": True, "loss_type": "reinforce"},
}


def tensor(*values):
    return torch.tensor(values, dtype=F64)
