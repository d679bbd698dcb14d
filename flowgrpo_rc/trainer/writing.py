"""The prompt writer of a run: rewrites of a batch's requests, and what the writer learns from their images."""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.gap.guard import Guard
from flowgrpo_rc.gap.tokens import TokenGap, token_gap
from flowgrpo_rc.loss import group_advantages
from flowgrpo_rc.models.base import DiffusionModel
from flowgrpo_rc.models.digests import spread, tokenizer_digest, values_digest
from flowgrpo_rc.models.lora import (
    ACTOR_ADAPTER,
    AdapterMismatchError,
    adapter_state,
    base_parameters,
    load_adapter_state,
)
from flowgrpo_rc.models.prompts import read_prompts
from flowgrpo_rc.rollout.config import IN_TRAINER, Share
from flowgrpo_rc.rollout.proof import check_adapter
from flowgrpo_rc.rollout.seeds import PROBE, VALIDATION, WRITER, seed_for
from flowgrpo_rc.trainer.adapter_sync import AdapterSync
from flowgrpo_rc.trainer.config import FlowGRPOConfig
from flowgrpo_rc.trainer.scoring import Gather
from flowgrpo_rc.writer import LanguageModel, WriterActor, WriterEngine, WriterProcesses, Written
from flowgrpo_rc.writer.engine import SamplesTokens, write

WRITER_FILE = "adapter_model.safetensors"
"""The adapter's file in a folder of peft's format."""
BASE_FILE = "trained_on.json"
"""Beside it: digests of the model that the adapter belongs to."""
WRITTEN = "written_prompt"
"""Key of a rewrite in the metadata that reward functions get; their prompt is the request."""


@dataclass(frozen=True)
class Rewrites:
    """The rewrites of some requests of this process."""

    drawn: list[PromptRecord]
    """Records whose prompt is a rewrite, or the request where the image model can read nothing of the rewrite."""
    scored: list[PromptRecord]
    """The requests, with the rewrite in their metadata."""
    written: Written
    request: Int[Tensor, " P"]
    """Of each rewrite the position of its request in the batch of all processes."""
    fit: Bool[Tensor, " P"]
    """Rewrites that say something to the image model and ended by themselves."""
    read_whole: Bool[Tensor, " P"]
    """Rewrites whose end the image model's text encoders do not cut off."""
    left_out: Float[Tensor, " P"]
    """Share of the request's words that the rewrite lacks, float64."""


