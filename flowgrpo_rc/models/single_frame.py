"""Run a video VAE's causal 3-D convolutions as 2-D ones when there is one frame.

Qwen-Image decodes images with a video VAE. A causal convolution pads the past with zeros, so over a single frame
only the last time slice of its kernel acts: a 2-D convolution gives the same numbers for a third of the multiplies.
"""

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def use_2d_convolutions_for_one_frame(vae: nn.Module) -> None:
    """Let this VAE's causal convolutions take the short way for one frame.

    Parameters stay where they are, so saving and loading are unaffected; several frames, or a cache of earlier
    ones, run as before. Outputs agree to rounding.
    """
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d) and module.stride == (1, 1, 1):
            module.forward = MethodType(_forward, module)


def _forward(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    if x.shape[2] != 1 or cache_x is not None:
        return type(self).forward(self, x, cache_x)
    left, _, top, _, _, _ = self._padding
    return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, padding=(top, left)).unsqueeze(2)
