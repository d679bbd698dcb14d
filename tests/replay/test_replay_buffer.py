"""The buffer: what goes in comes out, old mini-batches leave, damage is said, and files follow their checkpoints."""

import re

import pytest
import torch
from accelerate import PartialState
from tensordict import TensorDict
from tests_support import BRIGHTNESS
from torch.testing import assert_close

from flowgrpo_rc.batch import Key, MiniBatch, OldPolicy
from flowgrpo_rc.cli.compose import compose
from flowgrpo_rc.replay import ReplayBuffer, ReplayConfig
from flowgrpo_rc.replay.buffer import Replayed, _dealt
from flowgrpo_rc.run_folder import RunFolderError
from flowgrpo_rc.trainer.setup import recorded_settings

TEXTS = ["one", "two", "three"]
OWN = "reward.custom_reward_function"


def batch_of(step, images=4, window=3):
    generator = torch.Generator().manual_seed(step)
    draw = lambda *shape: torch.rand(images, *shape, generator=generator)  # noqa: E731
    tensors = {
        Key.LATENTS: draw(window, 2, 2),
        Key.NEXT_LATENTS: draw(window, 2, 2),
        Key.TIMESTEPS: draw(window),
        Key.SIGMAS: draw(window),
        Key.NEXT_SIGMAS: draw(window),
        Key.ROLLOUT_LOG_PROBS: draw(window),
        Key.ADVANTAGES: draw() - 0.5,
        Key.PROMPT_INDEX: torch.zeros(images, dtype=torch.int64),
        Key.GROUP: torch.zeros(images, dtype=torch.int64),
    }
    return TensorDict(tensors, batch_size=[images])


def minis_of(batch):
    """Two mini-batches; rejection and idle images have taken three and six steps from the second."""
    window = batch[Key.TIMESTEPS].shape[1]
    log_probs = torch.arange(2.0 * window).view(2, window)
    old = OldPolicy(log_probs=log_probs, weights=log_probs + 1, keep=log_probs > 1)
    return [MiniBatch(torch.tensor([0, 1]), old), MiniBatch(torch.tensor([3]), None, rejected=3, idle=6)]


@pytest.fixture(autouse=True)
def one_process():
    PartialState()


@pytest.fixture
def filled(tmp_path):
    def fill(steps=3, **settings):
        buffer = ReplayBuffer(tmp_path / "replay", ReplayConfig(**{"batches": 2} | settings), seed=1)
        for step in range(steps):
            batch = batch_of(step)
            buffer.add(batch, minis_of(batch), [2, 2, 1, 0], ["three", "three", "two", "one"], step=step, staleness=1)
        return buffer

    return fill


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_mini_batch_comes_back_as_it_was_learned_from(filled):
    buffer = filled()
    batch = batch_of(2)
    first, second = (buffer.read(entry, TEXTS) for entry in buffer.entries if entry.step == 2)
    assert set(first.batch.keys()) == set(batch.keys()) - {Key.PROMPT_INDEX, Key.GROUP}
    for name in first.batch.keys():  # noqa: SIM118
        assert torch.equal(first.batch[name], batch[name][:2])
        assert torch.equal(second.batch[name], batch[name][3:])
    assert (first.prompts, second.prompts) == ([2, 2], [0])
    old = minis_of(batch)[0].old
    for name, values in vars(old).items():
        assert values is getattr(first.mini.old, name) is None or torch.equal(values, getattr(first.mini.old, name))
    assert (second.mini.old, second.mini.rejected, second.mini.idle) == (None, 3, 6)


def test_only_the_newest_batches_stay(filled):
    buffer = filled()
    assert [(entry.step, entry.number) for entry in buffer.entries] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert files(buffer.folder) == ["step_1.0.0.pt", "step_1.1.0.pt", "step_2.0.0.pt", "step_2.1.0.pt"]


def test_spread_is_the_mean_size_of_advantages_over_all_images(filled):
    """Images that were left out count, with an advantage of 0: three of four in the second mini-batch."""
    advantages = batch_of(2)[Key.ADVANTAGES].abs().double()
    first, second = filled().entries[2:]
    assert first.spread == pytest.approx(float(advantages[:2].mean()))
    assert second.spread == pytest.approx(float(advantages[3]) / 4)


def test_mini_batches_without_an_old_policy_can_be_left_out(filled):
    """The second of each batch has none."""
    buffer = filled()
    said = []
    buffer.say = said.append
    buffer.remove_without_old()
    assert [(entry.step, entry.number) for entry in buffer.entries] == [(1, 0), (2, 0)]
    assert files(buffer.folder) == ["step_1.0.0.pt", "step_2.0.0.pt"]
    buffer.remove_without_old()
    assert len(said) == 1
    assert said[0].startswith("replay: 2 mini-batch(es) of bypass mode are left out")


