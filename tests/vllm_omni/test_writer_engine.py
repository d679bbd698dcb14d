"""The prompt writer's engine ``vllm``, the real one, beside the actor's float32 forward."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from tests_support import rows_of
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from flowgrpo_rc.models.lora import (
    ACTOR_ADAPTER,
    AdapterMismatchError,
    adapter_active,
    adapter_parameters,
    adapter_state,
)
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.rollout.config import Share
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.writer import LanguageModel, PromptWriterConfig, WriterActor, WriterProcesses
from flowgrpo_rc.writer.engine import INPUT_IDS, REQUEST_LENGTHS, write
from flowgrpo_rc.writer.language import NonFiniteWriterError

KERNELS = Path(sys.prefix) / "cpu_kernels"
"""A vllm for processors, from ``install_vllm_omni_cpu.sh``; the tests of images have one without kernels."""
on_a_cpu = pytest.mark.skipif(not KERNELS.is_dir(), reason="there is no vllm for processors")

WRITER = "algorithm.prompt_writer"
REQUESTS = ["forty-two", "seven", "nine hundred and one"]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Processes of the engine take it in the place of the other one."""
    with pytest.MonkeyPatch.context() as patch:
        if KERNELS.is_dir():
            patch.syspath_prepend(str(KERNELS))  # which they inherit
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny writer's tokenizer and a network with random weights; vllm's attention takes no heads of 24 numbers."""
    path = tmp_path_factory.mktemp("writer")
    source = resolve_asset("asset:tiny_writer")
    AutoTokenizer.from_pretrained(source).save_pretrained(path)
    config = Qwen3Config.from_pretrained(source)
    config.head_dim = 32
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(config)
    with torch.no_grad():
        network.model.norm.weight.mul_(4)  # unequal probabilities
    network.save_pretrained(path)
    return path


class Side:
    """An actor and its engine."""

    def __init__(self, folder, dtype, device="cpu", **engine):
        settings = {"name": "vllm", "placement": "process", "dtype": dtype, "kv_cache_gib": 0.05, "micro_batch_size": 8}
        self.config = PromptWriterConfig(
            path=str(folder), max_new_tokens=24, lora_rank=4, lora_alpha=6, engine=settings | engine
        )
        self.language = LanguageModel(self.config, device)
        self.actor = WriterActor(self.language, 1)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapter_parameters(self.actor.network).items():
                if ".lora_B." in name:
                    parameter.normal_(std=0.2)
        self.engine = WriterProcesses(self.config, device, Share(0, 1), allow_tf32=False)

    def state(self):
        return adapter_state(self.actor.network)

    def write(self, requests, first_seed=0):
        return write(self.engine, self.language.tokens, requests, range(first_seed, first_seed + len(requests)))

    def gap(self, written):
        """Largest and mean absolute log ratio of a token."""
        scored = self.actor.score(written.batch).log_probs
        ratios = (scored - written.batch["rollout_log_probs"])[written.batch["response_mask"]].abs()
        return float(ratios.max()), float(ratios.mean())


@pytest.fixture(scope="module")
def side(folder):
    made = Side(folder, "float32")
    yield made
    made.engine.close()


@on_a_cpu
@pytest.mark.process
def test_its_log_probs_are_the_actors_and_its_adapter_is_proved(side):
    """With every pushed adapter; and a killed engine writes the same again."""
    untrained = {name: torch.zeros_like(value) for name, value in side.state().items()}
    assert side.engine.sync(untrained, 1) == side.engine.digest_of(untrained)
    plain = side.write(REQUESTS * 8)
    assert side.gap(plain)[0] > 0.1  # the actor has another adapter
    assert side.engine.sync(side.state(), 2) == side.engine.digest_of(side.state())
    written = side.write(REQUESTS * 8)
    assert (written.adapter_version, written.adapter_digest) == (2, side.engine.digest_of(side.state()))
    assert written.texts != plain.texts
    assert side.gap(written)[0] < 1e-4
    assert len(set(written.texts)) > 12  # seeds differ
    os.kill(side.engine._handles[0].pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match=r"prompt writer 0 \(cpu\) is started anew"):
        again = side.write(REQUESTS * 8)
    assert again.texts == written.texts
    assert torch.equal(again.batch["rollout_log_probs"], written.batch["rollout_log_probs"])


@on_a_cpu
@pytest.mark.process
def test_tokens_are_drawn_from_the_whole_distribution(side):
    """Their mean log-prob is minus the entropy of the actor's distribution at their places, as z-score; one of
    draws at temperature 0.9 is seen."""
    side.engine.sync(side.state(), 3)
    batch = side.write(REQUESTS * 40, first_seed=1000).batch
    mask, lengths = batch["response_mask"], batch[REQUEST_LENGTHS]
    with torch.no_grad(), adapter_active(side.actor.network, ACTOR_ADAPTER):
        logits = side.actor.network(input_ids=batch[INPUT_IDS]).logits.double()
    places = (lengths[:, None] - 1 + torch.arange(mask.shape[1])).clamp(max=logits.shape[1] - 1)
    log_probs = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).log_softmax(-1)[mask]

    def z_score(found, expected):
        entropy = -(expected.exp() * expected).sum(-1)
        variance = (expected.exp() * expected.square()).sum(-1) - entropy.square()
        return float((found + entropy).sum() / variance.sum().sqrt())

    found = batch["rollout_log_probs"][mask].double()
    assert len(found) > 1000
    assert abs(z_score(found, log_probs)) < 3.5
    sharper = (log_probs / 0.9).log_softmax(-1)
    drawn = torch.multinomial(sharper.exp(), 1, generator=torch.Generator().manual_seed(0))
    assert z_score(log_probs.gather(-1, drawn).squeeze(-1), log_probs) > 3.5


@on_a_cpu
@pytest.mark.process
def test_what_does_not_fit_is_refused(side):
    state = side.state()
    name = next(iter(state))
    with pytest.raises(AdapterMismatchError, match="does not bind"):
        side.engine.sync({n: v for n, v in state.items() if n != name}, 4)
    stranger = {n.replace("q_proj", "other_proj"): v for n, v in state.items()}
    with pytest.raises(AdapterMismatchError, match="vllm does not take the writer's adapter"):
        side.engine.sync(stranger, 4)
    side.engine.sync({n: v * torch.nan for n, v in state.items()}, 5)
    with pytest.raises(NonFiniteWriterError, match="NaN for the requests"):
        side.write(REQUESTS)


@on_a_cpu
@pytest.mark.process
def test_a_compiled_bfloat16_engine_has_a_gap(folder):
    made = Side(folder, "bfloat16", torch_compile=True)
    try:
        assert made.engine.sync(made.state(), 1) == made.engine.digest_of(made.state())
        largest, mean = made.gap(made.write(REQUESTS * 8))
    finally:
        made.engine.close()
    assert 1e-4 < mean < 0.05
    assert largest < 1


@on_a_cpu
@pytest.mark.process
def test_a_run_writes_with_it(small_config, folder):
    """The engine's proof holds at each step, and its gap in float32 is rounding."""
    settings = (
        f"{WRITER}.path={folder}",
        f"{WRITER}.lora_rank=4",
        f"{WRITER}.lora_alpha=8",
        f"{WRITER}.max_new_tokens=40",
        f"{WRITER}.rewrites=4",
        f"{WRITER}.actor.optim.lr=3e-3",
        f"{WRITER}.engine.name=vllm",
        f"{WRITER}.engine.placement=process",
        f"{WRITER}.engine.dtype=float32",
        f"{WRITER}.engine.kv_cache_gib=0.05",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
    )
    rows = [row for row in rows_of(FlowGRPOTrainer(small_config(*settings)).fit().root) if "reward/mean" in row]
    assert len(rows) == 2
    assert max(row["writer/rollout_corr/logprob_abs_diff_mean"] for row in rows) < 1e-4
    assert max(row["writer/grad_norm"] for row in rows) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-2), ("bfloat16", 0.1)])
def test_on_a_gpu(folder, dtype, limit, compiled):
    made = Side(folder, dtype, "cuda:0", torch_compile=compiled)
    try:
        assert made.engine.sync(made.state(), 1) == made.engine.digest_of(made.state())
        assert made.gap(made.write(REQUESTS * 8))[1] < limit
    finally:
        made.engine.close()
