"""The base of the pipelines in vllm-omni: its own transformers in the sampling loop of the ``diffusers`` engine.

vllm-omni's scheduler batches compatible requests, one an image, and passes them to ``forward``. Noise, schedule,
guidance, transition, window and decoding must agree between engines, so they are the same code in both.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.base import Conditioning, DiffusionModel, Prompts
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutRequest
from flowgrpo_rc.rollout.sampling import RequestSampler
from flowgrpo_rc.rollout.vllm_omni.lora import load_adapter
from flowgrpo_rc.rollout.vllm_omni.plain_torch import check_plain_torch

EXTRA = "flowgrpo"
"""Key of our own values in a request's ``extra_args`` and in a result's metadata."""
SHARED = ("request_id", "window_size", "noise_level", "sde_type", "record_means")
"""Fields of a ``RolloutRequest`` that vllm-omni has no field for."""
PROMPT_FIELDS = ("embeds", "mask", "pooled", "references")
"""Tensors of ``Prompts`` in an image's prompt, each after ``prompt_`` or ``negative_``."""


class VllmFamily(DiffusionModel):
    """A mixin for a family's adapter: vllm-omni's transformers return a tuple or an object."""

    def _call(self, transformer: Any, inputs: dict[str, Any]) -> Any:
        output = transformer(**inputs, return_dict=False)
        return output[0] if isinstance(output, tuple) else output.sample


