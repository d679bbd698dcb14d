"""Settings of engines elsewhere and ahead: the ones that fit are taken, the others refused by name."""

import pytest
from tests_support import overrides_of

from flowgrpo_rc.cli.compose import compose

R = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{R}.ahead=-1",), f"{R}.ahead: got -1; give 0 or more"),
        (
            (f"{R}.ahead=3", f"{R}.max_staleness=2"),
            f"{R}.ahead: got 3, .*{R}.max_staleness=2 bounds that, so lower ahead or raise it",
        ),
        ((f"{R}.adapter_lag=1", f"{R}.max_staleness=0"), f"{R}.adapter_lag: got 1, .*max_staleness=0 bounds that"),
        ((f"{R}.placement=cloud",), f"{R}.placement: got 'cloud'; choose one of trainer, process, ray"),
        ((f"{R}.devices=[cuda:1]",), f"{R}.devices: got .* with placement=trainer; .*set {R}.placement=process"),
        ((f"{R}.placement=process", f"{R}.devices=[]"), f"{R}.devices: got \\[\\]; name a device"),
        ((f"{R}.placement=process", f"{R}.devices=[gpu1]"), f"{R}.devices: got 'gpu1'; a device is cpu or"),
        ((f"{R}.placement=process", f"{R}.devices=[cuda:1,cuda:1]"), f"{R}.devices: names cuda:1 twice"),
        (
            (f"{R}.placement=process", f"{R}.devices=[cuda:1+cuda:2]"),
            f"{R}.devices: got cuda:1\\+cuda:2; the diffusers engine computes on one device",
        ),
        ((f"{R}.engines=2",), f"{R}.engines: got 2 with placement=trainer; only Ray finds places"),
        ((f"{R}.ray.num_gpus=1.5",), f"{R}.ray.num_gpus: got 1.5; .*give a number up to 1 or a whole one"),
        ((f"{R}.process.silence_timeout_s=1",), f"{R}.process.silence_timeout_s: got 1.0; .*at least 3"),
        ((f"{R}.quantization=int4",), f"{R}.quantization: got 'int4'; choose one of fp8"),
        ((f"{R}.name=vllm_omni", f"{R}.merge_adapter=true"), f"{R}.merge_adapter: got true with name=vllm_omni"),
        ((f"{R}.quantization_skip=[attn]",), f"{R}.quantization_skip: got .*attn.* without a quantization"),
        (
            (f"{R}.torch_compile=true", f"{R}.cache.name=first_block"),
            f"{R}.torch_compile: got true with cache.name=first_block",
        ),
        ((f"{R}.calculate_log_probs=false",), f"{R}.calculate_log_probs: got False; .*so leave it true"),
        ((f"{R}.ray.address=ray://node0:1",), f"{R}.ray.address: got 'ray://node0:1', .*ray start --address=HEAD:6379"),
        (
            (f"{R}.placement=ray", f"{R}.ray.num_gpus=2"),
            f"{R}.ray.num_gpus: got 2; the diffusers engine computes on one device",
        ),
        (
            (f"{R}.name=vllm_omni", f"{R}.placement=process", f"{R}.vllm_omni.sync_timeout_s=50"),
            f"{R}.vllm_omni.sync_timeout_s: got 50; .*goes by {R}.process.sync_timeout_s, so set that",
        ),
        (
            (f"{R}.name=vllm_omni", f"{R}.process.start_timeout_s=50"),
            f"{R}.process.start_timeout_s: got 50; .*placement=trainer.*goes by {R}.vllm_omni.start_timeout_s",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(overrides, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        compose("tiny_qwen_image_ocr", [*overrides_of(tmp_path / "run"), *overrides])


def test_time_outs_are_taken_where_they_hold_and_several_devices_by_vllm_omni(tmp_path):
    """On Ray both sections do; where one does not, it may say what holds."""
    both = (f"{R}.vllm_omni.sync_timeout_s=50", f"{R}.process.sync_timeout_s=50")
    for settings in (
        (f"{R}.name=vllm_omni", f"{R}.placement=ray", f"{R}.vllm_omni.sync_timeout_s=50", f"{R}.ray.num_gpus=0"),
        (f"{R}.name=vllm_omni", *both),
        (f"{R}.name=vllm_omni", f"{R}.placement=process", *both),
        (f"{R}.process.sync_timeout_s=50",),
        (f"{R}.name=vllm_omni", f"{R}.placement=process", f"{R}.devices=[cuda:1+cuda:2,cuda:3+cuda:4]"),
    ):
        compose("tiny_qwen_image_ocr", [*overrides_of(tmp_path / "run"), *settings])
