"""The object in a vllm_omni engine's process.

It has one ``AsyncOmni`` with one diffusion stage, which vllm-omni runs inside this process. An adapter goes through
``AsyncOmni.add_lora``, and each image through one ``AsyncOmni.generate``; vllm-omni's scheduler batches them.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout.base import RolloutError, RolloutRequest, Trajectories, check_has_adapter, joined, rows_of
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES

EXTRA = "flowgrpo"
"""Key of an image's ``RolloutRequest`` in ``extra_args``, and of its ``Trajectories`` in a result's metadata."""


class Server:
    """The methods that the trainer may call.

    Args:
        config, lora: the sections ``actor_rollout_ref.rollout`` and ``model``.
        pipeline: class of the pipeline at ``lora.path``, a key of ``PIPELINES``.
        batch_guidance: compute both halves of a guided velocity in one call of the transformer, as the trainer does.
        timeout_s: seconds until vllm-omni stops waiting for the model to load.
        gpus: number of GPUs over which each layer is divided.
    """

    def __init__(
        self, config: RolloutConfig, lora: ModelConfig, pipeline: str, batch_guidance: bool, timeout_s: float, gpus: int
    ) -> None:
        from vllm_omni.diffusion.registry import register_diffusion_model
        from vllm_omni.entrypoints import AsyncOmni

        here = "flowgrpo_rc.rollout.vllm_omni"
        # Registered for its pre- and post-processor only: vllm-omni's own load images and drop metadata. ``Rollout``
        # has the class attributes that vllm-omni reads before it builds a pipeline.
        register_diffusion_model(
            pipeline,
            f"{here}.pipeline",
            "Rollout",
            pre_process_func_name="leave_as_they_are",
            post_process_func_name="leave_as_they_are",
        )
        attention = {"diffusion_attention_config": {"default": {"backend": config.rollout_attn_backend}}}
        self.omni = AsyncOmni(
            **(attention if config.rollout_attn_backend else {}),
            model=resolve_asset(lora.path),
            dtype=config.dtype,
            enforce_eager=not config.torch_compile,
            max_num_seqs=config.micro_batch_size,
            request_batch_max_wait_ms=100.0,  # it draws a batch that is not full after this
            max_cpu_loras=2,
            custom_pipeline_args={"pipeline_class": PIPELINES[pipeline].rollout.replace(":", ".")},
            worker_extension_cls=f"{here}.lora.RolloutWorker",
            tensor_parallel_size=gpus,
            enable_sleep_mode=config.vllm_omni.sleep,
            init_timeout=timeout_s,
            stage_init_timeout=timeout_s,
        )
        self._alpha = lora.lora_alpha
        # The adapter in use, under the actor's names, and the trainer's number of it.
        self._state: Mapping[str, Tensor] = {}
        self._version = -1
        # Its id in vllm-omni. Every push has a new one, since vllm-omni keeps the old adapter of a used id.
        self._adapter = 0
        self._ids = itertools.count(1)
        # Digest of the layers when it was bound.
        self._digest = ""
        self._sleeps = config.vllm_omni.sleep
        self._asleep = False
        # Bytes of the GPU in use before the last sleep and after.
        self._used = (0, 0)
        # Runs during calls only.
        # vllm-omni's interface is asynchronous, while calls of the trainer come one at a time.
        self._loop = asyncio.new_event_loop()
        tea_cache = None if config.cache.name is None else PIPELINES[pipeline].tea_cache
        self._run(self._worker("flowgrpo_prepare", lora.dtype, batch_guidance, tea_cache))

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Take over an adapter; returns the digest of the layers' values.

        Raises:
            AdapterMismatchError: it does not bind; the one before stays in use.
        """
        self._run(self._wake())
        self._adapter, self._digest = self._run(self._bind(state))
        self._state = state
        self._version = version
        return self._digest

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request with the adapter of the last ``sync``.

        Raises:
            RolloutError: there is no adapter yet, or an image could not be drawn.
        """
        check_has_adapter(self._version)
        self._run(self._wake())
        sampled = self._run(self._draw(request))
        self._run(self._sleep())
        return sampled

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU in use, by whatever process, before the engine slept last and after; zeros before that."""
        return self._used

    def close(self) -> None:
        """End vllm-omni."""
        self.omni.shutdown()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    async def _sleep(self) -> None:
        """Move the weights to the host's memory, if the engine sleeps."""
        if not self._sleeps:
            return
        before = _bytes_in_use()
        # From level 2, vllm-omni's default, it does not wake.
        _check_acknowledged("sleep", await self.omni.sleep(level=1))
        self._asleep = True
        self._used = (before, _bytes_in_use())

    async def _wake(self) -> None:
        """Move the weights back to the GPU; raises ``RolloutError`` if the layers then hold another adapter."""
        if not self._asleep:
            return
        _check_acknowledged("wake up", await self.omni.wake_up())
        self._asleep = False
        digest = await self._held(self._state, self._adapter)
        if digest != self._digest:
            raise RolloutError(
                f"after waking up, vllm-omni's layers hold an adapter with digest {digest[:16]}, not "
                f"{self._digest[:16]}; set actor_rollout_ref.rollout.vllm_omni.sleep=false"
            )

    async def _bind(self, state: Mapping[str, Tensor]) -> tuple[int, str]:
        """Add, bind and read back an adapter; only then drop the one before. A refused adapter leaves that in place.
        Returns its id in vllm-omni and the digest of the layers."""
        from flowgrpo_rc.rollout.vllm_omni.lora import lora_request

        # A new id even for the same version, because vllm-omni would keep the old tensors.
        new = next(self._ids)
        old = self._adapter
        try:
            await self.omni.add_lora(lora_request(new, state, self._alpha))
            # It returns True for an adapter that does not load.
            if new not in await self.omni.list_loras():
                raise AdapterMismatchError("the adapter does not load: vllm-omni does not list it; see its log")
            await self._worker("flowgrpo_activate", lora_request(new))
            digest = await self._held(state, new)
        except Exception as error:
            with suppress(Exception):
                await self.omni.remove_lora(new)
            if old:
                with suppress(Exception):
                    await self._worker("flowgrpo_activate", lora_request(old))
            raise AdapterMismatchError(str(error)) from error
        # Only now is the new one proven to be in the layers.
        if old:
            await self.omni.remove_lora(old)
        return new, digest

    async def _draw(self, request: RolloutRequest) -> Trajectories:
        """Sample all images of a request, each as a request of vllm-omni's, and put them into its order."""
        images = [rows_of(request, torch.tensor([row])) for row in range(len(request.prompt_index))]
        sampled = assemble(request, images, await asyncio.gather(*map(self._image, images)))
        # Read after drawing: the digest is of the layers that have drawn.
        digest = await self._held(self._state, self._adapter)
        if sampled.echo.adapter_version != self._adapter:
            raise RolloutError(f"vllm-omni sampled with adapter {sampled.echo.adapter_version}, not {self._adapter}")
        return replace(sampled, echo=replace(sampled.echo, adapter_version=self._version, adapter_digest=digest))

    async def _image(self, image: RolloutRequest) -> Trajectories:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        from flowgrpo_rc.rollout.vllm_omni.lora import lora_request

        params = OmniDiffusionSamplingParams(
            # vllm-omni batches images by these; the pipeline reads the request itself.
            height=image.conditioning.height,
            width=image.conditioning.width,
            num_inference_steps=image.num_inference_steps,
            true_cfg_scale=image.conditioning.true_cfg_scale,
            guidance_scale=image.conditioning.guidance_scale,
            lora_request=lora_request(self._adapter),
            extra_args={EXTRA: image},
        )
        last = None
        async for output in self.omni.generate(
            {"prompt": ""}, request_id=image.request_id, sampling_params_list=[params]
        ):
            last = output
        error = getattr(last, "error", None) or getattr(last, "error_message", None)
        if last is None or error:
            raise RolloutError(f"vllm-omni could not draw image {image.request_id}: {error or 'it returned nothing'}")
        return last.multimodal_output["metadata"][EXTRA]

    async def _held(self, state: Mapping[str, Tensor], adapter: int) -> str:
        """The digest of the layers' values; raises ``RolloutError`` if they hold another adapter than ``adapter``."""
        active, digest = await self._worker("flowgrpo_held", state)
        if active != adapter:
            raise RolloutError(f"the adapter does not bind: vllm-omni has {active} active, not {adapter}")
        return digest

    async def _worker(self, method: str, *arguments: Any) -> Any:
        """The worker's answer."""
        result = await self.omni.collective_rpc(method, args=arguments)
        # vllm-omni returns a worker's error instead of raising it.
        while isinstance(result, list) and len(result) == 1:
            result = result[0]
        if isinstance(result, dict) and result.get("supported") is False:
            raise RolloutError(result.get("error") or result.get("todo") or f"{method}: not supported")
        return result


