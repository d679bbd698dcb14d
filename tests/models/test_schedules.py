"""Noise levels and timesteps of every family are those of its own pipeline, whatever scheduler the checkpoint names."""

from pkgutil import resolve_name

import diffusers
import pytest
import torch
from tiny_families import TINY, wan
from tiny_families.references import pictures
from torch.testing import assert_close

from flowgrpo_rc.models.base import UnsupportedSchedulerError
from flowgrpo_rc.models.registry import FAMILIES
from flowgrpo_rc.models.wan import Wan

STEPS = 4
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
EULER = diffusers.FlowMatchEulerDiscreteScheduler
UNIPC = diffusers.UniPCMultistepScheduler
DPM = diffusers.DPMSolverMultistepScheduler

SCHEDULERS = {
    "shift": lambda: EULER(shift=3.0),
    "dynamic": lambda: EULER(use_dynamic_shifting=True, base_shift=0.3, max_shift=0.9),
    "dynamic_linear": lambda: EULER(use_dynamic_shifting=True, time_shift_type="linear"),
    "shift_terminal": lambda: EULER(shift=3.0, shift_terminal=0.1),
    "karras": lambda: EULER(shift=3.0, use_karras_sigmas=True),
    "exponential": lambda: EULER(shift=3.0, use_exponential_sigmas=True),
    "unipc": lambda: UNIPC(flow_shift=3.0, **FLOW),
    "unipc_dynamic": lambda: UNIPC(use_dynamic_shifting=True, shift_terminal=0.1, **FLOW),
    "unipc_karras": lambda: UNIPC(use_karras_sigmas=True, **FLOW),
    "dpm": lambda: DPM(flow_shift=3.0, **FLOW),
    "dpm_dynamic": lambda: DPM(use_dynamic_shifting=True, **FLOW),
    "dpm_sde": lambda: DPM(flow_shift=5.0, algorithm_type="sde-dpmsolver++", **FLOW),
}
NOT_A_FLOW = {
    "invert_sigmas": lambda: EULER(invert_sigmas=True),
    "final_sigmas_type": lambda: UNIPC(final_sigmas_type="sigma_min", **FLOW),
    "use_exponential_sigmas": lambda: UNIPC(use_exponential_sigmas=True, **FLOW),
    "use_karras_sigmas": lambda: DPM(use_karras_sigmas=True, **FLOW),
    "use_lu_lambdas": lambda: DPM(use_lu_lambdas=True, **FLOW),
}
"""By the setting that the refusal must name."""
OTHER_STEPS = {
    "stochastic": lambda: EULER(stochastic_sampling=True),
    "no flow": lambda: UNIPC(prediction_type="flow_prediction"),
    "noise": lambda: UNIPC(use_flow_sigmas=True, prediction_type="epsilon"),
    "another": lambda: diffusers.DDIMScheduler(),
}


REFUSED = (ValueError, TypeError, AssertionError)
"""Errors of diffusers' schedulers for arguments that they do not take."""


class Stop(Exception):
    """Ends the pipeline's call after its first step."""


def pipelines_schedule(name, pipe, size):
    """Timesteps and noise levels that the pipeline itself draws an image with."""
    family = TINY[name]

    def stop(*_):
        raise Stop

    references = {"images": pictures(family.images, 1)[0], "size": size} if family.images else {}
    arguments = family.call(["x"], ["y"], *family.guidances[0], family.length, **references)
    with family.during_call(), pytest.raises(Stop):
        pipe(
            **arguments,
            height=size[0],
            width=size[1],
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=stop,
        )
    return pipe.scheduler.timesteps.float(), pipe.scheduler.sigmas.float()


@pytest.mark.parametrize("name", TINY)
def test_levels_equal_the_pipelines(name):
    """For every scheduler that the pipeline can draw with."""
    TINY[name].before_loading()
    pipe = TINY[name].build()
    pipe.set_progress_bar_config(disable=True)
    model = resolve_name(FAMILIES[type(pipe).__name__].adapter)(pipe)
    drawn = set()
    for kind, scheduler in {"released": lambda: pipe.scheduler, **SCHEDULERS}.items():
        pipe.scheduler = scheduler()
        size = TINY[name].sizes[-1]
        try:
            timesteps, sigmas = pipelines_schedule(name, pipe, size)
        except REFUSED:
            # The pipeline gives this scheduler no shift, or levels that it does not take.
            with pytest.raises(REFUSED):
                model.schedule(STEPS, *size)
            continue
        ours = model.schedule(STEPS, *size)
        assert_close(ours.timesteps, timesteps, rtol=0, atol=0)
        assert_close(ours.sigmas, sigmas, rtol=0, atol=0)
        # Some schedulers round to whole timesteps.
        assert_close(model.timesteps_of(ours.sigmas[:-1]), ours.timesteps, rtol=1e-6, atol=1.0)
        if kind == "unipc_karras" and sigmas[0] < sigmas[1]:
            # diffusers reverses the levels that the pipeline passes.
            with pytest.raises(ValueError, match="do not fall from at most 1 to 0: .*use_karras_sigmas=True"):
                model.check_schedule()
            continue
        model.check_schedule()
        drawn.add(kind)
    assert drawn >= {"released", "shift", "karras"}
    assert ("unipc" in drawn) == (name not in ("cogview4", "z_image"))  # their pipelines pass levels that it refuses
    if name.startswith(("wan", "sana", "stable")):
        assert drawn >= {"dpm", "dpm_sde"}


def test_the_solvers_own_levels():
    """Shift 3 at four steps, by hand: ``3 s / (1 + 2 s)`` of levels that fall evenly from 1 to .001 in four steps."""
    model = Wan(wan.build())
    levels = torch.tensor([1.0, 0.9001, 0.7504, 0.5010, 0.0])
    assert_close(model.schedule(4, 32, 32).sigmas, levels, rtol=0, atol=1e-4)


@pytest.mark.parametrize("setting", NOT_A_FLOW)
def test_levels_that_no_flow_has_are_refused_by_name(setting):
    pipe = wan.build()
    pipe.scheduler = NOT_A_FLOW[setting]()
    with pytest.raises(ValueError, match=f"do not fall from at most 1 to 0: .*{setting}="):
        Wan(pipe).check_schedule()


@pytest.mark.parametrize("kind", OTHER_STEPS)
def test_a_scheduler_of_other_steps_is_refused(kind):
    pipe = wan.build()
    pipe.scheduler = OTHER_STEPS[kind]()
    with pytest.raises(UnsupportedSchedulerError, match="its scheduler is a .*; a policy is made of"):
        Wan(pipe).schedule(4, 32, 32)
