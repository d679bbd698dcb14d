"""DPO from files of preferences: the pairs of a batch, its first loss, resumes, and every row that is refused."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import adapter_of, before_step, power_cut, rows_of, same

from flowgrpo_rc.batch import Key
from flowgrpo_rc.data.prompts import load_prompts
from flowgrpo_rc.trainer import FlowGRPOTrainer

PROMPTS = ("seven", "eight", "nineteen", "forty-two", "sixty", "eleven")


@pytest.fixture
def pairs(tmp_path):
    """Six prompts, each with a bright picture that is preferred to a dark one; half of them are wider than high."""
    generator = np.random.default_rng(0)
    lines = []
    for i, prompt in enumerate(PROMPTS):
        names = {}
        for kind, low in (("chosen", 128), ("rejected", 0)):
            names[kind] = f"{kind}_{i}.png"
            pixels = generator.integers(low, low + 128, (32, 32 + 16 * (i % 2), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / names[kind])
        lines.append(json.dumps({"prompt": prompt, **names}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def settings(pairs):
    return (
        f"data.preferences={pairs}",
        "data.val_files=''",
        "algorithm.rollout_correction=null",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.diffusion_loss.loss_mode=dpo",
        "actor_rollout_ref.actor.diffusion_loss.dpo_beta=100",
    )


@pytest.mark.run
def test_a_batch_has_the_pairs_of_its_prompts(settings, pairs, small_config):
    # Nothing is scored, so the reward's missing weights are no fault.
    trainer = FlowGRPOTrainer(small_config(*settings, "reward.functions.pickscore=1"))
    trainer.run.engine.generate = lambda *_: pytest.fail("drawn")
    request = trainer.rollouts.next(0)
    batch, images = trainer._rollout(request)
    trainer._noise(batch, request, torch.arange(len(batch)))
    height, width = images.shape[1:3]
    for row, image in enumerate(images):
        prompt = request.prompts[row // 2].prompt
        name = f"{('chosen', 'rejected')[row % 2]}_{PROMPTS.index(prompt)}.png"
        picture = Image.open(pairs.parent / name)
        side = min(picture.size)
        left = (picture.width - side) // 2
        middle = picture.crop((left, 0, left + side, side)).resize((width, height), Image.Resampling.LANCZOS)
        assert np.abs(image.astype(int) - np.asarray(middle).astype(int)).max() <= 1
        assert (image.mean() > 128) == (row % 2 == 0)
    encoded = trainer.run.model.encode_images(torch.from_numpy(images))
    assert torch.equal(batch[Key.CLEAN_LATENTS], encoded)
    assert torch.equal(batch[Key.NOISE][0::2], batch[Key.NOISE][1::2])
    with request.scoring as scoring:
        assert scoring.result(images).total.tolist() == [1.0, 0.0] * (len(images) // 2)
    trainer.folder.close()


@pytest.mark.run
def test_a_run_learns_from_the_pairs_and_resumes_exactly(settings, small_config):
    steps = (*settings, "trainer.total_training_steps=3", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    rows = rows_of(FlowGRPOTrainer(small_config(*steps, folder="whole")).fit().root)
    # -log sigmoid(0): the actor begins at its reference.
    assert rows[0]["actor/pg_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert rows[-1]["actor/pg_loss"] < 0.1
    assert all(row["actor/grad_norm"] > 0 and row["reward/mean"] == 0.5 for row in rows)
    auto = (*steps, "trainer.resume_mode=auto", "trainer.save_freq=2")
    first = FlowGRPOTrainer(small_config(*auto, folder="parts"))
    before_step(first, 2, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    assert rows_of(FlowGRPOTrainer(small_config(*auto, folder="parts")).fit().root) == rows
    assert same(adapter_of(first.folder.root), adapter_of(first.folder.root.parent / "whole"))
    card = (first.folder.root / "lora" / "README.md").read_text()
    assert "trained by `dpo` on pairs of a preferred and a rejected image" in card
    assert "6 from pairs.jsonl" in card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "actor_rollout_ref.actor.diffusion_loss.loss_mode=awm",
            "preferences: got files with loss_mode=awm, which does not learn from pairs; set .*loss_mode=dpo",
        ),
        ("actor_rollout_ref.rollout.n=4", "rollout.n: got 4 with data.preferences, .* set it to 2"),
        ("trainer.rollout_data_dir=/kept", "trainer.rollout_data_dir: got /kept with data.preferences"),
        ("reward.normalization=group", "reward.normalization: got group with data.preferences"),
        ("actor_rollout_ref.rollout.adapter_lag=1", "rollout.adapter_lag: got 1 with data.preferences"),
    ],
)
def test_settings_of_drawn_images_are_refused(settings, small_config, change, message):
    with pytest.raises(ValueError, match=message):
        small_config(*settings, change)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "chosen_0.png"}, r"pairs.jsonl:1: 'rejected' names 0 images; .* columns chosen and rejected"),
        ({"chosen": ["chosen_0.png", "chosen_1.png"], "rejected": "rejected_0.png"}, "'chosen' names 2 images"),
        ({"chosen": 3, "rejected": "rejected_0.png"}, "'chosen' holds a int that names no image"),
        ({"chosen": "chosen_0.png", "rejected": "chosen_0.png"}, "chosen and rejected are the same image"),
        ({"chosen": "chosen_9.png", "rejected": "rejected_0.png"}, "chosen_9.png does not exist"),
    ],
)
def test_rows_without_a_preference_are_refused(pairs, row, message):
    pairs.write_text(json.dumps({"prompt": "seven", **row}))
    with pytest.raises(ValueError, match=message):
        load_prompts(pairs, pairs=True)


def test_other_columns_stay_metadata(pairs):
    pairs.write_text(json.dumps({"prompt": "7", "chosen": "chosen_0.png", "rejected": "rejected_0.png", "id": 5}))
    (record,) = load_prompts(pairs, pairs=True)
    assert record.metadata == {"id": 5}
    assert [image.path for image in record.pair] == [
        str(pairs.parent / f"{name}_0.png") for name in ("chosen", "rejected")
    ]
    assert load_prompts(pairs)[0].pair == ()
