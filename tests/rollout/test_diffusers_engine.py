"""The in-process engine: what it records, that it is reproducible, and that its gap to the actor is real."""

from functools import partial

import pytest
import torch
from rollout_cases import STARTS, random_like, request_for
from tolerances import LATENT, LOG_PROB
from torch.testing import assert_close

from flowgrpo_rc.models import ModelConfig, load_model
from flowgrpo_rc.models.lora import (
    adapter_active,
    adapter_parameters,
    adapter_state,
    attach_lora,
    base_parameters,
    load_adapter_state,
)
from flowgrpo_rc.rollout import DiffusersEngine
from flowgrpo_rc.rollout.diffusers_engine import round_fp8_rows
from flowgrpo_rc.sde import log_prob, transition

LORA = ModelConfig(lora_rank=4, lora_alpha=4)
STEPS, WINDOW = 5, 2
"""Of ``request_for``."""


@pytest.fixture
def make_engine(tiny_model):
    def make(dtype=torch.float32, micro_batch_size=6, quantization=None):
        engine = DiffusersEngine(
            tiny_model, LORA, dtype=dtype, micro_batch_size=micro_batch_size, device="cpu", quantization=quantization
        )
        engine.sync(adapter_state(engine.transformer, engine.adapter), 0)
        return engine

    return make


@pytest.fixture
def make_request(tiny_model):
    return partial(request_for, tiny_model)


def rescore(model, engine, request, batch, rows=(0, 1, 2, 3, 4, 5)):
    """Log-probs ``(rows, WINDOW)`` of recorded steps under ``engine``'s transformer."""
    scores = []
    rows = list(rows)
    cond = request.conditioning.rows(request.prompt_index[rows], torch.device("cpu"))
    for w in range(WINDOW):
        x, t = batch["latents"][rows, w], batch["timesteps"][rows, w]
        with torch.no_grad(), adapter_active(engine.transformer, engine.adapter):
            velocity = model.velocity(engine.transformer, x, t, cond)
        sigmas = batch["sigmas"][rows, w], batch["next_sigmas"][rows, w]
        step = transition(x, velocity, *sigmas, noise_level=0.7, sde_type=request.sde_type)
        scores.append(log_prob(step, batch["next_latents"][rows, w], sde_type=request.sde_type))
    return torch.stack(scores, 1)


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_records_the_window_of_every_group(tiny_model, make_engine, make_request, sde_type):
    result = make_engine().generate(make_request(sde_type=sde_type))
    schedule = tiny_model.schedule(STEPS, 32, 32)
    columns = torch.tensor(STARTS)[:, None] + torch.arange(WINDOW)
    batch = result.batch
    assert batch["latents"].shape == (6, WINDOW, 16, 32)
    assert_close(batch["sigmas"], schedule.sigmas[columns], rtol=0, atol=0)
    assert_close(batch["next_sigmas"], schedule.sigmas[columns + 1], rtol=0, atol=0)
    assert_close(batch["timesteps"], schedule.timesteps[columns], rtol=0, atol=0)
    # consecutive steps hand their latents on, unrounded
    assert_close(batch["next_latents"][:, 0], batch["latents"][:, 1], rtol=0, atol=0)
    assert {str(v.dtype) for k, v in batch.items() if k != "prompt_index"} == {"torch.float32"}
    assert torch.isfinite(batch["rollout_log_probs"]).all()
    assert batch["prompt_index"].tolist() == [0, 0, 1, 1, 2, 2]
    assert result.images.shape == (6, 32, 32, 3)


@pytest.mark.portable
@pytest.mark.parametrize(("sde_type", "cfg"), [("sde", 1.0), ("cps", 1.0), ("dance_sde", 1.0), ("sde", 4.0)])
def test_recorded_log_probs_are_the_transitions(tiny_model, make_engine, make_request, sde_type, cfg):
    """Rescored one by one, with another batch size, by the engine's own float32 transformer."""
    engine, request = make_engine(), make_request(sde_type=sde_type, cfg=cfg)
    batch = engine.generate(request).batch
    for row in range(6):
        scores = rescore(tiny_model, engine, request, batch, [row])
        assert_close(scores[0], batch["rollout_log_probs"][row], atol=LOG_PROB, rtol=0)


