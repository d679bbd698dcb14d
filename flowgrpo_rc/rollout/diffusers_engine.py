"""The in-process engine: a copy of the transformer, in a precision of its own, sampled step by step."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo_rc.checks import choice
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.attention import use_attention_backend
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora, load_adapter_state
from flowgrpo_rc.rollout.base import RolloutRequest, Trajectories, batch_of, check_has_adapter
from flowgrpo_rc.rollout.config import QUANTIZATIONS, RolloutConfig
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.quantize import round_fp8_rows, round_linear_weights
from flowgrpo_rc.rollout.sampling import RequestSampler


class DiffusersEngine:
    """Samples with ``model``'s transformer in ``dtype``, its adapter following the actor's through ``sync``.

    The transformer's frozen weights are shared with ``model`` when they already have this ``dtype`` and copied
    otherwise; the adapter is always the engine's own, in ``dtype``. Create the engine before the actor attaches
    its adapter.

    ``quantization="fp8"`` does what ``RolloutConfig.quantization`` says: the base's weights are rounded once, the
    adapter's at every ``sync``. The rounded matrices are the engine's own; ``model`` keeps its weights bit for bit.
    """

    def __init__(
        self,
        model: DiffusionModel,
        lora: ModelConfig,
        *,
        dtype: torch.dtype,
        micro_batch_size: int,
        device: Any,
        quantization: str | None = None,
        attn_backend: str | None = None,
    ) -> None:
        choice("quantization", quantization, (*QUANTIZATIONS, None))
        self._model = model
        self._device = torch.device(device)
        self._dtype = dtype
        self._micro_batch_size = micro_batch_size
        self.transformer = _copy_transformer(model.transformer, dtype)
        self._quantized = quantization is not None
        if self._quantized:
            round_linear_weights(self.transformer, adapter=False)
        attach_lora(self.transformer, model, lora, dtype=dtype)
        # On the engine's own modules: the actor's may compute attention in another way.
        use_attention_backend(self.transformer, attn_backend)
        self.transformer.requires_grad_(False).eval()
        # Below every version: nothing is drawn before the actor's adapter has come.
        self.adapter_version = -1

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: DiffusionModel, lora: ModelConfig, device: Any
    ) -> "DiffusersEngine":
        """The engine that the section ``actor_rollout_ref.rollout`` describes."""
        return cls(
            model,
            lora,
            dtype=torch_dtype(config.dtype),
            micro_batch_size=config.micro_batch_size,
            device=device,
            quantization=config.quantization,
            attn_backend=config.rollout_attn_backend,
        )

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Copy the actor's adapter into the engine's, rounding to its dtype and then to its quantization.

        Returns the digest of the weights that the transformer then has.

        Raises:
            AdapterMismatchError: some tensor does not bind; the engine keeps what it had.
        """
        load_adapter_state(self.transformer, state)
        if self._quantized:
            round_linear_weights(self.transformer, adapter=True)
        self.adapter_version = version
        return self._held_digest()

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded as ``sync`` rounds it."""
        held = {name: tensor.detach().to(self._device, self._dtype) for name, tensor in state.items()}
        if self._quantized:
            held = {name: round_fp8_rows(tensor) for name, tensor in held.items()}
        return adapter_digest(held)

    def close(self) -> None:
        """Drop the engine's transformer."""
        self.transformer = nn.Identity()

    def generate(self, request: RolloutRequest) -> Trajectories:
        """Sample every image of the request.

        Raises:
            RolloutError: no adapter has been synchronised yet, or an image's latents are not finite.
        """
        check_has_adapter(self.adapter_version)
        sampler = RequestSampler(self._model, self.transformer, request, self._device)
        micro_batches = torch.arange(len(request.prompt_index)).split(self._micro_batch_size)
        sampled = [sampler.sample(rows) for rows in micro_batches]
        record = {name: torch.cat([part[name] for _, part in sampled]) for name in sampled[0][1]}
        # Read from the weights after they have drawn, so that a change meanwhile is noticed.
        echo = sampler.echo(adapter_version=self.adapter_version, adapter_digest=self._held_digest())
        return Trajectories(torch.cat([images for images, _ in sampled]), batch_of(record, request), echo)

    def _held_digest(self) -> str:
        return adapter_digest(adapter_parameters(self.transformer))


def _copy_transformer(transformer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A second transformer in ``dtype``; storage is shared where nothing has to be converted."""
    if all(p.dtype == dtype for p in transformer.parameters()):
        # What stands in the memo counts as copied already: modules are copied around the same parameters.
        return copy.deepcopy(transformer, {id(p): p for p in transformer.parameters()})
    return nn.Module.to(copy.deepcopy(transformer), dtype)
