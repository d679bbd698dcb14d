"""The verl-omni drop-in, against stand-in modules of verl-omni's public shape."""

import importlib
import sys
import types
import warnings
from collections.abc import Mapping

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

HOME = "verl_omni.trainer.diffusion.rollout_correction"
NAMES = (
    "rollout_correction_enabled",
    "apply_bypass_mode_to_diffusion_batch",
    "apply_rollout_correction_to_diffusion_batch",
    "compute_rollout_corr_metrics_from_logprobs",
)


class Proto:
    """The part of verl's `DataProto` that these functions read."""

    def __init__(self, batch):
        self.batch = batch


@pytest.fixture
def omni(monkeypatch):
    """`(drop-in, home, trainer, losses)`: stand-ins with verl-omni's names, the trainer importing two by name."""
    modules = {}
    for name in (HOME, "verl_omni.trainer.diffusion.ray_diffusion_trainer", "verl_omni.workers.utils.losses"):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            modules.setdefault(path, types.ModuleType(path))
    home, trainer = modules[HOME], modules["verl_omni.trainer.diffusion.ray_diffusion_trainer"]
    losses = modules["verl_omni.workers.utils.losses"]
    for name in NAMES:
        setattr(home, name, lambda *args, _name=name: _name)
    trainer.apply_bypass_mode_to_diffusion_batch = home.apply_bypass_mode_to_diffusion_batch
    trainer.unrelated = object()
    losses.compute_rollout_correction_and_rejection_mask = lambda *args: "verl's"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flowgrpo_rc.integrations.verl_omni", raising=False)
    drop_in = importlib.import_module("flowgrpo_rc.integrations.verl_omni")
    yield drop_in, home, trainer, losses
    sys.modules.pop("flowgrpo_rc.integrations.verl_omni", None)


def batch(**more):
    old = torch.log(torch.tensor([[1.0, 1.5], [0.55, 1.0], [1.0, 1.0]]))
    data = {"old_log_probs": old, "rollout_log_probs": torch.zeros(3, 2), **more}
    return Proto(TensorDict(data, batch_size=3))


def test_importing_replaces_the_functions_everywhere(omni):
    drop_in, home, trainer, losses = omni
    for name in NAMES:
        assert getattr(home, name) is getattr(drop_in, name)
    assert trainer.apply_bypass_mode_to_diffusion_batch is drop_in.apply_bypass_mode_to_diffusion_batch
    name = "compute_rollout_correction_and_rejection_mask"
    assert getattr(losses, name) is getattr(drop_in, name)
    places = drop_in.installed.places
    assert len(places) == 6
    assert drop_in.install() is drop_in.installed  # which did it already
    assert drop_in.installed.places == places
    drop_in.installed.undo()
    assert home.rollout_correction_enabled({}) == "rollout_correction_enabled"
    assert drop_in.install().places == places
    drop_in.installed.undo()
    assert losses.compute_rollout_correction_and_rejection_mask() == "verl's"


def test_without_verl_omni_the_import_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "flowgrpo_rc.integrations.verl_omni", raising=False)
    monkeypatch.setitem(sys.modules, "verl_omni", None)
    with pytest.raises(ImportError, match="verl-omni, which cannot be imported"):
        importlib.import_module("flowgrpo_rc.integrations.verl_omni")


