"""HPSv2: a checkpoint of OpenCLIP under other names computes the same, and images are fitted into a black square."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_scorers
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from flowgrpo_rc.rewards import HPSv2Config
from flowgrpo_rc.rewards.clip.hpsv2 import FILES, padded_pixels, renamed
from flowgrpo_rc.rewards.clip.text_image import CLIPCosine, HPSv2

WIDTH, INNER, PROJECTION, HEADS = 32, 48, 24, 16
PATCH, SIDE, TOKENS = 8, 32, 77
ROUNDING = 64 * np.finfo(np.float32).eps
"""As in ``test_reward_clip.py``; attention is added up in another order in the reference."""
PROMPTS = ["a red fox", "two boats", "snow on a very old roof"]


def openclip_state(vocabulary: int) -> dict[str, Tensor]:
    """The tensors of OpenCLIP's ViT with two layers a tower, as its ``state_dict`` names them."""
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int, std: float = 0.3) -> Tensor:
        return std * torch.randn(shape, generator=rng)

    state = {
        "logit_scale": torch.tensor(math.log(100.0)),
        "positional_embedding": normal(TOKENS, WIDTH),
        "text_projection": normal(WIDTH, PROJECTION),
        "token_embedding.weight": normal(vocabulary, WIDTH),
        "visual.class_embedding": normal(WIDTH),
        "visual.positional_embedding": normal((SIDE // PATCH) ** 2 + 1, WIDTH),
        "visual.proj": normal(WIDTH, PROJECTION),
        "visual.conv1.weight": normal(WIDTH, 3, PATCH, PATCH, std=0.1),
    }
    norms = ["ln_final", "visual.ln_pre", "visual.ln_post"]
    for tower in ("transformer", "visual.transformer"):
        for layer in range(2):
            block = f"{tower}.resblocks.{layer}"
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
            for name, rows, columns in (
                ("attn.in_proj_", 3 * WIDTH, WIDTH),
                ("attn.out_proj.", WIDTH, WIDTH),
                ("mlp.c_fc.", INNER, WIDTH),
                ("mlp.c_proj.", WIDTH, INNER),
            ):
                state[f"{block}.{name}weight"] = normal(rows, columns)
                state[f"{block}.{name}bias"] = normal(rows)
    for norm in norms:
        state[f"{norm}.weight"] = 1 + normal(WIDTH, std=0.1)
        state[f"{norm}.bias"] = normal(WIDTH, std=0.1)
    return state


class Reference:
    """OpenCLIP's forward, from its description: pre-norm blocks, exact GELU, the text read at its last token."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}weight"].T + self.state[f"{name}bias"]

    def block(self, x: Tensor, name: str, mask: Tensor) -> Tensor:
        q, k, v = self.linear(self.norm(x, f"{name}.ln_1"), f"{name}.attn.in_proj_").split(WIDTH, dim=-1)
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v)]
        attention = (heads[0] @ heads[1].mT / math.sqrt(WIDTH // HEADS) + mask).softmax(-1) @ heads[2]
        x = x + self.linear(attention.transpose(1, 2).flatten(2), f"{name}.attn.out_proj.")
        inner = self.linear(self.norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc.")
        return x + self.linear(0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))), f"{name}.mlp.c_proj.")

    def image(self, pixels: Tensor) -> Tensor:
        x = F.conv2d(pixels, self.state["visual.conv1.weight"], stride=PATCH).flatten(2).mT
        x = torch.cat([self.state["visual.class_embedding"].expand(len(x), 1, -1), x], dim=1)
        x = self.norm(x + self.state["visual.positional_embedding"], "visual.ln_pre")
        for layer in range(2):
            x = self.block(x, f"visual.transformer.resblocks.{layer}", torch.zeros(()))
        return F.normalize(self.norm(x[:, 0], "visual.ln_post") @ self.state["visual.proj"], dim=-1)

    def text(self, tokens: Tensor) -> Tensor:
        x = self.state["token_embedding.weight"][tokens] + self.state["positional_embedding"][: tokens.shape[1]]
        mask = torch.full((tokens.shape[1], tokens.shape[1]), -math.inf).triu(1)
        for layer in range(2):
            x = self.block(x, f"transformer.resblocks.{layer}", mask)
        x = self.norm(x, "ln_final")[torch.arange(len(x)), tokens.argmax(-1)]
        return F.normalize(x @ self.state["text_projection"], dim=-1)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return openclip_state(len(tiny_scorers.tokenizer()))


@pytest.fixture(scope="module")
def checkpoint(state: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub's repository is, and the tokenizer in one of its own."""
    folder = tmp_path_factory.mktemp("hpsv2")
    torch.save({"epoch": 3, "state_dict": state}, folder / FILES["2.1"])
    tiny_scorers.tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def hpsv2(checkpoint: Path, **more: Any) -> HPSv2:
    sections = {"model_path": str(checkpoint), "processor_path": str(checkpoint / "tokenizer"), "device": "cpu"}
    return HPSv2(HPSv2Config(**sections | more))


def test_the_score_is_openclips_cosine(checkpoint: Path, state: dict[str, Tensor]) -> None:
    images = np.random.default_rng(2).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)
    scores = hpsv2(checkpoint)(images, PROMPTS)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((torch.from_numpy(images) / 255 - mean) / std).permute(0, 3, 1, 2)
    tokens = tiny_scorers.tokenizer()(PROMPTS, padding="max_length", max_length=TOKENS, return_tensors="pt")
    reference = Reference(state)
    expected = (reference.image(pixels) * reference.text(tokens["input_ids"])).sum(-1)
    assert np.ptp(scores) > 0.05
    np.testing.assert_allclose(scores, expected.numpy(), rtol=0, atol=ROUNDING)


def test_every_tensor_is_taken(checkpoint: Path, state: dict[str, Tensor]) -> None:
    """None is left over, none at random: what the network holds is what the file holds, value for value."""
    network = hpsv2(checkpoint).network
    assert sum(t.numel() for t in network.state_dict().values()) == sum(t.numel() for t in state.values())
    assert sorted(renamed(state)) == sorted(network.state_dict())
    assert not any(parameter.is_meta for parameter in (*network.parameters(), *network.buffers()))
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"visual.ln_pre.bias": None}, r"Missing key\(s\) in state_dict: \"vision_model.pre_layrnorm.bias\""),
        ({"text_projection": None}, r"it has no tensor 'text_projection'"),
        ({"visual.transformer.resblocks.0.attn.q_norm.weight": torch.ones(3)}, r"q_norm.weight' is not the name of a"),
        ({"visual.head.weight": torch.ones(3)}, r"'visual.head.weight' is not the name of a tensor of OpenCLIP"),
    ],
)
def test_a_tensor_that_is_missing_or_too_many(
    state: dict[str, Tensor], tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    changed = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
    torch.save({"state_dict": changed}, tmp_path / FILES["2.1"])
    with pytest.raises(ValueError, match=rf"reward\.hpsv2\.model_path: .*{told}") as caught:
        hpsv2(tmp_path)
    assert "\n" not in str(caught.value)


def test_which_file_is_read(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward\.hpsv2\.model_path: .*there is no .*HPS_v2_compressed.pt"):
        hpsv2(checkpoint, version="2.0")
    named = hpsv2(checkpoint, model_path=str(checkpoint / FILES["2.1"]), version="2.0")  # the file itself counts
    assert named.network.config.projection_dim == PROJECTION
    with pytest.raises(ValueError, match=r"reward\.hpsv2\.version: got '3'; choose one of 2.0, 2.1"):
        hpsv2(checkpoint, version="3")


def test_a_network_in_transformers_format_will_do(tmp_path: Path) -> None:
    """With its own tokenizer; on images of the network's size the score is then the plain cosine."""
    folder = str(tiny_scorers.clip(tmp_path / "clip"))
    images = np.random.default_rng(3).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)
    found = HPSv2(HPSv2Config(model_path=folder, device="cpu"))(images, PROMPTS[:2])
    cosine = CLIPCosine(HPSv2Config(model_path=folder, device="cpu"))(images, PROMPTS[:2])
    np.testing.assert_allclose(found, cosine, rtol=0, atol=ROUNDING)


# ---------------------------------------------------------------------- preprocessing


def prepared(image: np.ndarray) -> np.ndarray:
    """(32, 32, 3) grey levels after the preprocessing, the normalisation undone."""
    pixels = padded_pixels([image], SIDE)[0].permute(1, 2, 0).double().numpy()
    return (pixels * [0.26862954, 0.26130258, 0.27577711] + [0.48145466, 0.4578275, 0.40821073]) * 255


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (64, 64, slice(0, 32), slice(0, 32)),
        (32, 64, slice(8, 24), slice(0, 32)),
        (64, 48, slice(0, 32), slice(4, 28)),
        (30, 100, slice(11, 21), slice(0, 32)),  # 9.6 rows are 10
        (1, 300, slice(15, 16), slice(0, 32)),  # never none
        (16, 16, slice(0, 32), slice(0, 32)),  # enlarged
    ],
)
def test_the_longest_side_is_fitted_and_the_rest_is_black(height: int, width: int, rows: slice, columns: slice) -> None:
    found = prepared(np.full((height, width, 3), 200, np.uint8))
    inside = np.zeros((SIDE, SIDE), bool)
    inside[rows, columns] = True
    np.testing.assert_allclose(found[inside], 200, atol=0.01)
    np.testing.assert_allclose(found[~inside], 0, atol=0.01)


def test_resized_by_an_antialiased_bicubic_filter() -> None:
    """Pillow's, but for its rounding to whole levels after each of the two passes and its cut at black and white."""
    small = np.random.default_rng(4).integers(60, 190, (6, 9, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(small).resize((96, 64), Image.Resampling.BICUBIC))
    expected = np.asarray(Image.fromarray(image).resize((32, 21), Image.Resampling.BICUBIC)).astype(float)
    np.testing.assert_allclose(prepared(image)[5:26], expected, atol=1.5)
