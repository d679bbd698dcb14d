"""Memory by component, verdicts, what to change, work and time."""

import re
import warnings
from dataclasses import replace

import pytest
from small_pipelines import changed

from flowgrpo_rc.models.config import AUTO
from flowgrpo_rc.models.lora import linear_layers
from flowgrpo_rc.planner import memory as room
from flowgrpo_rc.planner.advice import advise
from flowgrpo_rc.planner.machines import GIB, Gpus
from flowgrpo_rc.planner.memory import MARGIN, RUNTIME, MemoryPlan
from flowgrpo_rc.planner.pipeline import PlanError
from flowgrpo_rc.planner.settings import RECOMPUTE
from flowgrpo_rc.planner.text import describe
from flowgrpo_rc.planner.work import StepFlops, configured_time, seconds_at_peak, step_flops, step_time
from flowgrpo_rc.rollout.config import ProbeConfig, VllmOmniConfig
from flowgrpo_rc.rollout.scout import ScoutConfig
from flowgrpo_rc.trainer import memory as planned

pytestmark = pytest.mark.slow


def sharded(run, **options):
    """The run with its transformer shared by GPUs."""
    return changed(run, **{f"actor__fsdp_config__{name}": value for name, value in {"shard": True, **options}.items()})


def in_rows(run, rows, *, recompute=False):
    """The run with another micro-batch, and activations that are recomputed or not."""
    again = {"model__enable_gradient_checkpointing": True} if recompute else {}
    return changed(run, actor__ppo_micro_batch_rows=rows, **again)


def just_enough(memory):
    """One GPU that the memory fits, and nothing more."""
    return Gpus(1, memory.total / (1 - MARGIN) / GIB + 1e-9)


