"""With its folder in PYTHONPATH, Python starts on a processor that seems to have AMX tiles and AVX512's bfloat16."""

import torch

torch.cpu._is_amx_tile_supported = lambda: True
torch.cpu._is_avx512_bf16_supported = lambda: True
