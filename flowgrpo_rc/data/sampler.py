"""Sampler of prompt batches: endless, reproducible, resumable."""

from collections.abc import Iterator
from typing import Any

import numpy as np

_SETTINGS = {
    "num_prompts": "data.train_files and data.train_max_samples (of pairs: data.preferences)",
    "batch_size": "data.train_batch_size",
    "seed": "data.seed",
    "shuffle": "data.shuffle",
}
"""Attributes that a saved position depends on, and the options that set them."""


class PromptSampler:
    """An endless iterator over batches of prompt indices.

    Every epoch visits the prompts in an order drawn from ``(seed, epoch)`` alone and yields
    ``num_prompts // batch_size`` batches; what is left over is dropped until the next epoch's order. No prompt
    comes twice in one batch. An order depends on nothing else, so ``(epoch, position)`` is the whole state.

    Args:
        num_prompts: size of the data set.
        batch_size: prompts per batch.
        seed: 0 or more.
        shuffle: False visits them in the order of the data set.

    Raises:
        ValueError: there are fewer prompts than a batch takes, or a number is out of range.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int = 42, shuffle: bool = True) -> None:
        for field, value, least in (("train_batch_size", batch_size, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"data.{field}: got {value}; it must be {least} or more")
        # A batch of repeated prompts would give their groups a wrong size.
        if batch_size > num_prompts:
            raise ValueError(
                f"data.train_batch_size: got {batch_size}, but the data set holds {num_prompts} prompts and "
                "no prompt may come twice in one batch; lower it or add prompts"
            )
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0  # number of the epoch, from 0, that the next batch belongs to
        self._position = 0

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self.num_prompts // self.batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """The next batch: (batch_size,) int64 indices, all different."""
        start = self._position * self.batch_size
        batch = self._order()[start : start + self.batch_size]
        self._position += 1
        if self._position == self.batches_per_epoch:
            self.epoch += 1
            self._position = 0
        return batch

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """All that is needed to continue, as JSON-compatible values.

        Args:
            batches: continue after so many batches from the start; ``None``: after the last that was given.
        """
        if batches is None:
            batches = self.epoch * self.batches_per_epoch + self._position
        epoch, position = divmod(batches, self.batches_per_epoch)
        return {"epoch": epoch, "position": position, **{name: getattr(self, name) for name in _SETTINGS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken. Raises ``ValueError`` if that was a sampler of another data set or other
        settings: continuing would repeat or skip prompts."""
        for name, field in _SETTINGS.items():
            own = getattr(self, name)
            # Another size or seed gives another order, in which the position would repeat or skip prompts.
            if state[name] != own:
                raise ValueError(
                    f"the saved data position belongs to {name}={state[name]}, this run has {own}; "
                    f"resume with the same {field} or start a new run with trainer.resume_mode=disable"
                )
        self.epoch = int(state["epoch"])
        self._position = int(state["position"])

    def _order(self) -> np.ndarray:
        """(num_prompts,) int64: the order of the present epoch."""
        if not self.shuffle:
            return np.arange(self.num_prompts, dtype=np.int64)
        # A generator of its own per epoch: the order depends on nothing that was drawn before.
        generator = np.random.Generator(np.random.PCG64([self.seed, self.epoch]))
        return generator.permutation(self.num_prompts).astype(np.int64)
