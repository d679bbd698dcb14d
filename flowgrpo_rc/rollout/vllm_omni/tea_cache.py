"""vllm-omni's TeaCache behind the methods of diffusers' ``CacheMixin``, which ``StepCache`` and the models call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from vllm_omni.diffusion.cache.teacache.config import TeaCacheConfig
from vllm_omni.diffusion.cache.teacache.hook import TeaCacheHook
from vllm_omni.diffusion.cache.teacache.state import TeaCacheState
from vllm_omni.diffusion.hooks import HookRegistry, StateManager

from flowgrpo_rc.rollout.cache import TeaCacheOptions

_NAME = "teacache"


class _States(StateManager):
    """One state for each context that a forward is in.

    The hook's own choice counts forwards, so that it takes a guided step for two of them and a step outside of the
    guidance interval for none.
    """

    def set_context(self, name: str) -> None:
        """The hook's own choice is not used."""

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Forwards in this context have the state ``name``, within the context around it."""
        outer = self._context
        self._context = f"{outer}, {name}"
        yield
        self._context = outer


def give_tea_cache(transformer: Any, kind: str) -> None:
    """Give a transformer of vllm-omni ``enable_cache``, which takes ``TeaCacheOptions``, ``disable_cache``,
    ``is_cache_enabled`` and ``cache_context``.

    Args:
        transformer: vllm-omni's.
        kind: vllm-omni's name of the rules that find the blocks and their input.
    """
    registry = HookRegistry.get_or_create(transformer)
    transformer.is_cache_enabled = False

    def enable_cache(options: TeaCacheOptions) -> None:
        hook = TeaCacheHook(TeaCacheConfig(transformer_type=kind, **asdict(options)))
        hook.state_manager = states = _States(TeaCacheState)
        registry.register_hook(_NAME, hook)
        transformer.cache_context = states.within
        transformer.is_cache_enabled = True

    def disable_cache() -> None:
        registry.remove_hook(_NAME)
        transformer.is_cache_enabled = False

    transformer.enable_cache = enable_cache
    transformer.disable_cache = disable_cache