def test_gaussian_log_probs_have_the_entropy_of_their_noise(make_engine, make_request):
    """Standard normal noise over 512 dimensions: log-prob + log(std) + log(2 pi)/2 is -1/2 +- 1/sqrt(1024)."""
    batch = make_engine().generate(make_request()).batch
    sigma, following = batch["sigmas"].double(), batch["next_sigmas"].double()
    g = 0.7 * torch.sqrt(sigma / (1 - torch.where(sigma == 1, following, sigma)))
    std = g * torch.sqrt(sigma - following)
    squares = -2 * (batch["rollout_log_probs"] + torch.log(std) + 0.5 * torch.log(torch.tensor(2 * torch.pi)))
    assert (squares - 1).abs().max() < 5 * (2 / 512) ** 0.5


@pytest.mark.portable
def test_images_do_not_depend_on_the_micro_batch(make_engine, make_request):
    together, split = (make_engine().generate(make_request()), make_engine(micro_batch_size=4).generate(make_request()))
    assert_close(together.batch["rollout_log_probs"], split.batch["rollout_log_probs"], atol=LOG_PROB, rtol=0)
    assert_close(together.batch["next_latents"], split.batch["next_latents"], atol=LATENT, rtol=0)


def test_same_seeds_same_bits_other_seeds_other_images(make_engine, make_request):
    engine = make_engine()
    first, again, other = (engine.generate(make_request(seed=s)) for s in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.batch["rollout_log_probs"], again.batch["rollout_log_probs"])
    assert not torch.equal(first.images, other.images)


