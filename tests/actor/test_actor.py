"""The actor: exact first ratios, splits that do not matter, NaN that stops, and no pass too many."""

import ast
import copy
import dataclasses
import inspect
import re
import shutil
from contextlib import contextmanager

import jaxtyping
import pytest
import torch
from accelerate import Accelerator
from tests_support import same
from tolerances import GRADIENT, LOG_PROB, RATIO, adam
from torch.testing import assert_close

from flowgrpo_rc.actor import DiffusionActor, DiffusionActorConfig, DiffusionLossConfig, NonFiniteUpdateError
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy, correct_old_policy
from flowgrpo_rc.gap.research.drift import DriftMeter
from flowgrpo_rc.loss import diffusion_loss_sums
from flowgrpo_rc.models import Conditioning, ModelConfig, PromptEncoder, load_model
from flowgrpo_rc.models.lora import adapter_parameters, adapter_state
from flowgrpo_rc.rollout import DiffusersEngine, RolloutRequest
from flowgrpo_rc.rollout.seeds import seed_for

LORA = ModelConfig(lora_rank=4, lora_alpha=8)


class Setup:
    """A tiny model, an engine and an actor with the same random adapter, and a rollout of 8 images of two prompts."""

    def __init__(
        self,
        model,
        dtype=torch.float32,
        sde_type="sde",
        cfg=1.0,
        lora=LORA,
        record_means=False,
        images=8,
        window=2,
        texts=('the text "12"', 'the text "34"'),
        **config,
    ):
        self.engine = DiffusersEngine(model, lora, dtype=dtype, micro_batch_size=8, device="cpu")
        settings = {
            "ppo_micro_batch_size_per_gpu": 8,
            "optim": {"lr": 1e-3},
            "rollout_correction": {"bypass_mode": True, "rollout_is": None},
        } | config
        settings["optim"] = DiffusionActorConfig().optim.__class__(**settings["optim"])
        self.config = DiffusionActorConfig(**settings)
        torch.manual_seed(0)
        self.actor = DiffusionActor(
            model,
            self.config,
            lora,
            Accelerator(cpu=True),
            sde_type=sde_type,
            noise_level=0.7,
            total_optimizer_steps=10,
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in adapter_parameters(self.actor.transformer).values():
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
        self.engine.sync(adapter_state(self.actor.transformer), 0)
        encoder = PromptEncoder(model, 512)
        negative = encoder([" "] * 2) if cfg > 1 else None
        self.cond = Conditioning(encoder(list(texts)), negative, cfg, None, 32, 32)
        prompts = torch.arange(2).repeat_interleave(images // 2)
        request = RolloutRequest(
            conditioning=self.cond,
            prompt_index=prompts,
            num_inference_steps=5,
            seeds=[seed_for(0, 0, 0, i) for i in range(images)],
            window_starts=prompts,
            window_size=window,
            noise_level=0.7,
            sde_type=sde_type,
            record_means=record_means,
        )
        self.batch = self.engine.generate(request).batch
        self.batch["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1])[:images]
        self.old = OldPolicy.of_rollout(self.batch)
        if not self.config.rollout_correction.bypass_mode:
            scored = self.actor.score(self.batch, self.cond)
            self.old, _ = correct_old_policy(scored, self.batch, self.config.rollout_correction)

    def update(self, size=8):
        """An update by all images, in mini-batches of `size`."""
        parts = torch.arange(8).split(size)
        return self.actor.update(self.batch, self.cond, [MiniBatch(rows, self.old.rows(rows)) for rows in parts])

    def gradient(self, rows=None, micro=None):
        """Gradient of one mini-batch, without stepping."""
        config = copy.deepcopy(self.config)
        config.ppo_micro_batch_size_per_gpu = micro or 8
        config.grad_clip = 1e9
        self.actor.config = config
        taken = {}

        def capture():
            taken.update({n: p.grad.clone() for n, p in adapter_parameters(self.actor.transformer).items()})

        self.actor.optimizer.step, step = capture, self.actor.optimizer.step
        try:
            rows = torch.arange(8) if rows is None else rows
            mini = MiniBatch(rows, self.old.rows(rows))
            metrics = self.actor.update(self.batch, self.cond, [mini]).metrics
        finally:
            self.actor.optimizer.step = step
        return taken, metrics


@contextmanager
def nothing_learned(actor):
    """Neither weights nor moments have changed after it."""
    before = adapter_state(actor.transformer)
    yield
    assert same(adapter_state(actor.transformer), before)
    assert not actor.optimizer.state


def test_gradients_of_several_losses_are_those_of_an_update(tiny_model):
    """From one forward, whatever the micro-batch, and nothing moves."""
    setup = Setup(tiny_model, dtype=torch.bfloat16, diffusion_loss=DiffusionLossConfig(clip_ratio=1e-4))
    update, _ = setup.gradient()
    expected = torch.cat([value.flatten() for value in update.values()])
    mode = ModeInForce.configured(setup.config)

    def loss(output, data):
        return diffusion_loss_sums(mode, output, data).loss_sum / (8 * 2)

    with nothing_learned(setup.actor):
        for micro in (3, 8):
            setup.actor.config = dataclasses.replace(setup.config, ppo_micro_batch_size_per_gpu=micro)
            once, thrice = setup.actor.gradients(setup.batch, setup.cond, [loss, lambda *a: 3 * loss(*a)])
            assert_close(once, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-4)
            assert_close(thrice, 3 * once, atol=1e-6 * float(expected.abs().max()), rtol=1e-4)
    setup.batch[Key.NEXT_LATENTS][5] = float("nan")
    with pytest.raises(NonFiniteUpdateError, match=r"rows \[5\]"):
        setup.actor.gradients(setup.batch, setup.cond, [loss])


@pytest.mark.parametrize(
    ("sde_type", "options", "checkpointing"),
    [
        ("cps", {}, False),
        ("dance_sde", {"use_kl_loss": True, "kl_loss_coef": 1.0}, False),
        ("sde", {"rollout_correction": {"bypass_mode": True, "rollout_rs": "seq_mean_k1"}}, True),
    ],
    ids=["cps", "kl", "rejection, checkpointing"],
)
def test_the_drift_step_by_step_is_that_of_whole_windows(tiny_model, sde_type, options, checkpointing):
    """The slow way: the expected loss itself on a forward of whole windows, without checkpointing."""
    if "rollout_correction" in options:
        options["rollout_correction"]["rollout_rs_threshold"] = "0.9998_1.0003"
    clip = {"sde": 1e-4, "dance_sde": 1e-4, "cps": 2e-5}[sde_type]
    setup = Setup(
        tiny_model,
        dtype=torch.bfloat16,
        sde_type=sde_type,
        record_means=True,
        diffusion_loss=DiffusionLossConfig(clip_ratio=clip),
        **options,
    )
    scored = setup.actor.rescore(setup.batch, setup.cond)
    mode = ModeInForce.configured(setup.config)
    slow = DriftMeter(mode, sde_type, 0)
    torch.randint(0, 2, (8,), generator=slow._generator)  # as many as the meter draws advantages
    groups = [setup.batch[:4], setup.batch[4:]]
    expected = [setup.actor.gradients(group, setup.cond, [slow._drift_loss])[0] for group in groups]
    if checkpointing:
        setup.actor.transformer.enable_gradient_checkpointing()
    meter = DriftMeter(mode, sde_type, 0)
    meter.add(setup.actor, setup.batch, scored, setup.cond)
    for found, gradient in zip(meter.group_sums(), expected, strict=True):
        assert gradient.norm() > 0
        assert (found - gradient).norm() < GRADIENT * 10 * gradient.norm()
    found = meter.result(0.95)
    assert [one.timestep for one in found.timesteps] == sorted(set(setup.batch[Key.TIMESTEPS].flatten().tolist()))[::-1]
    assert found.value > 0


@pytest.mark.portable
@pytest.mark.parametrize(("sde_type", "cfg"), [("sde", 1.0), ("cps", 1.0), ("dance_sde", 1.0), ("sde", 4.0)])
def test_float32_rollouts_rescore_to_the_same_log_probs(tiny_model, sde_type, cfg):
    setup = Setup(tiny_model, sde_type=sde_type, cfg=cfg)
    scored = setup.actor.score(setup.batch, setup.cond).log_probs
    assert_close(scored, setup.batch["rollout_log_probs"], atol=LOG_PROB, rtol=0)
    _, metrics = setup.gradient()
    assert metrics["actor/ratio_deviation_first"] <= RATIO
    assert metrics["actor/pg_clipfrac_first"] == 0.0


def test_bfloat16_rollouts_leave_a_gap(tiny_model):
    setup = Setup(tiny_model, dtype=torch.bfloat16)
    gap = (setup.actor.score(setup.batch, setup.cond).log_probs - setup.batch["rollout_log_probs"]).abs()
    assert 1e-5 < gap.mean() < 5e-3
    _, metrics = setup.gradient()
    assert_close(metrics["actor/log_ratio_abs_mean_first"], gap.mean().item(), atol=1e-7, rtol=1e-3)
    assert_close(metrics["actor/rollout_corr/logprob_abs_diff_mean"], gap.mean().item(), atol=1e-7, rtol=1e-3)


@pytest.mark.portable
@pytest.mark.parametrize("normalization", ["all", "kept"])
@pytest.mark.parametrize("bypass", [True, False])
def test_micro_batches_do_not_change_the_gradient(tiny_model, normalization, bypass):
    """One micro-batch of 8 equals 8 of 1, and 3 in another order, also when rejection hits some of them."""
    rc = {
        "bypass_mode": bypass,
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.99985_1.0002",
        "rejection_normalization": normalization,
    }
    setup = Setup(tiny_model, dtype=torch.bfloat16, rollout_correction=rc)
    whole, metrics = setup.gradient(micro=8)
    assert 0.1 < metrics["actor/kept_fraction"] < 0.9
    for micro, order in ((1, range(8)), (3, [5, 2, 7, 0, 3, 6, 1, 4])):
        split, split_metrics = setup.gradient(rows=torch.tensor(order), micro=micro)
        for name in whole:
            scale = whole[name].abs().max().item()
            assert_close(split[name], whole[name], atol=1e-6 * max(scale, 1e-3) * 10, rtol=1e-4)
        for name in metrics:
            assert_close(split_metrics[name], metrics[name], atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_rejected_samples_leave_the_gradient(tiny_model):
    """With ``kept``, rejecting is the same as never having had the samples; with ``all`` it is scaled by kept/total."""
    rc = {"bypass_mode": False, "rollout_is": None}
    kept = Setup(tiny_model, rollout_correction=rc | {"rejection_normalization": "kept"})
    keep = torch.tensor([True, False, True, True, False, True, True, True])[:, None].expand(8, 2)
    kept.old = dataclasses.replace(kept.old, keep=keep, weights=keep.float())
    rejected, metrics = kept.gradient()
    assert metrics["actor/kept_fraction"] == 0.75
    kept.old = dataclasses.replace(kept.old, keep=torch.ones(8, 2, dtype=torch.bool), weights=torch.ones(8, 2))
    without, _ = kept.gradient(rows=torch.tensor([0, 2, 3, 5, 6, 7]))
    kept.config.rollout_correction.rejection_normalization = "all"
    kept.old = dataclasses.replace(kept.old, keep=keep, weights=keep.float())
    diluted, _ = kept.gradient()
    for name in without:
        assert_close(rejected[name], without[name], atol=1e-7, rtol=1e-4)
        assert_close(diluted[name], 0.75 * without[name], atol=1e-7, rtol=1e-4)


def test_the_share_clipped_at_first_is_of_what_rejection_keeps(tiny_model):
    """A rejected step has a ratio of 1 in the metrics, and would thin it out."""
    rc = {"bypass_mode": True, "rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.99_1.01"}
    setup = Setup(tiny_model, diffusion_loss=DiffusionLossConfig(clip_ratio=1e-3), rollout_correction=rc)
    shift = torch.tensor([[0.0, 2e-3], [0.5, 0.5], [0.0, 0.5], [-2e-3, 0.0]]).repeat(2, 1)
    setup.batch["rollout_log_probs"] = setup.batch["rollout_log_probs"] - shift
    setup.old = OldPolicy.of_rollout(setup.batch)
    _, metrics = setup.gradient()
    assert metrics["actor/kept_fraction"] == pytest.approx(5 / 8)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 8)
    assert metrics["actor/pg_clipfrac_first"] == pytest.approx(2 / 5)


def test_everything_rejected_skips_the_step(tiny_model):
    rc = {"bypass_mode": True, "rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "2.0_3.0"}
    setup = Setup(tiny_model, rollout_correction=rc, optim={"lr": 1e-3, "weight_decay": 0.5})
    message = "rejected a whole mini-batch: its optimizer step is skipped"
    with nothing_learned(setup.actor), pytest.warns(UserWarning, match=message):
        result = setup.update()
    assert result.optimizer_steps == 0
    assert result.metrics["actor/kept_fraction"] == 0.0


def test_epochs_and_mini_batches_make_their_steps(tiny_model):
    setup = Setup(tiny_model, ppo_epochs=3)
    result = setup.update(4)
    assert result.optimizer_steps == 6
    assert setup.actor.averaged_state() is None
    assert result.metrics["actor/ratio_deviation_first"] <= RATIO
    assert result.metrics["actor/log_ratio_abs_mean"] > 1e-6


def test_kl_to_the_base_model(tiny_model):
    """The adapter is random, so the KL is positive; it enters the gradient with its coefficient."""
    plain, _ = Setup(tiny_model).gradient()
    with_kl = Setup(load_model("asset:tiny_qwen_image"), use_kl_loss=True, kl_loss_coef=0.5)
    gradient, metrics = with_kl.gradient()
    assert metrics["actor/kl_loss"] > 1e-6
    assert any((gradient[n] - plain[n]).abs().max() > 1e-6 for n in plain)
    for parameter in adapter_parameters(with_kl.actor.transformer).values():
        parameter.data.zero_()
    assert with_kl.gradient()[1]["actor/kl_loss"] == 0.0


@pytest.mark.parametrize("bypass", [True, False])
def test_non_finite_log_prob_names_the_samples(tiny_model, bypass):
    setup = Setup(tiny_model, rollout_correction={"bypass_mode": bypass, "rollout_is": None})
    setup.batch["next_latents"][5, 1, 3] = torch.nan
    message = r"non-finite log-prob for 1 samples of the batch \(rows \[5\]\)"
    with nothing_learned(setup.actor), pytest.raises(NonFiniteUpdateError, match=message) as error:
        setup.update()
    assert error.value.samples == [5]


@pytest.mark.parametrize(
    ("loss_mode", "bypass"),
    [("flow_grpo", True), ("flow_grpo", False), ("grpo_guard", False), ("flow_dppo", False)],
)
def test_non_finite_gradient_names_the_samples(tiny_model, loss_mode, bypass):
    """A finite loss whose gradient overflows: found one sample at a time, before the optimizer.

    In decoupled mode the first mini-batch is free: its old policy is the present one, of which nothing is kept.
    """
    correction = {"bypass_mode": bypass, "rollout_is": None}
    loss = DiffusionLossConfig(loss_mode=loss_mode)
    setup = Setup(tiny_model, rollout_correction=correction, diffusion_loss=loss)
    setup.batch["advantages"][2] = torch.nan
    message = r"non-finite gradient for 1 samples of the batch \(rows \[2\]\)"
    with nothing_learned(setup.actor), pytest.raises(NonFiniteUpdateError, match=message):
        setup.actor.update(setup.batch, setup.cond, [MiniBatch(torch.arange(8))])


def test_a_loss_that_is_nan_is_refused_though_its_gradient_is_finite(tiny_model):
    """Clip bands of no width that a number is: PPO then takes the unclipped gradient."""
    setup = Setup(tiny_model, diffusion_loss=DiffusionLossConfig(clip_ratio="auto"))
    setup.batch["clip_widths"] = torch.full((8, 2), torch.nan)
    with nothing_learned(setup.actor), pytest.raises(NonFiniteUpdateError):
        setup.update()


@pytest.mark.slow
def test_a_compiled_actor_makes_the_same_update(tiny_model, monkeypatch):
    """Without a C++ compiler ``aot_eager`` traces forward and backward as ``inductor`` does, and generates no code."""
    from flowgrpo_rc.actor import actor

    if shutil.which("g++") is None:
        monkeypatch.setattr(actor, "COMPILE_BACKEND", "aot_eager")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its stack would be another for each caller
    states = []
    gradients = []
    rollouts = []
    for model, compiled in ((tiny_model, False), (load_model("asset:tiny_qwen_image"), True)):
        kl = {"use_kl_loss": True, "kl_loss_type": "velocity", "kl_reference": "average", "ema_decay": 0.9}
        setup = Setup(model, lora=dataclasses.replace(LORA, torch_compile=compiled), kl_loss_coef=0.1, **kl)
        blocks = setup.actor.transformer.transformer_blocks
        assert {block._compiled_call_impl is not None for block in blocks} == {compiled}
        rollouts.append(setup.batch[Key.ROLLOUT_LOG_PROBS])
        before = adapter_state(setup.actor.transformer)

        def loss(output, data):
            return (output["log_probs"] * data[Key.ADVANTAGES][:, None]).sum()

        gradients.append(setup.actor.gradients(setup.batch, setup.cond, [loss, lambda *a: 2 * loss(*a)]))
        setup.update()
        states.append(adapter_state(setup.actor.transformer))
    assert torch.equal(*rollouts)  # the engine, which shares the transformer, runs what is not compiled
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 1e-3 * one.norm()
    plain, traced = states
    assert plain.keys() == traced.keys()
    apart = sum((traced[n] - plain[n]).square().sum() for n in plain).sqrt()
    update = sum((plain[n] - before[n]).square().sum() for n in plain).sqrt()
    assert apart < adam() * update
    assert max((plain[n] - before[n]).abs().max() for n in plain) > 9e-4  # Adam's first step is lr = 1e-3


def test_the_average_follows_its_definition(tiny_model):
    """``d * average + (1 - d) * weights`` with ``d = min(ema_decay, (1 + k) / (10 + k))``, and 0 at the first step."""
    setup = Setup(tiny_model, ema_decay=0.19)
    setup.actor.load_average(None)
    expected = adapter_state(setup.actor.transformer)
    for decay in (0.0, 2 / 11, 0.19, 0.19):  # (1 + 2) / (10 + 2) = 0.25 is above 0.19
        setup.update()
        weights = adapter_state(setup.actor.transformer)
        expected = {n: decay * expected[n].double() + (1 - decay) * weights[n].double() for n in weights}
        averaged = setup.actor.averaged_state()
        for name in weights:
            assert_close(averaged[name].double(), expected[name], atol=1e-8, rtol=1e-6)
    assert any((averaged[n] - weights[n]).abs().max() > 1e-5 for n in weights)


def test_a_later_mini_batch_needs_its_old_policy(tiny_model):
    """An optimizer step has moved the policy by then; only the first may find its own."""
    setup = Setup(tiny_model, rollout_correction={"bypass_mode": False})
    first, second = torch.arange(8).split(4)
    with pytest.raises(ValueError, match="a mini-batch after the first without an old policy"):
        setup.actor.update(setup.batch, setup.cond, [MiniBatch(first), MiniBatch(second)])
    with pytest.raises(ValueError, match="no mini-batches"):
        setup.actor.update(setup.batch, setup.cond, [])


def documented_keys():
    """Of every batch key: its value and what its documentation says first, ``(B, W) float32``."""
    tree = ast.parse(inspect.getsource(Key)).body[0].body[1:]
    texts = [node.value.value for node in tree if isinstance(node, ast.Expr)]
    names = [node.value.value for node in tree if isinstance(node, ast.Assign)]
    return {
        name: re.match(r"``(\(.*?\))`` (?:of )?(\w+)", text).groups() for name, text in zip(names, texts, strict=True)
    }


def test_batches_hold_what_the_vocabulary_says(tiny_model):
    """Every key that the engine records or the actor adds is documented, with its shape and dtype."""
    keys = documented_keys()
    setup = Setup(tiny_model, rollout_correction={"bypass_mode": False}, record_means=True)
    setup.batch["group"] = torch.arange(8)
    latents = tuple(setup.batch["latents"].shape[2:])
    shapes = {"(B,)": (8,), "(B, W)": (8, 2), "(B, W, *L)": (8, 2, *latents)}
    made = {**dict(setup.batch.items()), **setup.old.batch_keys()}
    for name, value in made.items():
        shape, dtype = keys[name]
        assert tuple(value.shape) == shapes[shape], name
        assert str(value.dtype) == f"torch.{dtype}", name
    of_trajectories = {"latents", "next_latents", "timesteps", "sigmas", "next_sigmas", "rollout_log_probs"}
    assert of_trajectories | {"rollout_means", "prompt_index", "advantages"} <= set(made)


@pytest.mark.portable
@pytest.mark.parametrize("batched", [True, False])
def test_guidance_without_the_unconditional_gradient_scores_alike_and_learns_otherwise(tiny_model, batched):
    """Engine and actor agree to rounding whether a velocity is one forward or two; only the gradient differs."""
    tiny_model.batch_guidance = batched
    setup = Setup(tiny_model, cfg=4.0)
    through_both, both_metrics = setup.gradient()
    setup.config.detach_unconditional = True
    scored = setup.actor.score(setup.batch, setup.cond).log_probs
    assert_close(scored, setup.batch["rollout_log_probs"], atol=LOG_PROB, rtol=0)
    conditional, metrics = setup.gradient()
    assert metrics["actor/ratio_deviation_first"] <= RATIO
    assert_close(metrics["actor/pg_loss"], both_metrics["actor/pg_loss"], atol=4 * RATIO, rtol=0)
    both, alone = (torch.cat([g.flatten() for g in found.values()]) for found in (through_both, conditional))
    assert (both - alone).norm() > 0.1 * both.norm()
