"""The work of each of the two processes of `test_distributed`; a module of its own so that they can import it."""

import torch

from flowgrpo_rc.batch import apply_rollout_correction_to_diffusion_batch
from flowgrpo_rc.correction import MetricAccumulator, RolloutCorrectionConfig, compute_rollout_correction

# Rows of each rank: unequal, so that a mean of the ranks' means would be wrong.
SIZES = (4, 9)
LEVELS = ("token", "sequence", "geometric")


def config(level: str) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold="0.7_1.8",
        rollout_is_mode="clip",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,seq_mean_k3",
        rollout_rs_threshold="0.6_1.9,0.08",
        rollout_token_veto_threshold=0.4,
    )


def data() -> dict[str, torch.Tensor]:
    """All rows: log-probs, a mask, timesteps. The first rank's gap is much larger than the second's."""
    g = torch.Generator().manual_seed(17)
    rows = sum(SIZES)
    q = -torch.rand(rows, 3, generator=g, dtype=torch.float64)
    spread = torch.where(torch.arange(rows) < SIZES[0], 0.6, 0.1).unsqueeze(1)
    mask = torch.rand(rows, 3, generator=g) < 0.8
    mask[SIZES[0]] = False
    timesteps = torch.randint(1, 4, (rows, 3), generator=g) * 100.0
    return {
        "p": q + 0.2 * spread + spread * torch.randn(rows, 3, generator=g, dtype=torch.float64),
        "q": q,
        "mask": mask,
        "timesteps": timesteps,
    }


def shard(rank: int) -> dict[str, torch.Tensor]:
    start = sum(SIZES[:rank])
    return {name: tensor[start : start + SIZES[rank]] for name, tensor in data().items()}


def results(rows: dict[str, torch.Tensor], *, micro_batches: int, accumulate: bool = True) -> dict:
    """Everything that is compared, from these rows; the last rank adds nothing unless `accumulate`."""
    out: dict = {}
    for level in LEVELS:
        made = compute_rollout_correction(
            rows["p"], rows["q"], rows["mask"], config=config(level), timesteps=rows["timesteps"]
        )
        factor = made.metrics["rollout_corr/rollout_is_batch_norm_factor"]
        plain = RolloutCorrectionConfig(**{**config(level).to_dict(), "rollout_is_batch_normalize": False})
        accumulator, empty = MetricAccumulator(), MetricAccumulator()
        for part in zip(*(rows[k].chunk(micro_batches) for k in ("p", "q", "mask", "timesteps")), strict=True):
            micro = compute_rollout_correction(*part[:3], config=plain, timesteps=part[3])
            accumulator.add(micro)
            if accumulate:
                empty.add(micro)
        batch = {"old_log_probs": rows["p"], "rollout_log_probs": rows["q"], "timesteps": rows["timesteps"]}
        batch, metrics = apply_rollout_correction_to_diffusion_batch(batch, config(level))
        out[level] = {
            "weights": made.weights,
            "mask": made.mask,
            "factor": factor,
            "accumulated": accumulator.compute(),
            "accumulated_where_present": empty.compute(),
            "batch_weights": batch["rollout_is_weights"],
            "batch_keep": batch["rollout_keep"],
            "batch_metrics": metrics,
        }
    return out


# Log ratio of every element of each rank, in float32: both below one half, on its two sides, both above.
SIDES = ((-13.8, -9.2), (-13.8, 0.1), (0.0, -13.8), (-0.6, -0.8), (0.2, 1e-4))


def sides() -> list[dict[str, float]]:
    """Of each of `SIDES` and each level: this rank's normalised weight, and the divisor."""
    rank, out = torch.distributed.get_rank(), []
    for case in SIDES:
        for level in LEVELS:
            columns = 3 if level == "geometric" else 1
            l = torch.full((SIZES[rank], columns), case[rank])  # noqa: E741
            options = RolloutCorrectionConfig(
                rollout_is=level, rollout_is_threshold=10.0, rollout_is_batch_normalize=True
            )
            made = compute_rollout_correction(l, torch.zeros_like(l), config=options)
            factor = made.metrics["rollout_corr/rollout_is_batch_norm_factor"]
            out.append({"weight": float(made.weights[0, 0]), "factor": factor})
    return out


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        alone = torch.distributed.new_group([0]), torch.distributed.new_group([1])
        found = results(shard(rank), micro_batches=2, accumulate=rank == 1)
        rows = shard(rank)
        own = compute_rollout_correction(
            rows["p"], rows["q"], rows["mask"], config=config("token"), dp_group=alone[rank]
        )
        found["own_factor"] = own.metrics["rollout_corr/rollout_is_batch_norm_factor"]
        found["sides"] = sides()
        torch.save(found, f"{folder}/rank{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
