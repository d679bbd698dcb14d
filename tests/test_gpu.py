"""The same run on CUDA, in float32 and bfloat16. ``make gpu`` runs these tests."""

import math
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests_support import TORCHRUN, overrides_of, run_process

from flowgrpo_rc import DiffusionActorConfig, apply_rollout_correction_to_diffusion_batch, diffusion_loss
from flowgrpo_rc.actor import DiffusionActor, DiffusionLossConfig
from flowgrpo_rc.actor.rows import take_rows
from flowgrpo_rc.models import Conditioning, ModelConfig, PipelineLoader, PromptEncoder, load_model
from flowgrpo_rc.models.lora import adapter_state, attach_lora
from flowgrpo_rc.rollout import RolloutConfig, RolloutRequest, build_engine
from flowgrpo_rc.rollout.build import digest_rule
from flowgrpo_rc.rollout.digest import adapter_digest
from flowgrpo_rc.rollout.process import ProcessHandle
from flowgrpo_rc.run_folder import RunFolder
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.timer import StageTimer
from flowgrpo_rc.transfers import onto, queued_to_host, to_host

pytestmark = pytest.mark.gpu

ON_GPU = ("trainer.device=auto", "trainer.test_freq=1")


def last_row(small_config, *overrides):
    folder = FlowGRPOTrainer(small_config(*ON_GPU, *overrides)).fit()
    return folder.rows()[-1]


def test_float32_first_ratio_is_one(small_config):
    """Engine and actor batch differently; on CUDA kernels then round differently too, so the bound is wider."""
    row = last_row(small_config, "actor_rollout_ref.rollout.dtype=float32")
    assert row["actor/ratio_deviation_first"] < 1e-4
    assert math.isfinite(row["actor/grad_norm"])


@pytest.mark.parametrize("actor", ["float32", "bfloat16"])
@pytest.mark.parametrize("bypass", ["true", "false"])
def test_bfloat16_rollouts_train(small_config, actor, bypass):
    row = last_row(
        small_config,
        f"actor_rollout_ref.model.dtype={actor}",
        f"algorithm.rollout_correction.bypass_mode={bypass}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    )
    assert 0 < row["actor/grad_norm"] < 1e3


def test_auto_recomputes_where_the_plan_does_not_fit(small_config, monkeypatch):
    auto = (*ON_GPU, "actor_rollout_ref.model.enable_gradient_checkpointing=auto")
    trainer = FlowGRPOTrainer(small_config(*auto, folder="large"))
    assert not trainer.run.actor.recomputes
    own = torch.cuda.get_device_properties(0)
    small = SimpleNamespace(total_memory=3 << 30, name=own.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    with pytest.warns(UserWarning, match="may end for want of memory"):
        assert FlowGRPOTrainer(small_config(*auto, folder="small")).run.actor.recomputes


@pytest.mark.parametrize("placement", ["trainer", "process"])
def test_a_prompt_writer_learns_beside_the_images(small_config, placement):
    """In bfloat16 beside a float32 actor; recomputation and an average are on."""
    writer = "algorithm.prompt_writer"
    settings = ("data.train_files=asset:tiny_requests/train.jsonl", "data.val_files=asset:tiny_requests/test.jsonl")
    settings += (
        "reward.functions.ocr=1",
        "reward.custom_reward_function.path=null",
        f"{writer}.path=asset:tiny_writer",
    )
    settings += (f"{writer}.max_new_tokens=40", f"{writer}.rewrites=2", f"{writer}.actor.ema_decay=0.5")
    settings += (f"{writer}.actor.enable_gradient_checkpointing=true", f"{writer}.engine.placement={placement}")
    row = last_row(small_config, *settings)
    assert 0 < row["writer/rollout_corr/logprob_abs_diff_mean"] < 0.1
    assert 0 < row["writer/grad_norm"] < 1e3


def test_rollouts_equal_the_cpus(small_config):
    """Noise is drawn on the host, so float32 rewards agree to what rounding does to an image."""
    cuda = FlowGRPOTrainer(small_config(*ON_GPU, "actor_rollout_ref.rollout.dtype=float32", folder="cuda")).fit()
    cpu = FlowGRPOTrainer(
        small_config(
            "trainer.device=cpu", "trainer.test_freq=1", "actor_rollout_ref.rollout.dtype=float32", folder="cpu"
        )
    ).fit()
    assert cuda.rows()[0]["val/reward/mean"] == pytest.approx(cpu.rows()[0]["val/reward/mean"], abs=1e-3)
    assert torch.cuda.max_memory_allocated() > 0


def loss_and_slope(path, mode, dtype, device):
    """Loss, gradient and metrics of a seeded batch, computed on ``device`` and brought back."""
    generator = torch.Generator().manual_seed(0)
    shape = (16, 3) if path == "steps" else (8, 200)
    old = -torch.rand(shape, generator=generator)
    scale = 1e-3 if path == "steps" else 0.1
    data = {
        "old_log_probs": old,
        "rollout_log_probs": old + scale * torch.randn(shape, generator=generator),
        "advantages": torch.randn(shape[0], generator=generator),
    }
    new = old + scale * torch.randn(shape, generator=generator)
    if path == "tokens":
        ends = torch.randint(50, 201, (shape[0], 1), generator=generator)
        data["response_mask"] = (torch.arange(shape[1]) < ends).int()
    correction = {"rollout_is": "token", "rollout_is_threshold": 1 + scale, "rollout_rs": "token_k1"}
    correction |= {"rollout_rs_threshold": 1 + 2 * scale, **mode}
    loss = {"clip_ratio": scale, "clip_ratio_c": 1 + 2 * scale}
    config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig(**loss), rollout_correction=correction)
    data = {name: t.to(device, dtype if t.is_floating_point() else t.dtype) for name, t in data.items()}
    if path == "steps" and not mode["bypass_mode"]:
        data, _ = apply_rollout_correction_to_diffusion_batch(data, config.rollout_correction)
    log_probs = new.to(device, dtype).requires_grad_()
    value, metrics = diffusion_loss(config, {"log_probs": log_probs}, data)
    value.backward()
    return value.detach().cpu(), log_probs.grad.float().cpu(), metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["steps", "tokens"])
