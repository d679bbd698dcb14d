"""The configuration of the actor: objective, optimizer and rollout correction. Importing this loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from flowgrpo_rc.checks import show
from flowgrpo_rc.correction.options.config import RolloutCorrectionConfig
from flowgrpo_rc.field_docs import documented_fields
from flowgrpo_rc.loss.aggregation import AGGREGATIONS
from flowgrpo_rc.loss.objectives import ADV_MODES, AWM_POWERS, DEFAULT, OBJECTIVES, Objective
from flowgrpo_rc.models.config import FSDPConfig
from flowgrpo_rc.section import (
    Check,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problems,
    Read,
    Section,
    one_of,
)

OPTIMIZERS = ("adamw", "adamw_8bit")
LR_SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine")
"""Learning-rate schedules, by their names in ``diffusers.optimization``."""
Betas = Annotated[
    list[float],
    Check(lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "give two numbers in [0, 1)"),
]


@documented_fields
@dataclass(kw_only=True, slots=True)
class DiffusionLossConfig(Section):
    """The section ``actor.diffusion_loss``."""

    section = "actor_rollout_ref.actor.diffusion_loss"

    loss_mode: Annotated[str, one_of(OBJECTIVES)] = DEFAULT
    """The objective, one of ``loss.objectives.OBJECTIVES``. ``flow_grpo`` clips the ratio as PPO does; ``dance_grpo``
    is the same for rollouts with ``sde_type=dance_sde``; ``grpo_guard`` first takes the timestep's bias and scale out
    of the ratio; ``flow_dppo`` has a KL trust region instead of a clip band. The others learn from noised clean images
    (``actor.clean``) and need no log-probs of the engine: ``awm`` clips the ratio of matching errors,
    ``diffusion_nft`` weighs an implicit positive and an implicit negative policy, ``dpo`` compares the best and the
    worst image of each prompt."""
    clip_ratio: PositiveFloat | Annotated[str, Check(lambda word: word == "auto", "give a number or auto")] = 1e-4
    """Half width of the clip band, the range around 1 in which ``pi_theta/pi_old`` earns a gradient. Log-probs are
    means over the latent dimensions, so ratios move by 1e-5 to 1e-2. In bypass mode the clip band must be at least four
    times as wide as the mean off-policy gap. With ``auto``, in bypass mode alone, its half width at each timestep is
    three times the 90 % quantile of the gap that rescoring measures there, within ``auto_clip_min`` and
    ``auto_clip_max``."""
    auto_clip_min: PositiveFloat = 1e-4
    """Least half width of the clip band with ``clip_ratio=auto``."""
    auto_clip_max: PositiveFloat = 1e-2
    """Largest half width of the clip band with ``clip_ratio=auto``."""
    clip_ratio_low: PositiveFloat | None = None
    """Half width of the clip band below 1; null takes ``clip_ratio``."""
    clip_ratio_high: PositiveFloat | None = None
    """Half width of the clip band above 1; null takes ``clip_ratio``."""
    clip_ratio_c: Annotated[float, Check(lambda bound: bound > 1, "give a number above 1")] | None = 3.0
    """The dual clip of tokens: where the advantage ``A`` is negative, the loss is at most ``-A * clip_ratio_c``. Null
    sets no such bound."""
    kl_mask_threshold: PositiveFloat = 1e-5
    """Trust region of ``flow_dppo``: the KL per latent dimension beyond which an update may not move further away."""
    adv_clip_max: PositiveFloat = 5.0
    """Advantages of images are clamped to ``+-adv_clip_max``; those of tokens are not."""
    awm_weighting: Annotated[str, one_of(AWM_POWERS)] = "none"
    """Weight of the matching error at noise level ``t``, which is the log-prob of objectives on clean images: 1
    (``none``), ``t`` or ``t^2`` (``t2``)."""
    mix_beta: PositiveFloat = 0.5
    """``diffusion_nft``: share ``b`` of the current velocity in the implicit policies."""
    adaptive_weight_min: PositiveFloat = 1e-5
    """``diffusion_nft``: least value of the mean error that each loss is divided by."""
    adv_mode: Annotated[str, one_of(ADV_MODES)] = "continuous"
    """``diffusion_nft``: the advantage that makes an image's share of the positive policy. ``continuous`` takes it as
    it is, ``positive_only`` and ``negative_only`` its part of that sign, ``one_only`` 1 above 0 and else 0, ``binary``
    its sign."""
    ref_kl_coef: NonNegativeFloat = 0.0
    """Objectives on clean images: weight of the velocity KL to the reference of ``kl_reference``, under verl-omni's
    name; ``use_kl_loss`` with ``kl_loss_type=velocity`` is the same."""
    dpo_beta: PositiveFloat = 2000.0
    """``dpo``: weight ``beta`` of the difference of matching errors."""
    loss_agg_mode: Annotated[str, one_of(AGGREGATIONS)] = "token-mean"
    """Aggregation of the losses of tokens, one of ``loss.aggregation.AGGREGATIONS``: ``token-mean`` is the mean over
    all kept tokens; the others are means over the sequences with a kept token, of their tokens' sum
    (``seq-mean-token-sum``), mean (``seq-mean-token-mean``) or sum divided by ``loss_scale_factor``
    (``seq-mean-token-sum-norm``)."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of ``seq-mean-token-sum-norm``; null takes ``T``, the padded length."""

    def problems(self) -> Iterator[str]:
        """Combinations of fields that cannot work."""
        if self.clip_ratio == "auto" and self.has_sides:
            yield "clip_ratio: got auto with clip_ratio_low or clip_ratio_high; give numbers, or only auto"
        elif self.clip_ratio == "auto" and not self.objective.clips_plain_ratio:
            yield (
                f"clip_ratio: got auto with loss_mode={self.loss_mode}, whose ratio has another scale; give a number"
            )
        if self.auto_clip_max < self.auto_clip_min:
            yield f"auto_clip_max: got {self.auto_clip_max}; give at least auto_clip_min={self.auto_clip_min}"

    @property
    def objective(self) -> Objective:
        """The record of ``loss_mode``: what the objective needs, what it limits and how."""
        return OBJECTIVES[self.loss_mode]

    @property
    def has_sides(self) -> bool:
        """True if one side of the clip band has a width of its own."""
        return self.clip_ratio_low is not None or self.clip_ratio_high is not None

    @property
    def takes_auto(self) -> bool:
        """True if the objective and its sides allow ``clip_ratio=auto``."""
        return self.objective.clips_plain_ratio and not self.has_sides


