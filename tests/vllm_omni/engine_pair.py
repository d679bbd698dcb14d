"""Both engines around one tiny model, and what to ask of them."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rollout_cases
import torch
from rollout_cases import PROMPTS, random_like
from tiny_families import TINY, TinyFamily
from tiny_families.references import asked

from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.rollout import DiffusersEngine
from flowgrpo_rc.rollout.config import RolloutConfig, VllmOmniConfig
from flowgrpo_rc.rollout.vllm_omni import VllmOmniEngine

FAMILIES: dict[str, TinyFamily | None] = {"qwen_image": None} | {
    name: TINY[name]
    for name in (
        *("stable_diffusion_3", "flux_dev", "flux_kontext", "flux2_klein_references", "flux2_dev", "z_image"),
        *("qwen_image_edit", "qwen_image_edit_plus_2511", "wan", "wan_ti2v"),
    )
}
"""The models that vllm-omni draws; ``None`` is the shipped one."""
TIMEOUTS = VllmOmniConfig(
    start_timeout_s=600.0, request_timeout_s=300.0, sync_timeout_s=300.0, silence_timeout_s=30.0, close_timeout_s=20.0
)


@dataclass(frozen=True)
class Pair:
    """The same model and adapter in both engines."""

    model: Any
    lora: ModelConfig
    vllm: VllmOmniEngine
    diffusers: DiffusersEngine
    family: TinyFamily | None = None
    """Its family in the tests of all families; ``None`` for the shipped model."""

    def sync(self, state, version):
        """Both engines take the adapter; returns vllm-omni's digest."""
        self.diffusers.sync(state, version)
        return self.vllm.sync(state, version)

    def request(self, *, guided=False, **settings):
        """As ``request_for``, with the family's weakest or strongest guidance."""
        guidances = ((1.0, None), (4.0, None)) if self.family is None else self.family.guidances
        cfg, guidance = guidances[-1 if guided else 0]
        return request_for(self.model, self.family, cfg=cfg, guidance=guidance, **settings)

    def with_targets(self, targets):
        """The same model and process with other layers in the adapter; the two must take turns."""
        lora = replace(self.lora, target_modules=targets)
        diffusers = DiffusersEngine(self.model, lora, dtype=torch.float32, micro_batch_size=4, device="cpu")
        return replace(self, lora=lora, diffusers=diffusers)


def random_adapter(pair, seed=0):
    """The adapter as it is after some training."""
    return random_like(adapter_state(pair.diffusers.transformer, pair.diffusers.adapter), 0.3, seed)


def zero_adapter(pair):
    """The adapter as a run begins: B is 0."""
    return {name: tensor * (".lora_A" in name) for name, tensor in random_adapter(pair, 1).items()}


def request_for(model, family=None, *, window=2, **settings):
    """``rollout_cases.request_for`` with the family's prompts; ``window=0`` is the deterministic ODE."""
    images, area, length = ((), None, 64) if family is None else (family.images, family.reference_area, family.length)
    settings |= {"length": length, "negatives": asked(images, [model.negative_prompt] * 3, area)}
    prompts = asked(images, PROMPTS, area)
    return rollout_cases.request_for(model, prompts, window=window, record_means=bool(window), **settings)


def make_pair(path="asset:tiny_qwen_image", family=None, dtype=torch.float32, alpha=8, **settings):
    """Both engines; the caller closes ``vllm``, which has further settings. A start takes ten to twenty seconds."""
    torch.set_num_threads(1)
    model = load_model(path)
    if family is not None:
        # vllm-omni does without the text encoders. The copy is there already where a worker makes the pair again.
        ignored = shutil.ignore_patterns("model.safetensors")
        path = shutil.copytree(path, f"{path}_{dtype}", ignore=ignored, dirs_exist_ok=True)
    lora = ModelConfig(path=path, lora_rank=4, lora_alpha=alpha)
    rollout = RolloutConfig(
        name="vllm_omni",
        dtype=dtype_name(dtype),
        micro_batch_size=4,
        vllm_omni=TIMEOUTS,
        **settings,
    )
    vllm = VllmOmniEngine(rollout, model, lora, "cpu")
    diffusers = DiffusersEngine(model, lora, dtype=dtype, micro_batch_size=4, device="cpu")
    return Pair(model, lora, vllm, diffusers, family)


def with_amx():
    """PYTHONPATH of a process on a processor that seems to have every kernel."""
    return os.pathsep.join([str(Path(__file__).parent / "amx"), os.environ.get("PYTHONPATH", "")])
