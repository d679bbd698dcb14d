"""Batches that rollout correction takes: dicts, TensorDicts and objects that hold one."""

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from flowgrpo_rc.batch import (
    Key,
    MiniBatch,
    OldPolicy,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    correct_old_policy,
)
from flowgrpo_rc.correction import RolloutCorrectionConfig, compute_rollout_correction
from flowgrpo_rc.correction.numerics.moments import metrics_from_moments


class Proto:
    """An object around a mapping, as verl's `DataProto` is."""

    def __init__(self, batch):
        self.batch = batch


FORMS = {
    "dict": lambda data: data,
    "TensorDict": lambda data: TensorDict(data, batch_size=len(data["rollout_log_probs"])),
    "object around a dict": Proto,
    "object around a TensorDict": lambda data: Proto(TensorDict(data, batch_size=len(data["rollout_log_probs"]))),
}

KEYS = {value for name, value in vars(Key).items() if not name.startswith("_")}

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())

# Ratios old/rollout per SDE step: the last row's are 0.5 and 4
RATIOS = torch.tensor([[1.0, 1.2], [0.8, 1.0], [0.5, 4.0]], dtype=torch.float64)


def _data(**more):
    rollout = torch.full((3, 2), -0.5, dtype=torch.float64)
    return {"old_log_probs": rollout + RATIOS.log(), "rollout_log_probs": rollout, **more}


def _inside(batch):
    return batch.batch if isinstance(batch, Proto) else batch


@every_form
def test_bypass_mode_takes_the_rollouts_log_probs(form):
    batch = form({name: values.float() for name, values in _data().items()})  # whose old ones are replaced
    assert apply_bypass_mode_to_diffusion_batch(batch) is batch
    inside = _inside(batch)
    assert torch.equal(inside["old_log_probs"], inside["rollout_log_probs"])
    assert inside["old_log_probs"].data_ptr() == inside["rollout_log_probs"].data_ptr()
    assert inside["old_log_probs"].dtype == torch.float32


@every_form
def test_weights_and_keep(form):
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=1.1, rollout_rs="token_k1", rollout_rs_threshold="0.6_3.0"
    )
    batch = form(_data())
    before = {key: value.clone() for key, value in _inside(batch).items()}
    returned, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    assert returned is batch
    inside = _inside(batch)
    # truncated at 1.1; 0.5 and 4 are rejected
    torch.testing.assert_close(inside["rollout_is_weights"], torch.tensor([[1.0, 1.1], [0.8, 1.0], [0.0, 0.0]]))
    assert inside["rollout_keep"].dtype == torch.bool
    assert inside["rollout_keep"].tolist() == [[True, True], [True, True], [False, False]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1.0 + 1.1 + 0.8 + 1.0 + 0.5 + 1.1) / 6)
    for key, value in before.items():
        assert torch.equal(inside[key], value)
    assert set(inside.keys()) == {*before, "rollout_is_weights", "rollout_keep"}
    assert set(inside.keys()) <= KEYS


@pytest.mark.parametrize("config", [None, {}, {"preset": "disabled"}, {"preset": "decoupled_geo_rs_token_tis"}])
def test_the_numbers_are_those_of_the_library(config):
    made = RolloutCorrectionConfig.from_dict(config)
    batch, metrics = apply_rollout_correction_to_diffusion_batch(_data(), made if config is None else config)
    expected = compute_rollout_correction(_data()["old_log_probs"], _data()["rollout_log_probs"], config=made)
    assert metrics == expected.metrics
    assert torch.equal(batch["rollout_keep"], expected.mask)
    weights = torch.ones(3, 2) if expected.weights is None else expected.weights.float()
    assert torch.equal(batch["rollout_is_weights"], weights * expected.mask)


@pytest.mark.parametrize("missing", ["old_log_probs", "rollout_log_probs"])
@every_form
def test_a_missing_key_is_named(form, missing):
    data = _data()
    batch = form(data)
    del _inside(batch)[missing]
    with pytest.raises(ValueError, match=f"rollout correction needs {missing} in the batch, which has"):
        apply_rollout_correction_to_diffusion_batch(batch, RolloutCorrectionConfig())


def test_bypass_mode_without_rollout_log_probs_says_what_to_set():
    with pytest.raises(
        ValueError, match=r"bypass mode needs rollout_log_probs .*\['latents'\].*calculate_log_probs=true"
    ):
        apply_bypass_mode_to_diffusion_batch({"latents": torch.zeros(1)})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"rollout_log_probs": (3, 3)}, r"must have identical shapes, got \(3, 2\) and \(3, 3\)"),
        ({"old_log_probs": (3,), "rollout_log_probs": (3,)}, r"are \(B, W\): images by SDE steps; got \(3,\)"),
        ({"timesteps": (3,)}, r"timesteps has shape \(3,\), but log-probs have \(3, 2\)"),
        ({"response_mask": (3, 5)}, r"response_mask has shape \(3, 5\) and log_probs \(3, 2\)"),
    ],
)
def test_wrong_shapes(shapes, message):
    batch = {**_data(), **{name: torch.zeros(shape) for name, shape in shapes.items()}}
    with pytest.raises(ValueError, match=message):
        apply_rollout_correction_to_diffusion_batch(batch, RolloutCorrectionConfig())