def assemble(
    request: RolloutRequest, images: Sequence[RolloutRequest], answers: Sequence[Trajectories]
) -> Trajectories:
    """The answers to the ``images`` of a request, in any order, as the answer to the request.

    Raises:
        RolloutError: an image is missing or twice there.
        RolloutSyncError: images were drawn with different settings.
    """
    # By the ids that the pipeline has put into them.
    by_id = {answer.echo.request_id: answer for answer in answers}
    wanted = [image.request_id for image in images]
    if sorted(by_id) != sorted(wanted):
        raise RolloutError(f"vllm-omni returned images {sorted(by_id)[:8]} for the {len(wanted)} of {wanted[0]}")
    return joined(request, [by_id[name] for name in wanted])


def _check_acknowledged(what: str, acknowledgements: Sequence[Any]) -> None:
    """Raise the errors that vllm-omni returns instead of raising them."""
    faults = [str(ack.error_msg) for ack in acknowledgements if ack.status != "SUCCESS"]
    if faults or not acknowledgements:
        reason = faults[0] if faults else "nothing answered"
        raise RolloutError(f"vllm-omni does not {what} ({reason}); set actor_rollout_ref.rollout.vllm_omni.sleep=false")


def _bytes_in_use() -> int:
    """Bytes of this process's GPU in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free
