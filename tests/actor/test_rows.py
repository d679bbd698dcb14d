"""Micro-batches of rows: whatever they cut, an update learns and measures the same, and needs less memory for it."""

from types import SimpleNamespace

import pytest
import torch
from test_actor import Setup, nothing_learned
from tolerances import GRADIENT, LOG_RATIO, adam

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig, NonFiniteUpdateError
from flowgrpo_rc.actor.config import OptimizerConfig
from flowgrpo_rc.actor.mode import ModeInForce
from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.loss import diffusion_loss_sums
from flowgrpo_rc.models import load_model
from flowgrpo_rc.models.lora import adapter_parameters

IMAGES = 4
WINDOW = 3
LOG_RATIOS = 1e-4 * torch.tensor([2.4, -2.25, 3.7, 0.4])[:, None] * torch.tensor([1.0, 0.2, 2.0])
"""Log ratios, actor over rollout, of each image's steps before the first update.

They replace those of the engine, which differ between processors. Every threshold below is at least ten times as far
from them as float32 rounds.
"""


class Rig(Setup):
    """An actor with a random adapter, and four images with three steps each that a bfloat16 engine drew."""

    def __init__(self, **changes):
        model = load_model("asset:tiny_qwen_image")
        super().__init__(model, torch.bfloat16, record_means=True, images=IMAGES, window=WINDOW, **changes)
        self.start = [value.detach().clone() for value in adapter_parameters(self.actor.transformer).values()]
        self.batch[Key.ADVANTAGES] = torch.tensor([1.0, -1.0, 2.0, -0.5])
        log_probs = self.actor.rescore(self.batch, self.cond)["log_probs"]
        self.batch[Key.ROLLOUT_LOG_PROBS] = log_probs - LOG_RATIOS
        self.batch[Key.CLIP_WIDTHS] = torch.full((IMAGES, WINDOW), 2e-4)
        self.batch[Key.ROLLOUT_RS_BOUNDS] = torch.full((IMAGES,), 3e-4)

    def reset(self, config):
        """The actor as it was, under another configuration."""
        for parameter, value in zip(adapter_parameters(self.actor.transformer).values(), self.start, strict=True):
            parameter.data = value.clone()
        self.actor.optimizer.state.clear()
        self.actor.config = config

    def update(self, config, *, size=IMAGES):
        """Metrics of an update, what it added to the weights, and the gradients of its optimizer steps."""
        self.reset(config)
        parts = [MiniBatch(rows) for rows in torch.tensor([2, 0, 3, 1]).split(size)]
        gradients = []
        optimizer_step = self.actor.optimizer.step

        def step():
            gradients.append(torch.cat([p.grad.flatten() for p in adapter_parameters(self.actor.transformer).values()]))
            optimizer_step()

        self.actor.optimizer.step = step
        try:
            metrics = self.actor.update(self.batch, self.cond, parts).metrics
        finally:
            self.actor.optimizer.step = optimizer_step
        weights = torch.cat([p.detach().flatten() for p in adapter_parameters(self.actor.transformer).values()])
        return metrics, weights - torch.cat([value.flatten() for value in self.start]), gradients


