"""Results find their rows by what they say, never by the order in which they come."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vllm")

from engine_pair import request_for
from flowgrpo_rc.rollout.vllm_omni.images import assemble

from flowgrpo_rc.models import load_model
from flowgrpo_rc.rollout.base import Echo, RolloutError
from flowgrpo_rc.rollout.vllm_omni.pipeline import EXTRA


@pytest.fixture(scope="module")
def request_of_six():
    return request_for(load_model("asset:tiny_qwen_image"))


def results_of(request):
    """Row i has seed i of the request, an image of grey level i and latents full of i."""
    echo = Echo(
        request_id=request.request_id,
        timesteps=torch.arange(5.0),
        sigmas=torch.linspace(1, 0, 6),
        true_cfg_scale=1.0,
        guidance_scale=None,
        noise_level=0.7,
        sde_type="sde",
        window_starts=None,
        window_size=2,
        seeds=(),
        dtype="float32",
        adapter_version=-1,
        adapter_digest="",
    )
    results = []
    for row, seed in enumerate(request.seeds):
        own = replace(echo, window_starts=request.window_starts[row : row + 1], seeds=(seed,))
        results.append(
            SimpleNamespace(
                request_id=f"{request.request_id}/{row}",
                images=[Image.fromarray(np.full((2, 2, 3), row, np.uint8))],
                trajectory_latents={"latents": torch.full((2, 3), float(row))},
                multimodal_output={"metadata": {EXTRA: {"row": row, "adapter": 1, "echo": own}}},
            )
        )
    return results


def test_any_order_gives_the_requests_order(request_of_six):
    results = results_of(request_of_six)
    sampled = assemble(request_of_six, [results[i] for i in (3, 0, 5, 1, 4, 2)], 1)
    assert sampled.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert sampled.batch["latents"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert sampled.echo.seeds == tuple(request_of_six.seeds)
    assert sampled.echo.window_starts.tolist() == request_of_six.window_starts.tolist()


def test_a_row_missing_or_twice_is_refused(request_of_six):
    results = results_of(request_of_six)
    with pytest.raises(RolloutError, match=r"returned rows \[0, 1, 2, 3, 4\] of 6"):
        assemble(request_of_six, results[:5], 1)
    with pytest.raises(RolloutError, match=r"returned rows \[0, 1, 2, 3, 4\] of 6"):
        assemble(request_of_six, [*results[:5], results[0]], 1)


def test_another_request_or_adapter_is_refused(request_of_six):
    results = results_of(request_of_six)
    with pytest.raises(RolloutError, match="adapter 1, not to .* and 2"):
        assemble(request_of_six, results, 2)
    with pytest.raises(RolloutError, match="not to another and 1"):
        assemble(replace(request_of_six, request_id="another"), results, 1)


def test_rows_of_different_schedules_are_refused(request_of_six):
    results = results_of(request_of_six)
    own = results[4].multimodal_output["metadata"][EXTRA]
    own["echo"] = replace(own["echo"], sigmas=own["echo"].sigmas * 0.99)
    with pytest.raises(RolloutError, match="rows 0 and 4 with different schedules"):
        assemble(request_of_six, results, 1)
