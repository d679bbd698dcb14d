"""Rows of clean images: noise levels by address, log-probs by hand, and updates that no cut of the rows changes."""

from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict
from test_rows import IMAGES, Rig, config
from tolerances import adam
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig, NonFiniteUpdateError
from flowgrpo_rc.actor.config import CleanImagesConfig
from flowgrpo_rc.actor.noising import NoiseLevels, noise_images
from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.models.lora import adapter_parameters
from flowgrpo_rc.section import convert
from flowgrpo_rc.trainer.rollout_queue import noising_seeds
from flowgrpo_rc.trainer.scoring import best_and_worst

PLACES = 3
OBJECTIVES = ("awm", "diffusion_nft", "dpo")
SCHEDULE = 3 * torch.linspace(1, 0, 1001) / (1 + 2 * torch.linspace(1, 0, 1001))


class CleanRig(Rig):
    """The images of ``Rig``, of which only the clean latents are known."""

    def __init__(self):
        super().__init__()
        recorded = self.batch
        kept = {name: recorded[name] for name in (Key.PROMPT_INDEX, Key.ADVANTAGES)}
        clean = recorded[Key.NEXT_LATENTS][:, -1]
        self.batch = TensorDict({**kept, Key.CLEAN_LATENTS: clean}, batch_size=[IMAGES])
        # The second pair of images shares its noise, as the images of a group do for dpo.
        noise_images(self.batch, [1, 1, 2, 2], CleanImagesConfig(places=PLACES), self.actor._model, (32, 32), 6)


@pytest.fixture(scope="module")
def rig():
    torch.set_num_threads(1)
    return CleanRig()


def clean_config(name, rows=None, **settings):
    clean = CleanImagesConfig(places=PLACES)
    correction = {"bypass_mode": False} | settings.pop("correction", {})
    more = {"correction": correction, "clean": clean, "loss": {"mix_beta": 0.3, "dpo_beta": 20.0}} | settings
    return config(name, rows, **more)


@pytest.mark.parametrize(
    ("distribution", "quartiles"),
    [
        ("uniform", [0.25, 0.5, 0.75]),
        ("logit_normal", [0.33747, 0.5, 0.66253]),  # 1 / (1 + exp(.67449)) at a quarter
        ("schedule", [0.5, 0.75, 0.9]),  # 3u / (1 + 2u)
    ],
)
def test_each_place_has_a_part_of_the_distribution(distribution, quartiles):
    levels = NoiseLevels(CleanImagesConfig(places=4, distribution=distribution), SCHEDULE)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([levels.draw(generator) for _ in range(500)])
    bounds = torch.tensor([0.0, *quartiles, 1.0])
    assert (drawn > 0).all()
    for place, (low, high) in enumerate(pairwise(bounds.tolist())):
        part = drawn[:, place]
        assert (part >= low - 1e-4).all()
        assert (part <= high + 1e-4).all()
        assert part.max() - part.min() > 0.9 * (high - low) or distribution != "uniform"
    cut = NoiseLevels(CleanImagesConfig(places=2, distribution=distribution, range=[0.2, 0.9]), SCHEDULE)
    drawn = torch.stack([cut.draw(generator) for _ in range(500)])
    assert_close(torch.stack([drawn.min(), drawn.max()]), torch.tensor([0.2, 0.9]), atol=0.02, rtol=0)


def test_places_at_steps_of_the_rollout():
    """Each step at most once and all equally often: of 5 steps, 3 places take each in 3/5 of the draws."""
    levels = NoiseLevels(
        CleanImagesConfig(places=3, distribution="steps"), torch.tensor([1.0, 0.9, 0.7, 0.4, 0.2, 0.0])
    )
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([levels.draw(generator) for _ in range(1000)])
    counts = {round(float(level), 4): int((drawn == level).sum()) for level in drawn.unique()}
    assert sorted(counts) == [0.2, 0.4, 0.7, 0.9, 1.0]
    assert all(abs(count - 600) < 4 * (1000 * 0.6 * 0.4) ** 0.5 for count in counts.values())
    assert all(len(row.unique()) == 3 for row in drawn)


def test_more_places_than_steps_are_refused():
    with pytest.raises(ValueError, match=r"clean.places: got 3 with distribution=steps, but a rollout has 2 steps"):
        NoiseLevels(CleanImagesConfig(places=3, distribution="steps"), torch.tensor([1.0, 0.5, 0.0]))