def test_components_of_one_gpu_and_of_four(run, plan):
    sizes = plan.sizes
    lora = 4 * sizes.lora_parameters
    one = plan.memory(run, 1)
    assert one.resident == {
        "transformer": 2 * sizes.parameters,
        "LoRA": lora,
        "AdamW's two moments": 2 * lora,
        "engine's LoRA": lora // 2,
        "VAE": sizes.vae,
    }
    assert one.total == sum(one.resident.values()) + max(one.stages.values()) + RUNTIME
    assert plan.memory(run, 4).resident == one.resident
    four = plan.memory(sharded(run), 4)
    assert four.resident["transformer, own shard"] == -(-2 * sizes.parameters // 4)
    block = 2 * sum(p.numel() for p in plan.actor.kinds[0].blocks[-1].parameters())
    outside = 2 * sizes.parameters - 6 * block
    assert four.resident["gathered blocks"] == 2 * block + outside
    assert four.tensors - one.tensors == four.resident["transformer, own shard"] - 4 * block


def test_what_sharding_keeps_where(run, plan):
    """Of the transformer's bytes T: T/2 with two GPUs to a copy, none with the host's memory, and whole where gathered
    weights stay."""
    whole = plan.sizes.transformer
    pairs = plan.memory(sharded(run, fsdp_size=2), 4)
    assert pairs.resident["transformer, own shard"] == whole // 2
    offloaded = plan.memory(sharded(run, param_offload=True), 4)
    assert "transformer, own shard" not in offloaded.resident
    assert offloaded.resident["gathered blocks"] == plan.sizes.gathered
    kept = plan.memory(sharded(run, reshard_after_forward=False), 4)
    assert kept.resident["gathered blocks"] == whole
    gathered = plan.memory(sharded(run).with_rollout(gather_weights=True), 4)
    assert gathered.stages["sampling"] - pairs.stages["sampling"] == whole - plan.sizes.gathered
    assert gathered.stages["decoding"] - pairs.stages["decoding"] == whole - plan.sizes.gathered
    alone = plan.memory(sharded(run), 1)
    assert alone.resident == plan.memory(run, 1).resident


def test_what_is_scored_at_once(run, plan):
    """64 images on 2 GPUs, 2 rows each: all of them for the update, or the probe's alone; cut by the micro-batch."""
    probing = run.with_rollout(probe=replace(run.rollout.probe, images=5))
    assert probing.scored_rows(2) == 3 * 2
    assert plan.memory(probing, 2).stages["scoring"] == plan.actor.forward(6).peak
    scoring = replace(probing, scored_share=0.5)
    assert scoring.scored_rows(2) == 4 * 2
    assert scoring.with_rollout(log_prob_micro_batch_size_per_gpu=500).scored_rows(2) == 32 * 2
    assert "scoring" not in plan.memory(run.with_rollout(probe=replace(run.rollout.probe, images=0)), 2).stages


def test_sharding_is_proposed_where_it_is_possible(run, plan, monkeypatch):
    monkeypatch.setattr(room, "RUNTIME", 0)

    def proposed(other, gpus):
        # From a run that no smaller piece helps, so that weights alone are left to save.
        return [change.override for change in advise(plan.of_run(other), Gpus(gpus, 1e-6))]

    smallest = changed(in_rows(run, 1, recompute=True), actor__optim__name="adamw_8bit")
    smallest = smallest.with_rollout(micro_batch_size=1)
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    assert proposed(smallest, 4) == [f"{fsdp}.shard=true", f"{fsdp}.param_offload=true"]
    assert proposed(smallest, 1) == ["actor_rollout_ref.model.quantization=nf4"]
    assert proposed(changed(smallest, model__torch_compile=True), 4) == []
    assert proposed(smallest.with_rollout(torch_compile=True), 4) == []
    assert f"{fsdp}.shard=true" not in proposed(smallest.with_rollout(quantization="fp8"), 4)
    kept = sharded(smallest, reshard_after_forward=False, param_offload=True)
    assert proposed(kept, 4) == [f"{fsdp}.reshard_after_forward=true"]
    gathering = sharded(smallest, param_offload=True).with_rollout(gather_weights=True)
    assert proposed(gathering, 4) == ["actor_rollout_ref.rollout.gather_weights=false"]


def test_rounded_weights_and_moments_are_counted_and_proposed(run, plan):
    """Blocks alone are rounded; their bytes by hand for Qwen-Image's layers."""
    lora = plan.sizes.lora_parameters
    rounded = changed(run, model__quantization="nf4", actor__optim__name="adamw_8bit")
    memory = plan.of_run(rounded).memory(rounded, 1)
    assert memory.resident["AdamW's two moments"] == 2 * (lora + lora // 64)
    layers = [layer for kind in plan.actor.kinds for block in kind.blocks for layer in linear_layers(block).values()]
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    assert plan.memory(run, 1).resident["transformer"] - memory.resident["transformer"] == (
        2 * numbers - numbers // 2 - numbers // 16
    )
    assert "engine's own copy of the transformer" not in memory.resident
    assert plan.of_run(rounded).sizes.parameters == plan.sizes.parameters
    smallest = in_rows(run, 1, recompute=True).with_rollout(micro_batch_size=1)

    def proposed(other):
        return [change.override for change in advise(plan.of_run(other), Gpus(1, 1e-6))]

    moments = "actor_rollout_ref.actor.optim.name=adamw_8bit"
    assert proposed(smallest) == ["actor_rollout_ref.model.quantization=nf4", moments]
    assert proposed(smallest.with_rollout(quantization="fp8")) == [moments]


def test_an_average_and_a_copy_are_counted(run, plan):
    lora = 4 * plan.sizes.lora_parameters
    averaged = plan.memory(changed(run, actor__ema_decay=0.9), 1)
    assert averaged.resident["average of the LoRA"] == lora
    held = plan.memory(changed(run, actor__use_kl_loss=True, actor__kl_reference="start"), 1)
    assert held.resident["reference LoRA of the KL"] == lora
    assert "reference LoRA of the KL" not in averaged.resident
    rounded = plan.memory(run.with_rollout(quantization="fp8"), 1)
    assert rounded.resident["engine's own copy of the transformer"] == plan.sizes.transformer
    assert rounded == plan.memory(run.with_rollout(quantization="fp8_emulated"), 1)
    own_process = plan.memory(run.with_rollout(name="vllm_omni"), 1)
    assert own_process.engine > plan.sizes.transformer + plan.sizes.vae + room.ENGINE_RUNTIME
    assert "sampling" not in own_process.stages


def test_weights_of_an_engine_in_8_bits_or_with_a_merged_adapter(run, plan):
    """By hand for Qwen-Image's layers: a byte a number and the scales of a row, but for the image's MLPs and for
    modulation; and the adapted layers once more, in 16 bits, where the engine cannot add to the actor's."""
    copy = "engine's own copy of the transformer"
    layers = [layer for kind in plan.actor.kinds for block in kind.blocks for layer in linear_layers(block).items()]
    for skip, kept in ((None, "img_mlp|_mod"), ([], "nothing"), (["attn"], "attn")):
        rounded = run.with_rollout(quantization="int8", quantization_skip=skip)
        in_8_bits = [layer for name, layer in layers if not re.search(kept, name)]
        saved = sum(x.in_features * x.out_features - 5 * x.out_features for x in in_8_bits)
        held = plan.sizes.transformer + plan.sizes.buffers - saved
        assert MemoryPlan(rounded).memory(rounded, 1).resident[copy] == held
    merged = run.with_rollout(merge_adapter=True)
    adapted = sum(x.in_features * x.out_features for name, x in layers if name == "attn.to_q")
    assert plan.sizes.adapted == adapted
    assert plan.memory(merged, 1).resident[copy] == 2 * adapted
    elsewhere, beside = (plan.memory(one.with_rollout(placement="process"), 2).engine for one in (merged, run))
    assert elsewhere - beside == 2 * adapted


def test_a_gpu_without_float8_kernels_holds_weights_as_they_were(run, plan, monkeypatch):
    planned_for = []
    monkeypatch.setattr(planned, "planned_run", lambda _: run.with_rollout(quantization="fp8"))
    monkeypatch.setattr(planned, "MemoryPlan", lambda asked: planned_for.append(asked) or plan)
    for emulates in (True, False):
        planned.check_memory(None, 1, 1 << 40, emulates_fp8=emulates)  # pyright: ignore[reportArgumentType]
    assert [one.rollout.quantization for one in planned_for] == ["fp8_emulated", "fp8"]


def test_prompts_that_are_padded_to_a_multiple_cost_what_longer_ones_do(run):
    padded = MemoryPlan(changed(run, model__prompt_length_multiple=64))
    longer = MemoryPlan(changed(run, rollout__pipeline__max_sequence_length=64))
    assert padded.actor.forward(2) == longer.actor.forward(2)


def test_an_engine_of_its_own_counts_where_it_is(run, plan):
    """On the trainer's GPU it takes as much as beside any other; elsewhere nothing, and nothing of it is in the
    trainer."""
    beside = plan.memory(run.with_rollout(placement="process"), 2)
    assert beside.engine == plan.memory(run.with_rollout(name="vllm_omni"), 2).engine
    assert beside.engine > plan.sizes.transformer
    for placed in (
        run.with_rollout(placement="process", devices=["cuda:2", "cuda:3"]),
        run.with_rollout(placement="ray", engines=4),
        run.with_rollout(placement="process", devices=["cuda:2+cuda:3"], name="vllm_omni"),
        run.with_rollout(placement="process", devices=["cpu"]),
    ):
        elsewhere = plan.memory(placed, 2)
        assert elsewhere.engine == 0
        assert not {"engine's LoRA", "engine's own copy of the transformer"} & elsewhere.resident.keys()
        assert not {"sampling", "decoding"} & elsewhere.stages.keys()
    assert plan.memory(run.with_rollout(placement="process", devices=["cuda:1", "cuda:2"]), 2) == beside


def test_an_engine_that_sleeps_leaves_its_weights_room_to_the_update(run, plan):
    """Awake it takes what one takes that does not sleep; the peak is the larger of rollout and update."""
    smallest = in_rows(run, 1, recompute=True)
    vllm_omni = smallest.with_rollout(name="vllm_omni", micro_batch_size=1, probe=ProbeConfig(images=0))
    plan = MemoryPlan(vllm_omni)
    sleeping = plan.memory(vllm_omni.with_rollout(vllm_omni=VllmOmniConfig(sleep=True)), 1)
    assert [change.override for change in advise(plan, just_enough(sleeping))] == [
        "actor_rollout_ref.rollout.vllm_omni.sleep=true"
    ]
    overrides = [change.override for change in advise(plan, Gpus(1, 0.1))]
    assert "actor_rollout_ref.rollout.name=diffusers actor_rollout_ref.rollout.vllm_omni.sleep=false" in overrides
    assert "actor_rollout_ref.rollout.vllm_omni.sleep=true" not in overrides


def test_the_largest_micro_batch_fits_and_the_next_does_not(run, plan):
    whole = plan.memory(in_rows(run, 9), 1)
    gpus = just_enough(whole)
    assert plan.largest_micro_batch(run, gpus) == 9
    assert not plan.memory(in_rows(run, 10), 1).fits(gpus.bytes)
    assert plan.largest_micro_batch(run, Gpus(1, 1)) == 0
    assert plan.largest_micro_batch(run, Gpus(1, 1000)) == 64  # all of a mini-batch: 4 prompts of 8 images of 2 steps


def test_changes_are_told_until_the_run_fits(run, plan):
    needed = plan.memory(in_rows(run, 2, recompute=True), 1)
    gpus = just_enough(needed)
    changes = advise(plan, gpus)
    names = [change.override.split("=")[0].rpartition(".")[2] for change in changes]
    assert names[0] == "enable_gradient_checkpointing"
    assert len(set(names)) == len(names) > 1
    totals = [change.memory.total for change in changes]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] < plan.memory(run, 1).total
    assert changes[-1].memory.fits(gpus.bytes)
    assert advise(plan, Gpus(1, 1000)) == []


def test_work_of_a_step_by_hand(run, plan):
    """64 images, 10 steps, a window of 2; a backward is about a forward, for the weights are frozen."""
    flops = step_flops(plan)
    forward = plan.actor.forward(8).forward_flops / 8
    decode = plan.actor.decode(1).forward_flops
    assert flops.rollout == pytest.approx(64 * (10 * forward + decode))
    assert flops.score == pytest.approx(4 * 2 * forward)  # the probe's four images
    assert flops.update == pytest.approx(64 * 2 * 2 * forward, rel=0.25)
    assert flops.recomputed == 0
    scored = step_flops(plan.of_run(replace(run, scored_share=0.5)))
    assert scored.score == pytest.approx((32 + 4) * 2 * forward)
    assert step_flops(plan.of_run(replace(run, draws=False))) == replace(flops, rollout=0)
    scouts = run.with_rollout(scout=ScoutConfig(n=16))
    assert step_flops(plan.of_run(scouts)) == replace(flops, rollout=pytest.approx(2 * flops.rollout))
    redrawn = run.with_rollout(scout=ScoutConfig(n=16, redraw=True, steps=4))
    looked_at = 128 * (4 * forward + decode)
    assert step_flops(plan.of_run(redrawn)) == replace(flops, rollout=pytest.approx(looked_at + flops.rollout))
    # No engine draws them one batch ahead, which a run with them refuses.
    assert "split" not in describe(plan.of_run(redrawn), Gpus(4, 80), [1, 2])
    assert "split" in describe(plan, Gpus(4, 80), [1, 2])
    again = step_flops(plan.of_run(replace(run, replayed=3.0)))
    assert again == replace(flops, update=pytest.approx(4 * flops.update))
    time = step_time(flops, run, Gpus(2, 80))
    assert time.engine == pytest.approx(flops.rollout / (2 * 0.4 * 989e12))
    assert time.update == pytest.approx((flops.score + flops.update + flops.recomputed) / (2 * 0.4 * 989e12))
    assert time.total == time.engine + time.update
    assert configured_time(flops, run, Gpus(2, 80)) == time


@pytest.mark.parametrize(
    ("placement", "own", "overlaps"),
    [
        ({"placement": "process", "devices": ["cuda:2"]}, 1, False),
        ({"placement": "process", "devices": ["cuda:2", "cuda:3", "cuda:4"], "ahead": 1}, 3, True),
        ({"placement": "ray", "engines": 2, "ahead": 1}, 4, True),
        ({"placement": "process", "devices": ["cuda:0", "cuda:1"], "ahead": 1}, 0, False),
    ],
)
def test_engines_with_gpus_of_their_own_take_their_own_time(run, plan, placement, own, overlaps):
    """With two GPUs for the trainer; engines on those share them."""
    placed = run.with_rollout(**placement)
    flops = step_flops(plan.of_run(placed))
    turns = step_time(flops, placed, Gpus(2, 80))
    time = configured_time(flops, placed, Gpus(2, 80))
    assert placed.own_gpus_of_engines(2) == own
    assert (time.engine, time.update) == (pytest.approx(turns.engine * 2 / (own or 2)), turns.update)
    assert time.total == (max if overlaps else lambda *both: sum(both))(time.engine, time.update)
    text = describe(plan.of_run(placed), Gpus(2, 80), [1])
    assert (f"on {own} GPU(s) of its own" in text) == bool(own)


def test_scouts_with_an_engine_of_their_own_need_its_weights(run, plan):
    """A rounded copy beside the actor; elsewhere a second process."""
    redrawn = run.with_rollout(scout=ScoutConfig(n=16, redraw=True))
    lower = {"n": 16, "redraw": True, "engine": {"quantization": "fp8_emulated"}}
    scouts = run.with_rollout(scout=ScoutConfig(**lower))
    one, two = (plan.of_run(which).memory(which, 1) for which in (redrawn, scouts))
    copy, lora = "scouts' own copy of the transformer", "scouts' LoRA"
    sizes = plan.engine.sizes
    more = {copy: sizes.transformer + sizes.buffers, lora: sizes.lora_parameters * 2}
    assert two.resident == one.resident | more
    assert two.stages == one.stages
    apart = [which.with_rollout(placement="process") for which in (redrawn, scouts)]
    first, second = (plan.of_run(which).memory(which, 1) for which in apart)
    assert second.engine == 2 * first.engine
    assert second.resident == first.resident


def test_time_at_the_peak_of_two_precisions_without_what_is_repeated(run):
    flops = StepFlops(rollout=989e12, score=67e12, update=134e12, recomputed=1e15)
    two = replace(run, model=replace(run.model, dtype="float32"))
    assert seconds_at_peak(flops, two, "NVIDIA H100 80GB HBM3") == pytest.approx(1 + 1 + 2)
    assert seconds_at_peak(flops, replace(two, autocast=True), "NVIDIA H100 80GB HBM3") == pytest.approx(1 + 201 / 989)
    assert seconds_at_peak(flops, two, "AMD Instinct MI300X") is None
    elsewhere = two.with_rollout(placement="ray")
    assert seconds_at_peak(flops, elsewhere, "NVIDIA H100 80GB HBM3") == pytest.approx(1 + 2)


@pytest.fixture
def train_check(run, plan, monkeypatch):
    """``check_memory`` of this run on a GPU of so many bytes."""
    monkeypatch.setattr(planned, "planned_run", lambda _: run)
    monkeypatch.setattr(planned, "MemoryPlan", lambda _: plan)
    return lambda device_bytes: planned.check_memory(None, 1, device_bytes)  # pyright: ignore[reportArgumentType]


def test_training_warns_of_too_little_memory(train_check, run, plan):
    memory = plan.memory(run, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_check(round(memory.total / (1 - MARGIN)) + 1) is plan
    with pytest.warns(UserWarning, match="a plan of this run needs 3.0 GiB on each GPU, of 3.4, and may end for want"):
        train_check(round(memory.total / (1 - MARGIN)) - 1000)
    with pytest.warns(UserWarning, match="flowgrpo-rc plan --gpus=1x"):
        train_check(1000)


def test_auto_recomputes_exactly_where_the_run_does_not_fit_without(train_check, run, plan, monkeypatch):
    kept, recomputed = (
        plan.memory(run.with_settings({RECOMPUTE: value}), 1).total / (1 - MARGIN) for value in (False, True)
    )
    assert recomputed + 3000 < kept
    auto = plan.of_run(run.with_settings({RECOMPUTE: AUTO}))
    monkeypatch.setattr(planned, "MemoryPlan", lambda _: auto)
    for device_bytes, wanted in ((kept + 1000, False), (kept - 1000, True), (recomputed + 1000, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            chosen = train_check(round(device_bytes))
        assert chosen.run.model.enable_gradient_checkpointing is wanted
        assert chosen.recomputes(chosen.run) is wanted
        described = describe(auto, Gpus(1, device_bytes / GIB))
        assert described == describe(chosen, Gpus(1, device_bytes / GIB))
        assert f"activations are {'recomputed (gradient checkpointing)' if wanted else 'kept'}\n" in described
    with pytest.warns(UserWarning, match="may end for want"):
        assert train_check(round(recomputed) - 1000).run.model.enable_gradient_checkpointing is True
    given = plan.of_run(run.with_settings({RECOMPUTE: True}))
    assert given.settled(Gpus(1, kept)) is given


def test_training_refuses_a_micro_batch_that_cannot_fit(train_check, run, plan, monkeypatch):
    """Only where its tensors alone are too many, and fewer images would do."""
    monkeypatch.setattr(room, "RUNTIME", 0)
    one = plan.memory(in_rows(run, 1), 1)
    available = round(one.total / (1 - MARGIN)) + 1000
    assert plan.memory(run, 1).tensors > available
    with pytest.raises(
        PlanError, match="ppo_micro_batch_rows: a micro-batch has 8 rows, which cannot fit; .*Give at most 1$"
    ):
        train_check(available)
    monkeypatch.setattr(planned, "MemoryPlan", _unknown)
    assert train_check(1) is None


def _unknown(_):
    raise PlanError("not known")
