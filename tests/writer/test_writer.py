"""The prompt writer's engine and actor: sampling, recorded log-probs, and updates against a slow reference."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests_support import built_twice
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.models.lora import adapter_active, adapter_parameters, adapter_state, linear_layers
from flowgrpo_rc.models.quantization import round_fp8_rows
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.writer import LanguageModel, PromptWriterConfig, WriterActor, WriterEngine
from flowgrpo_rc.writer.engine import INPUT_IDS, REQUEST_LENGTHS, SeededSampler
from flowgrpo_rc.writer.language import (
    NonFiniteWriterError,
    RequestTokens,
    recompute_activations,
    token_log_probs,
)

REQUESTS = ["forty-two", "zero seven", "thirteen", "ninety"]


def config_of(path="asset:tiny_writer", **settings):
    settings = {"engine": {"dtype": "float32"}, "max_new_tokens": 40, "lora_rank": 4, "lora_alpha": 8} | settings
    return PromptWriterConfig(path=str(path), **settings)


def writer_of(config, seed=0):
    """Language model, engine and actor; the adapter's second matrices are not 0."""
    torch.manual_seed(seed)
    language = LanguageModel(config, "cpu")
    engine, actor = WriterEngine(language), WriterActor(language, 10)
    with torch.no_grad():
        for name, parameter in adapter_parameters(actor.network).items():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    engine.sync(adapter_state(actor.network), 0)
    return language, engine, actor


@pytest.fixture(scope="module")
def written():
    language, engine, actor = writer_of(config_of())
    rows = [request for request in REQUESTS for _ in range(3)]
    return language, engine, actor, engine.write(rows, list(range(len(rows))))