class NoEncoder(nn.Module):
    """Replaces a text encoder or its processor while vllm-omni builds a pipeline, so that none is read or held.

    It has the attributes that vllm-omni's pipelines use meanwhile.
    """

    config = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.lm_head = nn.Identity()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "NoEncoder":
        """As transformers' classes."""
        return cls()

    def get_input_embeddings(self) -> Any:
        """Weights that a pipeline may tie ``lm_head`` to."""
        return SimpleNamespace(weight=None)

    def set_processor(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to process."""


class Rollout:
    """A mixin for a pipeline of vllm-omni: FlowGRPO sampling from prompt embeddings, without text encoders."""

    supports_request_batch = True
    supports_step_execution: ClassVar[bool] = False
    family: ClassVar[type[DiffusionModel]]
    text_encoders: ClassVar[tuple[str, ...]]
    """Names in the module of vllm-omni's pipeline that build text encoders and their processors."""
    _encoder_modules: ClassVar[list[str]] = []
    od_config: OmniDiffusionConfig
    weights_sources: list[Any]
    vae: Any
    transformer: Any

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        with _replaced(sys.modules[super().__init__.__module__], self._stand_ins(od_config)):
            super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        encoders: list[str] = super()._encoder_modules  # type: ignore[misc]
        # Some pipelines read their text encoders together with their transformer.
        self.weights_sources = [source for source in self.weights_sources if source.subfolder not in encoders]
        _name_fused_layers(self.transformer)
        if not hasattr(self.transformer, "config"):
            self.transformer.config = od_config.tf_model_config
        self.model: Any = None

    def _stand_ins(self, od_config: OmniDiffusionConfig) -> dict[str, Any]:
        """Replacements of names in the module of vllm-omni's pipeline while it is built."""
        return dict.fromkeys(self.text_encoders, NoEncoder)

    def prepare(self, vae_dtype: str, batch_guidance: bool, lora_manager: Any) -> None:
        """Set the trainer's precision of decoding, its way of guidance, and the manager of adapters, after loading."""
        check_plain_torch(self.transformer)
        dtype = torch_dtype(vae_dtype)
        if self.vae.dtype != dtype:  # some pipelines round it to the transformer's dtype
            # Rounded weights cannot be converted back, so they are read again.
            exact = type(self.vae).from_pretrained(self.od_config.model, subfolder="vae", torch_dtype=dtype)
            self.vae.to(dtype).load_state_dict(exact.state_dict())
        self.model = self.family(self)
        self.model.batch_guidance = batch_guidance
        self.lora_manager = lora_manager

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        return load_adapter(self.transformer, lora_request, dtype)

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One result a request, in the batch's order."""
        # vllm-omni warms up with a batch that has no embeddings.
        if req.is_dummy_run():
            return [DiffusionOutput(output=torch.zeros(1, 3, 16, 16)) for _ in range(req.num_reqs)]
        device = next(self.transformer.parameters()).device
        request, own = _rollout_request(req, device)
        sampler = RequestSampler(self.model, self.transformer, request, device)
        images, record = sampler.sample(torch.arange(req.num_reqs))
        # The server knows the pushed adapter, and fills in version and digest.
        echo = sampler.echo(adapter_version=-1, adapter_digest="")
        # Read after sampling, so that a switch meanwhile is found.
        adapter = self.lora_manager._active_adapter_id
        return [
            DiffusionOutput(
                output={
                    "payload": {"image": [Image.fromarray(images[i].numpy())]},
                    "metadata": {EXTRA: {"row": own[i]["row"], "adapter": adapter, "echo": _row(echo, i)}},
                },
                trajectory_latents={name: tensor[i].clone() for name, tensor in record.items()},
            )
            for i in range(req.num_reqs)
        ]


@contextmanager
def _replaced(module: Any, stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these names of ``module`` have other values. A missing name is an error."""
    before = {name: getattr(module, name) for name in stand_ins}
    vars(module).update(stand_ins)
    try:
        yield
    finally:
        vars(module).update(before)


def _name_fused_layers(transformer: Any) -> None:
    """Set the attribute by which vllm-omni's adapters find fused layers, on transformers without it."""
    # Newer models declare fused layers by the first attribute, adapters read the second.
    fused: Mapping[str, Sequence[str]] = getattr(transformer, "packed_modules_mapping", {})
    if getattr(transformer, "stacked_params_mapping", None) is None:
        transformer.stacked_params_mapping = [
            (f".{name}", f".{part}", index) for name, parts in fused.items() for index, part in enumerate(parts)
        ]


def leave_as_they_are(od_config: OmniDiffusionConfig) -> Callable[[Any], Any]:
    """vllm-omni's pre- and post-processor, without effect."""
    # Requests contain embeddings, and ``forward`` returns finished images.
    return lambda value: value


def _rollout_request(req: DiffusionRequestBatch, device: torch.device) -> tuple[RolloutRequest, list[dict[str, Any]]]:
    """The batch as one request, and each image's own settings."""
    params = req.sampling_params_list
    own = [p.extra_args[EXTRA] for p in params]
    # The batch is one call of the sampling loop, with one setting for all.
    if any(o[name] != own[0][name] for o in own for name in SHARED):
        raise RolloutError("vllm-omni put images of different rollouts into one batch")
    first = params[0]
    start = own[0]["window_start"]
    negative = _prompts(req, "negative", device) if "negative_embeds" in req.prompts[0] else None
    conditioning = Conditioning(
        prompts=_prompts(req, "prompt", device),
        negative=negative,
        true_cfg_scale=first.true_cfg_scale,
        guidance_scale=first.guidance_scale if first.guidance_scale_provided else None,
        height=first.height,
        width=first.width,
    )
    request = RolloutRequest(
        conditioning=conditioning,
        prompt_index=torch.arange(req.num_reqs),
        num_inference_steps=first.num_inference_steps,
        seeds=[p.generator.initial_seed() for p in params],
        window_starts=None if start is None else torch.tensor([o["window_start"] for o in own]),
        **{name: own[0][name] for name in SHARED},
    )
    return request, own


def _prompts(req: DiffusionRequestBatch, name: str, device: torch.device) -> Prompts:
    fields: dict[str, Any] = {}
    for field in PROMPT_FIELDS:
        rows = [prompt[f"{name}_{field}"] for prompt in req.prompts]
        fields[field] = None if rows[0] is None else torch.stack(rows).to(device)
    lengths = req.prompts[0][f"{name}_length"]
    return Prompts(
        **fields,
        reference_grids=req.prompts[0][f"{name}_reference_grids"],
        lengths=None if lengths is None else tuple(prompt[f"{name}_length"] for prompt in req.prompts),
    )


def _row(echo: Echo, i: int) -> Echo:
    """The echo of one image. Its tensors are copies, because each result is pickled by itself."""
    starts = None if echo.window_starts is None else echo.window_starts[i : i + 1].clone()
    return replace(
        echo,
        timesteps=echo.timesteps.clone(),
        sigmas=echo.sigmas.clone(),
        window_starts=starts,
        seeds=echo.seeds[i : i + 1],
    )
