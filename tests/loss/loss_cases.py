"""Shared by the tests of the losses: the modes, a slow correction in float64, and a loss on two ranks."""

import math

import torch
from torch.testing import assert_close

F64 = torch.float64
EXACT = {"rtol": 0, "atol": 0}
MODES = {
    "decoupled": {},
    "bypass ppo_clip": {"bypass_mode": True},
    "bypass reinforce": {"bypass_mode": True, "loss_type": "reinforce"},
}
BAND = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.15"}  # mirrored it would be [.87, 1.25]
STATISTICS = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def loop_correction(policy, rollout, rc, mask=None):
    """Weights and keep-mask of `policy` over `rollout`, one float at a time, over valid elements only.

    `(B,)` counts as `(B, 1)`.
    """
    valid = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask
    weights, keep = torch.ones_like(rollout), valid.clone()
    thresholds = str(rc.get("rollout_rs_threshold", "")).split(",")
    for i in range(len(rollout)):
        at = valid[i].reshape(-1).nonzero().flatten().tolist()
        gaps = [(policy[i] - rollout[i]).reshape(-1).tolist()[j] for j in at]
        n = len(gaps)
        row_weights = [1.0] * n
        if n and rc.get("rollout_is") is not None:
            exponents = {"token": gaps, "sequence": [sum(gaps)] * n, "geometric": [sum(gaps) / n] * n}
            row_weights = [math.exp(x) for x in exponents[rc["rollout_is"]]]
            threshold = str(rc["rollout_is_threshold"])
            if "_" in threshold:
                low, high = map(float, threshold.split("_"))
                row_weights = [x if low <= x <= high else 0.0 for x in row_weights]
            else:
                row_weights = [min(x, float(threshold)) for x in row_weights]
        row_keep = [True] * n
        for option, threshold in zip((rc.get("rollout_rs") or "").split(","), thresholds, strict=False):
            if not option or not n:
                continue
            aggregate, _, statistic = option.rpartition("_")
            values = [STATISTICS[statistic](x) for x in gaps]
            combined = {
                "token": values,
                "seq_sum": [sum(values)] * n,
                "seq_mean": [sum(values) / n] * n,
                "seq_max": [max(values)] * n,
            }[aggregate]
            if statistic == "k1":
                low, high = map(float, threshold.split("_"))
                passes = [low <= math.exp(x) <= high for x in combined]
            else:
                passes = [x <= float(threshold) for x in combined]
            row_keep = [a and b for a, b in zip(row_keep, passes, strict=True)]
        weights[i].view(-1)[at] = tensor(*row_weights)
        keep[i].view(-1)[at] = torch.tensor(row_keep, dtype=torch.bool)
    return weights, keep


def accumulated(loss_sums, config, inputs, data, cut):
    """Sum over denominator, gradients and metrics of micro-batches added up, as the actor does it.

    `inputs` is the model's output; gradients come back for those of its tensors that want one.
    """
    leaves = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in inputs.items()}
    sums, denominator, metrics = 0.0, 0.0, None
    for rows in cut:
        part = loss_sums(config, {k: v[rows] for k, v in leaves.items()}, {k: v[rows] for k, v in data.items()})
        part.loss_sum.backward()
        sums, denominator = sums + part.loss_sum.detach(), denominator + part.denominator
        metrics = part.metrics if metrics is None else metrics + part.metrics
    gradients = {k: v.grad / denominator for k, v in leaves.items() if v.requires_grad}
    return sums / denominator, gradients, metrics.compute()


def assert_inputs_stay(run, data):
    """Nothing in `data` gets a gradient or other values."""
    for value in data.values():
        if value.is_floating_point():
            value.requires_grad_()
    before = {name: (id(value), value.detach().clone()) for name, value in data.items()}
    run(data)
    assert [value.grad for value in data.values()] == [None] * len(data)
    assert {name: id(value) for name, value in data.items()} == {name: at for name, (at, _) in before.items()}
    assert_close({k: v.detach() for k, v in data.items()}, {k: v for k, (_, v) in before.items()}, **EXACT)


def on_two_ranks(folder, loss, cases, batch_of, first):
    """Results of two gloo processes for each case: averaged loss and gradient, a lone rank's loss, and metrics.

    `batch_of(*case)` is `config, log_probs, data`, of which rank 0 holds the first rows.
    """
    torch.multiprocessing.spawn(_rank, (str(folder), loss, cases, batch_of, first), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def _rank(rank, folder, loss, cases, batch_of, first):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for case in cases:
        config, new, data = batch_of(*case)
        rows = slice(0, first) if rank == 0 else slice(first, None)
        log_probs = new.requires_grad_()
        shard = {k: v[rows] for k, v in data.items()}
        value, metrics = loss(config, {"log_probs": log_probs[rows]}, shard, dp_group=torch.distributed.group.WORLD)
        value.backward()
        alone, _ = loss(config, {"log_probs": new[rows]}, shard)
        torch.distributed.all_reduce(log_probs.grad)
        losses = value.detach().clone()
        torch.distributed.all_reduce(losses)
        results.append((losses / 2, log_probs.grad / 2, alone.detach(), metrics))
    torch.save(results, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()