def test_selections(filled):
    newest = filled(select="newest").choose(3, 3)
    assert [(entry.step, entry.number) for entry in newest] == [(2, 0), (2, 1), (1, 0)]
    spread = filled(select="spread").choose(3, 4)
    assert [entry.spread for entry in spread] == sorted((entry.spread for entry in spread), reverse=True)
    buffer = filled(select="random")
    orders = {tuple((entry.step, entry.number) for entry in buffer.choose(step, 9)) for step in range(3, 40)}
    assert len(orders) > 10
    assert all(len(set(order)) == 4 for order in orders)
    assert buffer.choose(7, 2) == filled(select="random").choose(7, 2)


def test_images_that_are_too_stale_are_left_out(filled):
    """Each was drawn by an adapter one batch behind: at step 3 those of batch 2 are two batches stale."""
    assert {entry.step for entry in filled(max_staleness=2).choose(3, 9)} == {2}
    assert {entry.step for entry in filled(max_staleness=3).choose(3, 9)} == {1, 2}
    assert filled(max_staleness=2).choose(4, 9) == []


def test_late_steps_are_cut(filled):
    buffer = filled(steps=3)
    short = ReplayBuffer(buffer.folder, ReplayConfig(batches=2, steps=1), seed=1)
    short.load_state_dict(buffer.state_dict())
    batch = batch_of(2)
    first, second = (short.read(entry, TEXTS) for entry in short.entries if entry.step == 2)
    assert first.batch[Key.LATENTS].shape == (2, 1, 2, 2)
    assert torch.equal(first.batch[Key.ROLLOUT_LOG_PROBS], batch[Key.ROLLOUT_LOG_PROBS][:2, :1])
    assert torch.equal(first.batch[Key.ADVANTAGES], batch[Key.ADVANTAGES][:2])
    assert torch.equal(first.mini.old.weights, minis_of(batch)[0].old.weights[:, :1])
    # One image was rejected and two were idle, of three steps each.
    assert (second.mini.rejected, second.mini.idle) == (1, 2)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "texts", "message"),
    [
        (damage, TEXTS, r"step_1\.0\.0\.pt is not what was saved \(its digest differs\)"),
        (lambda path: path.unlink(), TEXTS, r"No such file.*step_1\.0\.0\.pt"),
        (lambda path: None, ["one", "two", "other"], "its prompts are not those of the training data"),
        (lambda path: None, ["one"], "its prompts are not those of the training data"),
    ],
)
def test_what_cannot_be_read_is_left_out_and_said(filled, harm, texts, message):
    buffer = filled()
    said = []
    buffer.say = said.append
    entry = buffer.entries[0]
    harm(buffer.folder / entry.file(0))
    assert buffer.read(entry, texts) is None
    assert len(said) == 1
    assert re.search(rf"^replay: the mini-batch 0 of step 2 is left out: .*{message}", said[0])
    assert entry not in buffer.entries
    assert len(buffer.entries) == 3


def test_a_full_disk_names_file_and_remedy(filled, monkeypatch):
    def full(path, write):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("flowgrpo_rc.replay.buffer.write_whole", full)
    with pytest.raises(RunFolderError, match=r"cannot write .*step_0\.0\.0\.pt: .*No space left.*algorithm\.replay"):
        filled()


def test_a_checkpoint_keeps_its_files_when_the_buffer_moves_on(filled, tmp_path):
    """Hard links: no more space, and what the buffer removes or writes anew stays in the checkpoint as it was."""
    buffer = filled()
    held = tmp_path / "checkpoint"
    buffer.link_into(held)
    assert (held / "step_1.0.0.pt").stat().st_ino == (buffer.folder / "step_1.0.0.pt").stat().st_ino
    state = buffer.state_dict()
    before = {path.name: path.read_bytes() for path in held.iterdir()}
    for step in (2, 3, 4):
        batch = batch_of(step + 10)
        buffer.add(batch, minis_of(batch), [0] * 4, ["one"] * 4, step=step, staleness=0)
    assert {path.name: path.read_bytes() for path in held.iterdir()} == before
    other = ReplayBuffer(tmp_path / "other", ReplayConfig(batches=2), seed=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "step_9.0.0.pt").write_bytes(b"of a run that was killed")
    other.load_state_dict(state)
    other.begin(held)
    assert {path.name: path.read_bytes() for path in other.folder.iterdir()} == before
    assert all(other.read(entry, TEXTS) is not None for entry in list(other.entries))
    other.end()
    assert not other.folder.exists()


def test_a_file_system_without_hard_links_copies(filled, tmp_path, monkeypatch):
    def refused(*paths):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    buffer = filled()
    buffer.link_into(tmp_path / "held")
    assert files(tmp_path / "held") == files(buffer.folder)


