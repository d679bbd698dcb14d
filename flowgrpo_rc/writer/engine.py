"""The engine of the writer: samples rewrites with transformers, and records the log-prob of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from flowgrpo_rc.batch import Key
from flowgrpo_rc.dtypes import torch_dtype
from flowgrpo_rc.models.lora import activate, adapter_active, adapter_parameters, linear_layers, load_adapter_state
from flowgrpo_rc.models.quantization import round_fp8_layers
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.writer.config import PromptWriterConfig
from flowgrpo_rc.writer.language import LanguageModel, NonFiniteWriterError, RequestTokens

INPUT_IDS = "input_ids"
"""``(B, L)`` int64: tokens of request and rewrite, padded at the end."""
REQUEST_LENGTHS = "request_lengths"
"""``(B,)`` int64: number of the request's tokens."""
ADAPTER = "rollout"


@dataclass(frozen=True)
class Sampled:
    """Tokens that an engine has sampled after some requests, and their log-probs, on the host."""

    tokens: list[Tensor]
    """Of each row its tokens, int64, with what may come after their end."""
    log_probs: list[Tensor]
    """Log-probs of these tokens in nats, float32."""
    adapter_version: int
    """Version of the adapter that sampled them."""
    adapter_digest: str
    """Digest of its weights."""


@dataclass(frozen=True)
class Written:
    """Rewrites of some requests."""

    texts: list[str]
    """The rewrites, without special tokens."""
    batch: TensorDict
    """``input_ids`` and ``request_lengths``; ``response_mask`` ``(B, T)``, true at the rewrite's tokens, its end
    included; and ``rollout_log_probs`` ``(B, T)`` in float32, 0 elsewhere. On the host."""
    ended: Bool[Tensor, " B"]
    """Rewrites that ended themselves; the others were cut."""
    adapter_version: int
    """Version of the adapter that wrote them."""
    adapter_digest: str
    """Digest of the weights that wrote them."""


@runtime_checkable
class SamplesTokens(Protocol):
    """An engine of the prompt writer, here or elsewhere."""

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """Take over the actor's adapter, rounded to the engine's dtype. Returns the digest of what the engine holds
        then. Raises ``AdapterMismatchError`` if some tensor does not bind; the engine keeps what it had."""
        ...

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """The digest of ``state`` rounded as ``sync`` rounds it."""
        ...

    def sample(self, asked: Sequence[list[int]], seeds: Sequence[int]) -> Sampled:
        """Tokens after each request.

        Args:
            asked: the requests' tokens, one for each rewrite; equal ones side by side need no padding.
            seeds: one for each rewrite, of a random stream of its own.
        """
        ...

    def close(self) -> None:
        """Release the network."""
        ...


def rounded_digest(state: Mapping[str, Tensor], config: PromptWriterConfig) -> str:
    """``SamplesTokens.digest_of`` of this file's engine, without one."""
    dtype = torch_dtype(config.engine.dtype)
    return adapter_digest({name: tensor.detach().to(dtype) for name, tensor in state.items()})


def write(engine: SamplesTokens, tokens: RequestTokens, requests: Sequence[str], seeds: Sequence[int]) -> Written:
    """Have ``engine`` write a prompt for each request; arguments as of ``SamplesTokens.sample``.

    Raises:
        NonFiniteWriterError: the network gives NaN.
    """
    known = {request: tokens.of(request) for request in dict.fromkeys(requests)}
    asked = [known[request] for request in requests]
    sampled = engine.sample(asked, seeds)
    bad = [requests[row] for row, values in enumerate(sampled.log_probs) if values.isnan().any()]
    if bad:
        raise NonFiniteWriterError(
            f"the prompt writer's log-probs are NaN for the requests {bad[:4]}; try float32 for "
            "algorithm.prompt_writer.engine.dtype, or a lower algorithm.prompt_writer.actor.optim.lr"
        )
    lengths = [_length(row.tolist(), tokens.ends) for row in sampled.tokens]
    rewrites = [row[:length] for row, length in zip(sampled.tokens, lengths, strict=True)]
    mask = pad_sequence([torch.ones(length, dtype=torch.bool) for length in lengths], batch_first=True)
    whole = [torch.cat([torch.tensor(first), row]) for first, row in zip(asked, rewrites, strict=True)]
    batch = {
        INPUT_IDS: pad_sequence(whole, batch_first=True, padding_value=tokens.pad),
        REQUEST_LENGTHS: torch.tensor([len(first) for first in asked]),
        Key.RESPONSE_MASK: mask,
        Key.ROLLOUT_LOG_PROBS: pad_sequence(
            [row[:length] for row, length in zip(sampled.log_probs, lengths, strict=True)], batch_first=True
        ),
    }
    ended = torch.tensor([int(row[-1]) in tokens.ends for row in rewrites])
    texts = [tokens.text(row.tolist()) for row in rewrites]
    record = TensorDict(batch, batch_size=[len(asked)])
    return Written(texts, record, ended, sampled.adapter_version, sampled.adapter_digest)


