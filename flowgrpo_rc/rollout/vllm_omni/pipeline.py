"""The base of the pipelines in vllm-omni: its own transformers in the sampling loop of the ``diffusers`` engine.

vllm-omni's scheduler batches compatible requests, one an image, and passes them to ``forward``. Noise, schedule,
guidance, transition, window and decoding must agree between engines, so they are the same code in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.base import DiffusionModel, Prompts
from flowgrpo_rc.rollout.base import RolloutError, RolloutRequest, Trajectories, batch_of
from flowgrpo_rc.rollout.sampling import RequestSampler, micro_batches
from flowgrpo_rc.rollout.vllm_omni.lora import load_adapter
from flowgrpo_rc.rollout.vllm_omni.server import EXTRA
from flowgrpo_rc.rollout.vllm_omni.tea_cache import give_tea_cache


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
    """The trainer's family, or a subclass for differences of vllm-omni's transformer."""
    text_encoders: ClassVar[tuple[str, ...]]
    """Names in the module of vllm-omni's pipeline that build text encoders and their processors."""
    _encoder_modules: ClassVar[list[str]] = []
    od_config: OmniDiffusionConfig
    weights_sources: list[Any]
    vae: Any
    transformer: Any

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        # A name that the module lacks is an error.
        with patch.multiple(super().__init__.__module__, **self._stand_ins(od_config)):
            super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        encoders: list[str] = super()._encoder_modules  # type: ignore[misc]
        # Some pipelines read their text encoders together with their transformer.
        self.weights_sources = [source for source in self.weights_sources if source.subfolder not in encoders]
        # Newer models declare fused layers by the first attribute, adapters read the second.
        fused: Mapping[str, Sequence[str]] = getattr(self.transformer, "packed_modules_mapping", {})
        if getattr(self.transformer, "stacked_params_mapping", None) is None:
            self.transformer.stacked_params_mapping = [
                (f".{name}", f".{part}", index) for name, parts in fused.items() for index, part in enumerate(parts)
            ]
        if not hasattr(self.transformer, "config"):
            self.transformer.config = od_config.tf_model_config
        self.model: Any = None

    def _stand_ins(self, od_config: OmniDiffusionConfig) -> dict[str, Any]:
        """Replacements of names in the module of vllm-omni's pipeline while it is built."""
        return dict.fromkeys(self.text_encoders, NoEncoder)

    def prepare(self, vae_dtype: str, batch_guidance: bool, tea_cache: str | None, lora_manager: Any) -> None:
        """Set the trainer's precision of decoding, its way of guidance, TeaCache's rules if requests may have a cache,
        and the manager of adapters, after loading."""
        check_plain_torch(self.transformer)
        dtype = torch_dtype(vae_dtype)
        if self.vae.dtype != dtype:  # some pipelines round it to the transformer's dtype
            # Rounded weights cannot be converted back, so they are read again.
            exact = type(self.vae).from_pretrained(self.od_config.model, subfolder="vae", torch_dtype=dtype)
            self.vae.to(dtype).load_state_dict(exact.state_dict())
        self.model = self.family(self)
        self.model.batch_guidance = batch_guidance
        if tea_cache is not None:
            give_tea_cache(self.transformer, tea_cache)
        self.lora_manager = lora_manager

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        return load_adapter(self.transformer, lora_request, dtype)

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One result a request, in the batch's order."""
        # vllm-omni warms up with a batch that has no embeddings.
        if req.is_dummy_run():
            return [DiffusionOutput(output=torch.zeros(1, 3, 16, 16)) for _ in range(req.num_reqs)]
        device = next(self.transformer.parameters()).device
        images = [params.extra_args[EXTRA] for params in req.sampling_params_list]
        request = merged(images)
        sampler = RequestSampler(self.model, self.transformer, request, device)
        with sampler.cache:
            parts = [sampler.sample(rows) for rows in micro_batches(request, req.num_reqs)]
        pixels = torch.cat([drawn for drawn, _ in parts])
        record = {name: torch.cat([steps[name] for _, steps in parts]) for name in parts[0][1]}
        # vllm-omni's number of the adapter, read after sampling so that a switch meanwhile is found. The server puts
        # the trainer's version and the digest in its place.
        echo = sampler.echo(adapter_version=self.lora_manager._active_adapter_id or 0, adapter_digest="")
        results = []
        for i, image in enumerate(images):
            # Copies, because each result is pickled by itself, and a view would take all of its storage along.
            batch = batch_of({name: tensor[i : i + 1].clone() for name, tensor in record.items()}, image)
            starts = None if echo.window_starts is None else echo.window_starts[i : i + 1].clone()
            shared = None if echo.start_seeds is None else echo.start_seeds[i : i + 1]
            own = replace(
                echo,
                request_id=image.request_id,
                window_starts=starts,
                seeds=echo.seeds[i : i + 1],
                start_seeds=shared,
                moves=None if echo.moves is None else echo.moves[i : i + 1].clone(),
            )
            answer = Trajectories(pixels[i : i + 1].clone(), batch, own)
            results.append(DiffusionOutput(output={"payload": {"image": []}, "metadata": {EXTRA: answer}}))
        return results


def leave_as_they_are(od_config: OmniDiffusionConfig) -> Callable[[Any], Any]:
    """vllm-omni's pre- and post-processor, without effect."""
    # Requests contain embeddings, and ``forward`` returns finished images.
    return lambda value: value


def merged(images: Sequence[RolloutRequest]) -> RolloutRequest:
    """Requests for one image each as one request."""
    first = images[0]
    # The batch is one call of the sampling loop, with one setting for all.
    if len({image.request_id.rpartition("/")[0] for image in images}) > 1:
        raise RolloutError("vllm-omni put images of different rollouts into one batch")
    conditionings = [image.conditioning for image in images]
    prompts = reduce(Prompts.followed_by, [one.prompts for one in conditionings])
    negative = None
    if first.conditioning.negative is not None:
        negative = reduce(Prompts.followed_by, [one.negative for one in conditionings if one.negative is not None])
    starts = None
    if first.window_starts is not None:
        starts = torch.cat([image.window_starts for image in images if image.window_starts is not None])
    return replace(
        first,
        conditioning=replace(first.conditioning, prompts=prompts, negative=negative),
        prompt_index=torch.arange(len(images)),
        seeds=[image.seeds[0] for image in images],
        start_seeds=[seed for image in images for seed in image.start_seeds or ()] or None,
        window_starts=starts,
    )


def check_plain_torch(model: nn.Module) -> None:
    """Check that a model loaded by vllm multiplies by plain torch, as the trainer does.

    Raises:
        RuntimeError: names the first layer with another product.
    """
    for name, layer in model.named_modules():
        # Layers of other kinds have no such attribute.
        product = getattr(layer, "cpu_linear", torch.nn.functional.linear)
        if product is not torch.nn.functional.linear:
            raise RuntimeError(
                f"vllm chose a kernel for the layer {name} by what this processor offers, which is not what the "
                "trainer computes with; install the versions of constraints-vllm.txt, or set "
                "actor_rollout_ref.rollout.name=diffusers"
            )