@documented_fields
@dataclass(kw_only=True, slots=True)
class CleanImagesConfig(Section):
    """The section ``actor.clean``: the places at which objectives on clean images noise an image anew."""

    section = "actor_rollout_ref.actor.clean"

    places: PositiveInt = 2
    """Places ``K`` of an image; each is a noise level and a noise of its own, and a forward and backward pass."""
    distribution: Annotated[str, one_of(("uniform", "logit_normal", "schedule", "steps"))] = "uniform"
    """Distribution of the noise levels: ``uniform``; ``logit_normal``, more in the middle; ``schedule``, as the model's
    own sampling schedule spaces them. It is cut into ``K`` equally likely parts, one for each place. ``steps`` takes
    the levels of ``K`` steps of the rollout, each at most once."""
    range: Annotated[
        list[float],
        Check(lambda ends: len(ends) == 2 and 0 <= ends[0] < ends[1] <= 1, "give two rising numbers from 0 to 1"),
    ] = field(default_factory=lambda: [0.0, 1.0])
    """Lowest and highest noise level; 0 is a clean image, 1 pure noise."""
    shared_noise: bool = True
    """The images of a prompt get the same levels and noises, so that their errors differ by the images alone."""

    def problems(self) -> Iterator[str]:
        """A range that has no effect."""
        if self.distribution == "steps" and self.range != [0.0, 1.0]:
            yield f"range: got {self.range} with distribution=steps, which takes all of the rollout's; leave it out"


@documented_fields
@dataclass(kw_only=True, slots=True)
class OptimizerConfig(Section):
    """The section ``actor.optim``: AdamW on the LoRA weights."""

    section = "actor_rollout_ref.actor.optim"

    name: Annotated[str, one_of(OPTIMIZERS)] = "adamw"
    """``adamw``; or ``adamw_8bit``, whose moments of matrices of 4,096 numbers and more take 8 bits each, with a scale
    for 256 of them (bitsandbytes; arXiv 2110.02861)."""
    lr: PositiveFloat = 1e-4
    """Learning rate."""
    betas: Betas = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    lr_scheduler_type: Annotated[str, one_of(LR_SCHEDULERS)] = "constant"
    """Schedule over the run's optimizer steps; one of ``LR_SCHEDULERS``."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly; the schedule ``constant`` has none."""
    lr_warmup_steps_ratio: Annotated[
        float, Check(lambda share: 0 <= share <= 1, "give a share of the run, from 0 to 1")
    ] = 0.0
    """The warm-up as a share of the run's optimizer steps, rounded down; it counts where ``lr_warmup_steps`` is 0."""

    def problems(self) -> Iterator[str]:
        """A warm-up that the schedule does not have."""
        for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
            steps = getattr(self, name)
            if steps and self.lr_scheduler_type == "constant":
                yield (
                    f"{name}: got {steps}, but lr_scheduler_type=constant has no warm-up; set it to "
                    "constant_with_warmup"
                )

    def warm_up(self, total_steps: int) -> int:
        """Optimizer steps of warm-up in a run of ``total_steps``."""
        return self.lr_warmup_steps or int(self.lr_warmup_steps_ratio * total_steps)


