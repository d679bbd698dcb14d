"""What ``--gpus`` takes, and the peaks of devices."""

import pytest

from flowgrpo_rc.planner.machines import Gpus, peak_flops, read_gpus


def test_lists_of_gpus():
    assert read_gpus("4x80") == [Gpus(4, 80)]
    assert read_gpus("4x80, 8X24,1*141GB") == [Gpus(4, 80), Gpus(8, 24), Gpus(1, 141)]
    assert read_gpus("1x79.6")[0].bytes == round(79.6 * 2**30)
    assert str(Gpus(4, 80)) == "4 x 80 GB"


@pytest.mark.parametrize(
    "text",
    ["", "80", "4x", "x80", "0x80", "4x0", "4x0.0", "-4x80", "4x-80", "4x80,", "fourx80", "4x80x2", "nan", "1e3x80"],
)
def test_what_is_no_list_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="--gpus: got .*; give how many of how many GB, e.g. 4x80"):
        read_gpus(text)


def test_peaks_by_the_names_that_torch_gives():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA L40S", "float16") == peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA L4", "bfloat16") == 121e12
    assert peak_flops("NVIDIA RTX 6000 Ada Generation", "bfloat16") == 364e12
    assert peak_flops("NVIDIA GeForce RTX 4090", "bfloat16") == 165e12
    assert peak_flops("AMD Instinct MI300X", "bfloat16") is None
