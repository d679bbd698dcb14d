"""The column ``images``: every form that names an image, and every file that is refused with its row."""

import copy
import io
import json
import pickle
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from flowgrpo_rc.data import PromptRecord, load_prompts
from flowgrpo_rc.prompt import _decoded
from flowgrpo_rc.rewards import RewardConfig, build_reward
from flowgrpo_rc.rewards.remote.protocols import PROTOCOLS, JsonProtocol, Request

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encoded(image: Image.Image = PICTURE, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def turned(kind: str) -> bytes:
    """A picture that its EXIF data turn by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(kind=kind, exif=exif)


def png_of(width: int, height: int, bits: int = 8, colours: int = 2, pixels: bytes = b"") -> bytes:
    """A PNG whose header claims this size, with ``pixels`` for the content of all rows."""
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(pixels), b"IEND": b""}
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def animation(kind: str) -> bytes:
    return encoded(kind=kind, save_all=True, append_images=[PICTURE.rotate(90)])


def read(folder: Path, images: Any) -> PromptRecord:
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "edit it", "images": images, "id": 7}))
    (record,) = load_prompts(folder / "train.jsonl")
    return record


def write_parquet(folder: Path, rows: list[Any]) -> list[PromptRecord]:
    table = pyarrow.Table.from_pylist([{"prompt": "edit it", "images": images} for images in rows])
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    return load_prompts(folder / "train.parquet")


def test_paths_begin_at_the_prompt_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a", "b"):
        (tmp_path / "images" / f"{name}.png").write_bytes(encoded())
    monkeypatch.chdir(Path(__file__).parent)
    record = read(tmp_path, ["images/a.png", str(tmp_path / "images" / "b.png")])
    first, second = record.images
    assert first == second  # the same file in two places
    assert (first.width, first.height, first.source) == (60, 40, f"{tmp_path}/train.jsonl:1")
    assert (first.path, second.path) == (f"{tmp_path}/images/a.png", f"{tmp_path}/images/b.png")
    assert record.metadata == {"id": 7, "images": [first, second]}
    np.testing.assert_array_equal(np.asarray(first), PIXELS)
    assert read(tmp_path, {"path": "images/a.png"}).images == (first,)


@pytest.mark.parametrize("nothing", [None, []])
def test_rows_without_images(tmp_path: Path, nothing: Any) -> None:
    record = read(tmp_path, nothing)
    assert (record.images, record.metadata) == ((), {"id": 7})


def test_parquet_holds_paths_bytes_or_both(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    for row in ("a.png", encoded(), {"bytes": encoded(), "path": "gone.png"}, {"bytes": None, "path": "a.png"}):
        for images in (row, [row, row]):
            (record,) = write_parquet(tmp_path, [images])
            assert len(record.images) == (2 if images is not row else 1)
            np.testing.assert_array_equal(np.asarray(record.images[0]), PIXELS)
    one, none = write_parquet(tmp_path, [[{"bytes": encoded(), "path": None}], None])
    assert (len(one.images), none.images, none.metadata) == (1, (), {})


def test_a_file_is_read_once_however_many_rows_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    (tmp_path / "train.jsonl").write_text('{"prompt": "edit it", "images": "a.png"}\n' * 3)
    opened = []
    own = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or own(path))
    records = load_prompts(tmp_path / "train.jsonl")
    assert opened == ["train.jsonl", "a.png"]
    assert [record.images[0].source.rpartition(":")[2] for record in records] == ["1", "2", "3"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_pictures_are_upright_as_they_are_measured(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a").write_bytes(turned(kind))
    (image,) = read(tmp_path, "a").images
    assert (image.width, image.height) == (40, 60)
    assert np.asarray(image).shape == (60, 40, 3)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_picture_is_given_in_colours(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a").write_bytes(encoded(PICTURE.convert(mode), "TIFF"))
    pixels = np.asarray(read(tmp_path, "a").images[0])
    assert (pixels.shape, pixels.dtype) == ((40, 60, 3), np.uint8)


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "a is empty; save it again"),
        (b"hello", "a is not an image of a known format; give one of PNG, JPEG, WEBP, BMP, GIF, TIFF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "a is not an image of a known format"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a is a Git LFS pointer, not the file itself; run ``git lfs"),
        *(
            (cut(encoded(kind=kind)), "a is damaged or cut off")
            for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
        ),
        (encoded()[:-60] + bytes(48) + encoded()[-12:], "a is damaged or cut off"),
        (png_of(0, 5), "a is not an image of a known format"),
        (png_of(9000, 9000), "a is larger than 67,108,864 pixels; scale it down"),
        (png_of(60000, 60000), "a is larger than 67,108,864 pixels; scale it down"),
        *((animation(kind), "a holds 2 pictures (an animation or several") for kind in ("PNG", "GIF", "WEBP", "TIFF")),
        (encoded(Image.fromarray(np.full((4, 6), 40000, np.uint16))), "a has more than 8 bits a value (mode I;16), wh"),
        (encoded(Image.fromarray(np.ones((4, 6), np.float32)), "TIFF"), "a has more than 8 bits a value (mode F), wh"),
    ],
)
def test_a_file_that_is_no_picture_is_named_with_its_row(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "good.png").write_bytes(encoded())
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/train.jsonl:1: the image {tmp_path}/{told}")) as caught:
        read(tmp_path, ["good.png", "a"])
    assert "\n" not in str(caught.value)
    if content:
        told = told.removeprefix("a ")
        with pytest.raises(ValueError, match=re.escape(f"train.parquet:2: the image in the prompt file {told}")):
            write_parquet(tmp_path, [encoded(), content])


@pytest.mark.parametrize(
    ("images", "told"),
    [
        ("gone.png", "the image {0}/gone.png does not exist or is not a file; paths are relative to the prompt file's"),
        ("folder", "the image {0}/folder does not exist or is not a file"),
        ("https://example.org/a.png", "/a.png does not exist or is not a file; it is an address; download the image"),
        ("a\0b", "'images' holds 'a\\x00b'; a path cannot hold a NUL character"),
        (" ", "'images' holds a str that names no image; give a path, an image file's bytes (parquet), a mapping"),
        (["good.png", 3], "'images' holds a int that names no image"),
        ({"url": "x"}, "'images' holds a dict with the keys url that names no image"),
    ],
)
def test_a_value_that_names_no_file_is_told_with_its_row(tmp_path: Path, images: Any, told: str) -> None:
    (tmp_path / "good.png").write_bytes(encoded())
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=re.escape(told.format(tmp_path))) as caught:
        read(tmp_path, images)
    assert str(caught.value).startswith(f"{tmp_path}/train.jsonl:1: ")
    assert "\n" not in str(caught.value)


def test_pixels_are_decoded_once_and_given_to_each_caller_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may draw on its picture; a file that has changed is told although its pixels are kept."""
    _decoded.cache_clear()
    (tmp_path / "a.png").write_bytes(encoded())
    (image,) = read(tmp_path, "a.png").images
    decoded = []
    opened = Image.open
    monkeypatch.setattr(Image, "open", lambda *given, **more: (decoded.append(given), opened(*given, **more))[1])
    first = image.open()
    first.paste((0, 0, 0), (0, 0, 60, 40))
    np.testing.assert_array_equal(np.asarray(image.open()), PIXELS)
    np.testing.assert_array_equal(np.asarray(image), PIXELS)
    assert len(decoded) == 1
    (tmp_path / "a.png").write_bytes(encoded(Image.new("RGB", (60, 40))))
    with pytest.raises(ValueError, match="has changed since the run began"):
        image.open()


def test_records_travel_to_other_processes(tmp_path: Path) -> None:
    for images in ("a.png", encoded()):
        (tmp_path / "a.png").write_bytes(encoded())
        (record,) = write_parquet(tmp_path, [images])
        for other in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
            assert other == record
            np.testing.assert_array_equal(np.asarray(other.metadata["images"][0]), PIXELS)


def test_rewards_are_given_the_pictures(tmp_path: Path) -> None:
    """A function for a batch, and one for an image in verl-omni's form."""
    (tmp_path / "a.png").write_bytes(encoded())
    record = read(tmp_path, ["a.png"])
    (tmp_path / "batch.py").write_text(
        "import numpy as np\n"
        "def compute_score(images, prompts, metadata):\n"
        "    return [float(np.asarray(row['images'][0]).mean()) for row in metadata]\n"
    )
    (tmp_path / "one.py").write_text(
        "def compute_score(solution_image, extra_info):\n    return float(extra_info['images'][0].open().width)\n"
    )
    images = np.zeros((1, 8, 8, 3), np.uint8)
    for file, expected in (("batch.py", PIXELS.mean()), ("one.py", 60)):
        config = RewardConfig(custom_reward_function={"path": str(tmp_path / file)})  # pyright: ignore
        scores = build_reward(config)(images, [record.prompt], [record.metadata]).total
        np.testing.assert_allclose(scores, [expected], rtol=1e-6)


def test_reward_servers_are_sent_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    record = read(tmp_path, ["a.png"])
    request = Request(files=[encoded()], prompts=[record.prompt], metadata=[record.metadata])
    (row,) = JsonProtocol().read_request(JsonProtocol().write_request(request)).metadata
    assert row == record.metadata
    np.testing.assert_array_equal(np.asarray(row["images"][0]), PIXELS)
    sent = pickle.loads(PROTOCOLS["flow_grpo"].write_request(request))
    assert sent["meta_datas"] == [{"prompt": "edit it", "id": 7, "images": [encoded()]}]


def test_a_server_is_told_of_a_file_that_is_no_picture() -> None:
    body = {"images": [], "prompts": [], "metadata": []}
    body |= {"prompts": ["x"], "metadata": [{"images": [{"base64": "aGVsbG8="}]}], "images": ["aGVsbG8="]}
    with pytest.raises(ValueError, match=r"metadata\[0\]: the image in the prompt file is not an image of a known"):
        JsonProtocol().read_request(json.dumps(body).encode())
