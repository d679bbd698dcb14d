"""Caches, which reuse blocks' outputs of earlier steps: before and after the SDE window, or everywhere.

Outside of the window a cache changes which states are visited and which picture is rewarded. Inside it changes
velocities that the actor computes in full, and so makes a gap. It keeps outputs of the steps before; it is therefore
emptied where the window begins and ends. Importing this loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

from flowgrpo_rc.dtypes import DTYPES
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.section import Check, PositiveFloat, Read, Section, convert, one_of, read_mapping

CACHES = {"first_block": "FirstBlockCacheConfig", "taylorseer": "TaylorSeerCacheConfig"}
"""Name -> diffusers' class of its options.

MagCache numbers its ratios from the first step on and FasterCache asks for the timestep of a pipeline, so that neither
can be emptied on the way.
"""


@dataclass(kw_only=True, slots=True)
class TeaCacheOptions:
    """Options of vllm-omni's TeaCache (arXiv 2411.19108), by its names."""

    rel_l1_thresh: PositiveFloat = 0.2
    """The blocks are computed once the changes of their input, summed since they last were, reach this."""
    coefficients: Annotated[list[float], Check(lambda values: len(values) == 5, "give five numbers")] | None = None
    """A polynomial that turns a change of the input into one of the output, the highest power first. ``None`` is
    vllm-omni's for the model."""


OF_VLLM_OMNI = {"tea_cache": TeaCacheOptions}
"""Name -> class of the options of a cache that the engine ``vllm_omni`` has."""


@documented_fields
@dataclass(kw_only=True, slots=True)
class CacheConfig(Section):
    """The section ``rollout.cache``: a cache in training's rollouts.

    The cache of a micro-batch is one for all of its images, so that an image depends on those beside it.
    """

    section = "actor_rollout_ref.rollout.cache"

    name: Annotated[str, one_of((*CACHES, *OF_VLLM_OMNI))] | None = None
    """Of the engine ``diffusers``: ``first_block`` skips a forward whose first block has changed little, and
    ``taylorseer`` extrapolates the outputs of every block between steps that it computes. Of ``vllm_omni``:
    ``tea_cache`` skips a forward whose input has changed little. Null computes every block."""
    options: Annotated[Any, Read(read_mapping("the options of diffusers' class, e.g. {threshold: 0.1}"))] = field(
        default_factory=dict
    )
    """Options of diffusers' ``FirstBlockCacheConfig`` or ``TaylorSeerCacheConfig``, e.g. ``{threshold: 0.1}``, or
    vllm-omni's ``rel_l1_thresh`` and ``coefficients``."""
    in_window: bool = False
    """Keep the cache on in the SDE window too. Its gap is measured and corrected like that of a lower precision."""

    def problems(self) -> Iterator[str]:
        """Settings of no cache."""
        if self.name is None and (self.options or self.in_window):
            given = f"options={self.options}, in_window={self.in_window}"
            yield f"name: got null with {given}; choose one of {', '.join((*CACHES, *OF_VLLM_OMNI))}"

    @property
    def described(self) -> str | None:
        """Its name, and where it acts; ``None`` without one."""
        if self.name is None:
            return None
        return f"{self.name} {'everywhere' if self.in_window else 'outside of the window'}"

    def checked(self) -> Any:
        """The argument of ``enable_cache``: an object of diffusers' class or a ``TeaCacheOptions``.

        Raises:
            ValueError: the class does not take these options.
        """
        import diffusers.hooks

        name = str(self.name)
        kind = OF_VLLM_OMNI.get(name) or getattr(diffusers.hooks, CACHES[name])
        known = [one.name for one in fields(kind)]
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise ValueError(
                f"{self.section}.options: got {', '.join(unknown)}; name={self.name} takes {', '.join(known)}"
            )
        types = get_type_hints(kind, include_extras=True)
        return kind(**{key: self._option(key, types[key], value) for key, value in self.options.items()})

    def _option(self, key: str, kind: Any, value: Any) -> Any:
        """An option in the type that its class takes."""
        from flowgrpo_rc.dtypes import torch_dtype

        try:
            if key == "taylor_factors_dtype":
                return torch_dtype(convert(Annotated[str, one_of(DTYPES)], value))
            value = convert(kind, value)
            if key.endswith("_identifiers"):
                for pattern in value or ():
                    re.compile(pattern)
            least = 0 if key == "max_order" else 1
            if type(value) is int and value < least:
                raise ValueError(f"got {value}; give {least} or more")
        except (ValueError, re.error) as error:
            told = str(error) if str(error).startswith("got ") else f"got {value}; {error}"
            raise ValueError(f"{self.section}.options.{key}: {told}") from None
        return value


def check_cache(config: CacheConfig, transformer: Any) -> None:
    """Raise ``ValueError`` unless the transformer can have this cache."""
    if config.name is None:
        return
    from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
    from diffusers.hooks._helpers import TransformerBlockRegistry
    from diffusers.hooks.taylorseer_cache import _TAYLORSEER_CACHE_HOOK
    from diffusers.models.cache_utils import CacheMixin

    cache = config.checked()
    why = None
    if not isinstance(transformer, CacheMixin):
        why = "has no cache in this version of diffusers"
    elif config.name == "first_block":
        lists = [getattr(transformer, name, ()) for name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS]
        blocks = [block for blocks in lists for block in blocks]
        try:
            for block in blocks:
                TransformerBlockRegistry.get(type(block))
        except ValueError:
            why = "has blocks that this cache does not know"
        if len(blocks) < 2:
            why = f"has {len(blocks)} block(s) that this cache knows, and needs two"
    else:
        # By names of modules: where none matches, diffusers takes the cache and nothing is ever reused.
        transformer.enable_cache(cache)
        modules: Any = transformer.modules()  # pyright: ignore[reportAttributeAccessIssue]  (of a mix-in)
        hooks = [getattr(module, "_diffusers_hook", None) for module in modules]
        if all(hook is None or hook.get_hook(_TAYLORSEER_CACHE_HOOK) is None for hook in hooks):
            why = "has no module of the names that it caches; give them as options.cache_identifiers"
        _disable(transformer)
    if why is not None:
        whose = f"the transformer {type(transformer).__name__}"
        raise ValueError(f"{config.section}.name: got {config.name}, but {whose} {why}; or set it to null")


def _disable(transformer: Any) -> None:
    transformer.disable_cache()
    # Else diffusers goes on with the hooks of this cache, also if the next one is of another kind.
    if (hook := getattr(transformer, "_diffusers_hook", None)) is not None:
        hook._child_registries_cache = None


class StepCache:
    """The cache of a rollout; a context that leaves the transformer as it was.

    The transformer has the methods of diffusers' ``CacheMixin``.
    """

    def __init__(self, transformer: Any, config: CacheConfig | None) -> None:
        self._transformer = transformer
        self._config = None if config is None or config.name is None else config
        self._inside: bool | None = None
        self.used: str | None = None
        """The cache that was on, and where; ``None`` before and without one."""

    def __enter__(self) -> StepCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.restart()

    def restart(self) -> None:
        """Remove the cache, with all that it holds."""
        self._inside = None
        if self._config is not None and self._transformer.is_cache_enabled:
            _disable(self._transformer)

    def begin(self, *, inside: bool) -> None:
        """Before each step: an empty cache where the window begins or ends, and none in it unless it is to be."""
        if self._config is None or inside == self._inside:
            return
        self.restart()
        self._inside = inside
        if not inside or self._config.in_window:
            self._transformer.enable_cache(self._config.checked())
            self.used = self._config.described
