"""Loss and gradient of ``diffusion_nft`` and ``awm`` beside NVlabs' DiffusionNFT and Flow-Factory, on the same tensors.

    git clone https://github.com/NVlabs/DiffusionNFT
    git clone https://github.com/X-GenGroup/Flow-Factory
    python benchmarks/against_clean_objectives.py --diffusion-nft DiffusionNFT --flow-factory Flow-Factory \
        --out benchmarks/results/against_clean_objectives.json

The statements between their models' outputs and their losses are read from the clones and executed as they are:
``scripts/train_nft_sd3.py`` and ``src/flow_factory/trainers/awm.py``. Both include the velocity KL. Velocities, clean
latents and noise are random, in float32; each of their steps takes one noise level of every image, and this package
takes all of them at once. The difference of two gradients is that of any element, over the largest element of theirs;
the difference of two losses is over theirs where that is above 1, since advantages of both signs cancel.
"""

import argparse
import ast
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from machine import describe

from flowgrpo_rc.actor import DiffusionActorConfig, DiffusionLossConfig
from flowgrpo_rc.loss import diffusion_loss

ALIKE = 1e-5
"""Largest difference allowed."""
IMAGES, PLACES, LATENT = 8, 3, (4, 6, 6)
KL = 0.1
ADV_MODES = ("continuous", "positive_only", "negative_only", "one_only", "binary")
WEIGHTINGS = {"none": "Uniform", "t": "t", "t2": "t**2"}
"""Flow-Factory's names."""

Step = Callable[[dict[str, Any], int], torch.Tensor]
"""The loss of one place of every image."""


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Velocities of three policies some tenths apart, and the rest of a batch under this package's names."""
    torch.manual_seed(seed)
    shape = (IMAGES, PLACES, *LATENT)
    common = torch.randn(shape)
    velocities = {
        name: common + 0.3 * torch.randn(shape) for name in ("velocities", "old_velocities", "ref_velocities")
    }
    return velocities | {
        "noise": torch.randn(shape),
        "clean_latents": torch.randn(IMAGES, *LATENT),
        "sigmas": 0.05 + 0.95 * torch.rand(IMAGES, PLACES),
        "advantages": 2 * torch.randn(IMAGES),
    }


def diffusion_nft_step(clone: Path, *, b: float, mode: str, bound: float) -> Step:
    """DiffusionNFT's statements from noised latents to loss."""
    tree = ast.parse((clone / "scripts" / "train_nft_sd3.py").read_text())
    body = next(body for body in _bodies(tree) if "advantages_clip" in map(_assigned, body))
    names = [_assigned(statement) for statement in body]
    # Whatever is between these two belongs to the loss, whether it assigns or not.
    first, last = names.index("advantages_clip"), names.index("loss", names.index("policy_loss")) + 1
    while _assigned(body[last]) != "loss":
        last += 1
    noising = [statement for statement in body[:first] if _assigned(statement) in ("t_expanded", "xt")]
    code = _compiled([*noising, *body[first : last + 1]])

    def step(tensors: dict[str, Any], place: int) -> torch.Tensor:
        scope = {
            "torch": torch,
            "config": SimpleNamespace(
                beta=b, train=SimpleNamespace(adv_clip_max=bound, adv_mode=mode, beta=KL, use_lora=True)
            ),
            "train_sample_batch": {"advantages": tensors["advantages"][:, None].expand(-1, PLACES)},
            "j_idx": place,
            "loss_terms": {},
            "t": tensors["sigmas"][:, place],
            "x0": tensors["clean_latents"],
            "noise": tensors["noise"][:, place],
            "forward_prediction": tensors["velocities"][:, place],
            "old_prediction": tensors["old_velocities"][:, place],
            "ref_forward_prediction": tensors["ref_velocities"][:, place],
        }
        exec(code, scope)
        return scope["loss"]

    return step


