"""The trainer's side of the vllm_omni engine; imports no vllm."""

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.dtypes import dtype_name, torch_dtype
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import check_adapter_state, target_layers
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout.base import RolloutError, RolloutRequest, Trajectories, check_has_adapter
from flowgrpo_rc.rollout.config import RolloutConfig, VllmOmniConfig
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.vllm_omni.adapter import AdapterPush, as_held, check_targets, expected_shapes
from flowgrpo_rc.rollout.vllm_omni.process import EngineDownError, EngineProcess, engine_environment
from flowgrpo_rc.rollout.vllm_omni.protocol import Settings
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES
from flowgrpo_rc.rollout.vllm_omni.versions import check_versions
from flowgrpo_rc.transfers import to_host


class VllmOmniEngine:
    """Samples in a process of its own that runs vllm-omni with the pipeline at ``lora.path``.

    The digests of this engine are those of vllm-omni's LoRA layers, read back from their buffers: the adapter in
    ``dtype`` with ``lora_alpha / lora_rank`` multiplied into the B matrices.

    A process that dies or hangs is started anew once for every call, gets the last adapter again and repeats the call.

    Args:
        model: the trainer's model; tells names, shapes and the precision of decoding.
        lora: the section ``actor_rollout_ref.model``.
        dtype: of vllm-omni's transformer and adapter.
        micro_batch_size: images per forward, vllm-omni's ``max_num_seqs``.
        device: the trainer's; the engine takes the same GPU.
        timeouts: when to give the process up, the section ``actor_rollout_ref.rollout.vllm_omni``.
        attn_backend: vllm-omni's name of the way to compute attention; ``None`` leaves the choice to it.

    Raises:
        ImportError: vllm, vllm-omni or diffusers are not of the working set.
        ValueError: vllm-omni does not draw this kind of pipeline here, not without the parts that it lacks, or gives a
            layer no adapter that ``lora`` has one for.
        RolloutError: the process does not start.
    """

    def __init__(
        self,
        model: DiffusionModel,
        lora: ModelConfig,
        *,
        dtype: torch.dtype,
        micro_batch_size: int,
        device: Any,
        timeouts: VllmOmniConfig | None = None,
        attn_backend: str | None = None,
    ) -> None:
        check_versions()
        pipeline = type(model.pipe).__name__
        if pipeline not in PIPELINES:
            raise ValueError(
                f"actor_rollout_ref.rollout.name=vllm_omni draws {', '.join(PIPELINES)} only so far, got {pipeline}; "
                "use rollout.name=diffusers"
            )
        # A text encoder may be missing because the trainer has not loaded it; its tokenizer is always there.
        tokenizers = {name: part for name, part in model.pipe.components.items() if name.startswith("tokenizer")}
        left_out = [name.replace("tokenizer", "text_encoder") for name in tokenizers if tokenizers[name] is None]
        if left_out:
            raise ValueError(
                f"actor_rollout_ref.rollout.name=vllm_omni loads {', '.join(left_out)}, which this model was saved "
                "without; use rollout.name=diffusers, or the whole model"
            )
        check_targets(target_layers(model.transformer, model, lora), PIPELINES[pipeline].takes_no_adapter)
        self._lora = lora
        self._dtype = dtype
        self._expected = expected_shapes(model, lora)
        self._timeouts = VllmOmniConfig() if timeouts is None else timeouts
        self._environment = engine_environment(device)
        self._settings = Settings(
            model=resolve_asset(lora.path),
            pipeline=pipeline,
            dtype=dtype_name(dtype),
            vae_dtype=lora.dtype,
            batch_guidance=model.batch_guidance,
            max_batch=micro_batch_size,
            attention=attn_backend,
            init_timeout=self._timeouts.start_timeout_s,
        )
        self.adapter_version = -1
        self.restarts = 0
        """How often the process has been started anew."""
        self._pushed: tuple[AdapterPush, str] | None = None
        self._start()

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any
    ) -> "VllmOmniEngine":
        """The engine that the section ``actor_rollout_ref.rollout`` describes."""
        return cls(
            model,
            lora,
            dtype=torch_dtype(config.dtype),
            micro_batch_size=config.micro_batch_size,
            device=device,
            timeouts=config.vllm_omni,
            attn_backend=config.rollout_attn_backend,
        )

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Send copies of the adapter; returns the digest of what vllm-omni's layers then hold.

        Raises:
            AdapterMismatchError: some tensor does not bind; the engine keeps what it had.
            RolloutError: the process is down and does not come back.
        """
        # Before anything is copied and sent.
        check_adapter_state(state, self._expected)
        copies = {name: tensor.clone().contiguous() for name, tensor in to_host(state).items()}
        push = AdapterPush(copies, version, self._lora.lora_rank, self._lora.lora_alpha)
        digest = self._call("sync", push)
        self._pushed = (push, digest)
        self.adapter_version = version
        return digest

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded and scaled as ``sync`` leaves it in the engine."""
        return adapter_digest(as_held(state, self._dtype, self._lora.lora_alpha / self._lora.lora_rank))

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            RolloutError: no adapter has been synchronised yet, an image could not be drawn, or the process is down
                and does not come back.
        """
        check_has_adapter(self.adapter_version)
        return self._call("generate", (_on_host(request), self.adapter_version))

    def close(self) -> None:
        """End the process."""
        self._closing()

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    def _start(self) -> None:
        self._process = EngineProcess(self._settings, self._timeouts, self._environment)
        self._closing = weakref.finalize(self, self._process.close)

    def _call(self, method: str, argument: Any) -> Any:
        try:
            return self._process.call(method, argument)
        except EngineDownError as error:
            self._closing.detach()
            warnings.warn(f"{error}; starting it anew", stacklevel=3)
        self.restarts += 1
        self._start()
        # A new process holds no adapter; one that is being pushed replaces the last one anyway.
        if self._pushed is not None and method != "sync":
            push, digest = self._pushed
            again = self._process.call("sync", push)
            if again != digest:
                raise RolloutError(
                    f"the restarted engine holds adapter version {push.version} with digest {again[:16]}, not "
                    f"{digest[:16]}"
                )
        return self._process.call(method, argument)


def _on_host(request: RolloutRequest) -> RolloutRequest:
    """The request with tensors of their own on the host, ready to be pickled; the images come back all at once."""
    every_prompt = torch.arange(len(request.conditioning.prompts.embeds))
    starts = request.window_starts
    return replace(
        request,
        conditioning=request.conditioning.rows(every_prompt, torch.device("cpu")),
        prompt_index=request.prompt_index.to("cpu", copy=True),
        window_starts=None if starts is None else starts.to("cpu", copy=True),
        on_images=None,
    )