def test_a_non_finite_log_prob_is_an_error_and_leaves_the_batch():
    data = _data()
    data["old_log_probs"][2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"1 of 6 positions .* the first is \(2, 1\)"):
        apply_rollout_correction_to_diffusion_batch(data, RolloutCorrectionConfig())
    assert set(data) == {"old_log_probs", "rollout_log_probs"}


@every_form
@pytest.mark.parametrize("padding", [-2.0, float("nan"), float("inf")])
def test_a_batch_of_tokens_is_corrected_where_its_mask_is(form, padding):
    """Padding two nats off would make the sequence's weight e^-4; it must count nowhere, whatever it holds."""
    rollout = torch.zeros(2, 4)
    old = torch.tensor([[0.1, 0.2, padding, padding], [-0.3, 0.0, 0.0, 0.0]])
    data = {"old_log_probs": old, "rollout_log_probs": rollout, "timesteps": torch.zeros(2, 1)}
    batch = form({**data, "response_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])})
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=10.0)
    _, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
    inside = _inside(batch)
    assert_close(inside["rollout_is_weights"][0], torch.tensor([0.3, 0.3, -torch.inf, -torch.inf]).exp())
    assert_close(inside["rollout_is_weights"][1], torch.full((4,), -0.3).exp())
    assert inside["rollout_keep"].tolist() == [[True, True, False, False], [True] * 4]
    assert metrics["rollout_corr/logprob_abs_diff_mean"] == pytest.approx(0.6 / 6)


@pytest.mark.parametrize("wrong", [[1, 2], torch.zeros(3), None, 7, Proto([1])])
def test_what_is_no_batch(wrong):
    with pytest.raises(ValueError, match="is no batch: give a TensorDict, a dict, or an object with .batch"):
        apply_bypass_mode_to_diffusion_batch(wrong)


# ---------------------------------------------------------------- the old policy


def old_policy(seed=0, means=True):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, 2, generator=generator)
    return OldPolicy(
        log_probs=torch.randn(4, 2, generator=generator),
        weights=weights,
        keep=weights > 0.5,
        means=torch.randn(4, 2, 3, generator=generator) if means else None,
    )


@pytest.mark.parametrize("means", [True, False])
def test_rows_of_the_old_policy_put_together_are_it(means):
    old = old_policy(means=means)
    parts = [old.rows(torch.tensor([0])), old.rows(torch.tensor([1, 2, 3]))]
    assert [len(part) for part in parts] == [1, 3]
    whole = OldPolicy.concatenate(parts).batch_keys()
    assert whole.keys() == old.batch_keys().keys() <= KEYS
    assert ("old_transition_means" in whole) is means
    for name, values in old.batch_keys().items():
        assert torch.equal(whole[name], values)
    shuffled = OldPolicy.concatenate([old, old]).rows(torch.tensor([6, 1]))
    assert torch.equal(shuffled.log_probs, old.log_probs[[2, 1]])
    assert torch.equal(shuffled.keep, old.keep[[2, 1]])


def test_a_part_of_a_mini_batch_has_its_rows_old_policy():
    mini = MiniBatch(torch.tensor([8, 9, 4, 5]), old_policy()).part(torch.tensor([2, 0]))
    assert mini.rows.tolist() == [4, 8]
    assert torch.equal(mini.old.weights, old_policy().weights[[2, 0]])
    assert MiniBatch(torch.tensor([8, 9])).part(torch.tensor([1])) == MiniBatch(torch.tensor([9]))


def test_the_rollouts_policy_as_the_old_one():
    data = {**_data(), "rollout_means": torch.ones(3, 2, 4)}
    old = OldPolicy.of_rollout(data)
    assert old.log_probs is data["rollout_log_probs"]
    assert old.means is data["rollout_means"]
    assert old.weights is old.keep is None
    assert OldPolicy.of_rollout(_data()).means is None


def test_correcting_the_value_is_correcting_the_batch():
    """The same weights, rejection and metrics; the value that was given stays as it is."""
    config = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_3.0"}
    scored = OldPolicy(log_probs=_data()["old_log_probs"], means=torch.ones(3, 2, 4))
    old, moments = correct_old_policy(scored, {"rollout_log_probs": _data()["rollout_log_probs"]}, config)
    batch, metrics = apply_rollout_correction_to_diffusion_batch(_data(), config)
    for name, values in {**batch, "old_transition_means": scored.means}.items():
        if name != "rollout_log_probs":
            assert torch.equal(old.batch_keys()[name], values), name
    assert metrics_from_moments(moments) == metrics
    assert scored.weights is scored.keep is None