def test_decoupled_correction_uses_the_documented_band(omni):
    _, home, _, _ = omni
    config = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
    made, metrics = home.apply_rollout_correction_to_diffusion_batch(
        batch(), {**config, "rollout_rs_threshold": "0.6_1.4"}
    )
    # ratios 1.5 and 0.55 lie outside [0.6, 1.4]; the mirrored band [0.714, 1.667] would keep 1.5
    torch.testing.assert_close(made.batch["rollout_is_weights"], torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    assert made.batch["rollout_keep"].tolist() == [[True, False], [False, True], [True, True]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)


def test_nothing_enabled_leaves_the_batch(omni):
    _, home, _, _ = omni
    made, metrics = home.apply_rollout_correction_to_diffusion_batch(batch(), {"bypass_mode": False})
    assert set(made.batch.keys()) == {"old_log_probs", "rollout_log_probs"}
    assert metrics["rollout_corr/kl"] == pytest.approx(-(torch.log(torch.tensor([1.5, 0.55])).sum() / 6).item())
    assert not home.rollout_correction_enabled({})
    assert not home.rollout_correction_enabled(None)
    assert home.rollout_correction_enabled({"rollout_is": None, "rollout_rs": "token_k2"})


OMNIS_OWN = {
    "_target_": "verl.trainer.config.algorithm.RolloutCorrectionConfig",
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
"""The section `algorithm.rollout_correction` of verl-omni's YAML."""


class Typed(Mapping):
    """Like verl's `BaseConfig`, whose missing keys are an `AttributeError` to `in`."""

    def __init__(self, values):
        self.__dict__.update(values)

    def get(self, key, default=None):
        return getattr(self, key, default)

    def __getitem__(self, key):
        return getattr(self, key)

    def __iter__(self):
        return iter(self.__dict__)

    def __len__(self):
        return len(self.__dict__)


@pytest.mark.parametrize("make", [dict, Typed, OmegaConf.create])
def test_verl_omnis_own_section_is_taken_silently(omni, make):
    _, home, _, _ = omni
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not home.rollout_correction_enabled(make(OMNIS_OWN))
        made, _ = home.apply_rollout_correction_to_diffusion_batch(batch(), make(OMNIS_OWN))
        assert set(made.batch.keys()) == {"old_log_probs", "rollout_log_probs"}
        section = make({**OMNIS_OWN, "rollout_is": "token", "rollout_is_threshold": 1.2})
        assert home.rollout_correction_enabled(section)
        made, _ = home.apply_rollout_correction_to_diffusion_batch(batch(), section)
    weights = torch.tensor([[1.0, 1.2], [0.55, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(made.batch["rollout_is_weights"], weights)


def test_a_veto_alone_is_a_correction(omni):
    _, home, _, _ = omni
    section = {**OMNIS_OWN, "rollout_token_veto_threshold": 0.6}
    assert home.rollout_correction_enabled(section)
    made, metrics = home.apply_rollout_correction_to_diffusion_batch(batch(), section)
    assert made.batch["rollout_keep"].tolist() == [[True, True], [False, False], [True, True]]
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 3)
    assert not home.rollout_correction_enabled({**section, "rollout_token_veto_threshold": None})


@pytest.mark.parametrize(
    ("section", "keep", "weights"),
    [
        # a lower bound of 0.5 where the upper one alone would give 1/1.6 = 0.625, and one of 0.6 that rejects 0.55
        ({"rollout_rs": "token", "rollout_rs_threshold": 1.6, "rollout_rs_threshold_lower": 0.5}, [True] * 6, None),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 1.6, "rollout_rs_threshold_lower": 0.6},
            [True, True, False, True, True, True],
            None,
        ),
        ({"use_tis": True, "tis_upper_bound": 1.2}, [True] * 6, [1.0, 1.2, 0.55, 1.0, 1.0, 1.0]),
        ({"use_rs": True, "rs_lower_bound": 0.6, "rs_upper_bound": 1.4}, [True, False, False, True, True, True], None),
    ],
)
def test_keys_of_other_dialects_are_translated(omni, section, keep, weights):
    _, home, _, _ = omni
    assert home.rollout_correction_enabled(section)
    with pytest.warns(UserWarning, match="canonical form"):
        made, _ = home.apply_rollout_correction_to_diffusion_batch(batch(), section)
    assert made.batch["rollout_keep"].flatten().tolist() == keep
    expected = torch.tensor(keep).float() if weights is None else torch.tensor(weights)
    torch.testing.assert_close(made.batch["rollout_is_weights"].flatten(), expected)


def test_an_unknown_key_warns_and_has_no_effect(omni):
    _, home, _, _ = omni
    with pytest.warns(UserWarning, match=r"treshold='0.6_1.4' has no effect.*nearest known: rollout_rs_thresh"):
        made, _ = home.apply_rollout_correction_to_diffusion_batch(batch(), {"rollout_rs_treshold": "0.6_1.4"})
    assert set(made.batch.keys()) == {"old_log_probs", "rollout_log_probs"}


def test_bypass_shares_the_rollout_log_probs(omni):
    _, home, _, _ = omni
    proto = batch()
    assert home.apply_bypass_mode_to_diffusion_batch(proto) is None
    torch.testing.assert_close(proto.batch["old_log_probs"], proto.batch["rollout_log_probs"])
    with pytest.raises(ValueError, match="rollout_log_probs"):
        home.apply_bypass_mode_to_diffusion_batch(Proto({"old_log_probs": torch.zeros(2, 2)}))


def test_the_bypass_loss_gets_mask_and_metrics(omni):
    _, _, _, losses = omni
    log_prob = torch.log(torch.tensor([[1.5], [0.7], [1.0]]))
    weights, mask, metrics = losses.compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_prob,
        rollout_log_prob=torch.zeros(3, 1),
        response_mask=torch.ones(3, 1),
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.6_1.4",
    )
    assert weights is None
    assert mask.tolist() == [[0.0], [1.0], [1.0]]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)


