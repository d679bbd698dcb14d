"""An optimizer step of two processes, one of which rejects all that it has."""

from types import SimpleNamespace

import pytest
import torch
from test_rows import IMAGES, Rig, adapter_parameters, config
from tolerances import GRADIENT

from flowgrpo_rc.batch import Key, MiniBatch

CORRECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}


def update(rig, images):
    """Kept share and gradient of an update whose last two images are all rejected."""
    rig.reset(config(rows=2, correction=CORRECTION))
    batch = rig.batch.clone()
    batch[Key.ROLLOUT_LOG_PROBS][IMAGES // 2 :] += 1.0
    calls = []
    forward = rig.actor._forward
    rig.actor._forward = lambda micro, **options: calls.append(0) or forward(micro, **options)
    result = rig.actor.update(batch, rig.cond, [MiniBatch(images)])
    flat = torch.cat([p.grad.flatten() for p in adapter_parameters(rig.actor.transformer).values()])
    return result.optimizer_steps, result.metrics["actor/kept_fraction"], flat, len(calls)


def one_of_two(rank, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rig = Rig()
    own = rig.actor._accelerator
    rig.actor._accelerator = SimpleNamespace(
        device=own.device, num_processes=2, autocast=own.autocast, backward=own.backward
    )
    torch.save(update(rig, torch.arange(IMAGES).chunk(2)[rank]), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.process
def test_a_process_whose_images_are_all_rejected_takes_the_step_of_the_others(tmp_path):
    """With as many forwards, and the gradient of one process that has all images."""
    torch.multiprocessing.spawn(one_of_two, (tmp_path,), nprocs=2)
    steps, kept, gradient, calls = update(Rig(), torch.arange(IMAGES))
    assert (steps, kept) == (1, 0.5)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0][3] == found[1][3] == calls // 2
    for steps, kept, own, _ in found:
        assert (steps, kept) == (1, 0.5)
        assert torch.equal(own, found[0][2])
        assert (own - gradient).norm() <= GRADIENT * gradient.norm()
