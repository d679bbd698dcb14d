"""An optimizer step of two processes, one of which rejects all that it has."""

import pytest
import torch
from test_rows import IMAGES, Rig, adapter_parameters, config, on_two_processes
from tolerances import GRADIENT

from flowgrpo_rc.batch import Key, MiniBatch
from flowgrpo_rc.models.lora import adapter_state

CORRECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}


def update(rig, images):
    """Metrics and gradient of an update whose last two images are all rejected, with a KL to another adapter."""
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "velocity", "kl_reference": "start"}
    rig.reset(config(rows=2, correction=CORRECTION, **kl))
    rig.actor.load_start({name: value.roll(1) for name, value in adapter_state(rig.actor.transformer).items()})
    batch = rig.batch.clone()
    batch[Key.ROLLOUT_LOG_PROBS][IMAGES // 2 :] += 1.0
    calls = []
    forward = rig.actor._forward
    rig.actor._forward = lambda micro, **options: calls.append(0) or forward(micro, **options)
    result = rig.actor.update(batch, rig.cond, [MiniBatch(images)])
    flat = torch.cat([p.grad.flatten() for p in adapter_parameters(rig.actor.transformer).values()])
    kl = [result.metrics[f"actor/{name}"] for name in ("kl_loss", "velocity_norm", "ref_velocity_norm")]
    return result.optimizer_steps, result.metrics["actor/kept_fraction"], flat, len(calls), kl


@pytest.mark.process
def test_a_process_whose_images_are_all_rejected_takes_the_step_of_the_others(tmp_path):
    """With as many forwards, and the gradient of one process that has all images."""
    found = on_two_processes(update, tmp_path)
    steps, kept, gradient, calls, kl = update(Rig(), torch.arange(IMAGES))
    assert min(kl) > 1e-6
    assert (steps, kept) == (1, 0.5)
    assert found[0][3] == found[1][3] == calls // 2
    for steps, kept, own, _, own_kl in found:
        assert (steps, kept) == (1, 0.5)
        assert own_kl == pytest.approx(kl, rel=1e-5)
        assert torch.equal(own, found[0][2])
        assert (own - gradient).norm() <= GRADIENT * gradient.norm()
