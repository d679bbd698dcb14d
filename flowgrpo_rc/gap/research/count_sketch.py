"""Count sketches: short vectors that keep the scalar products of long ones, up to an unbiased error."""

import torch
from jaxtyping import Float
from torch import Tensor

# Numbers of a sketch: products of two are off by about 1/512 of the product of their norms.
SKETCH = 1 << 18


class CountSketch:
    """Sums a gradient with fixed random signs into ``SKETCH`` buckets; gradients that short are returned as they are.

    Source: Charikar, Chen and Farach-Colton, ICALP 2002, with a number's position modulo ``SKETCH`` as its bucket.
    """

    def __init__(self) -> None:
        self._signs: Tensor | None = None

    def __call__(self, gradient: Float[Tensor, " parameters"]) -> Float[Tensor, " sketch"]:
        """The sketch; its error in products is about ``1 / sqrt(SKETCH)`` of the product of the norms."""
        if len(gradient) <= SKETCH:
            return gradient
        if self._signs is None:
            # All sketches of a run must have the same signs, or their products would mean nothing.
            generator = torch.Generator().manual_seed(0)
            self._signs = torch.randint(0, 2, (len(gradient),), generator=generator, dtype=torch.int8) * 2 - 1
        signed = gradient * self._signs
        return torch.nn.functional.pad(signed, (0, -len(signed) % SKETCH)).view(-1, SKETCH).sum(0)