def read_correction(value: Any) -> Any:
    """The value of a field ``rollout_correction`` as a ``RolloutCorrectionConfig``. A reference such as
    ``${algorithm.rollout_correction}`` stays, for the configuration tree to resolve."""
    if isinstance(value, str) and value.startswith("${"):
        return value
    if not isinstance(value, Mapping | RolloutCorrectionConfig | None):
        raise ValueError(f"got {show(value)}; give its keys, e.g. {{rollout_is: sequence}}, or null")
    try:
        return RolloutCorrectionConfig.from_dict(value)
    except (TypeError, ValueError) as error:
        # The correction's class does not know its section, and begins with the key only in some messages.
        message = str(error)
        key = re.split(r"\W", message, maxsplit=1)[0]
        if isinstance(value, Mapping) and key in value:
            raise Problems([message]) from error
        raise ValueError(message) from error


@documented_fields
@dataclass(kw_only=True, slots=True)
class DiffusionActorConfig(Section):
    """The section ``actor_rollout_ref.actor``."""

    section = "actor_rollout_ref.actor"

    ppo_mini_batch_size: PositiveInt = 8
    """Prompts per optimizer step, over all processes; each brings ``rollout.n`` images."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 16
    """Images per forward and backward pass on one process; each brings its whole SDE window."""
    ppo_micro_batch_rows: PositiveInt | None = None
    """Rows per forward and backward pass on one process, at most; a row is one SDE step of one image. It takes the
    place of ``ppo_micro_batch_size_per_gpu`` and may cut the window of an image, so that 1 needs the least memory; the
    result does not depend on it. If the correction decides by an image's whole window (``rollout_is=sequence``,
    criteria ``seq_...``, a veto), whole windows go together if they fit into that many rows. Otherwise a scoring pass
    without gradients comes before each update whose log-probs are not known yet. Null counts images."""
    ppo_epochs: PositiveInt = 1
    """Passes over one batch of rollouts."""
    score: Annotated[str, one_of(("auto", "always"))] = "auto"
    """Scoring pass of decoupled mode. ``auto`` skips the first mini-batch: until the first optimizer step of a batch
    the current policy is the old one, so the update's own first forward pass supplies its log-probs. ``always`` scores
    everything."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of the gradient of all LoRA weights."""
    ema_decay: Annotated[float, Check(lambda decay: 0 < decay < 1, "give a number between 0 and 1")] | None = None
    """Keep a moving average of the LoRA weights: ``d * average + (1 - d) * weights`` after every optimizer step, with
    ``d = min(ema_decay, (1 + k) / (10 + k))`` for step ``k`` (counted from 0, where ``d`` is 0). Validation samples
    with it, and the run folder gets it as ``lora_ema/``; null: none."""
    use_kl_loss: bool = False
    """Add ``kl_loss_coef`` times the distance ``kl_loss_type`` to the reference ``kl_reference``. It takes a second
    forward pass, without gradients."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: Annotated[str, one_of(("gaussian", "velocity"))] = "gaussian"
    """Distance to the reference at a step: ``gaussian``, the exact KL of the two transitions per latent dimension, or
    ``velocity``, the mean squared difference of the two velocities, which weighs all noise levels alike. With guidance
    both are of the guided velocity. Tokens have the k3 estimate in either case."""
    kl_reference: Annotated[str, one_of(("base", "start", "average"))] = "base"
    """The reference: ``base``, the model with its adapter switched off; ``start``, the adapter that training started
    from, which is ``model.lora_adapter_path`` or a fresh one that equals the base; ``average``, the moving average of
    ``ema_decay`` as it is before the optimizer step."""
    detach_unconditional: bool = False
    """Leave the unconditional half of a guided velocity out of the gradient and compute it without a graph: about a
    quarter less work in an update and half its activations. This is flow_grpo's gradient, ``true_cfg_scale`` times the
    conditional half's, and not the log-prob's own."""
    diffusion_loss: DiffusionLossConfig = field(default_factory=DiffusionLossConfig)
    """The objective and its limits; a mapping of the section's keys will do."""
    clean: CleanImagesConfig = field(default_factory=CleanImagesConfig)
    """The places of objectives on clean images; a mapping of the section's keys will do."""
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its learning-rate schedule; a mapping of the section's keys will do."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Division of the frozen weights over processes; a mapping of the section's keys will do."""
    rollout_correction: Annotated[Any, Read(read_correction)] = field(default_factory=dict)
    """A ``RolloutCorrectionConfig``, a mapping of its keys, or null (metrics only). In the trainer it is
    ``algorithm.rollout_correction``."""

    def problems(self) -> Iterator[str]:
        """KL settings without effect, and loss settings that the rollout correction rules out, and the reverse."""
        if self.kl_reference == "average" and self.ema_decay is None:
            yield "kl_reference: got average without ema_decay; set ema_decay=0.99, or kl_reference to base or start"
        for name, default in (("kl_loss_type", "gaussian"), ("kl_reference", "base")):
            value = getattr(self, name)
            if value != default and not (self.needs_reference if name == "kl_reference" else self.use_kl_loss):
                yield f"{name}: got {value} with use_kl_loss=false, which computes no KL; set use_kl_loss=true"
        if self.diffusion_loss.objective.clean:
            yield from self._clean_problems()
        elif self.diffusion_loss.ref_kl_coef:
            yield (
                f"diffusion_loss.ref_kl_coef: got {self.diffusion_loss.ref_kl_coef} with loss_mode="
                f"{self.diffusion_loss.loss_mode}, which does not read it; set it to 0, and for a KL use_kl_loss=true "
                "with kl_loss_coef"
            )
        rc = self.rollout_correction
        if isinstance(rc, str):
            return  # The configuration tree repeats the check after resolving the reference.
        loss = self.diffusion_loss
        guards = loss.objective.needs_old_means or not loss.objective.has_limit
        if rc.bypass_mode and rc.loss_type == "reinforce" and guards:
            yield (
                f"diffusion_loss.loss_mode: got {loss.loss_mode} with loss_type=reinforce, which has no ratio to "
                "guard; set loss_mode=flow_grpo or rollout_correction.loss_type=ppo_clip"
            )
        if loss.objective.clean and rc.bypass_mode:
            yield (
                f"rollout_correction.bypass_mode: got true with diffusion_loss.loss_mode={loss.loss_mode}, which needs "
                "no log-probs of the engine and gets none; set it to false"
            )
        elif loss.objective.clean and rc.plan().calibrated:
            yield (
                f"rollout_correction.rollout_rs_threshold: got auto with diffusion_loss.loss_mode={loss.loss_mode}, "
                "whose gap no probe measures; give a number"
            )
        elif loss.objective.clean and loss.clip_ratio == "auto":
            yield (
                f"diffusion_loss.clip_ratio: got auto with loss_mode={loss.loss_mode}, whose ratio has no engine's gap "
                "to follow; give a number"
            )
        elif loss.clip_ratio == "auto" and not (rc.bypass_mode and rc.loss_type == "ppo_clip"):
            yield (
                "diffusion_loss.clip_ratio: got auto, which follows the gap that bypass mode's PPO clips around; give "
                "a number, or set rollout_correction.bypass_mode=true with loss_type=ppo_clip"
            )
        # Decoupled mode normalises over the batch before it is cut.
        if rc.bypass_mode and rc.rollout_is_batch_normalize:
            yield (
                "rollout_correction.rollout_is_batch_normalize: got true with bypass_mode=true; there every "
                "micro-batch makes the weights anew, so their mean would depend on how the batch is cut. Set it to "
                "false, or bypass_mode=false"
            )

    def _clean_problems(self) -> Iterator[str]:
        """Settings that are for recorded SDE steps."""
        mode = self.diffusion_loss.loss_mode
        if self.use_kl_loss and self.diffusion_loss.ref_kl_coef:
            yield (
                f"diffusion_loss.ref_kl_coef: got {self.diffusion_loss.ref_kl_coef} with use_kl_loss=true, a second "
                "KL; set it to 0, or use_kl_loss=false"
            )
        if self.use_kl_loss and self.kl_loss_type == "gaussian":
            yield f"kl_loss_type: got gaussian with loss_mode={mode}, which has no transitions; set it to velocity"
        pair = 2 * self.clean.places
        if self.diffusion_loss.objective.paired and (self.ppo_micro_batch_rows or pair) < pair:
            yield (
                f"ppo_micro_batch_rows: got {self.ppo_micro_batch_rows} with loss_mode={mode}, which compares two "
                f"images at clean.places={self.clean.places} places each; give at least {pair}, or null"
            )
        if self.diffusion_loss.objective.paired and not self.clean.shared_noise:
            yield f"clean.shared_noise: got false with loss_mode={mode}, which compares images at the same noise"

    @property
    def needs_reference(self) -> bool:
        """True if the update runs the reference too: for a KL, or for an objective that compares with it."""
        loss = self.diffusion_loss
        return self.use_kl_loss or (loss.objective.clean and (loss.ref_kl_coef > 0 or loss.objective.needs_reference))

    def rows_per_image(self, window: int) -> int:
        """Rows of an image: the SDE steps of its ``window``, or its places for objectives on clean images."""
        return self.clean.places if self.diffusion_loss.objective.clean else window

    def micro_batch_rows(self, window: int) -> int:
        """Rows of a micro-batch where every image has ``window`` SDE steps."""
        return self.ppo_micro_batch_rows or self.ppo_micro_batch_size_per_gpu * window
