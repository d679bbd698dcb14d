"""Requests of rollouts: places of the SDE window, seeds, validation's own pipeline, early refusals."""

import pytest
import torch
from PIL import Image
from tests_support import recorded

from flowgrpo_rc import ImagePolicy
from flowgrpo_rc.batch import Key
from flowgrpo_rc.models import PipelineLoader
from flowgrpo_rc.trainer import FlowGRPOTrainer, setup

pytestmark = pytest.mark.run
R = "actor_rollout_ref.rollout"
M = "actor_rollout_ref.model"


@pytest.mark.parametrize("wanted", [None, "auto", "true", "false"])
def test_checkpointing_follows_the_setting_and_is_announced(wanted, small_config, monkeypatch, capsys):
    monkeypatch.setattr("flowgrpo_rc.models.config.CHECKPOINTING_FROM", 1_000_000)
    settings = [] if wanted is None else [f"{M}.enable_gradient_checkpointing={wanted}"]
    trainer = FlowGRPOTrainer(small_config(*settings))
    assert trainer.run.actor.recomputes == (wanted != "false")
    assert trainer.run.model.transformer.gradient_checkpointing == (wanted != "false")
    trainer._announce()
    assert ("Gradient checkpointing is on" in capsys.readouterr().out) == (wanted != "false")


def test_windows_and_noise_have_the_seeds_that_are_given(small_config):
    own = FlowGRPOTrainer(small_config(f"{R}.seed=7", "trainer.seed=1", folder="a"))
    same = FlowGRPOTrainer(small_config("trainer.seed=7", folder="b"))
    groups = list(range(40))
    assert own.rollouts.window_starts(groups, 0) == same.rollouts.window_starts(groups, 0)
    assert len(set(own.rollouts.window_starts(groups, 0))) > 1
    shared = FlowGRPOTrainer(small_config(f"{R}.algo.sde_window_seed=3", folder="c"))
    places = []
    for step in range(12):
        found = set(shared.rollouts.window_starts(groups, step))
        assert len(found) == 1
        places += found
    assert len(set(places)) > 1
    other = FlowGRPOTrainer(small_config(f"{R}.algo.sde_window_seed=3", "trainer.seed=9", folder="d"))
    assert other.rollouts.window_starts([0], 11) == [places[-1]]


def test_validation_has_its_own_pipeline(small_config):
    settings = ("height=64", "width=48", "max_sequence_length=4", "true_cfg_scale=2")
    trainer = FlowGRPOTrainer(small_config(*(f"{R}.val_kwargs.pipeline.{setting}" for setting in settings)))
    requests = recorded(trainer, "generate")
    trainer._validate()
    (((request,), _),) = requests
    cond = request.conditioning
    assert (cond.height, cond.width, cond.true_cfg_scale) == (64, 48, 2.0)
    assert cond.prompts.embeds.shape[1] == 4
    assert cond.negative is not None
    (grid,) = trainer.folder.samples.glob("*.png")
    assert Image.open(grid).size[1] > 64
    prompts = trainer.run.train_prompts[:2]
    training = trainer.run.conditioning(prompts, trainer.config.actor_rollout_ref.rollout.pipeline)
    assert (training.height, training.negative) == (32, None)
    assert training.prompts.embeds.shape[1] > 4