def test_recorded_log_probs_are_those_of_a_plain_forward(written):
    """Row by row, without padding, in float32."""
    language, _, actor, result = written
    batch = result.batch
    for row in range(len(batch)):
        length = int(batch[REQUEST_LENGTHS][row])
        count = int(batch[Key.RESPONSE_MASK][row].sum())
        ids = batch[INPUT_IDS][row, : length + count]
        request = language.tokens.of(REQUESTS[row // 3])
        assert ids[:length].tolist() == request
        with torch.no_grad():
            logits = actor.network(input_ids=ids[None]).logits[0]
        # The actor's adapter is active here, as it is in training.
        expected = logits.log_softmax(-1)[torch.arange(length - 1, length + count - 1), ids[length:]]
        assert_close(batch[Key.ROLLOUT_LOG_PROBS][row, :count], expected, rtol=0, atol=2e-5)
        assert not batch[Key.ROLLOUT_LOG_PROBS][row, count:].any()
        assert bool(result.ended[row]) == (int(ids[-1]) in language.tokens.ends)
        assert language.tokens.tokenizer.decode(ids[length:], skip_special_tokens=True) == result.texts[row]
    scored = actor.score(batch).log_probs
    mask = batch[Key.RESPONSE_MASK]
    assert_close(scored[mask], batch[Key.ROLLOUT_LOG_PROBS][mask], rtol=0, atol=2e-5)


def test_a_rewrite_depends_on_request_and_seed_alone(written):
    """Not on the rows beside it, whose requests are longer."""
    _, engine, _, result = written
    alone = engine.write([REQUESTS[1]], [4])
    assert alone.texts == [result.texts[4]]
    others = engine.write([REQUESTS[1]] * 20, list(range(100, 120)))
    assert len(set(others.texts)) > 3


def test_an_fp8_engine_rounds_all_layers_but_the_output():
    """Its log-probs are those of a network whose weights were rounded by hand, and the actor's are others."""
    language, _, actor = writer_of(config_of())
    config = config_of(engine={"dtype": "float32", "quantization": "fp8_emulated"})
    engine = WriterEngine(LanguageModel(config, "cpu"))
    state = adapter_state(actor.network)
    assert engine.sync(state, 1) == engine.digest_of(state)
    batch = engine.write(REQUESTS * 4, list(range(4 * len(REQUESTS)))).batch
    mask = batch[Key.RESPONSE_MASK]
    gap = (actor.score(batch).log_probs - batch[Key.ROLLOUT_LOG_PROBS])[mask].abs().mean()
    assert 3e-4 < gap < 0.1
    layers = {name: layer for name, layer in linear_layers(language.network).items() if name != "lm_head"}
    assert len(layers) == 14
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.copy_(round_fp8_rows(layer.weight))
    assert_close(actor.score(batch).log_probs[mask], batch[Key.ROLLOUT_LOG_PROBS][mask], rtol=0, atol=2e-5)


def test_sampling_inverts_the_cumulative_distribution():
    """By hand: probabilities .5, 0, .25, .25, and the draws of the seed."""
    logits = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).log()
    draws = torch.rand(400, generator=torch.Generator().manual_seed(3))
    sampler = SeededSampler([3], 400)
    found = [int(sampler(torch.empty(1, 0), logits).argmax()) for _ in range(400)]
    assert found == [0 if draw < 0.5 else 2 if draw < 0.75 else 3 for draw in draws.tolist()]
    (recorded,) = sampler.recorded()
    assert_close(recorded, logits[0, found], rtol=0, atol=1e-6)


def test_settings_of_the_folder_do_not_change_the_distribution(tmp_path, written):
    """A model's own penalties and limits would make the recorded log-probs another policy's."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_asset("asset:tiny_writer"), folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "repetition_penalty": 3.0,
        "temperature": 0.1,
        "top_k": 1,
        "do_sample": True,
    }
    file.write_text(json.dumps(settings))
    _, engine, _ = writer_of(config_of(folder))
    rows = [request for request in REQUESTS for _ in range(3)]
    assert engine.write(rows, list(range(len(rows)))).texts == written[3].texts


def test_a_long_rewrite_is_cut():
    _, engine, _ = writer_of(config_of(max_new_tokens=5))
    result = engine.write(REQUESTS, [0, 1, 2, 3])
    assert not result.ended.any()
    assert result.batch[Key.RESPONSE_MASK].shape == (4, 5)
    assert result.batch[Key.RESPONSE_MASK].all()


def test_the_prompt_of_a_rewrite_follows_its_marker():
    tokens = RequestTokens(config_of(prompt_marker="text"))
    ids = [tokens.tokenizer(text).input_ids for text in ('a text: the text "42"', "forty-two", 'text "1"')]
    assert [tokens.text(one) for one in ids] == ['"42"', "", '"1"']


def with_positions(count):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": count}))


def test_a_request_that_is_too_long_is_refused_by_its_line(tmp_path):
    """Whose longest request fits to the token."""
    requests = [("two", "train.txt:1"), ("forty-two", "train.txt:2")]
    most = max(len(RequestTokens(config_of()).of(text)) for text, _ in requests) + 40
    fits = RequestTokens(config_of(broken(tmp_path / "a", "config.json", with_positions(most))))
    assert fits.check_requests(requests) is None
    tight = RequestTokens(config_of(broken(tmp_path / "b", "config.json", with_positions(most - 1))))
    with pytest.raises(ValueError, match=f"^train.txt:2: .* {most - 40} tokens; .*max_new_tokens=40 .* {most - 1} of"):
        tight.check_requests(requests)


def test_a_request_that_the_template_refuses_is_named_by_its_line(tmp_path):
    template = "{% if 'two' in messages[0].content %}{{ raise_exception('no twos') }}{% endif %}"
    folder = broken(tmp_path, "chat_template.jinja", lambda file: file.write_text(template + file.read_text()))
    with pytest.raises(ValueError, match="^train.txt:2: .*chat template .* 'forty-two' .no twos"):
        RequestTokens(config_of(folder)).check_requests([("one", "train.txt:1"), ("forty-two", "train.txt:2")])


def test_requests_that_the_tokenizer_changes_are_said_by_line():
    tokens = RequestTokens(config_of())
    assert tokens.check_requests([(text, "a:1") for text in REQUESTS]) is None
    said = tokens.check_requests([("forty", "a:1"), ("f\u00fcnf \u4e94", "a:2"), ("\u4e03", "a:3")])
    assert re.search("cannot write 2 of 3 requests as they are .the first: a:2, 'f\u00fcnf \u4e94' becomes", said)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_holds_the_rounded_adapter(dtype):
    language, engine, actor = writer_of(config_of(engine={"dtype": dtype}))
    state = adapter_state(actor.network)
    assert engine.sync(state, 3) == engine.digest_of(state)
    assert engine.write(REQUESTS[:1], [0]).adapter_digest == engine.digest_of(state)
    state[next(iter(state))][0, 0] += 1
    assert engine.digest_of(state) != engine.write(REQUESTS[:1], [0]).adapter_digest
    assert {p.dtype for p in adapter_parameters(actor.network).values()} == {torch.float32}
    assert {p.dtype for p in language.network.parameters() if not p.requires_grad} == {torch.float32}


def test_equal_precision_leaves_no_gap():
    """A bfloat16 actor and a bfloat16 engine compute the same on equal shapes: rotary frequencies stay in float32."""
    _, engine, actor = writer_of(config_of(dtype="bfloat16", engine={"dtype": "bfloat16"}))
    batch = engine.write(REQUESTS, [0, 1, 2, 3]).batch
    with torch.no_grad(), adapter_active(engine.network, "rollout"):
        found = token_log_probs(engine.network, batch[INPUT_IDS], batch[REQUEST_LENGTHS], 8)
        expected = actor._log_probs({**batch, Key.RESPONSE_MASK: torch.ones(4, 8)})
    assert torch.equal(found, expected)
    gap = (actor.score(batch).log_probs - batch[Key.ROLLOUT_LOG_PROBS])[batch[Key.RESPONSE_MASK]].abs()
    assert gap.mean() < 0.02
    frequencies = [buffer for name, buffer in engine.network.named_buffers() if "inv_freq" in name]
    assert {buffer.dtype for buffer in frequencies} == {torch.float32}


CORRECTION = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.02,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.9_1.1",
}


def reference_gradient(actor, batch, old, bypass, kl):
    """The gradient of the loss by the formulas, over all tokens at once."""
    mask = batch[Key.RESPONSE_MASK]
    log_probs = actor._log_probs(batch)
    rollout = batch[Key.ROLLOUT_LOG_PROBS]
    gap = (log_probs.detach() if bypass else old.log_probs).double() - rollout.double()
    keep = mask & (gap.exp() >= 0.9) & (gap.exp() <= 1.1)
    weight = torch.ones_like(gap) if bypass else gap.exp().clamp(max=1.02)
    before = rollout if bypass else old.log_probs
    ratio = (log_probs - before).exp()
    advantage = batch[Key.ADVANTAGES][:, None]
    loss = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * 3), loss) * weight
    if kl:
        with torch.no_grad():
            apart = actor._log_probs(batch, adapter=None)
        difference = apart - log_probs
        loss = loss + 0.3 * (difference.exp() - 1 - difference)
    mean = (loss * keep).sum() / keep.sum()
    return torch.autograd.grad(mean, actor._parameters), keep


@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize(("bypass", "kl"), [(False, False), (True, False), (False, True)])
def test_an_update_has_the_gradient_of_the_formulas(size, bypass, kl):
    """Token weights, rejection, both clips and the KL, whatever the micro-batch; engine and actor differ."""
    settings = {
        "ppo_micro_batch_size_per_gpu": size,
        "use_kl_loss": kl,
        "kl_loss_coef": 0.3,
        "grad_clip": 1e9,
        "rollout_correction": CORRECTION | {"bypass_mode": bypass},
    }
    _, engine, actor = writer_of(config_of(engine={"dtype": "bfloat16"}, actor=settings))
    batch = engine.write([r for r in REQUESTS for _ in range(3)], list(range(12))).batch
    generator = torch.Generator().manual_seed(5)
    batch[Key.ADVANTAGES] = torch.randn(12, generator=generator)
    batch[Key.ROLLOUT_LOG_PROBS] += 0.05 * torch.randn(batch[Key.ROLLOUT_LOG_PROBS].shape, generator=generator)
    old, gap = (None, None) if bypass else actor.correct(batch, actor.score(batch))
    expected, keep = reference_gradient(actor, batch, old, bypass, kl)
    assert 0.5 < float(keep.sum() / batch[Key.RESPONSE_MASK].sum()) < 0.98
    found = []
    actor.optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in actor._parameters))
    metrics = actor.update(batch, [MiniBatch(torch.arange(12), old)], gap)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=2e-3, atol=1e-6)
    assert metrics["actor/kept_fraction"] == pytest.approx(float(keep.sum() / batch[Key.RESPONSE_MASK].sum()))
    prefix = "rollout_corr/"
    assert (
        metrics[f"{prefix}rollout_rs_token_k1_fraction_low"] + metrics[f"{prefix}rollout_rs_token_k1_fraction_high"] > 0
    )


def test_the_first_ratio_is_one_in_decoupled_mode(written):
    _, _, actor, result = written
    batch = result.batch.clone()
    batch[Key.ADVANTAGES] = torch.ones(len(batch))
    old, gap = actor.correct(batch, actor.score(batch))
    state = adapter_state(actor.network)
    actor.optimizer.param_groups[0]["lr"] = 0.0
    metrics = actor.update(batch, [MiniBatch(torch.arange(len(batch)), old)], gap)
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["rollout_corr/logprob_abs_diff_mean"] < 2e-5
    assert all(torch.equal(value, state[name]) for name, value in adapter_state(actor.network).items())


def test_what_is_not_finite_takes_no_step(written):
    _, _, actor, result = written
    batch = result.batch.clone()
    batch[Key.ADVANTAGES] = torch.full((len(batch),), torch.nan)
    old, _ = actor.correct(batch, actor.score(batch))
    state = adapter_state(actor.network)
    with pytest.raises((NonFiniteWriterError, ValueError), match="finite|NaN"):
        actor.update(batch, [MiniBatch(torch.arange(len(batch)), old)])
    assert all(torch.equal(value, state[name]) for name, value in adapter_state(actor.network).items())
    with pytest.raises(ValueError, match="in decoupled mode score"):
        actor.update(result.batch, [MiniBatch(torch.arange(2))])


def test_the_average_follows_each_step():
    """The recursion of ``ema_decay``, whose first step takes the weights."""
    _, engine, actor = writer_of(config_of(actor={"ema_decay": 0.5, "optim": {"lr": 1e-2}}))
    batch = engine.write(REQUESTS, range(4)).batch
    batch[Key.ADVANTAGES] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    expected = None
    for k in range(4):
        actor.update(batch, [MiniBatch(torch.arange(4), actor.score(batch))])
        decay = 0.0 if k == 0 else min(0.5, (1 + k) / (10 + k))
        own = {name: value.double() for name, value in adapter_state(actor.network).items()}
        expected = own if expected is None else {n: decay * expected[n] + (1 - decay) * own[n] for n in own}
    for name, value in actor.averaged_state().items():
        assert_close(value.double(), expected[name], rtol=0, atol=1e-6)


def test_recomputing_changes_no_gradient():
    """Bit for bit; fewer activations live at once."""
    found = {}
    for recomputes in (False, True):
        _, engine, actor = writer_of(config_of(actor={"enable_gradient_checkpointing": recomputes}))
        batch = engine.write(REQUESTS, range(4)).batch
        batch[Key.ADVANTAGES] = torch.tensor([1.0, -1.0, 0.5, -0.5])
        calls = []
        layer = actor.network.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        actor.update(batch, [MiniBatch(torch.arange(4), actor.score(batch))])
        found[recomputes] = adapter_state(actor.network), len(calls)
    (plain, once), (again, twice) = found[False], found[True]
    assert (once, twice) == (2, 3)
    assert all(torch.equal(value, again[name]) for name, value in plain.items())
    with pytest.raises(ValueError, match="enable_gradient_checkpointing: got true, but Linear has no layers that"):
        recompute_activations(torch.nn.Linear(1, 1))


def test_nan_is_never_sampled():
    _, engine, _ = writer_of(config_of())
    with torch.no_grad():
        next(iter(adapter_parameters(engine.network, "rollout").values())).fill_(torch.nan)
    with pytest.raises(NonFiniteWriterError, match=r"NaN for the requests \['forty-two'\]; try float32 for"):
        engine.write(REQUESTS[:1], [0])


def test_a_saved_adapter_is_the_policy_in_transformers(tmp_path, written):
    _, _, actor, result = written
    actor.save(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    network = AutoModelForCausalLM.from_pretrained(resolve_asset("asset:tiny_writer"), dtype=torch.float32)
    network.load_adapter(str(tmp_path))
    ids = result.batch[INPUT_IDS][:1]
    with torch.no_grad():
        assert_close(network(input_ids=ids).logits, actor.network(input_ids=ids).logits, rtol=0, atol=1e-5)


def broken(tmp_path, file, change):
    folder = tmp_path / "model"
    shutil.copytree(resolve_asset("asset:tiny_writer"), folder)
    change(folder / file)
    return folder


def without_end(file):
    settings = json.loads(file.read_text())
    for name in ("eos_token", "pad_token"):
        settings.pop(name)
    file.write_text(json.dumps(settings))
    for other in ("generation_config.json", "config.json"):
        path = file.parent / other
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token_id"}))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda file: file.unlink(), "has no config.json; give the folder of a language model"),
        ("chat_template.jinja", lambda file: file.unlink(), "has no chat template, through which requests go"),
        ("tokenizer_config.json", without_end, "names a token that ends a text"),
    ],
)
def test_a_folder_that_cannot_write_is_refused(tmp_path, file, change, message):
    with pytest.raises(ValueError, match=f"algorithm.prompt_writer.path: .*{message}"):
        LanguageModel(config_of(broken(tmp_path, file, change)), "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template_kwargs": {"conversation": 1}}, "prompt_writer: the chat template in .* does not take the req"),
        ({"target_modules": ["foo"]}, "algorithm.prompt_writer.target_modules: foo match no linear layer"),
    ],
)
def test_settings_that_the_model_does_not_take_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WriterEngine(LanguageModel(config_of(**settings), "cpu")).write(REQUESTS[:1], [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewrites": 1}, "prompt_writer.rewrites: got 1 with learns=both.*give 2 or more, or set learns to images"),
        ({"prompt_marker": ""}, "prompt_writer.prompt_marker: got an empty text"),
        ({"learns": "all"}, "prompt_writer.learns: got 'all'; choose one of both, writer, images"),
        (
            {"actor": {"rollout_correction": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "auto"}}},
            "prompt_writer.actor.rollout_correction.rollout_rs_threshold: got auto",
        ),
        (
            {"actor": {"token_loss": {"loss_agg_mode": "seq-mean-token-sum-norm"}}},
            "token_loss.loss_scale_factor: got null with loss_agg_mode=seq-mean-token-sum-norm; give a number",
        ),
        (
            {"actor": {"rollout_correction": {"bypass_mode": True, "rollout_is_batch_normalize": True}}},
            "rollout_is_batch_normalize: got true with bypass_mode=true",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config_of(**settings)


@pytest.mark.slow
def test_half_of_the_shipped_writers_rewrites_are_right():
    """Its card says 51 % of 2000; of 400, 43 % is three standard errors below."""
    language = LanguageModel(config_of(), "cpu")
    engine = WriterEngine(language)
    lines = Path(resolve_asset("asset:tiny_requests/train.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    asked = [row for row in rows for _ in range(5)]
    texts = engine.write([row["prompt"] for row in asked], list(range(len(asked)))).texts
    right = [text == f'the text "{row["ocr_target"]}"' for text, row in zip(texts, asked, strict=True)]
    assert 0.43 < sum(right) / len(right) < 0.59
    tokenizer = AutoTokenizer.from_pretrained(resolve_asset("asset:tiny_writer"))
    assert tokenizer.decode(tokenizer.encode('the text "42", too')) == 'the text "42", too'


@pytest.mark.slow
def test_the_build_script_repeats(tmp_path):
    script = Path(__file__).resolve().parents[2] / "examples" / "tiny_writer" / "build_tiny_writer.py"
    small = ("--steps", "3", "--batch-size", "4", "--samples", "0")
    folder = built_twice(script, tmp_path, *small, weights=1) / "model"
    engine = WriterEngine(LanguageModel(config_of(folder), "cpu"))
    assert len(engine.write(REQUESTS, [0, 1, 2, 3]).texts) == 4
