"""GPUs: their number, memory and compute. Needs no torch."""

import re
from dataclasses import dataclass

GIB = 2**30
# CUDA's context, kernels and allocator in the process of an engine.
ENGINE_RUNTIME = 1 * GIB
# Share of a device's peak that large transformers reach in training; an assumption, stated wherever times are.
UTILISATION = 0.4


@dataclass(frozen=True)
class Device:
    """A GPU's peak, dense, in FLOP/s, from its vendor's data sheet."""

    bfloat16: float
    float32: float  # Without TF32, which torch leaves off by default

    def peak(self, dtype: str) -> float:
        """Peak in a precision by its name in ``dtypes.DTYPES``; float16 is as fast as bfloat16."""
        return self.float32 if dtype == "float32" else self.bfloat16


# Part of a device's name, as torch.cuda.get_device_name gives it -> its peak. The first that matches counts.
DEVICES = {
    "B200": Device(2250e12, 75e12),
    "H200": Device(989e12, 67e12),
    "H100 PCIe": Device(756e12, 51e12),
    "H100": Device(989e12, 67e12),
    "A100": Device(312e12, 19.5e12),
    "L40S": Device(362e12, 91.6e12),
    "L40": Device(181e12, 90.5e12),
    "L4": Device(121e12, 30.3e12),
    "A40": Device(150e12, 37.4e12),
    "A10": Device(125e12, 31.2e12),
    "RTX 6000 Ada": Device(364e12, 91.1e12),
    "RTX A6000": Device(155e12, 38.7e12),
    "RTX 5090": Device(210e12, 104.8e12),
    "RTX 4090": Device(165e12, 82.6e12),
    "RTX 3090": Device(71e12, 35.6e12),
}
# Gigabytes -> the device assumed for times if only the memory is known; between two, the smaller one.
DEVICE_OF_SIZE = {24: "RTX 4090", 48: "L40S", 80: "H100", 141: "H200"}
# The GPUs that a plan without a list tries.
TRIED = [(count, size) for size in DEVICE_OF_SIZE for count in (1, 2, 4, 8)]


@dataclass(frozen=True)
class Gpus:
    """GPUs of one size on one machine."""

    count: int
    gigabytes: float

    @property
    def bytes(self) -> int:
        """Memory of each; a GPU sold with 80 GB has about 80 GiB."""
        return round(self.gigabytes * GIB)

    @property
    def device(self) -> str:
        """The device assumed for times."""
        return DEVICE_OF_SIZE[max([size for size in DEVICE_OF_SIZE if size <= self.gigabytes], default=24)]

    def __str__(self) -> str:
        return f"{self.count} x {self.gigabytes:g} GB"


def read_gpus(text: str) -> list[Gpus]:
    """``4x80`` is four GPUs of 80 GB; several are separated by commas.

    Raises:
        ValueError: anything else.
    """
    matches = [
        re.fullmatch(r"\s*(\d{1,6})\s*[xX*]\s*(\d{1,6}(?:\.\d+)?)\s*(?:GB)?\s*", part) for part in text.split(",")
    ]
    gpus = [Gpus(int(match[1]), float(match[2])) for match in matches if match]
    if len(gpus) < len(matches) or not all(one.count and one.gigabytes for one in gpus):
        raise ValueError(f"--gpus: got {text!r:.80}; give how many of how many GB, e.g. 4x80, or 4x80,8x24 for several")
    return gpus


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device by its name in ``torch.cuda.get_device_name``; None if it is not listed."""
    return next((device.peak(dtype) for name, device in DEVICES.items() if name in device_name), None)
