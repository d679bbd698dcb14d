"""The engine's process: ``python -m flowgrpo_rc.rollout.vllm_omni.server FD``, FD being its end of the pipe.

It holds one ``AsyncOmni`` with one diffusion stage, which vllm-omni runs inside this process. An adapter goes through
``AsyncOmni.add_lora``, a rollout through one ``AsyncOmni.generate`` an image; vllm-omni's scheduler batches them.
"""

import asyncio
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from flowgrpo_rc.messages import one_line
from flowgrpo_rc.rollout.vllm_omni.protocol import HEARTBEAT, READY, Call, Reply, Settings, receive, send
from flowgrpo_rc.rollout.vllm_omni.registry import PIPELINES

HEARTBEAT_SECONDS = 0.5
"""Seconds between two signs of life."""
_PR_SET_PDEATHSIG = 1
"""Linux's ``prctl`` option for a signal at the end of the parent's thread."""


def main() -> None:
    """Serve until the pipe closes, ``close`` arrives or the trainer is gone."""
    connection = Connection(int(sys.argv[1]))
    settings: Settings = receive(connection)
    _end_with_trainer(settings)
    lock = threading.Lock()
    threading.Thread(target=_send_heartbeats, args=(connection, lock, settings.parent), daemon=True).start()
    asyncio.run(_serve(_Server(settings), connection, lock))
    os._exit(0)


async def _serve(server: "_Server", connection: Connection, lock: threading.Lock) -> None:
    """Answer one call after the other; waiting for the next holds up the event loop, where nothing is left to do."""
    await server.prepare()
    with lock:
        send(connection, Reply(READY))
    closed = False
    while not closed:
        try:
            call: Call = receive(connection)
        except (EOFError, OSError):
            os._exit(1)
        reply = await server.answer(call)
        with lock:
            send(connection, reply)
        closed = call.method == "close"
    with suppress(Exception):
        server.omni.shutdown()


class _Server:
    """The calls that the trainer may make."""

    def __init__(self, settings: Settings) -> None:
        from vllm_omni.diffusion.registry import register_diffusion_model
        from vllm_omni.entrypoints import AsyncOmni

        here = "flowgrpo_rc.rollout.vllm_omni"
        # For the way in and out alone: vllm-omni's own pre-processors load images, and only some of its post-processors
        # let metadata through. What all pipelines have in common stands for what it asks of a class before it is built.
        register_diffusion_model(
            settings.pipeline,
            f"{here}.pipeline",
            "Rollout",
            pre_process_func_name="leave_as_they_are",
            post_process_func_name="leave_as_they_are",
        )
        self._settings = settings
        attention = {"diffusion_attention_config": {"default": {"backend": settings.attention}}}
        self.omni = AsyncOmni(
            **(attention if settings.attention else {}),
            model=settings.model,
            dtype=settings.dtype,
            enforce_eager=True,
            max_num_seqs=settings.max_batch,
            request_batch_max_wait_ms=100.0,  # for more images, before it draws a batch that is not full
            max_cpu_loras=2,
            custom_pipeline_args={"pipeline_class": PIPELINES[settings.pipeline].rollout.replace(":", ".")},
            worker_extension_cls=f"{here}.lora.RolloutWorker",
            init_timeout=settings.init_timeout,
            stage_init_timeout=settings.init_timeout,
        )
        self._pushed: Any = None
        """The adapter that is in use."""
        self._adapter = 0
        """Its id in vllm-omni: a number of its own for every push, since vllm-omni keeps the old one of a used id."""
        self._ids = itertools.count(1)

    async def prepare(self) -> None:
        """What is left to do after loading."""
        await self._worker("flowgrpo_prepare", self._settings.vae_dtype, self._settings.batch_guidance)

    async def answer(self, call: Call) -> Reply:
        """Never raises: an error goes back as one line."""
        try:
            return Reply(call.id, await getattr(self, f"do_{call.method}")(call.argument))
        except Exception as error:
            traceback.print_exc()
            return Reply(call.id, error=one_line(error, 1000), error_type=type(error).__name__)

    async def do_close(self, argument: None) -> None:
        """Answer first; ``_serve`` ends."""

    async def do_sync(self, push: Any) -> str:
        """Add, bind, read back, and only then drop the adapter before it; a refused one leaves that in place."""
        from flowgrpo_rc.models.lora import AdapterMismatchError
        from flowgrpo_rc.rollout.vllm_omni.lora import lora_request

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
        # Only now that the new one is proven to be in the layers.
        if old:
            await self.omni.remove_lora(old)
        listed = await self.omni.list_loras()
        if listed != [new]:
            raise AdapterMismatchError(f"a stale adapter was left in place: vllm-omni lists {listed}, not [{new}]")
        self._adapter = new
        self._pushed = push
        return digest

    async def do_generate(self, argument: tuple[Any, int]) -> Any:
        """Sample all images of a request; they come back in any order and are put in the request's."""
        from flowgrpo_rc.rollout.vllm_omni.images import assemble, image_request

        request, version = argument
        if self._pushed is None or self._pushed.version != version:
            held = None if self._pushed is None else self._pushed.version
            raise RuntimeError(f"the engine holds adapter version {held}, not {version}: call sync() before generate()")
        results = await asyncio.gather(
            *(self._image(*image_request(request, row, self._adapter)) for row in range(len(request.prompt_index)))
        )
        sampled = assemble(request, results, self._adapter)
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
        """The worker's answer; vllm-omni reports a worker's error in the result instead of raising it."""
        result = await self.omni.collective_rpc(method, args=arguments)
        while isinstance(result, list) and len(result) == 1:
            result = result[0]
        if isinstance(result, dict) and result.get("supported") is False:
            raise RuntimeError(result.get("error") or result.get("todo") or f"{method}: not supported")
        return result


def _end_with_trainer(settings: Settings) -> None:
    """Have the kernel end this process with the trainer's, and end now where that one has gone already."""
    if settings.die_with_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings.parent:
        os._exit(1)


def _send_heartbeats(connection: Connection, lock: threading.Lock, parent: int) -> None:
    """Show life, and end when the trainer is gone."""
    while True:
        time.sleep(HEARTBEAT_SECONDS)
        if os.getppid() != parent:
            os._exit(1)
        if lock.acquire(timeout=HEARTBEAT_SECONDS):
            try:
                send(connection, HEARTBEAT)
            except OSError:
                os._exit(1)
            finally:
                lock.release()


if __name__ == "__main__":
    main()
