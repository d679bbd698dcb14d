"""Plans of every model family: scaled to full depth, against real steps, and against operations counted by hand."""

from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F
from small_pipelines import PLAIN, write_tiny
from tiny_families import TINY, VARIANTS
from torch.overrides import TorchFunctionMode

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.planner import passes
from flowgrpo_rc.planner.live_bytes import LiveBytes
from flowgrpo_rc.planner.passes import Passes
from flowgrpo_rc.planner.pipeline import FakePipeline
from flowgrpo_rc.rollout.config import PipelineConfig, RolloutConfig
from flowgrpo_rc.sde import log_prob, transition

pytestmark = pytest.mark.slow
LORA = ModelConfig(lora_rank=4)
ROWS = 3


def passes_of(folder, name):
    """With the family's strongest guidance."""
    family = TINY[name]
    height, width = family.sizes[0]
    cfg, guidance = family.guidances[-1]
    asked = PipelineConfig(
        height=height,
        width=width,
        true_cfg_scale=cfg,
        guidance_scale=guidance,
        max_sequence_length=family.length,
        reference_area=height * width if family.images else None,
    )
    pipeline = FakePipeline(folder, torch.float32)
    return Passes(pipeline, LORA, "float32", RolloutConfig(pipeline=asked), autocast=False)


NAMES = [name for name in TINY if name not in VARIANTS]
EVERYTHING = PLAIN | {"recompute": True, "reference": True, "accumulates": True}
DEEP = ("stable_diffusion_3", "flux_dev", "z_image", "lumina2")
DEPTHS = [*((name, EVERYTHING) for name in DEEP), ("stable_diffusion_3", PLAIN | {"detached": True})]


@pytest.mark.parametrize(("name", "how"), DEPTHS)
def test_depth_scales_as_a_run_of_all_blocks_does(name, how, tmp_path, monkeypatch):
    """Within a thousandth; operations to the last one. Afterwards the transformer has all its blocks."""
    folder = write_tiny(tmp_path, TINY[name].build(), deeper=True)
    scaled = passes_of(folder, name)
    update = scaled.update(ROWS, **how)
    blocks = sum(len(kind.blocks) for kind in scaled.kinds)
    assert blocks == sum(len(scaled.transformer.get_submodule(place)) for place in {k.place for k in scaled.kinds}) > 4
    monkeypatch.setattr(passes, "SHORT", 100)
    whole = passes_of(folder, name)
    expected = whole.update(ROWS, **how)
    assert whole.sizes == scaled.sizes
    assert update.peak == pytest.approx(expected.peak, rel=1e-3)
    for flops in ("forward_flops", "backward_flops", "recomputed_flops"):
        assert getattr(update, flops) == getattr(expected, flops)
    assert (expected.recomputed_flops > 0) is how["recompute"]


class Counted(TorchFunctionMode):
    """Operations of products, attention and convolutions, from the shapes that a model calls them with."""

    flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.flops += 2 * out.numel() * args[1].shape[1]
        elif func in (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm):
            self.flops += 2 * out.numel() * args[0].shape[-1]
        elif func in (F.conv2d, F.conv3d, torch.conv2d, torch.conv3d):
            self.flops += 2 * out.numel() * args[1][0].numel()
        elif func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self.flops += 4 * out.numel() * given["key"].shape[-2]
        return out


@pytest.mark.parametrize(("name", "recompute"), [*((name, False) for name in NAMES), ("stable_diffusion_3", True)])
def test_a_real_step_has_the_living_bytes_and_operations_of_the_fake_one(name, recompute, tmp_path):
    """Tensor for tensor: the same operations allocate the same storages, whatever they hold."""
    pipe = TINY[name].build()
    fake = passes_of(write_tiny(tmp_path, pipe), name)
    expected = fake.update(ROWS, **PLAIN | {"recompute": recompute})
    one = fake.update(1, **PLAIN)
    assert expected.forward_flops == ROWS * one.forward_flops
    assert expected.backward_flops == ROWS * one.backward_flops > 0
    with fake._pipeline.fake:
        state = fake._state(ROWS)

    generator = torch.Generator().manual_seed(0)
    given = []

    def real(tensor):
        made = torch.rand(tensor.shape, generator=generator)
        given.append(made >= 0 if tensor.dtype == torch.bool else made)
        return given[-1]

    latents, level = real(state[0]), real(state[1])
    prompts = state[2].prompts.map(real)
    conditioning = replace(state[2], prompts=prompts, negative=prompts if state[2].negative else None)
    model = resolve_name(FAMILIES[type(pipe).__name__].adapter)(pipe)
    transformer = model.transformer.requires_grad_(False)
    attach_lora(transformer, model, LORA, dtype=torch.float32)
    if recompute:
        transformer.enable_gradient_checkpointing()

    def forward():
        velocity = model.velocity(transformer, latents, level * 1000, conditioning)
        made = transition(latents, velocity, level, level / 2, noise_level=0.7, sde_type="sde")
        return log_prob(made, latents, sde_type="sde")

    def step():
        forward().sum().backward()
        for parameter in adapter_parameters(transformer).values():
            parameter.grad = None

    step()  # what is computed once and kept
    with LiveBytes([*transformer.parameters(), *transformer.buffers(), *given]) as live:
        step()
    assert live.peak + sum(tensor.nbytes for tensor in given) == pytest.approx(expected.peak, rel=5e-3)
    flops = expected.forward_flops + expected.backward_flops + expected.recomputed_flops
    assert sum(stretch.flops for stretch in live.stretches) == flops
    with Counted() as counted, torch.no_grad():
        forward()
    assert counted.flops == expected.forward_flops > 0
