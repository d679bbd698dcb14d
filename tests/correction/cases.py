"""Batches for the tests of the correction package."""

import torch


def batch(seed, rows, columns, *, spread=0.3, shift=0.1, density=0.7, dtype=torch.float64):
    """`(log_prob, rollout_log_prob, mask)`: seeded, off-centre, with an empty row where there is room for one."""
    g = torch.Generator().manual_seed(seed)
    p = -2.0 * torch.rand(rows, columns, generator=g, dtype=torch.float64)
    q = p - shift - spread * torch.randn(rows, columns, generator=g, dtype=torch.float64)
    mask = (torch.rand(rows, columns, generator=g) < density).float()
    mask[0, 0] = 1.0
    if rows > 3:
        mask[2] = 0.0
    return p.to(dtype), q.to(dtype), mask


SHAPES = [(1, 1), (4, 1), (6, 2), (5, 10), (3, 65), (7, 300)]