class PromptWriting:
    """Language model, engine and actor of ``algorithm.prompt_writer``. The engine's adapter is as many batches old as
    that of the image engine (``rollout.ahead``, ``adapter_lag``).

    A rewrite's score is the mean reward of its images less ``request_penalty``, compared within its request. One that
    is empty or did not end gets the lowest score of its request. The images themselves are compared within their
    rewrite.
    """

    def __init__(
        self, config: FlowGRPOConfig, model: DiffusionModel, accelerator: Any, total_steps: int, share: Share
    ) -> None:
        self.config = config.algorithm.prompt_writer
        self._model = model
        self._pipelines = {
            "pipeline": config.actor_rollout_ref.rollout.pipeline,
            "val_kwargs.pipeline": config.actor_rollout_ref.rollout.validation_pipeline,
        }
        self._warns_of_cuts: bool = accelerator.is_main_process
        self._algorithm = config.algorithm
        self._rollout_seed = config.rollout_seed
        self._validation_seed = config.actor_rollout_ref.rollout.val_kwargs.seed
        self._mini_batches = config.mini_batches
        self._rank: int = accelerator.process_index
        self.language = LanguageModel(self.config, accelerator.device)
        # Equal on every process, whatever was drawn before.
        torch.manual_seed(config.trainer.seed)
        self.engine = self._make_engine(config, accelerator.device, share)
        torch.manual_seed(config.trainer.seed)
        try:
            self.actor = WriterActor(self.language, total_steps * config.mini_batches * self.config.actor.ppo_epochs)
        except BaseException:
            self.engine.close()
            raise
        rollout = config.actor_rollout_ref.rollout
        own = self.config.actor
        mode = ModeInForce(own.rollout_correction, own.diffusion_loss, own.use_kl_loss, own.kl_loss_coef)
        self.guard = Guard(mode, of_tokens=True)
        # Number of batches learned from.
        self._step = 0
        # Requests are written when they are made, wherever the images' engine is.
        self.adapter = AdapterSync(self.engine, self.actor, rollout.staleness, rollout.ahead)

    def _make_engine(self, config: FlowGRPOConfig, device: Any, share: Share) -> SamplesTokens:
        if self.config.engine.placement == IN_TRAINER:
            return WriterEngine(self.language)
        tf32 = config.actor_rollout_ref.model.allow_tf32
        return WriterProcesses(self.config, device, share, allow_tf32=tf32)

    def push(self, version: int) -> None:
        """Give the engine the adapter for the batch that it writes next; raises ``RolloutSyncError`` if it does not
        hold it then."""
        self._step = version
        self.adapter.push(version)

    def write(self, step: int, requests: Sequence[PromptRecord], positions: Sequence[int]) -> Rewrites:
        """``rewrites`` prompts for each request. Their seeds depend on the step and on ``positions``, those of the
        requests in the batch of all processes."""
        self.adapter.give_for(step)
        count = self.config.rewrites
        records = [record for record in requests for _ in range(count)]
        numbers = [position * count + i for position in positions for i in range(count)]
        seeds = [seed_for(self._rollout_seed, WRITER, step, number) for number in numbers]
        return self._rewrites(records, seeds, torch.tensor(positions).repeat_interleave(count), "pipeline")

    def for_validation(self, records: Sequence[PromptRecord], numbers: Sequence[int]) -> Rewrites:
        """A rewrite of its own for each validation image, always from the same seeds."""
        seeds = [seed_for(self._validation_seed, VALIDATION, 1, number) for number in numbers]
        return self._rewrites(records, seeds, torch.tensor(numbers), "val_kwargs.pipeline")

    def _rewrites(self, records: Sequence[PromptRecord], seeds: list[int], request: Tensor, section: str) -> Rewrites:
        written = write(self.engine, self.language.tokens, [record.prompt for record in records], seeds)
        check_adapter(self.adapter.held, written.adapter_version, written.adapter_digest)
        readings = read_prompts(self._model, written.texts, self._pipelines[section].max_sequence_length)
        rows = list(zip(records, written.texts, readings, strict=True))
        first = next((row for row in rows if row[2].is_cut), None)
        if first is not None and self._warns_of_cuts:
            self._warns_of_cuts = False
            record, text, reading = first
            warnings.warn(
                f"{record.source}: the image model reads {reading.kept} of the {reading.tokens} tokens of the rewrite "
                f"{text[:80]!r}; raise actor_rollout_ref.rollout.{section}.max_sequence_length or lower "
                "algorithm.prompt_writer.max_new_tokens. Further ones are not named; writer/read_fraction is the share "
                "of training's that are read to the end",
                stacklevel=2,
            )
        readable = [reading.has_text for reading in readings]
        return Rewrites(
            drawn=[replace(record, prompt=text if one.has_text else record.prompt) for record, text, one in rows],
            scored=[replace(record, metadata={**record.metadata, WRITTEN: text}) for record, text, _ in rows],
            written=written,
            request=request,
            fit=written.ended & torch.tensor(readable),
            read_whole=torch.tensor([not reading.is_cut for reading in readings]),
            left_out=torch.tensor([left_out(record.prompt, text) for record, text, _ in rows], dtype=torch.float64),
        )

    def measure_gap(self, requests: Sequence[PromptRecord], count: int) -> TokenGap:
        """The gap of engine and actor on ``count`` rewrites of ``requests`` in turn, before the first step."""
        prompts = [requests[i % len(requests)].prompt for i in range(count)]
        # Equal ones side by side need no padding.
        prompts.sort()
        seeds = [seed_for(self._rollout_seed, PROBE, 1, number) for number in range(count)]
        written = write(self.engine, self.language.tokens, prompts, seeds)
        check_adapter(self.adapter.held, written.adapter_version, written.adapter_digest)
        batch = written.batch
        log_ratio = self.actor.score(batch).log_probs.double() - batch[Key.ROLLOUT_LOG_PROBS].double()
        return token_gap(self.guard.mode, log_ratio, batch[Key.RESPONSE_MASK])

    def learn(self, rewrites: Rewrites, rewards: Float[np.ndarray, " B"], gather: Gather) -> dict[str, float]:
        """Learn from the rewards of the rewrites' images, which are equally many and side by side; returns metrics.
        The guard judges those of the update, and sets the mode of the next one."""
        batch = rewrites.written.batch
        scores = self.scores(rewrites, rewards)
        metrics = self._figures(rewrites, scores, gather)
        if self.config.learns == "images":
            return metrics
        batch[Key.ADVANTAGES] = self._advantages(scores, rewrites.request, gather)
        old, gap = None, None
        if not self.guard.mode.bypasses:
            old, gap = self.actor.correct(batch, self.actor.score(batch))
        parts = torch.arange(len(batch)).chunk(self._mini_batches)
        minis = [MiniBatch(rows, None if old is None else old.rows(rows)) for rows in parts]
        update = self.actor.update(batch, minis, gap)
        update |= self.guard(update, self._step + 1)
        self.actor.in_force = self.guard.mode
        return metrics | {f"writer/{name.removeprefix('actor/')}": value for name, value in update.items()}

    def scores(self, rewrites: Rewrites, rewards: Float[np.ndarray, " B"]) -> Float[Tensor, " P"]:
        """The score of each rewrite."""
        scores = torch.from_numpy(rewards).double().reshape(len(rewrites.drawn), -1).mean(1)
        scores -= self.config.request_penalty * rewrites.left_out
        unfit = ~rewrites.fit
        for one in rewrites.request[unfit].unique():
            own = rewrites.request == one
            scores[own & unfit] = scores[own].min()
        return scores

    def _advantages(self, scores: Tensor, request: Tensor, gather: Gather) -> Float[Tensor, " P"]:
        by_std, global_std = self._algorithm.norm_adv_by_std_in_grpo, self._algorithm.global_std
        found = group_advantages(gather(scores), gather(request), norm_by_std=by_std, global_std=global_std)
        start = self._rank * len(scores)
        return found.advantages[start : start + len(scores)].float()

    def _figures(self, rewrites: Rewrites, scores: Tensor, gather: Gather) -> dict[str, float]:
        count = self.config.rewrites
        texts = rewrites.written.texts
        groups = [texts[i : i + count] for i in range(0, len(texts), count)]
        lengths = rewrites.written.batch[Key.RESPONSE_MASK].sum(1).double()
        shares = (rewrites.fit.double(), rewrites.read_whole.double(), rewrites.left_out)
        per_rewrite = gather(torch.stack([scores, lengths, *shares], dim=1))
        distinct = gather(torch.tensor([len(set(group)) / count for group in groups], dtype=torch.float64))
        spread = gather(scores.reshape(-1, count).std(1, correction=0))
        return {
            "writer/score": float(per_rewrite[:, 0].mean()),
            "writer/score_std_in_request": float(spread.mean()),
            "writer/tokens": float(per_rewrite[:, 1].mean()),
            "writer/unfit_fraction": 1 - float(per_rewrite[:, 2].mean()),
            "writer/read_fraction": float(per_rewrite[:, 3].mean()),
            "writer/left_out_fraction": float(per_rewrite[:, 4].mean()),
            "writer/distinct_fraction": float(distinct.mean()),
        }

    def fingerprint(self) -> dict[str, Any]:
        """Digests of network and tokenizer, and the adapter's shape: a checkpoint is of these alone."""
        weights = [spread(value) for value in base_parameters(self.actor.network).values()]
        return {
            "network": values_digest(weights),
            "tokenizer": tokenizer_digest(self.language.tokens.tokenizer),
            "ends": self.language.tokens.ends,
            "lora_rank": self.config.lora_rank,
            "lora_alpha": self.config.lora_alpha,
        }

    def state_dict(self) -> dict[str, Any]:
        """Adapter, those of later batches, average, optimizer and schedule, and the guard's state."""
        average = self.actor.average
        return {
            "adapter": adapter_state(self.actor.network),
            "older": self.adapter.older,
            "average": None if average is None else average.state_dict(),
            "optimizer": self.actor.optimizer.state_dict(),
            "taken": self.actor.lr_scheduler.last_epoch,
            "guard": self.guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; raises ``AdapterMismatchError`` for another adapter's."""
        load_adapter_state(self.actor.network, state["adapter"])
        self.actor.load_average(state.get("average"))
        self.adapter.restore(0, state.get("older", {}))
        self.actor.load_optimizer(state["optimizer"]["state"], state["taken"])
        if "guard" in state:
            self.guard.load_state_dict(state["guard"])
            self.actor.in_force = self.guard.mode

    def check_base(self, folder: Path) -> None:
        """Raise ``AdapterMismatchError`` if the adapter that ``save`` wrote was trained on another network or
        tokenizer."""
        own = self._base()
        trained = json.loads((folder / BASE_FILE).read_text())
        # Rounded weights have another digest than those in float32.
        compared = ["tokenizer"] + (["network"] if trained["dtype"] == own["dtype"] else [])
        differs = [name for name in compared if trained[name] != own[name]]
        if differs:
            raise AdapterMismatchError(
                f"{folder}: its adapter was trained on another {' and '.join(differs)} than that of "
                f"algorithm.prompt_writer.path={self.config.path}; give the language model of its run"
            )

    def load(self, folder: Path) -> None:
        """Load an adapter that ``save`` wrote; raises ``AdapterMismatchError`` for another shape."""
        saved = load_file(folder / WRITER_FILE)
        names = {
            name: name.removeprefix("base_model.model.").replace(".weight", f".{ACTOR_ADAPTER}.weight")
            for name in saved
        }
        load_adapter_state(self.actor.network, {names[name]: value for name, value in saved.items()})

    def save(self, folder: Path, *, averaged: bool = False) -> None:
        """Write the adapter, or its moving average, in peft's format, which ``transformers`` loads on the same base."""
        with self.adapter.actor_with(self.actor.averaged_state() if averaged else None):
            self.actor.save(folder)
        (folder / BASE_FILE).write_text(json.dumps(self._base(), indent=2))

    def _base(self) -> dict[str, Any]:
        """Digests of network and tokenizer, and the network's precision."""
        found = self.fingerprint()
        return {"network": found["network"], "tokenizer": found["tokenizer"], "dtype": self.config.dtype}


def left_out(request: str, rewrite: str) -> float:
    """Share of the different words of ``request`` that ``rewrite`` lacks, whatever their case; 0 without words."""
    asked = words(request)
    return len(asked - words(rewrite)) / len(asked) if asked else 0.0


def words(text: str) -> set[str]:
    """The different words of ``text``, in lower case."""
    return set(re.findall(r"\w+", text.casefold()))