def on_two_processes(run, folder):
    """``run(rig, images)`` of two processes that share the images; what it returns on each."""
    torch.multiprocessing.spawn(_one_of_two, (run, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _one_of_two(rank, run, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rig = Rig()
    own = rig.actor._accelerator
    rig.actor._accelerator = SimpleNamespace(
        device=own.device, num_processes=2, autocast=own.autocast, backward=own.backward
    )
    torch.save(run(rig, torch.arange(IMAGES).chunk(2)[rank]), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def rig():
    torch.set_num_threads(1)
    return Rig()


def config(objective="flow_grpo", rows=None, **settings):
    correction = {"bypass_mode": True, "rollout_is": None} | settings.pop("correction", {})
    loss = {"loss_mode": objective, "clip_ratio": 3e-4} | settings.pop("loss", {})
    return DiffusionActorConfig(
        **{
            "ppo_micro_batch_size_per_gpu": IMAGES,
            "ppo_micro_batch_rows": rows,
            "diffusion_loss": DiffusionLossConfig(**loss),
            "rollout_correction": correction,
            "optim": OptimizerConfig(lr=1e-3),
            "grad_clip": 1e9,
        }
        | settings
    )


NONE = {}
TOKEN = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.0002,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.9995_1.0005",
}
SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": 1.0003, "rollout_rs": "seq_mean_k1"} | {
    "rollout_rs_threshold": "0.9998_1.0003"
}
BOTH = TOKEN | {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.9995_1.0005,1.3e-7"}
VETO = {"rollout_is": "geometric", "rollout_token_veto_threshold": 0.9996}
MASKED = {"rollout_is": "sequence", "rollout_is_mode": "mask", "rollout_is_threshold": "0.999_1.001"}
AUTO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto"}
LEVELS = {"none": NONE, "token": TOKEN, "sequence": SEQUENCE, "both": BOTH, "veto": VETO, "mask": MASKED, "auto": AUTO}
MODES = {
    "bypass": {"bypass_mode": True},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce"},
    "decoupled": {"bypass_mode": False},
}
CASES = [
    *(("flow_grpo", "bypass", level) for level in ("both", "veto", "auto")),
    *(("flow_grpo", "reinforce", level) for level in ("token", "sequence", "mask")),
    *(("flow_grpo", "decoupled", level) for level in ("token", "both")),
    ("grpo_guard", "bypass", "sequence"),
    ("flow_dppo", "bypass", "token"),
    *((name, "decoupled", "sequence") for name in ("grpo_guard", "flow_dppo")),
]
"""Every mode and kind of correction, and every objective that compares means, with steps that are coupled or not."""


def assert_same(found, expected):
    """Up to the order of float32 sums."""
    metrics, moved, gradients = found
    assert metrics.keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=WINDOW * LOG_RATIO), name
    assert len(gradients) == len(expected[2])
    for one, other in zip(gradients, expected[2], strict=True):
        assert (one - other).norm() <= GRADIENT * other.norm()
    assert (moved - expected[1]).norm() <= adam() * expected[1].norm()


@pytest.mark.portable
@pytest.mark.parametrize(("objective", "mode", "level"), CASES)
def test_an_update_does_not_depend_on_the_cut(rig, objective, mode, level):
    """Micro-batches that cut every window learn and measure what one of all does."""
    correction = MODES[mode] | LEVELS[level]
    expected = rig.update(config(objective, correction=correction))
    assert expected[2][0].norm() > 1e-6
    assert_same(rig.update(config(objective, rows=2, correction=correction)), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_more_rows_than_a_window_or_a_mini_batch_has(rig, level):
    """A window and a row more: where windows are decided about whole, the row waits for the next micro-batch."""
    correction = MODES["reinforce"] | LEVELS[level]
    expected = rig.update(config(correction=correction))
    assert_same(rig.update(config(rows=4, correction=correction)), expected)
    many = rig.update(config(rows=IMAGES * WINDOW + 1, correction=correction))
    assert many[0] == expected[0]
    assert torch.equal(many[1], expected[1])


KEPT = {"none": 12, "token": 11, "sequence": 6, "both": 9, "veto": 9, "mask": 9, "auto": 9}
"""Steps of 12 that ``LOG_RATIOS`` leave: a step of image 2, images 1 and 2, image 2, image 1, image 2, image 2."""


@pytest.mark.parametrize("level", LEVELS)
def test_the_cases_reject_some_images_and_some_steps(rig, level):
    """Or the cut could not show."""
    metrics, _, _ = rig.update(config(correction=MODES["bypass"] | LEVELS[level]))
    assert metrics["actor/kept_fraction"] == pytest.approx(KEPT[level] / 12)


def test_the_same_cut_is_the_same_update_bit_for_bit(rig):
    """Two images with three steps each, and six rows; also with mini-batches, epochs and a KL to the reference."""
    settings = {"ppo_epochs": 2, "use_kl_loss": True, "kl_loss_coef": 0.1, "correction": MODES["decoupled"] | TOKEN}
    images = rig.update(config(ppo_micro_batch_size_per_gpu=2, **settings), size=4)
    rows = rig.update(config(rows=6, **settings), size=4)
    assert rows[0] == images[0]
    assert torch.equal(rows[1], images[1])
    assert len(rows[2]) == 2
    cut = rig.update(config(rows=1, **settings), size=4)
    assert_same(cut, rows)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_only_windows_that_must_be_known_whole_are_scored_before(rig, level, monkeypatch):
    """Counted in rows that the transformer sees."""
    seen = []
    forward = rig.actor._forward

    def counting(micro, **options):
        seen.append((len(micro.data[Key.TIMESTEPS]), torch.is_grad_enabled()))
        return forward(micro, **options)

    monkeypatch.setattr(rig.actor, "_forward", counting)
    rig.update(config(rows=2, correction=MODES["bypass"] | LEVELS[level]))
    first = [] if level == "token" else [(2, False)] * 6
    assert seen == first + [(2, True)] * 6
    seen.clear()
    rig.update(config(rows=5, correction=MODES["bypass"] | LEVELS[level]))
    assert seen == ([(5, True), (5, True), (2, True)] if level == "token" else [(3, True)] * 4)


def test_gradients_and_scores_do_not_depend_on_the_cut(rig):
    """Of losses that read whole windows and transition means."""
    mode = ModeInForce.configured(config("flow_dppo", correction=MODES["bypass"] | SEQUENCE))

    def loss(output, data):
        given = {name: data[name] for name in (Key.ROLLOUT_LOG_PROBS, Key.ROLLOUT_MEANS, Key.ADVANTAGES)}
        return diffusion_loss_sums(mode, output, given).loss_sum

    def shift(output, data):
        return (output["transition_means"] * data[Key.LATENTS]).sum()

    found = {}
    for rows in (None, 2):
        rig.reset(config(rows=rows))
        found[rows] = rig.actor.gradients(rig.batch, rig.cond, [loss, shift])
        found[rows] += rig.actor.rescore(rig.batch, rig.cond).values()
    for one, other in zip(found[2], found[None], strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= GRADIENT * other.norm()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_cut_window_that_is_not_finite_is_named(rig, level):
    """Before the optimizer moves."""
    for settings, where, said in (
        (config(rows=2, correction=MODES["bypass"] | LEVELS[level]), (Key.NEXT_LATENTS, (1, 2)), r"log-prob .*\[1\]"),
        (config(rows=2), (Key.ADVANTAGES, 3), r"gradient .*\[3\]"),
    ):
        rig.reset(settings)
        batch = rig.batch.clone()
        batch[where[0]][where[1]] = torch.nan
        with nothing_learned(rig.actor), pytest.raises(NonFiniteUpdateError, match=f"non-finite {said}"):
            rig.actor.update(batch, rig.cond, [MiniBatch(torch.tensor([2, 0, 3, 1]))])


@pytest.mark.parametrize(("rows", "level"), [(6, "token"), (2, "sequence")])
def test_a_process_stops_where_another_has_found_something(rig, monkeypatch, rows, level):
    """Before it corrects, which on the other process would be an error of its own, that this one does not hear of."""
    monkeypatch.setattr("flowgrpo_rc.actor.actor.on_any_process", lambda flag: True)
    monkeypatch.setattr("flowgrpo_rc.actor.actor.correct_old_policy", None)
    rig.reset(config(rows=rows, correction=MODES["decoupled"] | LEVELS[level]))
    with pytest.raises(NonFiniteUpdateError, match="non-finite log-prob") as stopped:
        rig.actor.update(rig.batch, rig.cond, [MiniBatch(torch.arange(IMAGES))])
    assert stopped.value.samples == []
    assert not rig.actor.optimizer.state


def saved_bytes(rig, settings):
    """The most bytes that the graph of one micro-batch keeps for its backward pass: those of its rows. Left
    out are parameters and the table of positions, which alone is complex, and which all rows share."""
    rig.reset(settings)
    own = {p.untyped_storage().data_ptr() for p in rig.actor.transformer.parameters()}
    kept = {}
    graphs = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The storage itself is kept too, so that no other gets its address.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor.is_complex(), storage)
        return tensor

    backward = rig.actor._accelerator.backward

    def counting(loss):
        graphs.append(list(kept.values()))
        kept.clear()
        backward(loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.actor._accelerator, "backward", counting)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            rig.actor.update(rig.batch, rig.cond, [MiniBatch(torch.arange(IMAGES))])
    assert len({sum(size for size, is_table, _ in graph if is_table) for graph in graphs}) == 1
    return max(sum(size for size, is_table, _ in graph if not is_table) for graph in graphs)


def test_the_graph_of_a_micro_batch_grows_by_the_row(rig):
    """An image brings as much as three rows, the steps of its window."""
    one, two, three = (saved_bytes(rig, config(rows=rows)) for rows in (1, 2, 3))
    assert two % 2 == 0
    row = two // 2
    assert three == 3 * row
    assert row * 0.9 < one <= row  # of a single row some copies are views
    assert saved_bytes(rig, config(ppo_micro_batch_size_per_gpu=1)) == three
    assert saved_bytes(rig, config()) == IMAGES * WINDOW * row


def test_the_number_of_rows_is_that_of_images_where_none_is_given():
    assert DiffusionActorConfig(ppo_micro_batch_size_per_gpu=4).micro_batch_rows(10) == 40
    assert DiffusionActorConfig(ppo_micro_batch_size_per_gpu=4, ppo_micro_batch_rows=3).micro_batch_rows(10) == 3
