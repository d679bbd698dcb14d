"""Attention backends: the names are diffusers', what does not work here is refused before loading, and a difference
between engine and actor is a gap."""

import pytest
import torch
from tolerances import LOG_PROB
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowgrpo_rc.dtypes import set_tf32
from flowgrpo_rc.models import ModelConfig, attention
from flowgrpo_rc.models.attention import (
    ATTENTION_BACKENDS,
    check_attention_backend,
    kernels_in_words,
    use_attention_backend,
)
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.trainer import FlowGRPOTrainer

ACTOR = "actor_rollout_ref.model.attn_backend"
ENGINE = "actor_rollout_ref.rollout.rollout_attn_backend"


def check(name, pipeline="QwenImagePipeline", *, trains=True, dtype=torch.float32):
    check_attention_backend(
        ACTOR, name, pipeline, folder="assets/tiny_qwen_image", dtype=dtype, device="cpu", trains=trains
    )


def processors(transformer):
    return [module.processor for module in transformer.modules() if hasattr(module, "processor")]


def test_the_names_are_those_of_diffusers():
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert sorted(ATTENTION_BACKENDS) == sorted(name.value for name in AttentionBackendName)


@pytest.mark.parametrize(("backend", "found"), [(SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")])
@pytest.mark.parametrize("masks", [False, True])
def test_the_first_lines_name_the_kernel_that_torch_chooses(backend, found, masks):
    with sdpa_kernel(backend):
        said = kernels_in_words(None, 32, masks, torch.float32, torch.device("cpu"))
    assert said == f"attention by native ({found})"


@pytest.mark.parametrize(("allowed", "products"), [(False, "float32"), (True, "TF32")])
def test_the_first_lines_of_a_gpu_say_how_it_multiplies(allowed, products):
    set_tf32(allowed)
    try:
        said = kernels_in_words("_native_math", None, False, torch.bfloat16, torch.device("cuda"))
    finally:
        set_tf32(False)
    assert said == f"attention by _native_math, products of float32 in {products}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [None, "native", "_native_math"])
def test_what_works_on_any_machine_passes(name, dtype):
    check(name, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "trains", "says"),
    [
        ("_native_flash", False, "with a mask on cpu in float32 .*mask"),
        ("_native_cudnn", True, "with a mask and a gradient on cpu in float32"),
        ("flex", True, "FlexAttention does not support backward on CPU"),
    ],
)
def test_what_does_not_work_here_is_refused_with_the_reason(name, trains, says):
    with pytest.raises(ValueError, match=f"attn_backend: got {name}, which does not compute attention .*{says}") as e:
        check(name, trains=trains)
    assert "set it to native" in str(e.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may have the package")
@pytest.mark.parametrize("name", ["flash", "_flash_3_varlen_hub", "sage", "xformers"])
def test_a_missing_package_is_named(name):
    with pytest.raises(ValueError, match=f"got {name}, .*(install|build)"):
        check(name)


def test_a_backend_that_computes_something_else_is_refused(monkeypatch):
    """One that ignores the mask has right shapes and finite numbers."""
    attend = attention._attend
    monkeypatch.setattr(
        attention,
        "_attend",
        lambda values, mask, name, trains: attend(values, mask if name == "native" else None, name, trains),
    )
    with pytest.raises(ValueError, match=r"got _native_math, .*\(the output is off by \d\d%\)"):
        check("_native_math")


def test_a_family_with_one_way_to_compute_attention_takes_no_other(tiny_sd3_model):
    check("native", "StableDiffusion3Pipeline")
    with pytest.raises(ValueError, match="got _native_math, but the transformer of a StableDiffusion3Pipeline .* null"):
        check("_native_math", "StableDiffusion3Pipeline")
    assert not any(hasattr(p, "_attention_backend") for p in processors(tiny_sd3_model.transformer))


def test_a_backend_is_that_of_one_transformer_alone(tiny_model):
    """diffusers' own method also changes the process's default, by which every other network would compute."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()
    use_attention_backend(tiny_model.transformer, "_native_math")
    assert _AttentionBackendRegistry.get_active_backend() == before
    chosen = {str(p._attention_backend.value) for p in processors(tiny_model.transformer)}
    assert chosen == {"_native_math"}


@pytest.mark.parametrize(
    "config", [lambda: ModelConfig(attn_backend="x"), lambda: RolloutConfig(rollout_attn_backend="x")]
)
def test_unknown_names(config):
    with pytest.raises(ValueError, match=r"attn_backend: got 'x'; choose one of native, .* null"):
        config()


def test_each_engine_has_names_of_its_own():
    RolloutConfig(name="vllm_omni", rollout_attn_backend="FLASH_ATTN_3_HUB")
    with pytest.raises(ValueError, match="rollout_attn_backend: got 'native'; choose one of TORCH_SDPA"):
        RolloutConfig(name="vllm_omni", rollout_attn_backend="native")


@pytest.mark.run
def test_another_backend_in_the_engine_is_a_gap_of_float32s_rounding(small_config):
    """Engine and actor have equal weights; only the engine's transformer computes with the other backend.

    Both kernels may round alike, so that nothing is demanded of the gap but its upper bound.
    """
    trainer = FlowGRPOTrainer(
        small_config(
            f"{ENGINE}=_native_math",
            "actor_rollout_ref.rollout.dtype=float32",
            "trainer.total_training_steps=1",
            "trainer.device=cpu",
            "trainer.val_before_train=false",
            "data.val_files=null",
        )
    )
    engine = trainer.run.engine.transformer
    assert {str(p._attention_backend.value) for p in processors(engine)} == {"_native_math"}
    assert all(p._attention_backend is None for p in processors(trainer.run.actor.transformer))
    assert trainer.train_step()["rollout_sync/engine_gap_per_dimension"] <= LOG_PROB
