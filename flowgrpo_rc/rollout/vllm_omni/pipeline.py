"""The pipeline that vllm-omni runs: its own transformer, the sampling loop of the in-process engine.

vllm-omni's scheduler puts compatible requests, one an image, into a batch and hands it to ``forward``; everything
that must agree between engines (noise, schedule, guidance, transition, window, decoding) is the code that the
``diffusers`` engine runs, around ``QwenImageTransformer2DModel`` as vllm-omni has it.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.models.qwen_image import QwenImagePipeline
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from flowgrpo_rc.models.base import Conditioning, Prompts
from flowgrpo_rc.models.qwen_image import QwenImage
from flowgrpo_rc.rollout.base import Echo, RolloutError, RolloutRequest
from flowgrpo_rc.rollout.sampling import Used, sample
from flowgrpo_rc.rollout.vllm_omni.lora import load_adapter

EXTRA = "flowgrpo"
"""Where a request's ``extra_args`` hold what vllm-omni has no field for, and a result's metadata what came of it."""


class VllmQwenImage(QwenImage):
    """The model adapter around vllm-omni's pipeline."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        multiple = self.pipe.vae_scale_factor * 2
        return (height // multiple) * (width // multiple), self.transformer.in_channels

    def initial_noise(self, generator: torch.Generator, height: int, width: int) -> Tensor:
        channels = self.transformer.in_channels // 4
        device = torch.device("cpu")
        return self.pipe.prepare_latents(1, channels, height, width, torch.float32, device, generator)[0]

    def _forward(
        self, transformer: Any, latents: Tensor, timesteps: Tensor, prompts: Prompts, conditioning: Conditioning
    ) -> Tensor:
        inputs = self._inputs(_dtype(transformer), latents, timesteps, prompts, conditioning)
        lengths = [prompts.embeds.shape[1]] * len(latents)
        output = transformer(**inputs, txt_seq_lens=lengths, return_dict=False)
        return (output[0] if isinstance(output, tuple) else output.sample).float()


class RolloutPipeline(QwenImagePipeline):
    """Qwen-Image sampling for FlowGRPO; takes prompt embeddings, so it keeps no text encoder."""

    supports_request_batch = True
    supports_step_execution: ClassVar[bool] = False
    _encoder_modules: ClassVar[list[str]] = []

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self.text_encoder = None
        self.model = None

    def prepare(self, vae_dtype: str, lora_manager: Any) -> None:
        """Once, after loading: decode in the trainer's precision; know who switches adapters."""
        self.vae.to(getattr(torch, vae_dtype))
        self.model = VllmQwenImage(self)
        self.lora_manager = lora_manager

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        return load_adapter(lora_request, dtype)

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One result a request, in the batch's order."""
        if req.is_dummy_run():
            return [DiffusionOutput(output=torch.zeros(1, 3, 16, 16)) for _ in range(req.num_reqs)]
        request, own = _rollout_request(req, self.device)
        assert self.model is not None
        cond = request.conditioning
        used, rows = Used(), torch.arange(req.num_reqs)
        schedule = self.model.schedule(request.num_inference_steps, cond.height, cond.width)
        latents, record = sample(self.model, self.transformer, request, schedule, rows, used, self.device)
        images = self.model.decode(latents, cond.height, cond.width)
        echo = used.echo(
            request_id=request.request_id,
            dtype=str(_dtype(self.transformer)).removeprefix("torch."),
            adapter_version=-1,
            adapter_digest="",
        )
        adapter = self.lora_manager._active_adapter_id
        return [
            DiffusionOutput(
                output={
                    "payload": {"image": images[i : i + 1].permute(0, 3, 1, 2).float() / 127.5 - 1},
                    "metadata": {EXTRA: {"row": own[i]["row"], "adapter": adapter, "echo": _row(echo, i)}},
                },
                trajectory_latents={name: tensor[i].clone() for name, tensor in record.items()},
            )
            for i in range(req.num_reqs)
        ]


def _rollout_request(req: DiffusionRequestBatch, device: torch.device) -> tuple[RolloutRequest, list[dict[str, Any]]]:
    """The batch as one request, from what arrived with each image; and each image's own settings."""
    params = req.sampling_params_list
    own = [p.extra_args[EXTRA] for p in params]
    shared = ("request_id", "window_size", "noise_level", "sde_type", "record_means")
    if any(o[name] != own[0][name] for o in own for name in shared):
        raise RolloutError("vllm-omni put images of different rollouts into one batch")
    first, start = params[0], own[0]["window_start"]
    conditioning = Conditioning(
        prompts=_prompts(req, "prompt_embeds", device),
        negative=None if req.prompts[0].get("negative_embeds") is None else _prompts(req, "negative_embeds", device),
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
        **{name: own[0][name] for name in shared},
    )
    return request, own


def _prompts(req: DiffusionRequestBatch, name: str, device: torch.device) -> Prompts:
    embeds = torch.stack([p[name] for p in req.prompts]).to(device)
    masks = [p[f"{name}_mask"] for p in req.prompts]
    return Prompts(embeds, None if masks[0] is None else torch.stack(masks).to(device))


def _row(echo: Echo, i: int) -> Echo:
    starts = None if echo.window_starts is None else echo.window_starts[i : i + 1].clone()
    return replace(
        echo,
        timesteps=echo.timesteps.clone(),
        sigmas=echo.sigmas.clone(),
        window_starts=starts,
        seeds=echo.seeds[i : i + 1],
    )


def _dtype(transformer: nn.Module) -> torch.dtype:
    return next(transformer.parameters()).dtype
