"""Engines of a pool that need no process: each has a model of its own, and a thread of the pool calls it."""

import threading

import torch

from flowgrpo_rc.models.load import PipelineLoader
from flowgrpo_rc.rollout import DiffusersEngine, RolloutPool
from flowgrpo_rc.rollout.build import digest_rule


class Elsewhere:
    """An engine with a model of its own, which a thread of the pool calls."""

    loading = threading.Lock()
    """Libraries change classes while they load."""

    def __init__(self, config, lora, name):
        self.name = name
        self._config = config
        self._lora = lora
        self.drawn = []

    def start(self):
        torch.set_num_threads(1)
        with self.loading:
            model = PipelineLoader(self._lora.path, dtype=self._lora.dtype).load()
            model.batch_guidance = self._lora.batch_guidance
            self.engine = DiffusersEngine.from_config(self._config, model, self._lora, "cpu")

    def sync(self, state, version):
        return self.engine.sync(state, version)

    def generate(self, request):
        self.drawn.append((request.request_id, self.engine.adapter_version))
        return self.engine.generate(request)

    def close(self):
        pass


def pool_of(handles, config, lora):
    """As ``build_engine`` makes one around the trainer's model."""
    rule = digest_rule(config, lora)
    dtype = getattr(torch, config.dtype)
    return RolloutPool(handles, digest_of=rule, dtype=dtype, micro_batch_size=config.micro_batch_size)
