"""The object in a vllm_omni engine's process.

It has one ``AsyncOmni`` with one diffusion stage, which vllm-omni runs inside this process. An adapter goes through
``AsyncOmni.add_lora``, and each image through one ``AsyncOmni.generate``; vllm-omni's scheduler batches them.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES


@dataclass(frozen=True)
class Settings:
    """Settings of the engine that the section ``rollout`` does not hold."""

    model: str
    """Folder or hub name of the diffusers pipeline."""
    pipeline: str
    """Class of the pipeline, a key of ``PIPELINES``."""
    vae_dtype: str
    """Precision in which images are decoded, the trainer's."""
    batch_guidance: bool
    """Compute both halves of a guided velocity in one call of the transformer, as the trainer does."""
    init_timeout_s: float
    """Seconds until vllm-omni stops waiting for the model to load."""
    tensor_parallel: int
    """Number of GPUs over which each layer is divided."""


class Server:
    """The methods that the trainer may call.

    Args:
        config: the section ``actor_rollout_ref.rollout``.
        settings: the rest.
    """

    def __init__(self, config: RolloutConfig, settings: Settings) -> None:
        from vllm_omni.diffusion.registry import register_diffusion_model
        from vllm_omni.entrypoints import AsyncOmni

        here = "flowgrpo_rc.rollout.vllm_omni"
        # Registered for its pre- and post-processor only: vllm-omni's own load images and drop metadata. ``Rollout``
        # has the class attributes that vllm-omni reads before it builds a pipeline.
        register_diffusion_model(
            settings.pipeline,
            f"{here}.pipeline",
            "Rollout",
            pre_process_func_name="leave_as_they_are",
            post_process_func_name="leave_as_they_are",
        )
        attention = {"diffusion_attention_config": {"default": {"backend": config.rollout_attn_backend}}}
        self.omni = AsyncOmni(
            **(attention if config.rollout_attn_backend else {}),
            model=settings.model,
            dtype=config.dtype,
            enforce_eager=True,
            max_num_seqs=config.micro_batch_size,
            request_batch_max_wait_ms=100.0,  # it draws a batch that is not full after this
            max_cpu_loras=2,
            custom_pipeline_args={"pipeline_class": PIPELINES[settings.pipeline].rollout.replace(":", ".")},
            worker_extension_cls=f"{here}.lora.RolloutWorker",
            tensor_parallel_size=settings.tensor_parallel,
            enable_sleep_mode=config.vllm_omni.sleep,
            init_timeout=settings.init_timeout_s,
            stage_init_timeout=settings.init_timeout_s,
        )
        # The adapter in use.
        self._pushed: Any = None
        # Its id in vllm-omni. Every push has a new one, since vllm-omni keeps the old adapter of a used id.
        self._adapter = 0
        # Digest of the layers when it was bound.
        self._digest = ""
        self._ids = itertools.count(1)
        self._sleeps = config.vllm_omni.sleep
        self._asleep = False
        # Bytes of the GPU in use before the last sleep and after.
        self._used = (0, 0)
        # Runs during calls only.
        # vllm-omni's interface is asynchronous, while calls of the trainer come one at a time.
        self._loop = asyncio.new_event_loop()
        self._run(self._worker("flowgrpo_prepare", settings.vae_dtype, settings.batch_guidance))

    def sync(self, push: Any) -> str:
        """Take over an ``AdapterPush``; returns the digest of the layers' values.

        Raises:
            AdapterMismatchError: it does not bind; the one before stays in use.
        """
        self._run(self._wake())
        self._digest = self._run(self._sync(push))
        return self._digest

    def generate(self, request: Any, version: int) -> Any:
        """The ``Trajectories`` of a ``RolloutRequest``, drawn with the adapter of this version.

        Raises:
            RuntimeError: there is no such adapter, or an image could not be drawn.
        """
        self._run(self._wake())
        sampled = self._run(self._generate(request, version))
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
        # A second sleep would be an error in vllm-omni.
        if not self._sleeps or self._asleep:
            return
        before = _bytes_in_use()
        # From level 2, vllm-omni's default, it does not wake.
        _check_acknowledged("sleep", await self.omni.sleep(level=1))
        self._asleep = True
        self._used = (before, _bytes_in_use())

    async def _wake(self) -> None:
        """Move the weights back to the GPU, and check that the layers hold the adapter.

        Raises:
            RuntimeError: it does not wake, or the layers hold another adapter.
        """
        if not self._asleep:
            return
        _check_acknowledged("wake up", await self.omni.wake_up())
        self._asleep = False
        held = await self._worker("flowgrpo_held", self._pushed)
        if tuple(held) != (self._adapter, self._digest):
            raise RuntimeError(
                f"after waking up, vllm-omni's layers hold adapter {held[0]} with digest {held[1][:16]}, not "
                f"{self._adapter} with {self._digest[:16]}; set actor_rollout_ref.rollout.vllm_omni.sleep=false"
            )

    async def _sync(self, push: Any) -> str:
        """Add, bind and read back an adapter; only then drop the one before. A refused adapter leaves that in place."""
        from flowgrpo_rc.models.lora import AdapterMismatchError
        from flowgrpo_rc.rollout.vllm_omni.lora import lora_request

        # A new id even for the same version, because vllm-omni would keep the old tensors.
        new = next(self._ids)
        old = self._adapter
        try:
            await self.omni.add_lora(lora_request(new, push))
            if new not in await self.omni.list_loras():
                raise AdapterMismatchError(
                    "the adapter does not load: vllm-omni does not list it; see the engine's log"
                )
            await self._worker("flowgrpo_activate", lora_request(new))
            active, digest = await self._worker("flowgrpo_held", push)
            if active != new:
                raise AdapterMismatchError(f"the adapter does not bind: vllm-omni has {active} active, not {new}")
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
        listed = await self.omni.list_loras()
        if listed != [new]:
            raise AdapterMismatchError(f"a stale adapter was left in place: vllm-omni lists {listed}, not [{new}]")
        self._adapter = new
        self._pushed = push
        return digest

    async def _generate(self, request: Any, version: int) -> Any:
        """Sample all images of a request and put them into its order."""
        from flowgrpo_rc.rollout.vllm_omni.images import assemble, image_request

        if self._pushed is None or self._pushed.version != version:
            held = None if self._pushed is None else self._pushed.version
            raise RuntimeError(f"the engine holds adapter version {held}, not {version}: call sync() before generate()")
        results = await asyncio.gather(
            *(self._image(*image_request(request, row, self._adapter)) for row in range(len(request.prompt_index)))
        )
        sampled = assemble(request, results, self._adapter)
        # Read after drawing: the digest is of the layers that have drawn.
        active, digest = await self._worker("flowgrpo_held", self._pushed)
        if active != self._adapter:
            raise RuntimeError(f"vllm-omni sampled with adapter {self._adapter} and then had {active} active")
        echo = replace(sampled.echo, adapter_version=self._pushed.version, adapter_digest=digest)
        return replace(sampled, echo=echo)

    async def _image(self, name: str, prompt: dict[str, Any], params: Any) -> Any:
        last = None
        async for output in self.omni.generate(prompt, request_id=name, sampling_params_list=[params]):
            last = output
        if last is None:
            raise RuntimeError(f"vllm-omni returned nothing for image {name}")
        return last

    async def _worker(self, method: str, *arguments: Any) -> Any:
        """The worker's answer."""
        result = await self.omni.collective_rpc(method, args=arguments)
        # vllm-omni returns a worker's error instead of raising it.
        while isinstance(result, list) and len(result) == 1:
            result = result[0]
        if isinstance(result, dict) and result.get("supported") is False:
            raise RuntimeError(result.get("error") or result.get("todo") or f"{method}: not supported")
        return result


def _check_acknowledged(what: str, acknowledgements: Sequence[Any]) -> None:
    """Raise the errors that vllm-omni returns instead of raising them."""
    faults = [str(ack.error_msg) for ack in acknowledgements if ack.status != "SUCCESS"]
    if faults or not acknowledgements:
        reason = faults[0] if faults else "nothing answered"
        raise RuntimeError(f"vllm-omni does not {what} ({reason}); set actor_rollout_ref.rollout.vllm_omni.sleep=false")


def _bytes_in_use() -> int:
    """Bytes of this process's GPU in use by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free