@pytest.mark.parametrize(
    "mode", [{"bypass_mode": False}, {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}]
)
def test_both_paths_equal_the_cpu(mode, path, dtype):
    """The inputs are rounded before they reach the device, so only the arithmetic differs."""
    there, here = (loss_and_slope(path, mode, dtype, device) for device in ("cuda", "cpu"))
    torch.testing.assert_close(there[0], here[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(there[1], here[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-7)
    assert there[2].keys() == here[2].keys()
    for name, value in here[2].items():
        assert there[2][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_a_text_encoder_leaves_no_memory_behind():
    loader = PipelineLoader("asset:tiny_qwen_image", device="cuda")
    model = loader.load()
    before = torch.cuda.memory_allocated()
    with model.text_encoders():
        assert model.encode(["one"], 64)
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before


def test_queued_copies_carry_the_numbers_there_and_back():
    """Before the queue has done what stands in front of them, and with the host's tensors dropped at once."""
    device = torch.device("cuda")
    values = torch.randn(1000, 1000)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    there = [onto(values + i, device) for i in range(4)]
    back = to_host({"half": there[1].bfloat16(), "cut": there[2][:, 3:5], "whole": there[3]})
    assert torch.equal(back["half"], (values + 1).bfloat16())
    assert torch.equal(back["cut"], (values + 2)[:, 3:5])
    assert torch.equal(back["whole"], values + 3)
    state = {"a": values, "b": torch.ones(())}
    assert adapter_digest({name: tensor.to(device) for name, tensor in state.items()}) == adapter_digest(state)


def test_numbers_queued_to_the_host_are_there_once_it_has_waited():
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    values = torch.arange(1000.0, device="cuda") + 0 * busy[0, 0]
    queued = queued_to_host(values[::2])
    assert queued.is_pinned()
    to_host({"last": values[-1]})
    assert torch.equal(queued, torch.arange(0.0, 1000.0, 2))


def test_rows_reach_the_gpu_from_pinned_memory():
    device = torch.device("cuda")
    latents = torch.randn(4, 3, 16, 8)
    rows = torch.tensor([11, 0, 5])
    torch.cuda.synchronize()
    with waits_of_the_package() as waits:
        first, second = take_rows([latents, -latents], rows, device)
    assert waits == []
    assert torch.equal(first.cpu(), latents.flatten(0, 1)[rows])
    assert torch.equal(second.cpu(), -latents.flatten(0, 1)[rows])


@contextmanager
def waits_of_the_package():
    """The lines of this package, as ``file:number``, at which the host has waited for the device."""
    found = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        found += [f"{w.filename}:{w.lineno}" for w in waits if "flowgrpo_rc" in Path(w.filename).parts]


def test_a_wait_is_seen():
    value = torch.ones(3, device="cuda")
    with waits_of_the_package() as waits:
        to_host({"value": value})
    assert len(waits) == 1


@pytest.mark.parametrize("micro", ["ppo_micro_batch_size_per_gpu=1", "ppo_micro_batch_rows=1"])
def test_the_micro_batches_of_an_update_are_queued_without_a_wait(small_config, monkeypatch, micro):
    """From the second update on: the first one brings the limits of rejection to the device."""
    backward = DiffusionActor._backward
    found = []

    def watched(self, update, mini):
        with waits_of_the_package() as waits:
            done = backward(self, update, mini)
        found.append(waits)
        return done

    monkeypatch.setattr(DiffusionActor, "_backward", watched)
    rc = "algorithm.rollout_correction.rollout_rs=token_k1"
    row = last_row(small_config, f"actor_rollout_ref.actor.{micro}", rc, "trainer.total_training_steps=3")
    assert found[2:] == [[]] * 4
    assert math.isfinite(row["actor/grad_norm"])


def test_single_rows_need_less_memory_than_whole_windows(small_config, monkeypatch):
    """Bytes that an update adds to those before it: 16 rows at a time, and 1."""
    update = DiffusionActor.update
    peaks = []

    def watched(self, *arguments, **options):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = update(self, *arguments, **options)
        peaks.append((torch.cuda.max_memory_allocated(), before))
        return result

    monkeypatch.setattr(DiffusionActor, "update", watched)
    taken = {}
    for micro in ("ppo_micro_batch_size_per_gpu=8", "ppo_micro_batch_rows=1"):
        row = last_row(small_config, f"actor_rollout_ref.actor.{micro}")
        peak, before = peaks[-1]
        taken[micro] = peak - before
        logged = row["perf/max_memory_allocated_gb"] * 2**30
        assert peak * (1 - 1e-6) <= logged <= torch.cuda.max_memory_allocated() * (1 + 1e-6)
    assert taken["ppo_micro_batch_rows=1"] < taken["ppo_micro_batch_size_per_gpu=8"] / 2


def test_stages_are_charged_with_the_kernels_that_they_queue():
    timer = StageTimer(torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for stage, times in (("short", 1), ("long", 50)):
        with timer(stage):
            for _ in range(times):
                busy = busy @ busy / busy.norm()
    taken = timer.take()
    assert taken["timing_s/long"] > 5 * taken["timing_s/short"] > 0
    assert taken["timing_s/step"] == pytest.approx(taken["timing_s/long"] + taken["timing_s/short"])


@pytest.mark.parametrize("name", ["_native_cudnn", "_native_efficient"])
def test_an_attention_backend_of_gpus_trains(small_config, name):
    """If the trial before loading lets one through, the run ends with finite gradients."""
    try:
        row = last_row(
            small_config,
            "actor_rollout_ref.model.dtype=bfloat16",
            f"actor_rollout_ref.model.attn_backend={name}",
            f"actor_rollout_ref.rollout.rollout_attn_backend={name}",
        )
    except ValueError as refused:
        assert f"got {name}, which does not compute attention with a mask" in str(refused)  # noqa: PT017
        return
    assert math.isfinite(row["actor/grad_norm"])


def test_a_profile_has_the_gpus_kernels(small_config):
    folder = FlowGRPOTrainer(small_config(*ON_GPU, "trainer.profile_steps=[2]")).fit()
    trace = (folder.profile / "step_00002.rank_0.pt.trace.json").read_text()
    assert '"cat": "kernel"' in trace
    assert "CUDA" in (folder.profile / "step_00002.rank_0.txt").read_text()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.actor.fsdp_config.param_offload=true",)])
def test_a_sharded_run_equals_a_whole_one(tmp_path, more):
    """Two processes over NCCL, each with half of the frozen weights, on the GPU or on the host."""
    settings = (*ON_GPU, "actor_rollout_ref.rollout.dtype=float32", "trainer.resume_mode=disable")
    for name, sharding in (("whole", ()), ("sharded", ("actor_rollout_ref.actor.fsdp_config.shard=true", *more))):
        overrides = overrides_of(tmp_path / name, *settings, *sharding)
        done = run_process(*TORCHRUN, "-m", "flowgrpo_rc.cli.main", "demo", *overrides)
        assert done.returncode == 0, done.stderr[-3000:]
    whole, sharded = (RunFolder(tmp_path / name).rows()[-1] for name in ("whole", "sharded"))
    for name in ("reward/mean", "actor/loss", "actor/grad_norm"):
        assert sharded[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_a_process_on_the_gpu_draws_the_bits_of_the_engine_beside_the_actor():
    """It sees its own GPU alone, as cuda:0; digests of fp8 weights are worked out on the host and on the device."""
    model_config = ModelConfig(path="asset:tiny_qwen_image", lora_rank=4, lora_alpha=8)
    rollout = RolloutConfig(dtype="bfloat16", quantization="fp8_emulated", micro_batch_size=4)
    last = f"cuda:{torch.cuda.device_count() - 1}"
    handle = ProcessHandle(rollout, model_config, last)
    try:
        handle.start()
        model = load_model(model_config.path, device=last)
        beside = build_engine(rollout, model, model_config, last)
        attach_lora(model.transformer, model, model_config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        state = {
            name: 0.2 * torch.randn(value.shape, generator=generator)
            for name, value in adapter_state(model.transformer).items()
        }
        on_device = {name: value.to(last) for name, value in state.items()}
        rule = digest_rule(rollout, model_config)
        assert handle.sync(state, 1) == beside.sync(on_device, 1) == rule(state) == rule(on_device)
        request = RolloutRequest(
            conditioning=Conditioning(PromptEncoder(model, 64)(["one", "two"]), None, 1.0, None, 32, 32),
            prompt_index=torch.tensor([0, 0, 1, 1]),
            num_inference_steps=4,
            seeds=[1, 2, 3, 4],
            window_starts=torch.tensor([0, 1, 0, 1]),
            window_size=2,
            noise_level=0.7,
        )
        here, there = beside.generate(request), handle.generate(request)
        assert torch.equal(here.images, there.images)
        assert here.batch is not None
        assert there.batch is not None
        assert torch.equal(here.batch["next_latents"], there.batch["next_latents"])
        assert torch.equal(here.batch["rollout_log_probs"], there.batch["rollout_log_probs"])
    finally:
        handle.close()
