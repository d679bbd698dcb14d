"""Before a run: check its prompts and their reference images, and encode the prompts that the store lacks."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.models.base import Conditioning, DiffusionModel
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.models.digests import short_digest
from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.models.prompt_store import PromptKey, PromptStore, open_store
from flowgrpo_rc.models.prompts import PromptEncoder, check_length, check_prompts, encode_into
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.models.sharding import processes_on_node
from flowgrpo_rc.prompt import Prompt, as_prompt
from flowgrpo_rc.rollout.config import PipelineConfig

NAMED = 5
"""Rows that a message names at most."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts of training or of validation."""

    records: Sequence[PromptRecord]
    pipeline: PipelineConfig
    section: str = "pipeline"  # section of ``pipeline`` under ``actor_rollout_ref.rollout``

    @property
    def positive(self) -> list[str | Prompt]:
        """The prompts, one per record."""
        return [self._prompt(record.prompt, record) for record in self.records]

    def negative(self, model: DiffusionModel) -> list[str | Prompt]:
        """The negative prompts, one per record, with the images of the prompt; none without guidance."""
        if self.pipeline.true_cfg_scale <= 1:
            return []
        prompts = [self._prompt(record.negative_prompt or model.negative_prompt, record) for record in self.records]
        return [replace(as_prompt(one), negative=True) for one in prompts] if model.instructs_prompts else prompts

    def keys(self, model: DiffusionModel) -> list[PromptKey]:
        """Keys of all prompts in a store."""
        both = (*self.positive, *self.negative(model))
        return [(prompt, self.pipeline.max_sequence_length) for prompt in both]

    def _prompt(self, text: str, record: PromptRecord) -> str | Prompt:
        return Prompt(text, record.images, self.pipeline.reference_area) if record.images else text


@dataclass(frozen=True)
class Encoding:
    """Counts of the prompts of a run, over all processes."""

    prompts: int  # distinct prompts and lengths, with negative prompts
    encoded: int  # prompts that went through the text encoder now; machines that do not share the store count their own
    size: int  # bytes of all their embeddings

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts, negative ones among them, of which {self.encoded} were encoded now; their "
            f"embeddings have {self.size:,} bytes, {self.size / self.prompts:,.0f} per prompt"
        )


def open_checked(model: ModelConfig, sets: Sequence[PromptSet], accelerator: Any) -> tuple[PipelineLoader, PromptStore]:
    """Check image sizes, guidance, prompt lengths and reference images of each set, or raise ``ValueError``. Returns
    the model without its networks, and the store of its prompts."""
    # The loader reads configurations and tokenizers, which the checks need, and no weights.
    loader = PipelineLoader(model.path, dtype=model.dtype, device=accelerator.device, quantization=model.quantization)
    store = open_store(model.prompt_store, loader.model, model.dtype)
    for one in sets:
        pipe = one.pipeline
        loader.model.check_request(pipe.height, pipe.width, pipe.guidance_scale, pipe.true_cfg_scale, one.section)
        check_length(loader.model, pipe.max_sequence_length, one.section)
        sources = [(record.prompt, record.source) for record in one.records]
        cut = check_prompts(loader.model, sources, pipe.max_sequence_length, one.section)
        if cut and accelerator.is_main_process:
            warnings.warn(cut, stacklevel=2)
        if loader.model.takes_images:
            _check_grids(loader.model, one)
    return loader, store


