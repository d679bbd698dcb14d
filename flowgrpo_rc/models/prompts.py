"""Prompt embeddings: computed once per distinct prompt, kept in a bounded cache, padded per batch."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from flowgrpo_rc.models.base import DiffusionModel, EncodedPrompt, Prompts

PROMPTS_AT_ONCE = 8
"""Prompts per call of the text encoder: a 7B encoder's activations for hundreds of them would fill a GPU."""


class PromptEncoder:
    """Encodes prompts through a least-recently-used cache on the host.

    Raises:
        ValueError: ``max_sequence_length`` is more than the model takes.
    """

    def __init__(self, model: DiffusionModel, max_sequence_length: int, cache_size: int) -> None:
        if max_sequence_length > model.longest_prompt:
            raise ValueError(
                f"actor_rollout_ref.rollout.pipeline.max_sequence_length: got {max_sequence_length}; this model takes "
                f"at most {model.longest_prompt}"
            )
        self._model = model
        self._max_length = max_sequence_length
        self._cache_size = cache_size
        self._cache: OrderedDict[str, EncodedPrompt] = OrderedDict()
        self.encoded = 0
        """How many prompts have gone through the text encoder."""

    def __call__(self, prompts: Sequence[str]) -> Prompts:
        """Embeddings of ``prompts`` in their order, padded with zeros to the longest."""
        missing = [p for p in dict.fromkeys(prompts) if p not in self._cache]
        fresh: dict[str, EncodedPrompt] = {}
        for start in range(0, len(missing), PROMPTS_AT_ONCE):
            part = missing[start : start + PROMPTS_AT_ONCE]
            fresh |= zip(part, self._model.encode(part, self._max_length), strict=True)
        self.encoded += len(missing)
        rows = [fresh[p] if p in fresh else self._cache[p] for p in prompts]
        for prompt in dict.fromkeys(prompts):
            self._cache[prompt] = fresh.get(prompt, self._cache.get(prompt))  # type: ignore[assignment]
            self._cache.move_to_end(prompt)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return pad(rows)


def pad(rows: Sequence[EncodedPrompt]) -> Prompts:
    """Stack embeddings ``(T_i, D)`` into ``(P, max T, D)``; no mask when all lengths agree."""
    lengths = torch.tensor([len(row.embeds) for row in rows])
    embeds = torch.nn.utils.rnn.pad_sequence([row.embeds for row in rows], batch_first=True)
    mask = torch.arange(embeds.shape[1])[None] < lengths[:, None]
    pooled = [row.pooled for row in rows if row.pooled is not None]
    return Prompts(embeds, None if bool(mask.all()) else mask, torch.stack(pooled) if pooled else None)
