"""The steps of each image's SDE window, kept on the sampling device until the last step is done."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo_rc.batch import Key
from flowgrpo_rc.sde import Transition
from flowgrpo_rc.transfers import onto

_SCALARS = (Key.TIMESTEPS, Key.SIGMAS, Key.NEXT_SIGMAS, Key.ROLLOUT_LOG_PROBS)


class WindowRecord:
    """``W + 1`` states of every image and the values of its ``W`` steps, float32 on ``device``.

    Column ``c`` of an image is step ``start + c`` of the schedule. A write addresses the columns of all images at once,
    by indices made before the loop. Steps outside of an image's window go into an extra column that is never read, so
    that no write depends on data and waits for the device.

    Args:
        starts: first step of each image's window.
        window_size: ``W``; 0 keeps nothing.
        num_steps: ``N``, of the schedule.
        device: of the states.
    """

    def __init__(self, starts: Int[Tensor, " b"], window_size: int, num_steps: int, device: torch.device) -> None:
        # Made once before the loop, on the host, where indexing needs no synchronisation.
        columns = torch.arange(num_steps + 1)[:, None] - starts
        in_record = (columns >= 0) & (columns <= window_size)
        self._writes = in_record.any(1).tolist()
        self._columns = onto(torch.where(in_record, columns, window_size + 1), device)
        self._rows = torch.arange(len(starts), device=device)
        self._window_size = window_size
        self._kept: dict[str, Tensor] = {}

    def of_step(self, values: Float[Tensor, " b W *L"], step: int) -> Float[Tensor, " b *L"]:
        """The column of ``values`` for ``step`` of each image; any column outside of the image's window."""
        return values[self._rows, self._columns[step].clamp(max=self._window_size - 1)]

    def state(self, step: int, latents: Float[Tensor, " b *L"]) -> None:
        """Record the latents before ``step``, from 0 to ``N`` inclusive."""
        self._put("states", step, latents)

    def transition(self, step: int, scalars: tuple[Float[Tensor, " b"], ...]) -> None:
        """Record timestep, noise level, next noise level and log-prob of ``step``."""
        self._put("scalars", step, torch.stack(scalars, 1))

    def means(self, step: int, distribution: Transition) -> None:
        """Record the mean of the transition of ``step``."""
        self._put(Key.ROLLOUT_MEANS, step, distribution.mean)

    def tensors(self) -> dict[str, Tensor]:
        """The record on the device: ``states (b, W + 1, *L)``, and the rest as ``(b, W, ...)``.

        Values that were never written are NaN, which ``proof`` refuses.
        """
        window = self._window_size
        return {name: kept[:, : window + (name == "states")] for name, kept in self._kept.items()}

    @staticmethod
    def by_key(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``tensors``, on any device, by their keys in the trajectory batch."""
        states = tensors["states"]
        found = {Key.LATENTS: states[:, :-1], Key.NEXT_LATENTS: states[:, 1:]}
        found |= zip(_SCALARS, tensors["scalars"].unbind(2), strict=True)
        if Key.ROLLOUT_MEANS in tensors:
            found[Key.ROLLOUT_MEANS] = tensors[Key.ROLLOUT_MEANS]
        return found

    def _put(self, name: str, step: int, values: Tensor) -> None:
        # Steps outside of every window write nothing.
        if not self._writes[step] or not self._window_size:
            return
        if name not in self._kept:
            # One column more than there are states, for everything outside of the window.
            shape = (len(values), self._window_size + 2, *values.shape[1:])
            self._kept[name] = values.new_full(shape, torch.nan, dtype=torch.float32)
        # float32 in every engine, because the actor scores these numbers.
        self._kept[name][self._rows, self._columns[step]] = values.float()