def fill_store(model: DiffusionModel, store: PromptStore, sets: Sequence[PromptSet], accelerator: Any) -> Encoding:
    """Encode the prompts that the store lacks. Every process calls it; they share the work. The stored prompts are read
    once, to find damage before the run. The text encoders are loaded only if prompts are missing, and freed after. An
    embedding that is not finite is a ``ValueError``."""
    # In a fixed order, so that every process takes the same shares.
    keys = list(dict.fromkeys(key for one in sets for key in one.keys(model)))
    encoded = 0
    here = processes_on_node(accelerator.num_processes)
    shares = [(accelerator.process_index, accelerator.num_processes)]
    if here < accelerator.num_processes:
        # Several machines may have no store in common; then each of them encodes all prompts.
        shares.append((accelerator.local_process_index, here))
    for first, every in shares:
        # Shared by number, not by what is missing: another run may add to the store, and processes may see different
        # states of it.
        own = keys[first::every]
        for damage in store.set_damaged_aside(own):
            warnings.warn(f"{damage}; its prompts are encoded anew", stacklevel=2)
        accelerator.wait_for_everyone()
        store.refresh()  # with the changes of the others
        missing = [key for key in own if key not in store]
        encode_into(store, model, missing)
        encoded += len(missing)
        accelerator.wait_for_everyone()
        store.refresh()
    # The count is for the line at the start; each process encoded its share.
    total = accelerator.reduce(torch.tensor(encoded, device=accelerator.device), reduction="sum")
    return Encoding(len(keys), int(total), store.nbytes(keys))


def condition(model: DiffusionModel, encoder: PromptEncoder, prompts: PromptSet) -> Conditioning:
    """Embeddings of ``prompts``, one row each, with negative prompts when guidance is on."""
    pipeline = prompts.pipeline
    length = pipeline.max_sequence_length
    negative = prompts.negative(model)
    positive = encoder(prompts.positive, length)
    steered = encoder(negative, length) if negative else None
    interval = None
    if pipeline.guidance_interval is not None:
        low, high = pipeline.guidance_interval
        interval = (low, high)
    return Conditioning(
        positive,
        steered,
        pipeline.true_cfg_scale,
        pipeline.guidance_scale,
        pipeline.height,
        pipeline.width,
        guidance_interval=interval,
    )


def check_numbers(pipeline_class: str, records: Sequence[PromptRecord]) -> None:
    """Raise ``ValueError`` with the rows of prompts with more or fewer images than pipelines of this class take."""
    fewest, most = FAMILIES[pipeline_class].images
    wrong = [record for record in records if not fewest <= len(record.images) <= most]
    if not wrong:
        return
    rows = _rows([record.source for record in wrong])
    if most == 0:
        raise ValueError(
            f"{rows}: a {pipeline_class} takes no reference images; leave out the column 'images', or give it another "
            "name if rewards alone read it"
        )
    count = len(wrong[0].images)
    raise ValueError(
        f"{rows}: {count or 'no'} reference image{'' if count == 1 else 's'} in the column 'images'; a "
        f"{pipeline_class} takes {most if fewest == most else f'{fewest} to {most}'}; give each prompt as many"
    )


def _check_grids(model: DiffusionModel, prompts: PromptSet) -> None:
    """Raise ``ValueError`` unless all prompts' images make the same grids of tokens, and so fit into one batch."""
    area = prompts.pipeline.reference_area
    # Rows x columns of each image of a prompt -> places of the prompts.
    sources: dict[str, list[str]] = {}
    for record in prompts.records:
        grids = [model.reference_grid(image, area) for image in record.images]
        in_words = ", ".join(f"{rows} x {columns} tokens" for rows, columns in grids) or "no tokens"
        sources.setdefault(in_words, []).append(record.source)
    if len(sources) < 2:
        return
    # The most frequent grid is taken for the right one, so that the message names the exceptions.
    most = max(sources, key=lambda grids: len(sources[grids]))
    others = {grids: rows for grids, rows in sources.items() if grids != most}
    raise ValueError(
        f"{_rows([row for rows in others.values() for row in rows])}: the reference images make {next(iter(others))}, "
        f"those of the other prompts {most} (actor_rollout_ref.rollout.{prompts.section}.reference_area="
        f"{area or 'null'}); crop or pad them to the same aspect ratio and give every prompt as many"
    )


def references_digest(records: Sequence[PromptRecord]) -> str:
    """Digest of the prompts' reference images and pairs; empty without any."""
    if not any(record.images + record.pair for record in records):
        return ""
    lines = [" ".join(image.digest for image in record.images + record.pair) for record in records]
    return short_digest("\n".join(lines).encode())


def _rows(sources: Sequence[str]) -> str:
    named = ", ".join(sources[:NAMED])
    return named if len(sources) <= NAMED else f"{named} and {len(sources) - NAMED} more rows"
