"""Images of a prompt that start from one noise: steps computed once, and what stays as it would be without."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from rollout_cases import request_for, tiny_engine
from torch.testing import assert_close

from flowgrpo_rc.batch import Key
from flowgrpo_rc.rollout import RolloutSyncError
from flowgrpo_rc.rollout.base import joined, rows_of
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.proof import HeldAdapter, check_rollout
from flowgrpo_rc.section import convert

INDEX = (0, 0, 0, 1, 1, 1)
STARTS = (1, 1, 1, 3, 3, 3)
SHARED = [11, 11, 11, 12, 12, 12]
STEPS = 5


@pytest.fixture
def make_engine(tiny_model):
    return partial(tiny_engine, tiny_model)


@pytest.fixture
def request_(tiny_model):
    return replace(request_for(tiny_model, index=INDEX, starts=STARTS, seed=7, cfg=3.0), start_seeds=SHARED)


def rows_computed(model, engine, request, monkeypatch):
    """Rows of every velocity."""
    counts = []
    velocity = type(model).velocity.__get__(model)

    def counted(transformer, latents, *more, **options):
        counts.append(len(latents))
        return velocity(transformer, latents, *more, **options)

    monkeypatch.setattr(model, "velocity", counted)
    engine.generate(request)
    return counts


def test_steps_in_common_are_computed_once(tiny_model, make_engine, request_, monkeypatch):
    """The first prompt's images part after step 1, the second's after step 3."""
    engine = make_engine()
    assert rows_computed(tiny_model, engine, request_, monkeypatch) == [2, 2, 4, 4, 6]
    assert rows_computed(tiny_model, engine, replace(request_, start_seeds=None), monkeypatch) == [6] * STEPS
    # Of a batch that is cut within a prompt, each part computes them.
    assert rows_computed(tiny_model, make_engine(4), request_, monkeypatch) == [2, 2, 4, 4, 4, 1, 1, 1, 1, 2]


def test_images_are_those_of_every_image_by_itself(make_engine, request_):
    """Drawn one at a time, where nothing is shared."""
    together = make_engine().generate(request_)
    engine = make_engine(1)
    alone = joined(request_, [engine.generate(rows_of(request_, torch.tensor([i]))) for i in range(6)])
    assert together.echo.start_seeds == alone.echo.start_seeds == tuple(SHARED)
    for name in (Key.LATENTS, Key.NEXT_LATENTS, Key.ROLLOUT_LOG_PROBS):
        assert_close(together.batch[name], alone.batch[name], atol=2e-5, rtol=1e-4)
    assert (together.images.int() - alone.images.int()).abs().max() <= 1


def test_states_part_with_the_first_noise(make_engine, request_):
    batch = make_engine().generate(request_).batch
    before, after = batch[Key.LATENTS][:, 0], batch[Key.NEXT_LATENTS][:, 0]
    for group in ((0, 1, 2), (3, 4, 5)):
        assert torch.equal(before[group[0]], before[group[1]])
        assert torch.equal(before[group[0]], before[group[2]])
        assert not torch.equal(after[group[0]], after[group[1]])
    assert not torch.equal(before[0], before[3])


def test_the_noise_of_the_window_is_each_images_own(make_engine, request_):
    """It does not depend on the noise that they start from."""
    batch = make_engine().generate(request_).batch
    other = make_engine().generate(replace(request_, start_seeds=[21] * 6)).batch
    std = [(one[Key.NEXT_LATENTS] - one[Key.LATENTS]).std() for one in (batch, other)]
    assert not torch.equal(batch[Key.LATENTS], other[Key.LATENTS])
    assert_close(std[0], std[1], rtol=0.2, atol=0)
    # log p = -z^2 / 2 + constants: the same noise z gives the same log-prob.
    assert_close(batch[Key.ROLLOUT_LOG_PROBS], other[Key.ROLLOUT_LOG_PROBS], atol=1e-4, rtol=1e-4)


def test_another_starting_noise_than_asked_for_is_refused(tiny_model, make_engine, request_):
    engine = make_engine()
    request = replace(request_, window_starts=torch.zeros(6, dtype=torch.long))
    answer = engine.generate(request)
    held = HeldAdapter(5, answer.echo.adapter_digest)
    check_rollout(request, answer, tiny_model, held, "float32")
    for seeds in (None, (1, *SHARED[1:])):
        wrong = replace(answer, echo=replace(answer.echo, start_seeds=seeds))
        with pytest.raises(RolloutSyncError, match="start_seeds: got"):
            check_rollout(request, wrong, tiny_model, held, "float32")
    own = engine.generate(replace(request, start_seeds=None))
    forged = replace(own, echo=replace(own.echo, start_seeds=tuple(SHARED)))
    with pytest.raises(RolloutSyncError, match="does not start from the noise of its seed 11"):
        check_rollout(request, forged, tiny_model, held, "float32")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"n": 16}, 10),
        # Windows of 2 in [0, 5) start at step 1.5 on average: 2.5 of 10 steps are computed once for 16 images.
        ({"n": 16, "algo": {"init_same_noise": True}}, 10 - 2.5 * 15 / 16),
        # Three micro-batches of 16 cut 4 groups of 12 into 6 parts.
        ({"n": 12, "algo": {"init_same_noise": True}}, 10 - 2.5 * (1 - 6 / 48)),
        ({"n": 16, "micro_batch_size": 4, "algo": {"init_same_noise": True}}, 10 - 2.5 * 12 / 16),
    ],
)
def test_forwards_of_an_image_by_hand(settings, expected):
    algo = {"sde_window_size": 2, "sde_window_range": [0, 5]} | settings.pop("algo", {})
    given = {"micro_batch_size": 16, "pipeline": {"num_inference_steps": 10}} | settings | {"algo": algo}
    config = convert(RolloutConfig, given)
    assert sum(config.forwards_per_image(clean=False)) == expected
