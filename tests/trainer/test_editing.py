"""Editing by reinforcement learning: prompts with reference images through the trainer, and what is refused of them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import SMALL_RUN, adapter_of, before_step, last_of_each, power_cut, recorded, rows_of, same
from tiny_families import flux

from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.cli.main import main
from flowgrpo_rc.data import load_prompts
from flowgrpo_rc.trainer import CheckpointError, FlowGRPOTrainer

pytestmark = pytest.mark.run
PIPELINE = "actor_rollout_ref.rollout.pipeline"
REWARD = """
import numpy as np

SEEN = []


def compute_score(images, prompts, metadata):
    references = [np.asarray(row["images"][0]) for row in metadata]
    SEEN.extend((row["images"][0].digest, picture.shape) for row, picture in zip(metadata, references))
    return [float(picture.mean() / 255 - abs(image.mean() - picture.mean()) / 255)
            for image, picture in zip(images, references)]
"""


@pytest.fixture(scope="module")
def kontext(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "kontext"
    flux.build(pipeline="FluxKontextPipeline").save_pretrained(folder)
    return str(folder)


def write_prompts(folder, sizes=((60, 40),) * 6, name="train.jsonl", seed=0, text="make it blue"):
    """A row for each size, all with the same text."""
    generator = np.random.default_rng(seed)
    rows = []
    for i, (width, height) in enumerate(sizes):
        file = f"{name}.{i}.png"
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / file)
        rows.append({"prompt": text, "images": file})
    (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder / name


def settings(tmp_path, kontext, *overrides):
    (tmp_path / "likeness.py").write_text(REWARD)
    return last_of_each(
        *SMALL_RUN,
        f"actor_rollout_ref.model.path={kontext}",
        f"actor_rollout_ref.model.prompt_store={tmp_path / 'store'}",
        f"{PIPELINE}.height=32",
        f"{PIPELINE}.width=32",
        f"{PIPELINE}.guidance_scale=3.5",
        f"{PIPELINE}.true_cfg_scale=2",
        f"{PIPELINE}.max_sequence_length=24",
        f"{PIPELINE}.reference_area=1024",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        "data.val_files=null",
        f"reward.custom_reward_function.path={tmp_path / 'likeness.py'}",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        *overrides,
    )


@pytest.fixture
def config(tmp_path, kontext):
    """``config(*overrides, folder=...)``: a run of two steps that edits."""

    def make(*overrides, folder="run"):
        where = f"trainer.default_local_dir={tmp_path / folder}"
        return compose("tiny_qwen_image_ocr", settings(tmp_path, kontext, where, *overrides))

    return make


def rewards_of(folder):
    return [{k: v for k, v in row.items() if k.startswith(("reward/", "actor/", "step"))} for row in rows_of(folder)]


def test_a_run_on_references_is_repeated_by_a_resumed_one(config, tmp_path):
    """Two steps in one go, and one, then one more. Equal texts with other images are other prompts."""
    train = write_prompts(tmp_path)
    whole = FlowGRPOTrainer(config(folder="whole")).fit().root
    first = FlowGRPOTrainer(config(folder="parts"))
    assert first.run.encoding.prompts == 12  # with a negative prompt for each image
    before_step(first, 1, power_cut)
    with pytest.raises(ConnectionError):
        first.fit()
    second = FlowGRPOTrainer(config(folder="parts"))
    assert second.step == 1
    rows = rewards_of(second.fit().root)
    assert rows == rewards_of(whole)
    adapter = adapter_of(whole)
    assert same(adapter_of(second.folder.root), adapter)
    assert any(value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name)
    # The reward is at most the reference's own brightness.
    brightest = max(np.asarray(record.images[0]).mean() / 255 for record in load_prompts(train))
    assert 0 < rows[-1]["reward/mean"] < brightest


def test_a_resume_with_other_references_is_refused(config, tmp_path):
    write_prompts(tmp_path)
    FlowGRPOTrainer(config("trainer.total_training_steps=1")).fit()
    write_prompts(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"step_1 was trained with other reference images \(\w{16} there, \w{16}"):
        FlowGRPOTrainer(config())
    write_prompts(tmp_path)
    assert FlowGRPOTrainer(config()).step == 1


def test_validation_draws_every_pair_of_text_and_image(config, tmp_path):
    """Three rows of one text, two of them with the same image."""
    write_prompts(tmp_path)
    held_out = write_prompts(tmp_path, name="val.jsonl", sizes=((30, 20),) * 3, seed=7)
    row = json.loads(held_out.read_text().splitlines()[0])
    held_out.write_text("\n".join(json.dumps(row | {"images": f"val.jsonl.{i}.png"}) for i in (0, 1, 0)))
    overrides = (f"data.val_files={held_out}", "actor_rollout_ref.rollout.val_kwargs.pipeline.reference_area=256")
    trainer = FlowGRPOTrainer(config(*overrides))
    requests = recorded(trainer, "generate")
    trainer._validate()
    (((request,), _),) = requests
    assert request.prompt_index.tolist() == [0, 1, 0]
    references = request.conditioning.prompts.references
    # 256 pixels in the shape 3 to 2 are 19.6 x 13.1, in multiples of 8.
    assert request.conditioning.prompts.reference_grids == ((2, 2),)
    assert references.shape == (2, 4, 64)
    assert (references[0] - references[1]).abs().max() > 1e-2
    assert torch.equal(request.conditioning.negative.references, references)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{}, {}], "train.jsonl:1, {0}/train.jsonl:2: no reference images in the column 'images'; a FluxKontextP"),
        ([{"images": "a.png"}, {"images": ["a.png", "b.png"]}], "train.jsonl:2: 2 reference images in the column 'i"),
        (
            [{"images": "gone.png"}],
            "train.jsonl:1: the image {0}/gone.png does not exist or is not a file; paths are r",
        ),
        (
            [{"images": "a.png"}, {"images": "a.png"}, {"images": "b.png"}],
            "train.jsonl:3: the reference images make 5 x 3 tokens, those of the other prompts 3 x 5 tokens "
            "(actor_rollout_ref.rollout.pipeline.reference_area=1024); crop or pad them to the same aspect ratio",
        ),
        ([{"images": "thin.png"}], "train.jsonl:1: a reference image of 2000 x 1 pixels, scaled to 1,024 in multiples"),
    ],
    ids=["none", "too many", "missing", "another shape", "too thin"],
)
def test_references_that_do_not_fit_are_told_before_weights_are_read(
    kontext, tmp_path, capsys, monkeypatch, rows, told
):
    monkeypatch.setattr("flowgrpo_rc.models.load.PipelineLoader._read", lambda *_: pytest.fail("weights were read"))
    for file, size in {"a.png": (60, 40), "b.png": (40, 60), "thin.png": (2000, 1)}.items():
        Image.new("RGB", size).save(tmp_path / file)
    lines = [json.dumps({"prompt": "make it red"} | row) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    smallest = ("data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    run = settings(tmp_path, kontext, f"trainer.default_local_dir={tmp_path / 'run'}", *smallest)
    # A run and ``encode-prompts`` make the same checks.
    command = ["encode-prompts", "--config-name", "tiny_qwen_image_ocr"] if len(rows) == 1 else ["demo"]
    assert main([*command, *run]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert told.format(tmp_path) in errors[0]


def test_a_model_that_takes_no_images_is_given_none(tmp_path, capsys, kontext):
    train = write_prompts(tmp_path, sizes=((8, 8),) * 8)
    run = (*SMALL_RUN, f"trainer.default_local_dir={tmp_path / 'run'}", f"data.train_files={train}")
    assert main(["demo", *run]) == 2
    assert (
        f"{train}:5 and 3 more rows: a QwenImagePipeline takes no reference images; leave out the column 'images', or "
        "give it another name if rewards alone read it"
    ) in capsys.readouterr().err