def test_noise_is_that_of_its_seed(rig):
    """Whatever other images there are; equal seeds share levels and noise."""
    batch = rig.batch
    assert_close(batch[Key.NOISE][0], batch[Key.NOISE][1], atol=0, rtol=0)
    assert not torch.equal(batch[Key.NOISE][1], batch[Key.NOISE][2])
    alone = TensorDict({Key.CLEAN_LATENTS: batch[Key.CLEAN_LATENTS][2:3]}, batch_size=[1])
    noise_images(alone, [2], CleanImagesConfig(places=PLACES), rig.actor._model, (32, 32), 6)
    for name in (Key.NOISE, Key.SIGMAS, Key.TIMESTEPS):
        assert torch.equal(alone[name][0], batch[name][3])
    assert_close(batch[Key.TIMESTEPS], 1000 * batch[Key.SIGMAS])


def test_the_images_of_a_prompt_share_their_noise_unless_told_otherwise():
    group = torch.tensor([2, 2, 5, 5])
    numbers = torch.tensor([4, 5, 10, 11])
    shared = noising_seeds(7, 3, numbers, group, CleanImagesConfig())
    assert shared[0] == shared[1] != shared[2] == shared[3]
    own = noising_seeds(7, 3, numbers, group, CleanImagesConfig(shared_noise=False))
    assert len(set(own)) == 4
    assert not set(own) & set(noising_seeds(7, 4, numbers, group, CleanImagesConfig(shared_noise=False)))
    with pytest.raises(ValueError, match="shared_noise: got false with loss_mode=dpo, which compares images"):
        clean_config("dpo", clean=CleanImagesConfig(shared_noise=False))


def test_log_probs_by_hand(rig):
    """Of every place, from the velocity at the noised image; scored in parts of two rows."""
    rig.reset(clean_config("diffusion_nft", rows=2, loss={"awm_weighting": "t"}))
    old = rig.actor.score(rig.batch, rig.cond)
    batch = rig.batch
    for image in range(IMAGES):
        for place in range(PLACES):
            clean, noise = batch[Key.CLEAN_LATENTS][image], batch[Key.NOISE][image, place]
            level, timestep = batch[Key.SIGMAS][image, place], batch[Key.TIMESTEPS][image, place]
            with torch.no_grad():
                velocity = rig.actor._model.velocity(
                    rig.actor.transformer,
                    ((1 - level) * clean + level * noise)[None],
                    timestep[None],
                    rig.cond.rows(batch[Key.PROMPT_INDEX][image : image + 1], torch.device("cpu")),
                )[0]
            assert_close(old.means[image, place], velocity, atol=1e-4, rtol=1e-4)
            expected = -level * (velocity - (noise - clean)).square().mean()
            assert_close(old.log_probs[image, place], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_cut_of_the_rows_changes_an_update(rig, name):
    """Of two optimizer steps, with a KL; pairs need two whole images."""
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "velocity"}

    def update(rows):
        settings = clean_config(name, rows, **kl)
        rig.reset(settings)
        old = rig.actor.score(rig.batch, rig.cond) if settings.diffusion_loss.objective.needs_old else None
        parts = [MiniBatch(rows, old and old.rows(rows)) for rows in torch.tensor([[2, 3], [0, 1]])]
        metrics = rig.actor.update(rig.batch, rig.cond, parts).metrics
        weights = torch.cat([p.detach().flatten() for p in adapter_parameters(rig.actor.transformer).values()])
        return metrics, weights - torch.cat([value.flatten() for value in rig.start])

    whole, moved = update(None)
    assert whole["actor/kl_loss"] > 0
    assert moved.abs().max() > 1e-4
    for rows in (2 * PLACES,) if name == "dpo" else (1, 4):
        metrics, other = update(rows)
        assert metrics == pytest.approx(whole, rel=1e-3, abs=1e-5)
        assert (other - moved).norm() <= adam() * moved.norm()


@pytest.mark.parametrize("name", ["awm", "diffusion_nft"])
def test_the_first_forward_supplies_the_old_policy(rig, name):
    def update(scored):
        rig.reset(clean_config(name, ppo_epochs=2))
        old = rig.actor.score(rig.batch, rig.cond) if scored else None
        return rig.actor.update(rig.batch, rig.cond, [MiniBatch(torch.arange(IMAGES), old)]).metrics

    assert update(False) == pytest.approx(update(True), rel=1e-4, abs=1e-6)


