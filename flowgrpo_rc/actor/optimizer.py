"""The optimizer of an adapter: made, resumed, and its gradients summed over processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flowgrpo_rc.actor.config import OptimizerConfig
from flowgrpo_rc.models.quantization import check_packages

BUCKET = 64
"""Gradients that are summed over ranks in one collective, and copied for it: 250 MB in an adapter of rank 64."""


def optimizer_class(name: str) -> Any:
    """The class of an optimizer in ``OPTIMIZERS``."""
    if name == "adamw":
        return torch.optim.AdamW
    check_packages(optimizer=name)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit


def make_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig, total_steps: int) -> tuple[Any, Any]:
    """The optimizer of ``parameters`` and its learning-rate schedule over ``total_steps`` steps."""
    from diffusers.optimization import get_scheduler

    # bitsandbytes' AdamW is one kernel anyway, and has no such option.
    fused = {"fused": True} if config.name == "adamw" and parameters[0].device.type == "cuda" else {}
    optimizer = optimizer_class(config.name)(
        parameters,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        **fused,
    )
    schedule = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warm_up(total_steps),
        # A resumed run that is already complete has no step left, and the schedule divides by this.
        num_training_steps=max(1, total_steps),
    )
    return optimizer, schedule


def moving_average(parameters: Sequence[nn.Parameter], decay: float | None, state: dict[str, Any] | None = None) -> Any:
    """The moving average of ``parameters`` from ``state``, or one that starts from them; ``None`` without ``decay``."""
    if decay is None:
        return None
    from diffusers.training_utils import EMAModel

    average = EMAModel(parameters, decay=decay, foreach=True)
    if state is not None:
        # The decay is a setting, not a state: a resumed run follows its configuration.
        average.load_state_dict(state | {"decay": decay})
        average.to(device=parameters[0].device)
    return average


def resume_optimizer(optimizer: Any, schedule: Any, lr: float, moments: dict[int, Any], taken: int) -> None:
    """Resume from ``moments`` after ``taken`` steps of the schedule, with the present options and rate ``lr``."""
    # Only the moments come from the checkpoint; lr, betas and eps stay this configuration's.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": taken, "_step_count": taken + 1})
    (group,) = optimizer.param_groups
    (scale,) = schedule.lr_lambdas
    # The scheduler sets the rate when it steps, so before the next step it must be set here.
    group["lr"] = lr * scale(taken)
    schedule._last_lr = [group["lr"]]


def reduce_gradients(parameters: Sequence[nn.Parameter], denominator: Tensor, processes: int) -> None:
    """Sum the gradients over so many ranks, a bucket at a time, and divide them by the global denominator."""
    # Collectives need equal shapes on every rank, also on one whose rows reach no parameter.
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for start in range(0, len(gradients), BUCKET):
        bucket = gradients[start : start + BUCKET]
        flat = parameters_to_vector(bucket)
        if processes > 1:
            torch.distributed.all_reduce(flat)
        # Divided after the sum, so that the result does not depend on the number of ranks.
        flat /= denominator
        vector_to_parameters(flat, bucket)
