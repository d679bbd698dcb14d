"""Split a rollout into vllm-omni's requests, one an image, and assemble their results."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from flowgrpo_rc.models.base import Prompts
from flowgrpo_rc.rollout.base import RolloutError, RolloutRequest, Trajectories, batch_of
from flowgrpo_rc.rollout.vllm_omni.lora import lora_request
from flowgrpo_rc.rollout.vllm_omni.pipeline import EXTRA, PROMPT_FIELDS, SHARED

_SCHEDULE = ("request_id", "true_cfg_scale", "guidance_scale", "dtype", "window_size", "sde_type", "noise_level")


def image_request(
    request: RolloutRequest, row: int, adapter: int
) -> tuple[str, dict[str, Any], OmniDiffusionSamplingParams]:
    """Id, prompt and sampling parameters of one image, in vllm-omni's own fields if it has them."""
    cond = request.conditioning
    prompt = {"prompt": "", **_fields("prompt", cond.prompts, int(request.prompt_index[row]))}
    if cond.negative is not None:
        prompt |= _fields("negative", cond.negative, int(request.prompt_index[row]))
    params = OmniDiffusionSamplingParams(
        height=cond.height,
        width=cond.width,
        num_inference_steps=request.num_inference_steps,
        true_cfg_scale=cond.true_cfg_scale,
        guidance_scale=cond.guidance_scale,
        # vllm-omni makes a generator from it; the pipeline takes only the seed back out.
        seed=int(request.seeds[row]),
        generator_device="cpu",
        lora_request=lora_request(adapter),
        extra_args={
            EXTRA: {
                "row": row,
                "window_start": None if request.window_starts is None else int(request.window_starts[row]),
                **{name: getattr(request, name) for name in SHARED},
            }
        },
    )
    return f"{request.request_id}/{row}", prompt, params


def assemble(request: RolloutRequest, results: Sequence[Any], adapter: int) -> Trajectories:
    """Assemble results in any order by the rows that they name.

    Raises:
        RolloutError: a row is missing or twice there, an image failed or was drawn with another adapter, or batches
            used different schedules.
    """
    size = len(request.prompt_index)
    # Results arrive in the order in which batches finish.
    by_row: dict[int, tuple[Any, dict[str, Any]]] = {}
    for result in results:
        error = getattr(result, "error", None) or getattr(result, "error_message", None)
        if error:
            raise RolloutError(f"vllm-omni could not draw image {result.request_id}: {error}")
        own = result.multimodal_output["metadata"][EXTRA]
        if own["echo"].request_id != request.request_id or own["adapter"] != adapter:
            raise RolloutError(
                f"image {result.request_id} belongs to request {own['echo'].request_id} and adapter {own['adapter']}, "
                f"not to {request.request_id} and {adapter}"
            )
        by_row[own["row"]] = result, own
    # A row that is there twice would hide one that is missing.
    if sorted(by_row) != list(range(size)) or len(results) != size:
        raise RolloutError(f"vllm-omni returned rows {sorted(by_row)[:8]} of {size}")
    ordered = [by_row[row] for row in range(size)]
    echoes = [own["echo"] for _, own in ordered]
    first = echoes[0]
    # Batches are drawn one after the other, so each could have used other settings.
    for row, echo in enumerate(echoes):
        same = all(getattr(echo, name) == getattr(first, name) for name in _SCHEDULE)
        if not (same and torch.equal(echo.sigmas, first.sigmas) and torch.equal(echo.timesteps, first.timesteps)):
            raise RolloutError(f"vllm-omni drew rows 0 and {row} with different schedules, guidance or noise")
    starts = None if first.window_starts is None else torch.cat([e.window_starts for e in echoes])
    records = [result.trajectory_latents or {} for result, _ in ordered]
    return Trajectories(
        images=torch.stack([torch.from_numpy(np.array(result.images[0].convert("RGB"))) for result, _ in ordered]),
        batch=batch_of({name: torch.stack([r[name] for r in records]) for name in records[0]}, request),
        echo=replace(first, window_starts=starts, seeds=tuple(s for e in echoes for s in e.seeds)),
    )


def _fields(name: str, prompts: Prompts, index: int) -> dict[str, Any]:
    tensors = {field: getattr(prompts, field) for field in PROMPT_FIELDS}
    rows = {f"{name}_{field}": None if tensor is None else tensor[index] for field, tensor in tensors.items()}
    length = None if prompts.lengths is None else prompts.lengths[index]
    return {**rows, f"{name}_reference_grids": prompts.reference_grids, f"{name}_length": length}