def test_a_drawing_policy_corrects_as_on_sde_steps(rig):
    """Matching errors under the adapter that drew take the rollout log-probs' place: weights over all of an image."""
    settings = clean_config("awm", correction={"rollout_is": "sequence", "rollout_is_threshold": 5.0})
    rig.reset(settings)
    old = rig.actor.score(rig.batch, rig.cond)
    shift = 0.1 * torch.arange(IMAGES * PLACES).view(IMAGES, PLACES) / PLACES
    batch = rig.batch.clone()
    batch[Key.ROLLOUT_LOG_PROBS] = old.log_probs - shift
    metrics = rig.actor.update(batch, rig.cond, [MiniBatch(torch.arange(IMAGES))]).metrics
    ratios = shift.sum(1).exp().clamp(max=5.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    expected = -(ratios * rig.batch[Key.ADVANTAGES]).mean()
    assert metrics["actor/pg_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_best_and_worst_by_hand():
    advantages = torch.tensor([0.0, 2.0, -1.0, 0.5, 0.5, 0.5, 3.0, -3.0, 0.1])
    group = torch.tensor([4, 4, 4, 7, 7, 7, 9, 9, 9])
    assert best_and_worst(torch.arange(9), advantages, group).tolist() == [1, 2, 3, 3, 6, 7]
    assert best_and_worst(torch.arange(3, 9), advantages, group).tolist() == [3, 3, 6, 7]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rollout_correction": {"bypass_mode": True}}, "bypass_mode: got true with diffusion_loss.loss_mode=awm"),
        (
            {"rollout_correction": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto"}},
            "rollout_rs_threshold: got auto with diffusion_loss.loss_mode=awm",
        ),
        (
            {"diffusion_loss": {"loss_mode": "awm", "clip_ratio": "auto"}},
            "clip_ratio: got auto with loss_mode=awm, whose ratio",
        ),
        ({"use_kl_loss": True}, "kl_loss_type: got gaussian with loss_mode=awm"),
        (
            {
                "use_kl_loss": True,
                "kl_loss_type": "velocity",
                "diffusion_loss": {"loss_mode": "awm", "ref_kl_coef": 0.1},
            },
            "ref_kl_coef: got 0.1 with use_kl_loss=true",
        ),
        (
            {"diffusion_loss": {"loss_mode": "dpo"}, "ppo_micro_batch_rows": 3},
            "ppo_micro_batch_rows: got 3 with loss_mode=dpo",
        ),
        ({"clean": {"range": [0.5, 0.5]}}, "clean.range: got .*; give two rising numbers from 0 to 1"),
        ({"clean": {"distribution": "normal"}}, "clean.distribution: got 'normal'; choose one of uniform"),
    ],
)
def test_what_does_not_fit_clean_images_is_refused(settings, says):
    settings = {"diffusion_loss": {"loss_mode": "awm"}, "rollout_correction": {"bypass_mode": False}} | settings
    with pytest.raises(ValueError, match=says):
        convert(DiffusionActorConfig, settings)


class Overflow(torch.autograd.Function):
    """The identity, whose gradient overflows in some rows."""

    @staticmethod
    def forward(ctx, values, rows):
        ctx.rows = rows
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[ctx.rows] = torch.inf
        return gradient, None


@pytest.mark.parametrize(("name", "blamed"), [("awm", [2]), ("dpo", [2, 3])])
def test_a_gradient_that_is_not_finite_names_the_image_or_the_pair(rig, monkeypatch, name, blamed):
    """The gradient of the third image overflows."""
    rig.reset(clean_config(name))
    forward = DiffusionActor._forward

    def overflowing(self, micro, **options):
        output = forward(self, micro, **options)
        rows = micro.data[Key.ADVANTAGES] == rig.batch[Key.ADVANTAGES][2]
        return output | {"velocities": Overflow.apply(output["velocities"], rows)}

    monkeypatch.setattr(DiffusionActor, "_forward", overflowing)
    with pytest.raises(NonFiniteUpdateError, match=r"non-finite gradient for \d samples") as error:
        rig.actor.update(rig.batch, rig.cond, [MiniBatch(torch.arange(IMAGES))])
    assert error.value.samples == blamed
