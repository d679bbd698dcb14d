"""What a checkpoint must have in common with the run that goes on: what shapes its samples and what judges them."""

import inspect
import json
from typing import Any

import torch

from flowgrpo_rc.models import DiffusionModel
from flowgrpo_rc.models.digests import spread, values_digest
from flowgrpo_rc.models.lora import base_parameters
from flowgrpo_rc.models.sharding import whole
from flowgrpo_rc.rewards import RewardMix
from flowgrpo_rc.trainer.config import FlowGRPOConfig

_SCALES = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
"""How a VAE's configuration names what latents are multiplied by and shifted by."""


def fingerprint(
    config: FlowGRPOConfig, model: DiffusionModel, reward: RewardMix | None = None, references: str = ""
) -> dict[str, Any]:
    """The fingerprint of a loaded model and of the adapter that the configuration gives it, as JSON gives it back.

    ``pipeline`` is the class of the pipeline; ``transformer`` has its settings and a digest of the first values of some
    of its frozen weights; ``lora`` rank, alpha and target modules of the adapter; ``parts`` what else shapes the
    samples: text encoders, vocabularies, VAE and schedule; ``rewards`` a digest of each scorer's network; and
    ``references`` that of the training prompts' images. Of a sharded transformer every process must ask.
    """
    lora = config.actor_rollout_ref.model
    transformer = _settings(model.pipe.transformer)
    frozen = _frozen(model.transformer)
    # Copies, for what a sharded transformer gathers must not be kept.
    samples = [whole(p).flatten()[:256].clone() for p in frozen[:: max(1, len(frozen) // 16)]]
    transformer["weights"] = values_digest(samples)
    targets = list(model.default_lora_targets) if lora.target_modules is None else lora.target_modules
    found = {
        "pipeline": type(model.pipe).__name__,
        "transformer": transformer,
        "lora": {"rank": lora.lora_rank, "alpha": lora.lora_alpha, "target_modules": targets},
        "parts": _parts(model),
        "rewards": {} if reward is None else _rewards(reward),
        "references": references,
    }
    return json.loads(json.dumps(found, default=str))  # tuples become lists, as in a checkpoint


def _parts(model: DiffusionModel) -> dict[str, Any]:
    """A digest of each network (values spread evenly over every weight) and vocabulary, and the numbers of schedule
    and VAE. Text encoders, which a run may never load, are known by their files."""
    found: dict[str, Any] = dict(model.digests)
    for name, part in model.pipe.components.items():
        if isinstance(part, torch.nn.Module) and name not in found:
            found[name] = values_digest([spread(whole(p)) for p in _frozen(part)])
        elif name == "scheduler" and part is not None:
            found |= {f"{name} {k}": v for k, v in _settings(part).items()}
    vae = dict(model.pipe.vae.config)
    return found | {f"vae {name}": vae[name] for name in _SCALES if name in vae}


def _rewards(reward: RewardMix) -> dict[str, str]:
    return {name: values_digest([spread(w).cpu() for w in weights]) for name, weights in reward.networks().items()}


def _settings(part: Any) -> dict[str, Any]:
    """What a part's class takes of its configuration file, which may hold keys that act on nothing."""
    taken = inspect.signature(type(part).__init__).parameters
    return {k: v for k, v in dict(part.config).items() if k in taken}


def _frozen(network: torch.nn.Module) -> list[torch.Tensor]:
    """The base's parameters, without an adapter's."""
    return [parameter.detach() for parameter in base_parameters(network).values()]