def flow_factory_step(clone: Path, *, weighting: str, low: float, high: float, bound: float) -> Step:
    """Flow-Factory's log-prob, and its statements from log-probs to loss."""
    source = clone / "src" / "flow_factory"
    tree = ast.parse((source / "trainers" / "awm.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    schedule = ast.parse((source / "utils" / "noise_schedule.py").read_text())
    of_schedule = {node.name: node for node in schedule.body if isinstance(node, ast.FunctionDef)}
    constants = [statement for statement in schedule.body if isinstance(statement, ast.Assign)]
    log_prob = functions["compute_weighted_log_prob"]
    log_prob.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "Literal": Literal}
    exec(_compiled([*constants, of_schedule["flow_match_sigma"], log_prob]), scope)
    wanted = "adv adv_clip_range ratio_clip_range ratio unclipped_loss clipped_loss policy_loss loss kl_div kl_loss"
    assignments = [node for node in ast.walk(functions["optimize"]) if _assigned(node) in wanted.split()]
    assignments.sort(key=lambda node: node.lineno)
    # The loss of the policy, then its sum with the KL; what follows is another KL, to an average.
    last = [i for i, node in enumerate(assignments) if _assigned(node) == "loss"][1]
    code = _compiled(assignments[: last + 1])

    def step(tensors: dict[str, Any], place: int) -> torch.Tensor:
        target = (tensors["noise"] - tensors["clean_latents"][:, None])[:, place]
        log_probs = {
            name: scope["compute_weighted_log_prob"](
                tensors[name][:, place], target, 1000 * tensors["sigmas"][:, place], WEIGHTINGS[weighting]
            )
            for name in ("velocities", "old_velocities")
        }
        settings = SimpleNamespace(adv_clip_range=(-bound, bound), clip_range=(-low, high))
        own = {
            **scope,
            "self": SimpleNamespace(training_args=settings, kl_beta=KL),
            "batch": {"advantage": tensors["advantages"]},
            "log_prob": log_probs["velocities"],
            "old_log_prob": log_probs["old_velocities"],
            "noise_pred": tensors["velocities"][:, place],
            "ref_noise_pred": tensors["ref_velocities"][:, place],
        }
        exec(code, own)
        return own["loss"]

    return step


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every block of statements."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


def _assigned(node: ast.AST) -> str | None:
    """The variable that a statement assigns or adds to."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AugAssign) else None


def _compiled(statements: list[Any]) -> Any:
    return compile(ast.Module(body=statements, type_ignores=[]), "<clone>", "exec")


def compare(step: Step, config: DiffusionActorConfig, seeds: int) -> dict[str, float]:
    """Largest differences of losses and gradients over the seeds."""
    found = {"loss": 0.0, "gradient": 0.0}
    for seed in range(seeds):
        tensors = random_tensors(seed)
        theirs, ours = (tensors | {"velocities": tensors["velocities"].clone().requires_grad_()} for _ in range(2))
        loss = torch.stack([step(theirs, place) for place in range(PLACES)]).mean()
        loss.backward()
        own, _ = diffusion_loss(config, {name: ours[name] for name in ("velocities", "ref_velocities")}, ours)
        own.backward()
        apart = abs(own.item() - loss.item()) / max(abs(loss.item()), 1.0)
        a, b = ours["velocities"].grad, theirs["velocities"].grad
        found["loss"] = max(found["loss"], apart)
        found["gradient"] = max(found["gradient"], float((a - b).abs().max() / b.abs().max()))
    return found


def cases(nft: Path | None, factory: Path | None) -> Iterator[tuple[str, Step, DiffusionActorConfig]]:
    """Name, their step and this package's configuration."""
    if nft is not None:
        for mode in ADV_MODES:
            for b in (0.1, 1.0):
                own = DiffusionLossConfig(
                    loss_mode="diffusion_nft", mix_beta=b, adv_mode=mode, adv_clip_max=3.0, ref_kl_coef=KL
                )
                step = diffusion_nft_step(nft, b=b, mode=mode, bound=3.0)
                yield f"DiffusionNFT, {mode}, b={b}", step, DiffusionActorConfig(diffusion_loss=own)
    if factory is not None:
        for weighting in WEIGHTINGS:
            for low, high in ((0.02, 0.02), (0.01, 0.05)):
                own = DiffusionLossConfig(
                    loss_mode="awm",
                    awm_weighting=weighting,
                    clip_ratio_low=low,
                    clip_ratio_high=high,
                    adv_clip_max=3.0,
                    ref_kl_coef=KL,
                )
                step = flow_factory_step(factory, weighting=weighting, low=low, high=high, bound=3.0)
                yield (
                    f"Flow-Factory AWM, {weighting}, clip {low} {high}",
                    step,
                    DiffusionActorConfig(diffusion_loss=own),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--diffusion-nft", type=Path, help="a clone of NVlabs' DiffusionNFT")
    parser.add_argument("--flow-factory", type=Path, help="a clone of Flow-Factory")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a JSON file for the differences")
    given = parser.parse_args()
    clones = {"diffusion_nft": given.diffusion_nft, "flow_factory": given.flow_factory}
    if not any(clones.values()):
        parser.error("--diffusion-nft, --flow-factory: give the folder of a clone to at least one of them")
    differences = {}
    for name, step, config in cases(*clones.values()):
        differences[name] = compare(step, config, given.seeds)
        print(f"{name}: loss {differences[name]['loss']:.0e}, gradient {differences[name]['gradient']:.0e}", flush=True)
    if given.out:
        commits = {name: _commit(clone) for name, clone in clones.items() if clone is not None}
        told = {"machine": describe(), **commits, "seeds": given.seeds, "differences": differences}
        given.out.write_text(json.dumps(told, indent=1) + "\n")
    worst = max(max(one.values()) for one in differences.values())
    if not worst <= ALIKE:
        raise SystemExit(f"the largest difference is {worst:.0e}; at most {ALIKE:.0e} is rounding")


def _commit(clone: Path) -> str:
    asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
