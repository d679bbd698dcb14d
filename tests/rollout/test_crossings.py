"""Places at which drawing a batch waits for an accelerator: the whole list, with file and count."""

import pytest
import torch
from crossings import DEVICE, Crossings, OnDevice, put_on_device
from rollout_cases import request_for
from tiny_families import z_image
from tolerances import LATENT, guided
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import DiffusersEngine

LORA = ModelConfig(lora_rank=4, lora_alpha=4)
STEPS, MICRO = 3, 2
BATCHES = 2


@pytest.fixture
def tiny_z_image_model(tmp_path):
    z_image.build().save_pretrained(tmp_path)
    return load_model(str(tmp_path))


def counted(model, cfg):
    """An engine's trajectories, the same drawn with its model on the device, and the waits of the second run."""
    engine = DiffusersEngine(model, LORA, dtype=torch.float32, micro_batch_size=MICRO, device="cpu")
    state = adapter_state(engine.transformer, engine.adapter)
    engine.sync(state, 0)
    request = request_for(model, index=(0, 1, 1, 2), starts=(0, 1, 1, 0), steps=STEPS, cfg=cfg, record_means=True)
    expected = engine.generate(request)
    put_on_device(engine.transformer)
    put_on_device(model.pipe.vae)
    engine._device = DEVICE
    state = {name: OnDevice(tensor) for name, tensor in state.items()}
    with Crossings() as pushing:
        assert engine.digest_of(state) == engine.sync(state, 0)
    with Crossings() as drawing:
        found = engine.generate(request)
    return expected, found, pushing.found, drawing.found


PUSHED = {("rollout/digest.py", "to host"): 2}
"""A push: the digest of what is sent, and that of what the engine then holds."""
DRAWN = {
    # Records and the check for finite latents, once a micro-batch; the schedule that the echo reports, once.
    ("rollout/sampling.py", "to host"): BATCHES + 1,
    # The check for finite pixels, and the images.
    ("models/base.py", "nonzero"): BATCHES,
    ("models/base.py", "tolist"): BATCHES,
    ("models/base.py", "to host"): BATCHES,
    # Whether the adapter that has drawn is still the one whose digest is known.
    ("rollout/digest.py", "equal"): 1,
}
"""Waits of ``BATCHES`` micro-batches of any family."""
OF_THE_FAMILY = {
    "tiny_sd3_model": {},
    # Three tables of positions at the first call; lengths of captions are known on the host.
    "tiny_z_image_model": {("diffusers/models/transformers/transformer_z_image.py", "to device"): 3},
    # Two tables of positions at the first call.
    "tiny_model": {("diffusers/models/transformers/transformer_qwenimage.py", "to device"): 2},
}


@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("family", OF_THE_FAMILY)
def test_drawing_waits_a_few_times_a_micro_batch_and_for_no_step(request, family, cfg):
    expected, found, pushing, drawing = counted(request.getfixturevalue(family), cfg)
    assert pushing == PUSHED
    assert drawing == DRAWN | OF_THE_FAMILY[family]
    assert found.echo.adapter_digest == expected.echo.adapter_digest
    # Other kernels: torch chooses convolutions and attention by the device that it takes a tensor to be on.
    assert (found.images.int() - expected.images.int()).abs().max() <= 1
    for name, tensor in expected.batch.items():
        assert_close(found.batch[name], tensor, atol=guided(LATENT, cfg), rtol=0, msg=name)


def test_every_kind_of_wait_is_counted_and_a_mixture_of_sides_refused():
    x = OnDevice(torch.arange(4.0))
    host = torch.arange(4)
    waits = {
        "_local_scalar_dense": [lambda: x.sum().item(), lambda: bool((x > 1).any()), lambda: float(x[0])],
        "to host": [x.cpu, lambda: x.to("cpu"), lambda: torch.empty(4).copy_(x)],
        "to device": [
            lambda: x.new_tensor([1.0]),
            lambda: host.to(DEVICE),
            lambda: host.to(x),
            lambda: host.to(DEVICE, non_blocking=True),  # a copy from memory that is not page-locked waits all the same
            lambda: torch.as_tensor(0.5, device=DEVICE),
            lambda: x[host],
        ],
        "nonzero": [x.nonzero],
        "index by a mask": [lambda: x[x > 1]],
        "tolist": [x.tolist],
        "equal": [lambda: torch.equal(x, x)],
    }
    for kind, calls in waits.items():
        for call in calls:
            with Crossings() as crossings:
                call()
            assert crossings.found == {("elsewhere", kind): 1}
    with Crossings() as crossings:
        queued = host.pin_memory().to(DEVICE, non_blocking=True)
        assert (torch.zeros(4, device=DEVICE) + queued + x * 2)[1:].shape == (3,)
        x.new_full((2,), 0.5)
    assert not crossings.found
    with pytest.raises(AssertionError, match="on the device and on the host"):
        x + host
