"""Cut a batch into micro-batches of rows and bring them to the actor's device.

A row is one recorded SDE step of one image, or one place of a clean image: the image noised to one level. A batch of
``B`` images with ``W`` steps or places each has ``B * W`` rows; the rows of an image follow each other. A micro-batch
is any number of consecutive rows.

The scalars of all rows and the prompts' embeddings cross to the device once per update. Latents are too large for that:
they stay on the host, and those of a micro-batch cross together, from pinned memory on a GPU, without a host sync.
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
"""Scalars of a step or an image that the actor reads, where a batch has them."""


class MicroBatch(NamedTuple):
    """Some rows on the actor's device."""

    places: slice  # position of these rows among all that were cut
    data: dict[str, Tensor]  # latents ``(n, *L)`` and scalars ``(n,)``, under the keys of a batch
    conditioning: Conditioning  # one row of it for each row


class RecordedSteps:
    """The rows of a batch on the host, for one update or one scoring pass on ``device``; ``prompt_index`` points into
    ``conditioning``."""

    means = "transition_means"
    """Output of the forward pass that objectives compare besides log-probs: the means, or the velocities."""
    old_means = Key.OLD_TRANSITION_MEANS
    """Key of the old policy's."""
    _large: tuple[str, ...] = (Key.LATENTS, Key.NEXT_LATENTS)

    def __init__(self, batch: TensorDict, conditioning: Conditioning, device: torch.device) -> None:
        self.window = int(batch[Key.TIMESTEPS].shape[1])  # steps per image
        self._device = device
        self._batch = batch
        present = set(batch.keys())
        numbers = {name: batch[name] for name in _NUMBERS if name in present}
        # A scalar of an image, such as its advantage, holds for each of its steps.
        flat = {n: v.flatten() if v.dim() > 1 else v.repeat_interleave(self.window) for n, v in numbers.items()}
        self._numbers = {name: onto(values, device) for name, values in flat.items()}
        # Prompts repeat over the images of a group, so their embeddings go over once and are indexed there.
        self._conditioning = conditioning.to(device)
        self._prompt_index = batch[Key.PROMPT_INDEX].repeat_interleave(self.window)

    @property
    def has_rollout_log_probs(self) -> bool:
        """False for clean images whose correction is off: nothing then compares them with the policy that drew."""
        return Key.ROLLOUT_LOG_PROBS in self._numbers

    def cut(
        self, images: Int[Tensor, " M"], size: int, *, rollout_means: bool = False, old: OldPolicy | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the steps of some images, in their order, as micro-batches of at most ``size`` rows. With
        ``rollout_means`` they have the engine's transition means, if the batch has them. The values of ``old``, the old
        policy of these images, join the rows' data under the keys of a batch."""
        rows = (images[:, None] * self.window + torch.arange(self.window)).flatten()
        # The same indices on both sides: latents are gathered on the host, scalars on the device.
        rows_there = onto(rows, self._device)
        names = self._large
        # A TensorDict iterates over its rows, so ``in`` needs the keys.
        if rollout_means and Key.ROLLOUT_MEANS in self._batch.keys():  # noqa: SIM118
            names = (*names, Key.ROLLOUT_MEANS)
        old_numbers: dict[str, Tensor] = {}
        if old is not None:
            # Means are as large as latents and follow them, a micro-batch at a time.
            scalars = replace(old, means=None).batch_keys()
            old_numbers = {name: onto(values.flatten(), self._device) for name, values in scalars.items()}
        for start in range(0, len(rows), size):
            places = slice(start, start + size)
            large = take_rows([self._batch[name] for name in names], rows[places], self._device)
            numbers = {name: values[rows_there[places]] for name, values in self._numbers.items()}
            data = self._inputs(dict(zip(names, large, strict=True)), numbers, rows[places])
            data |= {name: values[places] for name, values in old_numbers.items()}
            if old is not None and old.means is not None:
                (data[self.old_means],) = take_rows([old.means], torch.arange(len(rows))[places], self._device)
            conditioning = self._conditioning.rows(self._prompt_index[rows[places]], self._device)
            conditioning = conditioning.at_levels(self._batch[Key.SIGMAS].flatten()[rows[places]].tolist())
            yield MicroBatch(places, data, conditioning)

    def _inputs(
        self, large: dict[str, Tensor], numbers: dict[str, Tensor], rows: Int[Tensor, " n"]
    ) -> dict[str, Tensor]:
        """The data of some rows, from their large tensors and their scalars."""
        return large | numbers


class NoisedImages(RecordedSteps):
    """The same for clean images: ``latents`` come from ``clean_latents``, ``noise`` and ``sigmas``, on the device."""

    means = "velocities"
    old_means = Key.OLD_VELOCITIES
    _large = (Key.NOISE,)

    def _inputs(
        self, large: dict[str, Tensor], numbers: dict[str, Tensor], rows: Int[Tensor, " n"]
    ) -> dict[str, Tensor]:
        images = self._batch[Key.CLEAN_LATENTS].unsqueeze(1)
        (clean,) = take_rows([images], rows // self.window, self._device)
        noise = large[Key.NOISE]
        sigma = numbers[Key.SIGMAS][(..., *[None] * (clean.dim() - 1))]
        latents = (1 - sigma) * clean + sigma * noise
        return {Key.LATENTS: latents, Key.CLEAN_LATENTS: clean, **large, **numbers}


def correction_numbers(batch: TensorDict) -> TensorDict:
    """The scalars of a batch that ``correct_old_policy`` reads besides the old policy."""
    names = [Key.ROLLOUT_LOG_PROBS, Key.ROLLOUT_RS_BOUNDS]
    # Noise levels of clean images are all different, so that no figures by timestep exist.
    if not _is_clean(batch):
        names.append(Key.TIMESTEPS)
    return batch.select(*names, strict=False)


def _is_clean(batch: TensorDict) -> bool:
    # A TensorDict iterates over its rows, so ``in`` needs the keys.
    return Key.CLEAN_LATENTS in batch.keys()  # noqa: SIM118


def rows_of_batch(batch: TensorDict, conditioning: Conditioning, device: torch.device) -> RecordedSteps:
    """The rows of a batch of recorded steps or of noised clean images."""
    kind = NoisedImages if _is_clean(batch) else RecordedSteps
    return kind(batch, conditioning, device)


def present_as_old(
    mode: ModeInForce, data: Mapping[str, Tensor], output: Mapping[str, Tensor], window: int
) -> dict[str, Tensor]:
    """The current policy in the place of the old one, from the forward pass of a micro-batch with the rows ``data``.

    In decoupled mode this is exact before the first optimizer step of a batch. In bypass mode the rollout is the old
    policy, and only weights and rejection come from here. If the mode couples steps, the rows are whole windows.

    Returns:
        Log-probs, means (if ``output`` has them), weights and the keep-mask, each ``(n, ...)``, under the keys of a
        batch.
    """
    present = output["log_probs"].detach()
    log_probs = present
    if mode.couples_steps and Key.ROLLOUT_LOG_PROBS in data:
        # Sequence criteria see each image's window as a row of its own.
        log_probs = present.view(-1, window)
        whole = {Key.ROLLOUT_LOG_PROBS: data[Key.ROLLOUT_LOG_PROBS].view(-1, window)}
        if Key.ROLLOUT_RS_BOUNDS in data:
            whole[Key.ROLLOUT_RS_BOUNDS] = data[Key.ROLLOUT_RS_BOUNDS][::window]
        data = whole
    found: dict[str, Tensor] = {}
    if Key.ROLLOUT_LOG_PROBS in data:
        weights, keep = weights_and_keep(log_probs, data, mode.rollout_correction)
        found = {Key.ROLLOUT_IS_WEIGHTS: weights.flatten(), Key.ROLLOUT_KEEP: keep.flatten()}
    # In bypass mode the batch's rollout log-probs stay the old ones.
    if not mode.bypasses:
        found[Key.OLD_LOG_PROBS] = present
        kind = NoisedImages if mode.objective.clean else RecordedSteps
        if kind.means in output:
            found[kind.old_means] = output[kind.means].detach()
    return found


def take_rows(
    tensors: Sequence[Float[Tensor, "B W *L"]], rows: Int[Tensor, " n"], device: torch.device
) -> tuple[Tensor, ...]:
    """Gather the same rows ``(n, *L)`` of large tensors on the host and bring them to ``device`` in one transfer."""
    shape = (len(tensors), len(rows), *tensors[0].shape[2:])
    # Pinned memory lets the copy run beside the computation.
    together = torch.empty(shape, dtype=tensors[0].dtype, pin_memory=device.type == "cuda")
    for place, tensor in zip(together, tensors, strict=True):
        torch.index_select(tensor.flatten(0, 1), 0, rows, out=place)
    return together.to(device, non_blocking=True).unbind()
