"""Learn from the buffer after a batch, and keep the batch in it."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from accelerate import PartialState
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor import UpdateResult
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, OldPolicy, optional
from flowgrpo_rc.correction.numerics.weights import row_sum, safe_exp
from flowgrpo_rc.data import PromptRecord
from flowgrpo_rc.replay import ReplayBuffer, Replayed
from flowgrpo_rc.trainer.rollout_queue import BatchRequest
from flowgrpo_rc.trainer.scoring import Gather
from flowgrpo_rc.trainer.setup import Run


class Replay:
    """The part of ``train_step`` that learns from the buffer of ``algorithm.replay``.

    Args:
        run: the parts of the run.
        set_limits: adds calibrated limits to a batch, for the mode in force.
        naming: a context that names the prompts of a batch whose samples are not finite.
        gather: concatenates the tensors of all processes in rank order, on the host.
    """

    def __init__(
        self,
        run: Run,
        set_limits: Callable[[TensorDict], None],
        naming: Callable[[TensorDict, list[PromptRecord]], AbstractContextManager[None]],
        gather: Gather,
    ) -> None:
        self._run = run
        self._set_limits = set_limits
        self._naming = naming
        self._gather = gather
        self._config = run.config.algorithm.replay
        self.buffer: ReplayBuffer = run.replay
        self._texts = [record.prompt for record in run.train_prompts]
        corrects = run.config.rollout_correction.corrects
        if self.buffer and self._config.old_policy == "current" and not corrects and PartialState().is_main_process:
            warnings.warn(
                "algorithm.replay.old_policy=current without importance weights or rejection: nothing limits what is "
                "learned from stale images; set rollout_correction.rollout_is or rollout_rs, or old_policy=kept",
                stacklevel=2,
            )

    def learn(self, step: int, mode: ModeInForce) -> dict[str, float]:
        """Take an optimizer step from each mini-batch that is due after batch ``step``; returns ``replay/...`` metrics.

        Raises:
            NonFiniteUpdateError: as ``DiffusionActor.update``.
        """
        if not mode.bypasses and self._config.old_policy == "kept":
            # Without one the ratio would begin at 1, and no clip would hold what was learned from before.
            self.buffer.remove_without_old()
        ages: list[int] = []
        found: list[dict[str, float]] = []
        taken = 0
        for entry in self.buffer.choose(step, self._config.due(step, self._run.config.mini_batches)):
            replayed = self.buffer.read(entry, self._texts)
            if replayed is not None:
                steps, figures = self._learn_from(replayed, entry.staleness, mode)
                taken += steps
                ages.append(step - entry.step)
                found.append(figures)
        metrics = {"replay/optimizer_steps": float(taken), "replay/buffer": float(len(self.buffer.entries))}
        if not found:
            return metrics
        metrics |= {"replay/age": sum(ages) / len(ages)} | {f"replay/{name}": v for name, v in _means(found).items()}
        for age in sorted(set(ages)):
            own = [figures for figures, other in zip(found, ages, strict=True) if other == age]
            metrics |= {f"replay/age_{age}/{name}": value for name, value in _means(own).items()}
        return metrics

    def keep(
        self,
        step: int,
        staleness: int,
        batch: TensorDict,
        request: BatchRequest,
        update: UpdateResult,
        mode: ModeInForce,
    ) -> None:
        """Put the mini-batches of batch ``step`` into the buffer, as the update in this mode has returned them."""
        rows = batch[Key.PROMPT_INDEX].tolist()
        places = [request.chosen[row] for row in rows]
        texts = [self._texts[place] for place in places]
        minis = update.mini_batches
        if mode.bypasses:
            # The rollout's log-probs are in the batch. Without weights and rejection they are no old policy of
            # decoupled mode, which the guard may put in force.
            minis = [mini._replace(old=None) for mini in minis]
        self.buffer.add(batch, minis, places, texts, step=step, staleness=staleness)

    def _learn_from(self, replayed: Replayed, staleness: int, mode: ModeInForce) -> tuple[int, dict[str, float]]:
        """Take an optimizer step from a mini-batch, which was ``staleness`` batches stale when it was new. Returns 1,
        or 0 if rejection empties it, and its figures."""
        run = self._run
        batch = replayed.batch
        places = list(dict.fromkeys(replayed.prompts))
        batch[Key.PROMPT_INDEX] = torch.tensor([places.index(place) for place in replayed.prompts])
        prompts = [run.train_prompts[place] for place in places]
        cond = run.conditioning(prompts, run.config.actor_rollout_ref.rollout.pipeline)
        self._set_limits(batch)
        first = replayed.mini.old
        drawn = optional(batch, Key.ROLLOUT_LOG_PROBS)
        if drawn is None and first is not None and mode.objective.needs_old and not staleness:
            # Clean images, which the old policy drew itself.
            drawn = first.log_probs
        mini = replayed.mini._replace(old=self._old(replayed, mode))
        if mini.old is None and drawn is not None:
            batch[Key.ROLLOUT_LOG_PROBS] = drawn
        with self._naming(batch, prompts):
            update = run.actor.update(batch, cond, [mini], mode, epochs=1)
        return update.optimizer_steps, self._figures(drawn, update)

    def _old(self, replayed: Replayed, mode: ModeInForce) -> OldPolicy | None:
        """The old policy; ``None``: the current one, which the update's own forward pass supplies."""
        if mode.bypasses:
            return OldPolicy.of_rollout(replayed.batch)
        return replayed.mini.old if self._config.old_policy == "kept" else None

    def _figures(self, drawn: Float[Tensor, "B W"] | None, update: UpdateResult) -> dict[str, float]:
        """Figures of a mini-batch over all processes; weights are ``pi_theta / pi_rollout`` of windows, ``drawn`` being
        the log-probs of the policy that drew."""
        metrics = update.metrics
        figures = {
            "kept_fraction": metrics["actor/kept_fraction"],
            "teaching_fraction": metrics["actor/teaching_fraction"],
        }
        if drawn is not None:
            weights = self._gather(window_weights(update.log_probs[0], drawn[update.mini_batches[0].rows]))
            figures["weight_mean"] = float(weights.mean())
            figures["eff_sample_size"] = float(weights.mean() ** 2 / (weights**2).mean())
        return figures


def window_weights(log_probs: Float[Tensor, "M W"], rollout_log_probs: Float[Tensor, "M W"]) -> Float[Tensor, " M"]:
    """Importance weights ``pi_theta / pi_rollout`` of whole windows, in float64 and not truncated (SPEC 2)."""
    return safe_exp(row_sum(log_probs.double() - rollout_log_probs.double()))


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means over the rows that have a figure: not all have log-probs of the policy that drew."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
