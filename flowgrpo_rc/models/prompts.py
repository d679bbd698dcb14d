"""Embeddings of prompts, from a store or the text encoders, and the check that every prompt has readable tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from flowgrpo_rc.dtypes import dtype_name
from flowgrpo_rc.models.base import DiffusionModel, EncodedPrompt, Prompts
from flowgrpo_rc.models.prompt_store import PromptKey, PromptStore
from flowgrpo_rc.prompt import Prompt, as_prompt, texts
from flowgrpo_rc.quiet import TOKENIZATION, only_errors

BYTES_A_FILE = 64 * 2**20
"""Bytes of embeddings per file: a kill loses no more, and tens of thousands of prompts are a few hundred files."""
PROMPTS_AT_ONCE = 8
"""Prompts per call of the text encoder: a 7B encoder's activations for hundreds of them would fill a GPU."""


class PromptEncoder:
    """Embeddings of prompts, from a store if there is one.

    The text encoders are loaded only for prompts that the store lacks; these are added to it. A ``max_sequence_length``
    beyond what the model takes is a ``ValueError``.
    """

    def __init__(self, model: DiffusionModel, max_sequence_length: int, store: PromptStore | None = None) -> None:
        check_length(model, max_sequence_length)
        self._model = model
        self._max_length = max_sequence_length
        self._store = store

    def __call__(self, prompts: Sequence[str | Prompt], max_sequence_length: int | None = None) -> Prompts:
        """Embeddings of ``prompts`` in their order, padded with zeros to the longest; ``max_sequence_length`` is by
        default the encoder's own. Raises ``PromptStoreError`` if the store is damaged or cannot be written."""
        length = max_sequence_length or self._max_length
        keys: list[PromptKey] = [(prompt, length) for prompt in prompts]
        distinct = list(dict.fromkeys(keys))
        if self._store is None:
            with self._model.text_encoders():
                rows = {key: row for part in encode_in_groups(self._model, distinct) for key, row in part.items()}
        else:
            encode_into(self._store, self._model, [key for key in distinct if key not in self._store])
            rows = {key: self._store.read(key) for key in distinct}
        # Padding must not matter.
        return pad([rows[key] for key in keys], self._model.prompt_multiple if self._model.masks_prompts else 1)


def check_length(model: DiffusionModel, max_sequence_length: int, section: str = "pipeline") -> None:
    """Raise ``ValueError`` if the length, from this ``section`` of the rollout, is more than the text encoders take."""
    if max_sequence_length > model.longest_prompt:
        raise ValueError(
            f"actor_rollout_ref.rollout.{section}.max_sequence_length: got {max_sequence_length}; this model takes "
            f"at most {model.longest_prompt}"
        )


def encode_into(store: PromptStore, model: DiffusionModel, keys: Sequence[PromptKey]) -> None:
    """Encode these prompts, which the store lacks, and add them to it."""
    if not keys:
        return
    # A store that cannot be written must show before the text encoders are loaded, which takes longest.
    store.check_writable()
    held: dict[PromptKey, EncodedPrompt] = {}
    with model.text_encoders():
        for rows in encode_in_groups(model, keys):
            held |= rows
            if sum(row.embeds.nbytes for row in held.values()) >= BYTES_A_FILE:
                store.add(held)
                held = {}
    if held:
        store.add(held)


def encode_in_groups(model: DiffusionModel, keys: Sequence[PromptKey]) -> Iterator[dict[PromptKey, EncodedPrompt]]:
    """Embeddings of distinct prompts, a few at a time; call it inside ``model.text_encoders()``. Prompts of equal
    length go through the text encoder together, so that nothing is computed for padding. Their number may show in the
    last bits of an embedding. One that is not finite is a ``ValueError`` with the prompt."""
    # By the lengths for all tokenizers: a family with two pads each by its own.
    groups: dict[tuple[int, ...], list[PromptKey]] = {}
    words = texts(prompt for prompt, _ in keys)
    tokens = [_tokens(tokenizer, words) for tokenizer, _ in model.tokenizers(keys[0][1])]
    for key, *rows in zip(keys, *tokens, strict=True):
        groups.setdefault((key[1], *(min(len(row), key[1]) for row in rows)), []).append(key)
    # Pipelines warn of every prompt that they cut; ``check_prompts`` reports all of them in one line.
    quiet = (TOKENIZATION, type(model.pipe).__module__)
    for (length, *_), group in groups.items():
        for start in range(0, len(group), PROMPTS_AT_ONCE):
            part = group[start : start + PROMPTS_AT_ONCE]
            with only_errors(*quiet):
                encoded = model.encode([prompt for prompt, _ in part], length)
            for (prompt, _), row in zip(part, encoded, strict=True):
                tensors = (row.embeds, row.pooled, row.references)
                # Before the store keeps them: a NaN there would reach every later run.
                if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None):
                    raise ValueError(
                        f"the text encoder gives values that are not finite for {as_prompt(prompt).text[:80]!r} in "
                        f"{dtype_name(row.embeds.dtype)}; try actor_rollout_ref.model.dtype=float32 or bfloat16"
                    )
            yield dict(zip(part, encoded, strict=True))


