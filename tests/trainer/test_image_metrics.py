"""``images/...``: the same for any number of processes."""

import numpy as np
import pytest
import torch

from flowgrpo_rc.evaluation.image_statistics import SPREADS, STATISTICS, image_statistics
from flowgrpo_rc.trainer.scoring import image_metrics


def test_two_processes_log_the_metrics_of_one():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 20, 16, 3)).astype(np.uint8)
    group = torch.tensor([0, 0, 1, 1, 2, 2, 0, 2, 1, 0, 1, 2])
    alone = image_metrics(images, group, lambda values: values)
    assert list(alone) == [f"images/{name}" for name in (*STATISTICS, *SPREADS)]
    assert alone["images/contrast"] == pytest.approx(image_statistics(images)["contrast"].mean())
    first: list[torch.Tensor] = []

    def remember(values):
        first.append(values)
        return values

    image_metrics(images[:6], group[:6], remember)
    together = image_metrics(images[6:], group[6:], lambda values: torch.cat([first.pop(0), values]))
    assert together == alone
