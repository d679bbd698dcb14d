"""Named figures of a block of rows, on its device: of its elements, then of its rows; in the end a few numbers.

Weights, rejection and diagnostics add what their metrics need; ``Moments`` holds the numbers on the host.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo_rc.correction.numerics.elements import SHORT_ROW, Elements

FAR = 1e38
"""Beyond any value, to keep what is invalid out of minima and maxima."""
SUMMED_TOGETHER = 1 << 14
"""Elements up to which a block of short rows is summed in one operation for all figures, which takes more memory."""


class Figures:
    """A table with a line for each named figure and a column for each row of the block.

    Figures of elements come first: their line is their mean along each row. After ``average`` figures of rows follow.
    Where an element figure and a row figure would have one name, that of rows starts with ``rows/``.
    """

    def __init__(self, x: Elements) -> None:
        self.names: list[str] = []
        self._x = x
        self._together = len(x.valid) <= SHORT_ROW and x.valid.numel() <= SUMMED_TOGETHER
        self._elements: list[Tensor] = []
        self._lines: list[Tensor] = []
        self.add("elements", x.valid)

    def add(self, name: str, values: Float[Tensor, "T B"]) -> None:
        """A figure of elements: numbers or flags, 0 at invalid elements."""
        self.names.append(name)
        self._elements.append(values if self._together else values.sum(0))

    def average(self) -> None:
        """Ends the figures of elements: takes their sums and means along the rows, in float64."""
        table = torch.stack(self._elements)
        if self._together:
            table = table.sum(1)
        self._sums = table.double()
        self._count = self._sums[0]
        means = self._sums / self._count.clamp(min=1.0)
        self._lines.append(means)

    def sum(self, name: str) -> Float[Tensor, " B"]:
        """Sums of a figure of elements along the rows."""
        return self._sums[self.names.index(name)]

    def mean(self, name: str) -> Float[Tensor, " B"]:
        """Means of a figure of elements over the valid elements of each row; 0 for a row without one."""
        return self._lines[0][self.names.index(name)]

    def means(self, first: str, last: str) -> Float[Tensor, "K B"]:
        """The same of all figures that were added from the first to the last one named."""
        return self._lines[0][self.names.index(first) : self.names.index(last) + 1]

    def add_rows(self, names: Sequence[str], lines: Float[Tensor, "K B"]) -> None:
        """Figures of rows: a line of numbers or flags for each name. Rows without a valid element do not count."""
        self.names += names
        self._lines.append(lines)

    def add_extremes(self, values: dict[str, Float[Tensor, "T B"]]) -> None:
        """Each row's smallest and largest value of figures of elements, as figures of the row."""
        tables = [torch.stack(list(values.values()))] if self._together else [each[None] for each in values.values()]
        smallest = largest = tables
        if not self._x.whole:
            away = (1.0 - self._x.valid) * FAR
            smallest = [table + away for table in tables]
            largest = [table - away for table in tables]
        self.add_rows([f"{name}/least" for name in values], torch.cat([table.amin(1) for table in smallest]))
        self.add_rows([f"{name}/most" for name in values], torch.cat([table.amax(1) for table in largest]))

    def totals(self) -> tuple[Float[Tensor, "2 N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
        """Reduces every line over the rows, in the order of ``names``.

        Returns:
            Sums with each row as often as it has elements, and with each row once; smallest values; largest values.
        """
        table = torch.cat(self._lines)
        nonempty = self._lines[0][0]  # the mean of the flags of valid elements
        smallest = largest = table
        if not self._x.whole:
            away = (1.0 - nonempty) * FAR
            smallest = table + away
            largest = table - away
        once = table if self._x.whole else table * nonempty
        sums = torch.stack([(table * self._count).sum(1), once.sum(1)])
        return sums, smallest.amin(1), largest.amax(1)