class WriterEngine:
    """A ``SamplesTokens`` with a copy of the writer's network in ``engine.dtype``, in this process.

    Tokens are drawn at temperature 1 from the whole distribution, so that the recorded log-probs are the policy's.

    Args:
        language: the model.
        alone: no actor learns in this process, so that the engine takes the model's own network, in its dtype; else
            create the engine before the actor attaches its adapter.
    """

    def __init__(self, language: LanguageModel, *, alone: bool = False) -> None:
        self._language = language
        dtype = torch_dtype(language.config.engine.dtype)
        self.network: Any = language.network if alone else language.copy_of_base(dtype)
        if language.config.engine.quantization is not None:
            output = self.network.get_output_embeddings()
            round_fp8_layers(layer for layer in linear_layers(self.network).values() if layer is not output)
        language.attach(self.network, ADAPTER, dtype, dtype)
        self.network.requires_grad_(False).eval()
        activate(self.network, None)
        # The folder's own settings may change the distribution, e.g. by a penalty on repetition.
        self.network.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=language.config.max_new_tokens,
            eos_token_id=language.tokens.ends,
            pad_token_id=language.tokens.pad,
        )
        self.adapter_version = -1

    def sync(self, state: Mapping[str, Tensor], version: int) -> str:
        """As ``SamplesTokens.sync``."""
        load_adapter_state(self.network, state, ADAPTER)
        self.adapter_version = version
        return self._held_digest()

    def digest_of(self, state: Mapping[str, Tensor]) -> str:
        """As ``SamplesTokens.digest_of``."""
        return rounded_digest(state, self._language.config)

    def write(self, requests: Sequence[str], seeds: Sequence[int]) -> Written:
        """A prompt for each request; see ``write``."""
        return write(self, self._language.tokens, requests, seeds)

    @torch.no_grad()
    def sample(self, asked: Sequence[list[int]], seeds: Sequence[int]) -> Sampled:
        """As ``SamplesTokens.sample``."""
        config = self._language.config
        tokens: list[Tensor] = []
        log_probs: list[Tensor] = []
        with adapter_active(self.network, ADAPTER):
            for rows in torch.arange(len(asked)).split(config.engine.micro_batch_size):
                chosen = rows.tolist()
                sampler = SeededSampler([seeds[row] for row in chosen], config.max_new_tokens)
                # Copies: a row that is sent as a view would take all others with it.
                tokens += [row.clone() for row in self._generate([asked[row] for row in chosen], sampler)]
                log_probs += [row.clone() for row in sampler.recorded()]
        return Sampled(tokens, log_probs, self.adapter_version, self._held_digest())

    def close(self) -> None:
        """Drop the engine's network."""
        self.network = torch.nn.Identity()

    def _generate(self, asked: Sequence[list[int]], sampler: "SeededSampler") -> list[Tensor]:
        """Tokens after each request, with what comes after their end; on the host."""
        longest = max(map(len, asked))
        pad = self._language.tokens.pad
        # Padded in front, so that all rows go on at the same place.
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in asked])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked])
        written = self.network.generate(
            ids.to(self._language.device),
            attention_mask=mask.to(self._language.device),
            logits_processor=LogitsProcessorList([sampler]),
        )
        return list(written[:, longest:].cpu())

    def _held_digest(self) -> str:
        return adapter_digest(adapter_parameters(self.network, ADAPTER))


class SeededSampler(LogitsProcessor):
    """Draws each row's tokens from a stream of its own, by the inverse of the cumulative distribution, and records
    their log-probs. ``generate`` without sampling then takes what was drawn: all other logits become minus infinity."""

    def __init__(self, seeds: Sequence[int], most: int) -> None:
        draws = [torch.rand(most, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self._draws = torch.stack(draws, dim=1).double()
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]) -> Any:
        log_probs = scores.float().log_softmax(-1)
        # In float64: sums of 150,000 float32 probabilities lose the rare tokens.
        cumulative = log_probs.double().exp().cumsum(-1)
        draw = self._draws[len(self._log_probs)].to(scores.device) * cumulative[:, -1]
        # The first token whose sum exceeds the draw; one of probability 0 never is.
        chosen = torch.searchsorted(cumulative, draw[:, None], right=True)
        # Only NaN lies beyond the last token; ``write`` refuses it.
        chosen = chosen.clamp(max=scores.shape[-1] - 1)
        self._log_probs.append(log_probs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)

    def recorded(self) -> list[Float[Tensor, " T"]]:
        """Log-probs of each row's tokens, on the host."""
        return list(torch.stack(self._log_probs, dim=1).cpu())


def _length(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """Number of tokens up to the first that ends the text, itself included."""
    return next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
