"""Rows: recorded SDE steps of images, one by one, as the actor takes them to its device.

A row is one step of one image. A batch of ``B`` images with ``W`` steps each has ``B * W`` rows, those of an image
together, and a micro-batch is any number of them.

What an update reads of every row crosses to the device once: numbers of rows, and the embeddings of the prompts.
Latents are too large for that. They stay on the host, and those of a micro-batch cross together, from pinned memory
where the device is a GPU, so that neither the host nor the device waits for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, OldPolicy, weights_and_keep
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.transfers import onto

_NUMBERS = (
    *(Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS, Key.ROLLOUT_LOG_PROBS, Key.CLIP_WIDTHS),
    *(Key.ADVANTAGES, Key.ROLLOUT_RS_BOUNDS),
)
"""What the actor reads of every step or image, besides latents, where a batch has it."""
_LATENTS = (Key.LATENTS, Key.NEXT_LATENTS)


class MicroBatch(NamedTuple):
    """Some rows on the actor's device."""

    places: slice
    """Which of the rows they are that were cut into micro-batches."""
    data: dict[str, Tensor]
    """Their latents ``(n, *L)`` and numbers ``(n,)``, under the keys of a batch."""
    conditioning: Conditioning
    """A row for each."""


class RecordedSteps:
    """The rows of a batch, for one update or one scoring pass.

    Args:
        batch: trajectories, on the host.
        conditioning: what ``prompt_index`` points into.
        device: where the actor computes.
    """

    def __init__(self, batch: TensorDict, conditioning: Conditioning, device: torch.device) -> None:
        self.window = int(batch[Key.TIMESTEPS].shape[1])
        """Steps of an image."""
        self._device = device
        self._batch = batch
        present = set(batch.keys())
        numbers = {name: batch[name] for name in _NUMBERS if name in present}
        # What an image has once holds for all of its steps.
        flat = {n: v.flatten() if v.dim() > 1 else v.repeat_interleave(self.window) for n, v in numbers.items()}
        self._numbers = {name: onto(values, device) for name, values in flat.items()}
        self._conditioning = conditioning.to(device)
        self._prompt_index = batch[Key.PROMPT_INDEX].repeat_interleave(self.window)

    def cut(self, images: Int[Tensor, " M"], size: int, *, means: bool = False) -> Iterator[MicroBatch]:
        """Micro-batches of ``size`` rows, the last one of what is left, of all steps of some images in their order.

        Args:
            means: bring the engine's transition means, too, if the batch has them.
        """
        rows = (images[:, None] * self.window + torch.arange(self.window)).flatten()
        rows_there = onto(rows, self._device)
        means = means and Key.ROLLOUT_MEANS in self._batch.keys()  # noqa: SIM118  (a TensorDict iterates over its rows)
        names = [*_LATENTS, Key.ROLLOUT_MEANS] if means else _LATENTS
        for start in range(0, len(rows), size):
            places = slice(start, start + size)
            large = take_rows([self._batch[name] for name in names], rows[places], self._device)
            numbers = {name: values[rows_there[places]] for name, values in self._numbers.items()}
            conditioning = self._conditioning.rows(self._prompt_index[rows[places]], self._device)
            yield MicroBatch(places, dict(zip(names, large, strict=True)) | numbers, conditioning)


class OldRows:
    """The old policy of a mini-batch as the loss reads it, a micro-batch at a time.

    Args:
        known: of the mini-batch's rows; ``None``: the present policy is the old one, or in bypass mode the one that
            weights and rejection come from, so that each micro-batch's own forward supplies it.
        mode: the mode in force.
        device: where the actor computes.
    """

    def __init__(self, known: OldPolicy | None, mode: ModeInForce, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._means = None if known is None or mode.bypasses else known.means
        self._numbers: dict[str, Tensor] | None = None
        if known is not None:
            numbers = replace(known, means=None).batch_keys()
            self._numbers = {name: onto(values.flatten(), device) for name, values in numbers.items()}

    def of(self, micro: MicroBatch, output: Mapping[str, Tensor], window: int) -> dict[str, Tensor]:
        """Old log-probs and means, weights and rejection of a micro-batch's rows, under the keys of a batch.

        Args:
            output: of the micro-batch's forward.
            window: steps of an image. Where its steps are coupled, the micro-batch has whole windows.
        """
        if self._numbers is None:
            return self._of_present(micro.data, output, window)
        found = {name: values[micro.places] for name, values in self._numbers.items()}
        if self._means is not None:
            rows = torch.arange(self._means.shape[:2].numel())[micro.places]
            (found[Key.OLD_TRANSITION_MEANS],) = take_rows([self._means], rows, self._device)
        return found

    def _of_present(self, data: Mapping[str, Tensor], output: Mapping[str, Tensor], window: int) -> dict[str, Tensor]:
        present = output["log_probs"].detach()
        log_probs = present
        if self._mode.couples_steps:
            bounds = Key.ROLLOUT_RS_BOUNDS
            log_probs = present.view(-1, window)
            rollout = data[Key.ROLLOUT_LOG_PROBS].view(-1, window)
            data = {Key.ROLLOUT_LOG_PROBS: rollout} | ({bounds: data[bounds][::window]} if bounds in data else {})
        weights, keep = weights_and_keep(log_probs, data, self._mode.rollout_correction)
        found = {Key.ROLLOUT_IS_WEIGHTS: weights.flatten(), Key.ROLLOUT_KEEP: keep.flatten()}
        if not self._mode.bypasses:
            found[Key.OLD_LOG_PROBS] = present
            if "transition_means" in output:
                found[Key.OLD_TRANSITION_MEANS] = output["transition_means"].detach()
        return found


def take_rows(
    tensors: Sequence[Float[Tensor, "B W *L"]], rows: Int[Tensor, " n"], device: torch.device
) -> tuple[Tensor, ...]:
    """The same rows of large tensors on the host, ``(n, *L)`` each, brought to ``device`` in one transfer."""
    shape = (len(tensors), len(rows), *tensors[0].shape[2:])
    together = torch.empty(shape, dtype=tensors[0].dtype, pin_memory=device.type == "cuda")
    for place, tensor in zip(together, tensors, strict=True):
        torch.index_select(tensor.flatten(0, 1), 0, rows, out=place)
    return together.to(device, non_blocking=True).unbind()
