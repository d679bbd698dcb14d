"""Other ways to keep the gap from emptying bypass mode's clip, tried against a wider band; run by ``gap_study.py``.

    python benchmarks/clip_alternatives.py centred --config-name tiny_qwen_image_ocr <overrides>

``centred``     the clip's centre at each timestep is the engine's log-prob plus the running mean of the gap there;
``first_free``  decoupled mode that never scores: the first mini-batch's old policy comes from its own forward, as in
                decoupled mode, and all later mini-batches are clipped around the engine's log-probs, as in bypass.

Both replace one method of the trainer; what the study found is in docs/gap_study.md.
"""

import argparse
import sys
from collections import deque
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict

from flowgrpo_rc.batch import Key, OldPolicy
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.gap.bands import MEMORY
from flowgrpo_rc.gap.statistics import GapSample
from flowgrpo_rc.models.base import Conditioning
from flowgrpo_rc.trainer import FlowGRPOTrainer


class Centred(FlowGRPOTrainer):
    """Bypass mode with the clip centred on the mean gap of each timestep."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._gaps: dict[float, deque[float]] = {}
        rescore = self.rescoring.rescore

        def remembering(batch: TensorDict, rows: torch.Tensor, conditioning: Conditioning) -> GapSample:
            sample = rescore(batch, rows, conditioning)
            for timestep, gap in zip(sample.timesteps.flatten().tolist(), sample.total.flatten().tolist(), strict=True):
                self._gaps.setdefault(timestep, deque(maxlen=MEMORY)).append(gap)
            return sample

        self.rescoring.rescore = remembering

    def _score(self, batch: TensorDict, cond: Conditioning) -> OldPolicy | None:
        centres = [[fmean(self._gaps.get(t, [0.0])) for t in row] for row in batch[Key.TIMESTEPS].tolist()]
        # In bypass mode the old policy is the one that these are said to come from.
        batch[Key.ROLLOUT_LOG_PROBS] = batch[Key.ROLLOUT_LOG_PROBS] + torch.tensor(centres)
        return super()._score(batch, cond)


class FirstFree(FlowGRPOTrainer):
    """Decoupled for the first mini-batch of a batch, bypass for the others; no scoring pass."""

    def _score(self, batch: TensorDict, cond: Conditioning) -> OldPolicy | None:
        later = batch[len(batch) // self._mini_batch_count :]
        return OldPolicy.of_rollout(later) if len(later) else None


ALTERNATIVES = {"centred": Centred, "first_free": FirstFree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("alternative", choices=ALTERNATIVES)
    parser.add_argument("--config-name", default="tiny_qwen_image_ocr")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    try:
        config = compose(arguments.config_name, arguments.overrides)
    except ValueError as error:
        sys.exit(f"error: {error}")
    ALTERNATIVES[arguments.alternative](config).fit()


if __name__ == "__main__":
    main()