def _tokens(tokenizer: Any, words: list[str]) -> list[list[int]]:
    with only_errors(TOKENIZATION):
        return tokenizer(words, add_special_tokens=False).input_ids


def check_prompts(
    model: DiffusionModel, prompts: Sequence[tuple[str, str]], max_sequence_length: int, section: str = "pipeline"
) -> str | None:
    """Check that every prompt, given with its place, gives the model's text encoders a token with text.

    It needs the tokenizers alone; ``section`` of ``actor_rollout_ref.rollout`` holds the length, for messages. Returns
    one line on the prompts that are cut, or ``None``. Raises ``ValueError`` with the place of a prompt whose known
    tokens no tokenizer keeps.
    """
    here = f"actor_rollout_ref.rollout.{section}.max_sequence_length"
    readings = read_prompts(model, [text for text, _ in prompts], max_sequence_length)
    for (text, source), reading in zip(prompts, readings, strict=True):
        if not reading.has_text:
            raise ValueError(
                f"{source}: {text[:80]!r} says nothing to the model: its first {reading.kept} tokens ({here}) are "
                "blank or unknown; rewrite it"
            )
    cut = [i for i, reading in enumerate(readings) if reading.is_cut]
    if not cut:
        return None
    source = prompts[cut[0]][1]
    first = readings[cut[0]]
    return (
        f"{here}={max_sequence_length} cuts off the ends of {len(cut)} of {len(prompts)} prompts (the first: {source}, "
        f"{first.tokens} tokens of which {first.kept} are read)"
    )


@dataclass(frozen=True)
class Reading:
    """A prompt as the text encoders read it: by the tokenizer that keeps most of it."""

    has_text: bool  # some tokenizer keeps a token with text
    tokens: int
    kept: int  # tokens that are read at most

    @property
    def is_cut(self) -> bool:
        """The end of the prompt is not read."""
        return self.tokens > self.kept


def read_prompts(model: DiffusionModel, prompts: Sequence[str], max_sequence_length: int) -> list[Reading]:
    """Each prompt as the model's tokenizers read it; the text encoders are not needed."""
    tokenizers = model.tokenizers(max_sequence_length)
    kept = [most for _, most in tokenizers]
    roomiest = kept.index(max(kept))
    tokens = [_tokens(tokenizer, list(prompts)) for tokenizer, _ in tokenizers]
    return [
        Reading(
            any(_has_text(t, row, most) for (t, most), row in zip(tokenizers, rows, strict=True)),
            len(rows[roomiest]),
            kept[roomiest],
        )
        for rows in zip(*tokens, strict=True)
    ]


def _has_text(tokenizer: Any, tokens: list[int], kept: int) -> bool:
    """The kept tokens hold some text."""
    known = [token for token in tokens[: max(kept, 0)] if token != tokenizer.unk_token_id]
    # Only short or cut prompts can be blank; decoding every prompt would take longer than the rest of the check.
    if len(known) > 4 and len(tokens) <= kept:
        return True
    return bool(tokenizer.decode(known).strip())


def pad(rows: Sequence[EncodedPrompt], multiple: int = 1) -> Prompts:
    """Stack embeddings ``(T_i, D)`` into ``(P, T, D)``, with ``T`` the first ``multiple`` that holds the longest; no
    mask without padding. Raises ``ValueError`` if their reference images have other sizes, which one batch cannot
    hold."""
    lengths = tuple(len(row.embeds) for row in rows)
    embeds = torch.nn.utils.rnn.pad_sequence([row.embeds for row in rows], batch_first=True)
    embeds = F.pad(embeds, (0, 0, 0, -max(lengths) % multiple))
    all_real = min(lengths) == embeds.shape[1]
    mask = torch.arange(embeds.shape[1])[None] < torch.tensor(lengths)[:, None]
    pooled = [row.pooled for row in rows if row.pooled is not None]
    references = [row.references for row in rows if row.references is not None]
    grids = {row.reference_grids for row in rows}
    if len(grids) > 1:
        raise ValueError(f"reference images of one batch must have the same sizes in tokens, got {sorted(grids)}")
    return Prompts(
        embeds,
        None if all_real else mask,
        torch.stack(pooled) if pooled else None,
        torch.stack(references) if references else None,
        grids.pop(),
        None if all_real else lengths,
    )
