"""A run whose engines are actors of Ray, one batch ahead: every number of one whose engine is in its process."""

import os
import signal

import pytest
from tests_support import untimed

from flowgrpo_rc.rollout.ray.handle import RayHandle
from flowgrpo_rc.trainer import FlowGRPOTrainer

R = "actor_rollout_ref.rollout"
SETTINGS = ("trainer.total_training_steps=4", "trainer.test_freq=2", f"{R}.micro_batch_size=5")


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:given more than once")
def test_on_ray_one_ahead_is_adapter_lag_though_an_actor_is_killed(small_config, ray_environment, monkeypatch):
    for name in ray_environment.keys() - os.environ.keys():
        monkeypatch.setenv(name, ray_environment[name])
    killed = []
    draw = RayHandle.generate

    def draw_until_killed(self, request):
        """The first engine dies over the fourth chunk that it is given."""
        killed.append(self.name == "ray 0")
        if sum(killed) == 4 and killed[-1]:
            os.kill(self.pid, signal.SIGKILL)
        return draw(self, request)

    monkeypatch.setattr(RayHandle, "generate", draw_until_killed)
    expected = FlowGRPOTrainer(small_config(*SETTINGS, f"{R}.adapter_lag=1", folder="lag")).fit()
    there = (f"{R}.placement=ray", f"{R}.engines=2", f"{R}.ray.num_gpus=0", f"{R}.ray.num_cpus=0.5", f"{R}.ahead=1")
    with pytest.warns(UserWarning, match="rollout engine ray 0 is started anew: The actor is dead because"):
        found = FlowGRPOTrainer(small_config(*SETTINGS, *there, folder="ray")).fit()
    assert len(untimed(found.rows())) == len(untimed(expected.rows())) == 5
    assert all(len(row) > 80 for row in untimed(found.rows())[1:])
    for one, other in zip(untimed(found.rows()), untimed(expected.rows()), strict=True):
        assert one == other
