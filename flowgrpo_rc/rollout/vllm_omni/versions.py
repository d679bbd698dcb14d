"""Versions of vllm-omni and its companions that this package works with."""

from importlib.metadata import PackageNotFoundError, version

WORKING_SET = "vllm 0.30.*, vllm-omni 0.30.*, diffusers 0.40.*"
_SERIES = {"vllm": "0.30", "vllm-omni": "0.30", "diffusers": "0.40"}


def check_versions() -> None:
    """Refuse other versions than the working set, without importing the packages.

    Raises:
        ImportError: a package is missing or of another series; names the working set.
    """
    wrong = []
    for package, series in _SERIES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            wrong.append(f"{package} is not installed")
            continue
        # Patch releases and local builds keep the internals that this package uses.
        if found.split("+")[0].split(".")[:2] != series.split("."):
            wrong.append(f"{package} is {found}")
    if wrong:
        raise ImportError(
            f"actor_rollout_ref.rollout.name=vllm_omni works with {WORKING_SET}; {', '.join(wrong)}. "
            "Without a GPU: scripts/install_vllm_omni_cpu.sh; with one, in a checkout: pip install vllm==0.30.0 "
            "'.[vllm-omni]'"
        )
