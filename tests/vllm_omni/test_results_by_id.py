"""Results find their rows by what they say, never by the order in which they come."""

from dataclasses import replace

import pytest
import torch
from engine_pair import request_for

from flowgrpo_rc.models import load_model
from flowgrpo_rc.rollout import Trajectories
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutSyncError, batch_of, rows_of
from flowgrpo_rc.rollout.vllm_omni.server import assemble


@pytest.fixture(scope="module")
def rollout():
    """A request for six images, those of one image each, and an answer to each: all pixels and latents are its row."""
    request = request_for(load_model("asset:tiny_qwen_image"))
    images = [rows_of(request, torch.tensor([row])) for row in range(6)]
    answers = []
    for row, image in enumerate(images):
        echo = Echo(
            request_id=image.request_id,
            timesteps=torch.arange(5.0),
            sigmas=torch.linspace(1, 0, 6),
            true_cfg_scale=1.0,
            guidance_scale=None,
            noise_level=0.7,
            sde_type="sde",
            window_starts=image.window_starts,
            window_size=2,
            seeds=tuple(image.seeds),
            dtype="float32",
            adapter_version=1,
            adapter_digest="",
        )
        record = {"latents": torch.full((1, 2, 3), float(row))}
        answers.append(Trajectories(torch.full((1, 2, 2, 3), row, dtype=torch.uint8), batch_of(record, image), echo))
    return request, images, answers


def test_any_order_gives_the_requests_order(rollout):
    request, images, answers = rollout
    sampled = assemble(request, images, [answers[i] for i in (3, 0, 5, 1, 4, 2)])
    assert sampled.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert sampled.batch["latents"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert sampled.batch["prompt_index"].tolist() == request.prompt_index.tolist()
    assert sampled.echo.request_id == request.request_id
    assert sampled.echo.seeds == tuple(request.seeds)
    assert sampled.echo.window_starts.tolist() == request.window_starts.tolist()


def test_rows_missing_twice_or_of_other_requests_and_settings_are_refused(rollout):
    request, images, answers = rollout

    def changed(**settings):
        return [*answers[:4], replace(answers[4], echo=replace(answers[4].echo, **settings)), answers[5]]

    for wrong in (answers[:5], [*answers[:5], answers[0]], changed(request_id="another/4")):
        with pytest.raises(RolloutError, match="vllm-omni returned images .* for the 6 of"):
            assemble(request, images, wrong)
    for name, value in {"adapter_version": 2, "sigmas": torch.linspace(1, 0.01, 6), "true_cfg_scale": 4.0}.items():
        with pytest.raises(RolloutSyncError, match=f"{name}: images of one rollout were drawn with"):
            assemble(request, images, changed(**{name: value}))
