"""Before a run: every prompt that it will use is checked, and encoded where the store lacks it."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.models.base import DiffusionModel, EncodedPrompt
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.models.prompt_store import PromptKey, PromptStore, open_store
from flowgrpo_rc.models.prompts import check_length, check_prompts, encode_in_groups
from flowgrpo_rc.prompt import Prompt, as_prompt
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.trainer.launch import processes_here
from flowgrpo_rc.trainer.references import check_grids

BYTES_A_FILE = 64 * 2**20
"""Embeddings that are held before they are written, so that a kill costs no more, and tens of thousands of prompts
make no more than some hundred files."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts of training or of validation."""

    records: Sequence[PromptRecord]
    pipeline: PipelineConfig
    section: str = "pipeline"
    """Where ``pipeline`` stands under ``actor_rollout_ref.rollout``."""

    @property
    def positive(self) -> list[str | Prompt]:
        """The prompts, one a record."""
        return [self._asked(record.prompt, record) for record in self.records]

    def negative(self, model: DiffusionModel) -> list[str | Prompt]:
        """The prompts to steer away from, one a record, with the images of the prompt; none without guidance."""
        if self.pipeline.true_cfg_scale <= 1:
            return []
        asked = [self._asked(record.negative_prompt or model.negative_prompt, record) for record in self.records]
        return [replace(as_prompt(one), negative=True) for one in asked] if model.instructs_prompts else asked

    def keys(self, model: DiffusionModel) -> list[PromptKey]:
        """All of them as a store knows them."""
        both = (*self.positive, *self.negative(model))
        return [(prompt, self.pipeline.max_sequence_length) for prompt in both]

    def _asked(self, text: str, record: PromptRecord) -> str | Prompt:
        return Prompt(text, record.images, self.pipeline.reference_area) if record.images else text


@dataclass(frozen=True)
class Encoding:
    """What became of the prompts of a run, over all processes."""

    prompts: int
    """Distinct ones, with negative prompts; two where one is read at two lengths."""
    encoded: int
    """How many went through the text encoder now; machines that do not share the store count their own."""
    size: int
    """Bytes of all their embeddings."""

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts, negative ones among them, of which {self.encoded} were encoded now; their "
            f"embeddings have {self.size:,} bytes, {self.size / self.prompts:,.0f} a prompt"
        )


def open_checked(model: ModelConfig, sets: Sequence[PromptSet], accelerator: Any) -> tuple[PipelineLoader, PromptStore]:
    """The model without its networks, and the store of its prompts, after the prompts have been checked.

    Raises:
        UnsupportedModelError: see ``PipelineLoader``.
        PromptStoreError: the store is of another text encoder, or cannot be read.
        ValueError: see ``check_sets``.
    """
    loader = PipelineLoader(model.path, dtype=model.dtype, device=accelerator.device)
    store = open_store(model.prompt_store, loader.model, model.dtype)
    check_sets(loader.model, sets, warn=accelerator.is_main_process)
    return loader, store


def check_sets(model: DiffusionModel, sets: Sequence[PromptSet], *, warn: bool) -> None:
    """The model can draw what each set asks for, its text encoders can read the prompts, and the reference images of
    each set's prompts go into one batch.

    Raises:
        ValueError: they cannot; names the section or the prompt's place.
    """
    for one in sets:
        asked = one.pipeline
        model.check_request(asked.height, asked.width, asked.guidance_scale, asked.true_cfg_scale, one.section)
        check_length(model, asked.max_sequence_length, one.section)
        sources = [(record.prompt, record.source) for record in one.records]
        cut = check_prompts(model, sources, asked.max_sequence_length, one.section)
        if cut and warn:
            warnings.warn(cut, stacklevel=2)
        check_grids(model, one.records, asked, one.section)


def fill_store(model: DiffusionModel, store: PromptStore, sets: Sequence[PromptSet], accelerator: Any) -> Encoding:
    """Have all prompts in the store. Every process calls it; they share the work.

    What the store holds is read once, to find what is damaged before a run needs it. The text encoders are loaded where
    prompts are missing, and given up after.

    Raises:
        PromptStoreError: the store cannot be written.
        ValueError: an embedding is not finite.
    """
    keys = list(dict.fromkeys(key for one in sets for key in one.keys(model)))
    encoded = 0
    for share in _shares(accelerator):
        # By number, not by what is missing: another run may be adding to the store, and processes see that at
        # different times.
        own = keys[share]
        for damage in store.set_damaged_aside(own):
            warnings.warn(f"{damage}; its prompts are encoded anew", stacklevel=2)
        _wait(accelerator, store)
        encoded += _encode(model, store, [key for key in own if key not in store])
        _wait(accelerator, store)
    total = accelerator.reduce(torch.tensor(encoded, device=accelerator.device), reduction="sum")
    return Encoding(len(keys), int(total), store.nbytes(keys))


def _shares(accelerator: Any) -> list[slice]:
    """This process's share of the prompts; with several machines also its share if its machine were alone: where they
    do not see each other's store, it encodes there what the others have done."""
    ranks = accelerator.num_processes
    here = processes_here(accelerator)
    shares = [slice(accelerator.process_index, None, ranks)]
    return shares if here == ranks else [*shares, slice(accelerator.local_process_index, None, here)]


def _wait(accelerator: Any, store: PromptStore) -> None:
    """For all processes, and then see what they have done to the store."""
    accelerator.wait_for_everyone()
    store.refresh()


def _encode(model: DiffusionModel, store: PromptStore, keys: Sequence[PromptKey]) -> int:
    """Encode these prompts and add them to the store; returns how many they are."""
    if not keys:
        return 0
    store.check_writable()
    held: dict[PromptKey, EncodedPrompt] = {}
    size = 0
    with model.text_encoders():
        for rows in encode_in_groups(model, keys):
            held |= rows
            size += sum(row.embeds.nbytes for row in rows.values())
            if size >= BYTES_A_FILE:
                store.add(held)
                held = {}
                size = 0
    if held:
        store.add(held)
    return len(keys)
