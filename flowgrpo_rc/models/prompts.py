"""Prompt embeddings: computed once per distinct prompt, kept in a bounded cache, padded per batch."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo_rc.models.base import DiffusionModel, EncodedPrompt, Prompts
from flowgrpo_rc.models.quiet import only_errors

PROMPTS_AT_ONCE = 8
"""Prompts per call of the text encoder: a 7B encoder's activations for hundreds of them would fill a GPU."""

PROMPTS_TOKENIZED_AT_ONCE = 1000
"""Prompts per call of the tokenizers: a bound on the tokens that are held at a time."""


class PromptEncoder:
    """Encodes prompts through a least-recently-used cache on the host.

    Raises:
        ValueError: ``max_sequence_length`` is more than the model takes.
    """

    def __init__(self, model: DiffusionModel, max_sequence_length: int, cache_size: int) -> None:
        self._model = model
        self.check_length(max_sequence_length, "pipeline")
        self._max_length = max_sequence_length
        self._cache_size = cache_size
        self._cache: OrderedDict[tuple[str, int], EncodedPrompt] = OrderedDict()
        self.encoded = 0
        """How many prompts have gone through the text encoder."""

    def check_length(self, max_sequence_length: int, section: str) -> None:
        """Raise ``ValueError`` where the length, which a ``section`` of ``actor_rollout_ref.rollout`` asks for, is more
        than the model's text encoders take."""
        if max_sequence_length > self._model.longest_prompt:
            raise ValueError(
                f"actor_rollout_ref.rollout.{section}.max_sequence_length: got {max_sequence_length}; this model takes "
                f"at most {self._model.longest_prompt}"
            )

    def __call__(self, prompts: Sequence[str], max_sequence_length: int | None = None) -> Prompts:
        """Embeddings of ``prompts`` in their order, padded with zeros to the longest.

        Args:
            max_sequence_length: another one than the encoder was made with, for these prompts.
        """
        length = max_sequence_length or self._max_length
        missing = [p for p in dict.fromkeys(prompts) if (p, length) not in self._cache]
        for start in range(0, len(missing), PROMPTS_AT_ONCE):
            part = missing[start : start + PROMPTS_AT_ONCE]
            self._cache |= zip([(prompt, length) for prompt in part], self._model.encode(part, length), strict=True)
        self.encoded += len(missing)
        # Before old ones are dropped: the cache may be smaller than this call.
        rows = [self._cache[prompt, length] for prompt in prompts]
        for prompt in dict.fromkeys(prompts):
            self._cache.move_to_end((prompt, length))
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return pad(rows)


def check_prompts(model: DiffusionModel, prompts: Sequence[tuple[str, str]], max_sequence_length: int) -> str | None:
    """Every prompt gives the model's text encoders something to read.

    Args:
        model: with its tokenizers; no text encoder runs.
        prompts: each with where it stands (``train.txt:3``).
        max_sequence_length: as the model's ``encode`` takes it.

    Returns:
        One line on the prompts whose ends are cut off; None where all are read whole.

    Raises:
        ValueError: a prompt gives no tokenizer a token that it knows, or none within what it keeps; names its place.
    """
    tokenizers = model.tokenizers(max_sequence_length)
    roomiest = max(range(len(tokenizers)), key=lambda i: tokenizers[i][1])
    cut: list[tuple[str, int]] = []
    for start in range(0, len(prompts), PROMPTS_TOKENIZED_AT_ONCE):
        part = prompts[start : start + PROMPTS_TOKENIZED_AT_ONCE]
        texts = [text for text, _ in part]
        with only_errors("transformers.tokenization_utils_base"):  # it warns of long texts, without naming them
            tokens = [t(texts, add_special_tokens=False).input_ids for t, _ in tokenizers]
        for i, (text, source) in enumerate(part):
            if not any(_says(t, rows[i], kept) for (t, kept), rows in zip(tokenizers, tokens, strict=True)):
                raise ValueError(
                    f"{source}: {text[:80]!r} says nothing to the model: its first {tokenizers[roomiest][1]} tokens "
                    "(actor_rollout_ref.rollout.pipeline.max_sequence_length) are blank or unknown; rewrite it"
                )
            if len(tokens[roomiest][i]) > tokenizers[roomiest][1]:
                cut.append((source, len(tokens[roomiest][i])))
    if not cut:
        return None
    source, length = cut[0]
    return (
        f"actor_rollout_ref.rollout.pipeline.max_sequence_length={max_sequence_length} cuts off the ends of {len(cut)} "
        f"of {len(prompts)} prompts (the first: {source}, {length} tokens of which {tokenizers[roomiest][1]} are read)"
    )


def _says(tokenizer: Any, tokens: list[int], kept: int) -> bool:
    """Whether the tokens that are kept hold any text."""
    known = [token for token in tokens[: max(kept, 0)] if token != tokenizer.unk_token_id]
    # Only what is cut, or is short, can be blank: decoding every prompt would take longer than all else here.
    if len(known) > 4 and len(tokens) <= kept:
        return True
    return bool(tokenizer.decode(known).strip())


def pad(rows: Sequence[EncodedPrompt]) -> Prompts:
    """Stack embeddings ``(T_i, D)`` into ``(P, max T, D)``; no mask when all lengths agree."""
    lengths = torch.tensor([len(row.embeds) for row in rows])
    embeds = torch.nn.utils.rnn.pad_sequence([row.embeds for row in rows], batch_first=True)
    mask = torch.arange(embeds.shape[1])[None] < lengths[:, None]
    pooled = [row.pooled for row in rows if row.pooled is not None]
    prompts = Prompts(embeds, None if bool(mask.all()) else mask)
    return replace(prompts, pooled=torch.stack(pooled)) if pooled else prompts