def test_lora_weights_and_moments_have_the_precision_that_is_given(small_config):
    trainer = FlowGRPOTrainer(small_config(f"{M}.lora_dtype=bfloat16"))
    metrics = trainer.train_step()
    actor = trainer.run.actor
    assert {parameter.dtype for parameter in actor._parameters} == {torch.bfloat16}
    moments = [state["exp_avg"].dtype for state in actor.optimizer.state.values()]
    assert moments
    assert set(moments) == {torch.bfloat16}
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{R}.pipeline.guidance_scale=4"], "pipeline.guidance_scale: got 4.0 .*; it takes none; set it to null"),
        ([f"{R}.val_kwargs.pipeline.guidance_scale=4"], "rollout.val_kwargs.pipeline.guidance_scale: got 4.0"),
        ([f"{M}.path=SD3", f"{R}.pipeline.guidance_scale=4.5"], r"guidance_scale=null and true_cfg_scale=4.5"),
        ([f"{R}.val_kwargs.pipeline.height=33"], "val_kwargs.pipeline.height=33, width=32: this model draws multiples"),
        ([f"{R}.val_kwargs.pipeline.max_sequence_length=4000"], "max_sequence_length: got 4000; this model takes at"),
    ],
)
def test_what_the_model_does_not_take_is_refused_before_weights_are_read(
    overrides, says, small_config, tiny_sd3_path, monkeypatch
):
    monkeypatch.setattr(PipelineLoader, "load", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=says):
        FlowGRPOTrainer(small_config(*(override.replace("SD3", tiny_sd3_path) for override in overrides)))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("trainer.rollout_data_dir=/dev/null/below", r"/dev/null/below cannot be written \(Not a directory\)"),
        ("trainer.validation_data_dir=/dev/null/below", r"/dev/null/below cannot be written \(Not a directory\)"),
        (f"{M}.attn_backend=_native_npu", "attn_backend: got _native_npu, .*install `torch_npu`"),
        (f"{R}.rollout_attn_backend=_native_npu", "rollout_attn_backend: got _native_npu, .*install `torch_npu`"),
        (f"{R}.cache.options={{threshold: x}}", "rollout.cache.options.threshold: got 'x'; give a number"),
        (f"{M}.lora_adapter_path=/dev/null", "lora_adapter_path: /dev/null is no folder"),
        ("actor_rollout_ref.actor.fsdp_config.shard=true", "fsdp_config.shard: got true with one process, .*torchrun"),
    ],
)
def test_what_cannot_work_here_is_refused_before_the_model_is_opened(setting, says, small_config, monkeypatch):
    monkeypatch.setattr(setup, "open_checked", lambda *_, **__: pytest.fail("the model was opened"))
    cache = [f"{R}.cache.name=first_block"] if "cache" in setting else []
    config = small_config("trainer.device=cpu", f"{R}.dtype=float32", *cache, setting)
    with pytest.raises(ValueError, match=says) as caught:
        FlowGRPOTrainer(config)
    assert setting.partition("=")[0] in str(caught.value)


def test_a_prompts_images_start_from_one_noise(small_config):
    """Of a run and of ``ImagePolicy``: a seed for each prompt, and another one at another step. Tail and cache of the
    latter are the configured ones too."""
    shared = "actor_rollout_ref.rollout.algo.init_same_noise=true"
    trainer = FlowGRPOTrainer(small_config(shared))
    seeds = [trainer.rollouts.request(step).request.start_seeds for step in (0, 1)]
    groups = [seeds[0][first : first + 4] for first in range(0, 16, 4)]
    assert [len(set(group)) for group in groups] == [1] * 4
    assert len({*seeds[0], *seeds[1]}) == 8
    trainer.folder.close()
    parts = small_config(shared).actor_rollout_ref
    policy = ImagePolicy(parts.model, parts.rollout, parts.actor, seed=0)
    drawn = policy.draw(["twelve", "thirty"], seed=0)
    first = drawn.batch[Key.LATENTS][:, 0]
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[4])
    asked = []
    generate = policy.engine.generate
    policy.engine.generate = lambda request: asked.append(request) or generate(request)
    policy._rollout.tail.steps = 0.5
    policy._rollout.cache.name = "first_block"
    policy.draw(["twelve"], seed=0)
    policy.draw(["twelve"], seed=0, learn=False)
    assert [one.tail and one.tail.steps for one in asked] == [0.5, None]
    assert [one.cache and one.cache.name for one in asked] == ["first_block", None]
    assert [one.start_seeds is None for one in asked] == [False, True]
    plain = FlowGRPOTrainer(small_config(folder="plain"))
    assert plain.rollouts.request(0).request.start_seeds is None
    plain.folder.close()


def test_one_start_without_a_stochastic_step_is_refused(small_config):
    """All images of a prompt would be the same."""
    with pytest.raises(ValueError, match="init_same_noise: got true with loss_mode=awm, .* set it to false"):
        small_config(
            "actor_rollout_ref.rollout.algo.init_same_noise=true",
            "actor_rollout_ref.actor.diffusion_loss.loss_mode=awm",
            "algorithm.rollout_correction=null",
        )
