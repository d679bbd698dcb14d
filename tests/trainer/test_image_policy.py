"""``ImagePolicy``: the trainer's first step by hand, guidance, deterministic draws, refusals; reference images."""

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo_rc import ImagePolicy, Prompt, reference_image
from flowgrpo_rc.models import PromptEncoder
from flowgrpo_rc.models.lora import adapter_state
from flowgrpo_rc.trainer import FlowGRPOTrainer

A = "actor_rollout_ref.actor"
WINDOW = {"sde_window_size": 2, "sde_window_range": [0, 3]}
PIPELINE = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 24}


def tiny(path="asset:tiny_qwen_image", *, actor=None, lora=None, **pipeline):
    return ImagePolicy(
        {"path": path, "lora_rank": 4, "lora_alpha": 8, **(lora or {})},
        {"n": 3, "dtype": "float32", "algo": WINDOW, "pipeline": PIPELINE | pipeline},
        actor,
    )


@pytest.mark.run
@pytest.mark.parametrize(
    ("bypass", "objective"),
    [("true", "flow_grpo"), ("false", "flow_grpo"), ("false", "diffusion_nft"), ("false", "dpo")],
)
def test_a_step_by_hand_equals_the_trainers_first(bypass, objective, small_config):
    correction = "algorithm.rollout_correction"
    config = small_config(
        f"{correction}.bypass_mode={bypass}",
        f"{A}.score=always",
        f"{A}.optim.lr_scheduler_type=constant",
        f"{A}.diffusion_loss.loss_mode={objective}",
        "actor_rollout_ref.rollout.tail.steps=0.5",
    )
    trainer = FlowGRPOTrainer(config)
    prompts = [trainer.run.train_prompts[i].prompt for i in trainer.run.sampler._order()[:4]]
    parts = config.actor_rollout_ref
    policy = ImagePolicy(parts.model, parts.rollout, parts.actor, seed=config.trainer.seed)
    drawn = policy.draw(prompts, seed=config.rollout_seed)
    # In the trainer's precision: Adam's first step divides a gradient by itself, so rounding would show.
    metrics = policy.update(drawn, np.float32(drawn.images.mean((1, 2, 3)) / 255))
    expected = trainer.train_step()
    assert expected["actor/grad_norm"] > 0
    shared = [name for name in metrics if name in expected]
    assert len(shared) > (20 if objective == "flow_grpo" else 15)
    for name in shared:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    ours, theirs = (adapter_state(one.transformer) for one in (policy.actor, trainer.run.actor))
    assert policy.engine.adapter_version == 1
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name)
    trainer.folder.close()


@pytest.mark.run
def test_the_saved_lora_draws_the_same_images(tmp_path):
    policy = tiny()
    before = policy.draw(["twelve"], seed=3, n=2, learn=False)
    drawn = policy.draw(["twelve", "thirty"], seed=0)
    policy.update(drawn, torch.linspace(0, 1, 6), policy.score(drawn)[0])
    after = policy.draw(["twelve"], seed=3, n=2, learn=False)
    assert (before.images != after.images).any()
    assert (after.batch, after.prompts, after.group.tolist()) == (None, ["twelve", "twelve"], [0, 0])
    policy.save(tmp_path / "lora")
    again = tiny(lora={"lora_adapter_path": str(tmp_path / "lora")}).draw(["twelve"], seed=3, n=2, learn=False)
    # The file has the scale in its weights: 2, a power of two, so that nothing is rounded.
    assert np.array_equal(again.images, after.images)
    with pytest.raises(ValueError, match="drawn with learn=False"):
        policy.update(after, [0.0, 1.0])


@pytest.mark.run
def test_guidance_steers_away_from_the_negative_prompt_as_the_family_encodes_it(folder_of_family):
    sana = tiny(folder_of_family("sana"), height=64, width=64, true_cfg_scale=3.0)
    encoder = PromptEncoder(sana.model, PIPELINE["max_sequence_length"])
    for negative, text in ((None, sana.model.negative_prompt), ("blurred", "blurred")):
        drawn = sana.draw(["twelve"], seed=0, negative=negative, learn=False)
        assert torch.equal(drawn.conditioning.negative.embeds, encoder([Prompt(text, negative=True)]).embeds)
    # An ordinary prompt stands behind an instruction.
    assert encoder(["blurred"]).embeds.shape != drawn.conditioning.negative.embeds.shape


@pytest.mark.run
def test_an_engine_of_a_rounded_base_must_have_its_precision():
    with pytest.raises(ValueError, match=r"rollout.dtype: got float32; with model.quantization=nf4 .* to bfloat16"):
        tiny(lora={"dtype": "bfloat16", "quantization": "nf4"})


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_what_the_model_says(allowed):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        tiny(lora={"allow_tf32": allowed})
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_refusals():
    with pytest.raises(ValueError, match="clip_ratio: got auto, .* give numbers"):
        tiny(actor={"diffusion_loss": {"clip_ratio": "auto"}, "rollout_correction": {"bypass_mode": True}})
    with pytest.raises(ValueError, match="has no key hight; nearest: height"):
        tiny(hight=32)
    with pytest.raises(ValueError, match="height=30"):
        tiny(height=30)
    with pytest.raises(ValueError, match="'twelve': a QwenImagePipeline takes no reference images"):
        tiny().draw([Prompt("twelve", (reference_image(Image.new("RGB", (8, 8))),))], seed=0)


def test_a_reference_image_of_a_path_of_bytes_and_of_a_picture(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    file = tmp_path / "a.png"
    picture.save(file)
    of_path, of_bytes, of_picture = (reference_image(one) for one in (file, file.read_bytes(), picture))
    assert of_path == of_bytes
    assert (of_path.path, of_bytes.path) == (str(file), None)
    for one in (of_path, of_bytes, of_picture):
        assert (one.width, one.height) == (4, 4)
        assert np.array_equal(np.asarray(one), np.asarray(picture))
    with pytest.raises(ValueError, match="does not exist"):
        reference_image(tmp_path / "none.png")
    with pytest.raises(ValueError, match="not an image"):
        reference_image(b"no image")