def test_weights_are_shared_only_in_the_same_precision(tiny_model, make_engine):
    own = dict(tiny_model.transformer.named_parameters())
    for dtype, shared in ((torch.float32, True), (torch.bfloat16, False)):
        engine = make_engine(dtype)
        copies = base_parameters(engine.transformer)
        assert copies.keys() == own.keys()
        assert all((copies[n].data_ptr() == own[n].data_ptr()) is shared for n in own)
        assert (engine.transformer is tiny_model.transformer) is shared
    assert all(p.dtype == torch.float32 for p in own.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_weights_are_the_engines_own(tiny_model, make_engine, dtype):
    """Every base matrix is rounded; biases and norms are those of an engine without; the model keeps its bits."""
    before = {n: p.detach().clone() for n, p in tiny_model.transformer.named_parameters()}
    engine = make_engine(dtype, quantization="fp8")
    plain = {n: p for n, p in make_engine(dtype).transformer.named_parameters() if ".lora_" not in n}
    linear = {f"{n}.weight" for n, m in engine.transformer.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, parameter in engine.transformer.named_parameters():
        assert parameter.dtype == dtype
        if ".lora_" not in name:
            rounded = round_fp8_rows(plain[name]) if name in linear else plain[name]
            assert torch.equal(parameter, rounded), name
    changed = {n for n, p in engine.transformer.named_parameters() if n in plain and not torch.equal(p, plain[n])}
    assert len(changed) > 0.9 * len(linear & plain.keys())
    assert all(torch.equal(p, before[n]) for n, p in base_parameters(tiny_model.transformer).items())


def test_fp8_weights_leave_a_gap_wider_than_bfloat16s(tiny_model, make_engine, make_request):
    request, exact = make_request(), make_engine()
    gaps = {}
    for name, engine in (
        ("none", exact),
        ("bfloat16", make_engine(torch.bfloat16)),
        ("fp8", make_engine(quantization="fp8")),
    ):
        batch = engine.generate(make_request()).batch
        gaps[name] = (rescore(tiny_model, exact, request, batch) - batch["rollout_log_probs"]).abs().mean()
    assert gaps["none"] < LOG_PROB
    assert gaps["bfloat16"] < gaps["fp8"]
    assert 1e-4 < gaps["fp8"] < 1e-2


def test_unknown_quantization_is_refused(tiny_model):
    with pytest.raises(ValueError, match="quantization: got 'fp4'; choose one of fp8"):
        DiffusersEngine(tiny_model, LORA, dtype=torch.float32, micro_batch_size=6, device="cpu", quantization="fp4")


def test_unsynchronised_engine_refuses(tiny_model, make_request):
    engine = DiffusersEngine(tiny_model, LORA, dtype=torch.float32, micro_batch_size=6, device="cpu")
    with pytest.raises(RuntimeError, match="call sync\\(\\) before generate"):
        engine.generate(make_request())


def trained_beside(model, engine):
    """An actor's adapter on the engine's transformer, trainable and with other weights than the engine's."""
    attach_lora(model.transformer, model, LORA, dtype=torch.float32)
    load_adapter_state(model.transformer, random_like(adapter_state(model.transformer), seed=2))
    return random_like(adapter_state(engine.transformer, engine.adapter), seed=1)


def test_a_shared_transformer_draws_what_one_of_the_engines_own_draws(tiny_model, make_engine, make_request):
    """Bit for bit, with the actor's adapter beside, which acts again afterwards, as does the base without either."""
    own = DiffusersEngine(
        load_model("asset:tiny_qwen_image"), LORA, dtype=torch.float32, micro_batch_size=6, device="cpu"
    )
    request = make_request(cfg=4.0)
    cond = request.conditioning.rows(request.prompt_index, torch.device("cpu"))
    noise = torch.randn(6, *tiny_model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def velocity(model):
        return model.velocity(model.transformer, noise, torch.full((6,), 500.0), cond)

    base = velocity(tiny_model)
    shared = make_engine()
    assert torch.equal(velocity(tiny_model), base)
    state = trained_beside(tiny_model, shared)
    trained = velocity(tiny_model)
    assert own.sync(state, 0) == shared.sync(state, 0) == shared.digest_of(state)
    before = adapter_state(tiny_model.transformer)
    drawn, expected = shared.generate(request), own.generate(request)
    assert torch.equal(drawn.images, expected.images)
    for name in ("latents", "next_latents", "rollout_log_probs"):
        assert torch.equal(drawn.batch[name], expected.batch[name])
    assert torch.equal(velocity(tiny_model), trained)
    assert not torch.equal(trained, base)
    with adapter_active(tiny_model.transformer, None):
        assert torch.equal(velocity(tiny_model), base)
    assert all(torch.equal(before[n], p) for n, p in adapter_parameters(tiny_model.transformer).items())
    trainable = {n for n, p in tiny_model.transformer.named_parameters() if p.requires_grad}
    assert trainable == before.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_engine_leaves_the_actors_transformer(tiny_model, make_engine, dtype):
    engine = make_engine(dtype)
    trained_beside(tiny_model, engine)
    names = {n for n, _ in tiny_model.transformer.named_parameters() if ".rollout." not in n}
    engine.close()
    engine.close()
    assert {n for n, _ in tiny_model.transformer.named_parameters()} == names
    assert list(tiny_model.transformer.peft_config) == ["default"]
    assert tiny_model.transformer.active_adapters() == ["default"]


def test_an_engine_comes_before_the_actor(tiny_model, make_engine):
    attach_lora(tiny_model.transformer, tiny_model, LORA, dtype=torch.float32)
    with pytest.raises(ValueError, match="create the rollout engine before the actor"):
        make_engine()


def test_a_failed_generate_gives_the_transformer_back(tiny_model, make_engine, make_request):
    engine = make_engine()
    trained_beside(tiny_model, engine)
    next(iter(adapter_parameters(engine.transformer, engine.adapter).values())).data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="non-finite latents"):
        engine.generate(make_request())
    assert tiny_model.transformer.active_adapters() == ["default"]


# ---------------------------------------------------------------------- rounding through fp8


def test_a_row_by_hand():
    """Neighbours in e4m3: 1/64 apart in [1/8, 1/4), 1/32 in [1/4, 1/2), 2 in [16, 32); ties go to the even mantissa.

    The smallest number is 1/512, so half of it and less becomes 0. The second row is the first one over 448, with a
    scale of its own: the same codes.
    """
    row = torch.tensor([448.0, 0.3, -17.0, 19.0, 0.2, 1 / 600, 1 / 1025])
    expected = torch.tensor([448.0, 10 / 32, -16.0, 20.0, 13 / 64, 1 / 512, 0.0])
    rounded = round_fp8_rows(torch.stack([row, row / 448]))
    assert_close(rounded, torch.stack([expected, expected / 448]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_twice_is_rounding_once(dtype):
    weight = torch.randn(64, 257, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = round_fp8_rows(weight)
    assert once.dtype == dtype
    assert torch.equal(round_fp8_rows(once), once)
    assert torch.equal(once.abs().amax(1), weight.abs().amax(1))
    error = (once.float() - weight.float()).abs() / weight.float().abs().amax(1, keepdim=True)
    assert 0.005 < error.max() < 1 / 28 + 1 / 256  # half a step of the top binade, 16 of 448; dtype's own rounding


def test_zero_rows_stay_zero_and_scales_do_not_mix():
    weight = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1e6, 1.0]])
    assert_close(round_fp8_rows(weight), torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1e6, 0.0]]), rtol=1e-6, atol=0)