def test_a_batch_without_tensors_lacks_them(omni):
    """As verl-omni's: a `DataProto` made of no tensors has None for its `.batch`."""
    drop_in, home, _, _ = omni
    with pytest.raises(ValueError, match="rollout_log_probs"):
        home.apply_bypass_mode_to_diffusion_batch(Proto(None))
    with pytest.raises(ValueError, match=r"old_log_probs.*rollout_log_probs"):
        home.apply_rollout_correction_to_diffusion_batch(Proto(None), {"rollout_is": "token"})
    for bypass in (True, False):
        assert drop_in.compute_rollout_corr_metrics_from_batch(Proto(None), bypass_mode=bypass) == {}


def test_diagnostics_of_a_batch(omni):
    drop_in, _, _, _ = omni
    of_batch = drop_in.compute_rollout_corr_metrics_from_batch
    proto = batch(all_timesteps=torch.tensor([[900.0, 700.0]] * 3))
    metrics = of_batch(proto, bypass_mode=False)
    assert metrics["rollout_corr/logprob_abs_diff/ts_900"] == pytest.approx(-float(torch.tensor(0.55).log()) / 3)
    assert of_batch(proto, bypass_mode=True) == {}
    assert of_batch(Proto({"old_log_probs": torch.zeros(2, 2)}), bypass_mode=False) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rejection_normalization", "kept"),
        ("guard", "fallback"),
        ("guard", "warn"),
        ("guard_patience", 5),
        ("rollout_rs_auto_share", 0.02),
        ("rollout_rs_treshold", "0.6_1.4"),
    ],
)
def test_a_key_that_has_no_effect_warns_once_by_name(omni, key, value):
    _, home, _, _ = omni
    section = {"rollout_is": "token", key: value}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            home.rollout_correction_enabled(section)
            home.apply_rollout_correction_to_diffusion_batch(batch(), section)
    (warning,) = caught
    assert f"rollout_correction.{key}={value!r} has no effect" in str(warning.message)


@pytest.mark.parametrize(("key", "value"), [("rejection_normalization", "all"), ("guard", "off"), ("_target_", "x")])
def test_what_verl_omni_does_anyway_gives_no_warning(omni, key, value):
    _, home, _, _ = omni
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        home.apply_rollout_correction_to_diffusion_batch(batch(), {"rollout_is": "token", key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("preset", "bypass_ppo_clip"), ("use_policy_gradient", True), ("use_rollout_logprobs", True)]
)
def test_bypass_mode_in_other_words_is_not_what_verl_omni_reads(omni, key, value):
    """Its trainer looks at `bypass_mode` alone, and calls this function in decoupled mode."""
    _, home, _, _ = omni
    with pytest.warns(UserWarning, match=f"{key}={value!r} has no effect.*write bypass_mode=true"):
        home.apply_rollout_correction_to_diffusion_batch(batch(), {key: value, **OMNIS_OWN})


@pytest.mark.parametrize(
    "more",
    [
        {"preset": "decoupled_token_is"},
        {"use_tis": True},
        {"preset": "decoupled_geo_rs", "rollout_is": "token", "rollout_rs_threshold": "0.5_2.0"},
    ],
)
def test_verl_omnis_defaults_do_not_override_what_was_asked(omni, more):
    _, home, _, _ = omni
    section = {**OMNIS_OWN, **more}
    assert home.rollout_correction_enabled(section)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, _ = home.apply_rollout_correction_to_diffusion_batch(batch(), section)
    torch.testing.assert_close(made.batch["rollout_is_weights"], torch.tensor([[1.0, 1.5], [0.55, 1.0], [1.0, 1.0]]))


def test_what_only_looks_true_is_not_enabled(omni):
    _, home, _, _ = omni
    for section in ({"use_tis": "false"}, {"preset": "disabled"}, {"rollout_is": ""}, {"use_tis": False}):
        assert not home.rollout_correction_enabled(section)
    assert home.rollout_correction_enabled({"rollout_rs": "token_k1"})  # which lacks a threshold, as apply then says