def test_a_buffer_of_other_settings_is_left_out_and_said(filled):
    buffer = filled()
    state = buffer.state_dict() | {"settings": {"noise_level": 0.7, "sde_type": "sde"}}
    same = ReplayBuffer(buffer.folder, ReplayConfig(batches=2), 1, {"noise_level": 0.7, "sde_type": "sde"})
    same.load_state_dict(state)
    assert same.entries == buffer.entries
    other = ReplayBuffer(buffer.folder, ReplayConfig(batches=2), 1, {"noise_level": 0.7, "sde_type": "cps"})
    said = []
    other.say = said.append
    other.load_state_dict(state)
    assert other.entries == []
    assert said == ["replay: the checkpoint's buffer is left out, since sde_type was sde there and is cps here"]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("reward.functions={ocr: 0.5}", ["reward.functions"]),
        (f"{OWN}.reward_kwargs={{scale: 2}}", [f"{OWN}"]),
        (f"{OWN}.path={BRIGHTNESS}", [OWN, "content of rewards"]),
        ("reward.ocr.contained_is_match=true", ["reward.ocr"]),
        ("reward.normalization=group", ["reward.normalization"]),
        ("algorithm.global_std=false", ["algorithm.global_std"]),
        ("algorithm.norm_adv_by_std_in_grpo=false", ["algorithm.norm_adv_by_std_in_grpo"]),
        ("reward.timeout_s=7", []),
        ("reward.overlap=false", []),
    ],
)
def test_other_rewards_are_other_settings(override, names):
    """Advantages of another reward would be learned from beside the new ones."""
    before, after = (recorded_settings(compose("tiny_qwen_image_ocr", given)) for given in ([], [override]))
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == names


def test_fewer_batches_after_a_resume(filled):
    buffer = filled()
    short = ReplayBuffer(buffer.folder, ReplayConfig(batches=1), seed=1)
    short.load_state_dict(buffer.state_dict())
    assert {entry.step for entry in short.entries} == {2}
    off = ReplayBuffer(buffer.folder, ReplayConfig(), seed=1)
    off.load_state_dict(buffer.state_dict())
    assert (off.entries, bool(off)) == ([], False)


def test_rows_are_dealt_to_another_number_of_processes():
    """In their order; what was left out is counted once."""
    parts = []
    for process in range(2):
        batch = batch_of(process, images=4).exclude(Key.PROMPT_INDEX, Key.GROUP)
        old = OldPolicy(log_probs=batch[Key.ROLLOUT_LOG_PROBS] + 1)
        prompts = [4 * process + i for i in range(4)]
        parts.append(Replayed(batch, prompts, MiniBatch(torch.arange(4), old, rejected=3, idle=process)))
    whole = torch.cat([part.batch[Key.LATENTS] for part in parts])
    for count in (1, 4):
        dealt = [_dealt(parts, process, count, 1) for process in range(count)]
        assert torch.equal(torch.cat([one.batch[Key.LATENTS] for one in dealt]), whole)
        assert [place for one in dealt for place in one.prompts] == list(range(8))
        assert (sum(one.mini.rejected for one in dealt), sum(one.mini.idle for one in dealt)) == (6, 1)
        for one in dealt:
            assert_close(one.mini.old.log_probs, one.batch[Key.ROLLOUT_LOG_PROBS] + 1, rtol=0, atol=0)
            assert torch.equal(one.mini.rows, torch.arange(8 // count))
    with pytest.raises(ValueError, match="its 8 images cannot be dealt to 3 processes"):
        _dealt(parts, 0, 3, 1)
    # Pairs stay together.
    with pytest.raises(ValueError, match="its 8 images cannot be dealt to 8 processes"):
        _dealt(parts, 0, 8, 2)


@pytest.mark.parametrize(
    ("share", "mini_batches", "expected"),
    [(0.5, 2, [2, 2, 2, 2]), (0.25, 1, [0, 0, 1, 0, 0, 1]), (0.75, 1, [3, 3, 3]), (0.6, 2, [3, 3, 3, 3])],
)
def test_mini_batches_that_are_due(share, mini_batches, expected):
    """A share of .25 is one in four optimizer steps: one for three new ones."""
    config = ReplayConfig(batches=9, share=share)
    assert [config.due(step, mini_batches) for step in range(len(expected))] == expected
    assert ReplayConfig(share=share).due(2, mini_batches) == 0


def test_optimizer_steps_of_a_run():
    """Two for each batch; the first batch finds the buffer empty, the second finds one batch of two."""
    assert ReplayConfig(batches=2, share=0.5).optimizer_steps(5, 2, 0) == 0 + 2 * 4
    # Six are due; there are 0, 2, 4, 4, 4.
    assert ReplayConfig(batches=2, share=0.75).optimizer_steps(5, 2, 0) == 0 + 2 + 4 + 4 + 4
    # Images are one batch stale when they are new, so that those of one batch alone are fresh enough.
    assert ReplayConfig(batches=2, share=0.75, max_staleness=2).optimizer_steps(5, 2, 1) == 0 + 2 + 2 + 2 + 2
    assert ReplayConfig().optimizer_steps(5, 2, 0) == 0
