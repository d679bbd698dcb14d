"""Prompts are encoded once: the store of their embeddings, who fills it, and when a text encoder is loaded."""

import gc
import shutil
import threading
import weakref
from types import SimpleNamespace

import damage
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests_support import overrides_of

from flowgrpo_rc.cli.main import main
from flowgrpo_rc.models import PipelineLoader, PromptEncoder, PromptStore, PromptStoreError, UnsupportedModelError
from flowgrpo_rc.models import load as loading
from flowgrpo_rc.models.base import EncodedPrompt
from flowgrpo_rc.models.prompt_store import _name, open_store
from flowgrpo_rc.models.prompts import encode_in_groups
from flowgrpo_rc.paths import resolve_asset
from flowgrpo_rc.prompt import Prompt
from flowgrpo_rc.rollout.config import PipelineConfig
from flowgrpo_rc.trainer import FlowGRPOTrainer
from flowgrpo_rc.trainer.encoding import PromptSet, fill_store

TINY = "asset:tiny_qwen_image"
STORE = "actor_rollout_ref.model.prompt_store"
ENCODER = {"text_encoder": "0123", "dtype": "bfloat16"}


def rows(count, first=0, dtype=torch.bfloat16):
    """Embeddings of made-up prompts, each of its own length, with a pooled vector."""
    generator = torch.Generator().manual_seed(first)
    return {
        (f"prompt {i}", 64): EncodedPrompt(
            torch.randn(3 + i, 8, generator=generator).to(dtype), torch.randn(5, generator=generator)
        )
        for i in range(first, first + count)
    }


def filled(folder, *chunks):
    store = PromptStore(folder, ENCODER)
    store.check_writable()
    for chunk in chunks:
        store.add(chunk)
    return store


def same(one, other):
    return torch.equal(one.embeds, other.embeds) and torch.equal(one.pooled, other.pooled)


def alone(index=0, count=1, wait=lambda: None):
    """The attributes of an accelerator that ``fill_store`` reads."""
    return SimpleNamespace(
        num_processes=count,
        process_index=index,
        local_process_index=index,
        device="cpu",
        wait_for_everyone=wait,
        reduce=lambda tensor, reduction: tensor,
    )


def opened(folder, loader):
    return open_store(str(folder), loader.model, "float32")


@pytest.fixture
def loads(monkeypatch):
    """The names of the networks that are read from their files, in order."""
    names = []
    read = loading._load_weights
    monkeypatch.setattr(
        loading, "_load_weights", lambda files, part, *rest: names.append(part.name) or read(files, part, *rest)
    )
    return names


# ---------------------------------------------------------------- the files


def test_what_was_added_is_read_back_bit_for_bit(tmp_path):
    written = rows(3) | rows(2, first=3, dtype=torch.float32)
    filled(tmp_path / "store", dict(list(written.items())[:2]), dict(list(written.items())[2:]))
    store = PromptStore(tmp_path / "store", ENCODER)
    assert len(store) == 5
    for key, row in written.items():
        assert key in store
        assert same(store.read(key), row)
        assert store.read(key).embeds.dtype == row.embeds.dtype
    assert ("prompt 1", 63) not in store
    # Lengths 3 to 7 and 8 wide, three of them in 2 bytes; five pooled vectors of 5 floats.
    assert store.nbytes(written) == (3 + 4 + 5) * 8 * 2 + (6 + 7) * 8 * 4 + 5 * 5 * 4


def test_a_store_of_another_text_encoder_is_refused(tmp_path):
    filled(tmp_path, rows(1))
    with pytest.raises(PromptStoreError, match=f"{STORE}: {tmp_path} .* another text encoder") as caught:
        PromptStore(tmp_path, ENCODER | {"text_encoder": "4567"})
    assert "(text_encoder 0123 there and 4567 here); name another folder" in str(caught.value)


@pytest.mark.parametrize("place", ["header", "end", "values", "metadata", "encoder"])
def test_damage_is_found_and_set_aside(tmp_path, place):
    store = filled(tmp_path, rows(2), rows(2, first=2))
    file = next(path for path in store._files if len(load_file(path)) == 4)
    if place == "encoder":
        save_file(load_file(file), file, {"encoder": "[]"})
    content = bytearray(file.read_bytes())
    if place == "end":
        content = content[:-1]
    elif place == "metadata":
        content = bytearray(bytes(content).replace(b"__metadata__", b"__metadatb__"))
    elif place != "encoder":
        content[2 if place == "header" else -1] ^= 1
    file.write_bytes(bytes(content))
    again = PromptStore(tmp_path, ENCODER)
    (told,) = again.set_damaged_aside([*rows(4)])
    assert str(file) in told
    assert not file.exists()
    assert len(again) == 2
    whole = [key for key in rows(4) if key in again]
    assert all(again.read(key).embeds.isfinite().all() for key in whole)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_encoded(tmp_path, loads):
    (tmp_path / "file").write_text("not a folder")
    loader = PipelineLoader(TINY)
    with pytest.raises(PromptStoreError, match=f"{STORE}: .*file cannot be read"):
        open_store(str(tmp_path / "file"), loader.model, "float32")
    # Nobody, root neither, can make a folder there.
    store = open_store("/proc/no/such/store", loader.model, "float32")
    with pytest.raises(PromptStoreError, match=f"{STORE}: /proc.* cannot be written .*; name a folder that can"):
        fill_store(loader.model, store, [of("a")], alone())
    assert loads == []


# ---------------------------------------------------------------- who fills it


def of(*prompts, **pipeline):
    records = [SimpleNamespace(prompt=prompt, negative_prompt=None, images=(), source="here") for prompt in prompts]
    return PromptSet(records, PipelineConfig(max_sequence_length=64, **pipeline))


def test_a_family_that_instructs_prompts_is_told_which_are_negative():
    """They are two prompts then, also where they say the same."""
    one = of("a", true_cfg_scale=2.0)
    instructing = SimpleNamespace(negative_prompt="a", instructs_prompts=True)
    assert one.negative(instructing) == [Prompt("a", negative=True)]
    assert one.keys(instructing) == [("a", 64), (Prompt("a", negative=True), 64)]
    assert len({_name(key) for key in one.keys(instructing)}) == 2
    assert one.negative(SimpleNamespace(negative_prompt="a", instructs_prompts=False)) == ["a"]


def test_prompts_of_training_validation_and_guidance_are_encoded_once(tmp_path, loads):
    loader = PipelineLoader(TINY)
    store = opened(tmp_path, loader)
    sets = [of("one", "two"), of("two", "three", true_cfg_scale=2.0)]
    first = fill_store(loader.model, store, sets, alone())
    assert (first.prompts, first.encoded) == (4, 4)  # with " ", the negative prompt
    assert loads == ["text_encoder"]
    again = opened(tmp_path, loader)
    second = fill_store(loader.model, again, sets, alone())
    assert (second.prompts, second.encoded, second.size) == (4, 0, first.size)
    assert loads == ["text_encoder"]
    wider = fill_store(loader.model, again, [*sets, of("four")], alone())
    assert (wider.prompts, wider.encoded) == (5, 1)
    full = loading.load_model(TINY)
    for prompt in ("one", " ", "four"):
        exact = full.encode([prompt], 64)[0].embeds
        torch.testing.assert_close(again.read((prompt, 64)).embeds, exact, rtol=1e-5, atol=1e-5)


def test_damaged_prompts_are_encoded_anew(tmp_path):
    loader = PipelineLoader(TINY)
    sets = [of("one", "two")]
    fill_store(loader.model, opened(tmp_path, loader), sets, alone())
    (file,) = tmp_path.glob("prompts-*.safetensors")
    damage.cut(file, 0.9)
    store = opened(tmp_path, loader)
    with pytest.warns(UserWarning, match=rf"{file.name} is damaged .*; its prompts are encoded anew"):
        filled_again = fill_store(loader.model, store, sets, alone())
    assert filled_again.encoded == 2
    assert fill_store(loader.model, opened(tmp_path, loader), sets, alone()).encoded == 0


def test_processes_share_the_work_and_then_all_read(tmp_path):
    """Two of them, as threads that wait for each other."""
    barrier = threading.Barrier(2, timeout=120)
    sets = [of(*(f"prompt number {i}" for i in range(7)))]
    loaders = [PipelineLoader(TINY) for _ in range(2)]
    stores = [opened(tmp_path, loader) for loader in loaders]
    for loader in loaders:  # transformers does not load in two threads at a time
        loader.read_text_encoders()
    done = {}

    def process(index):
        done[index] = fill_store(loaders[index].model, stores[index], sets, alone(index, 2, barrier.wait))

    threads = [threading.Thread(target=process, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done[index].encoded for index in range(2)] == [4, 3]
    assert all(key in store for store in stores for key in sets[0].keys(loaders[0].model))


def test_prompts_that_go_together_have_as_many_tokens(tiny_model, monkeypatch):
    calls = []
    encode = tiny_model.encode
    monkeypatch.setattr(tiny_model, "encode", lambda prompts, length: calls.append(prompts) or encode(prompts, length))
    keys = [("a" * (1 + i % 3), 64) for i in range(3)] + [(f"{i:02d}", 64) for i in range(20)]
    found = {key: row for part in encode_in_groups(tiny_model, keys) for key, row in part.items()}
    assert found.keys() == set(keys)
    tokens = [{len(tiny_model.pipe.tokenizer(p).input_ids) for p in prompts} for prompts in calls]
    assert all(len(lengths) == 1 for lengths in tokens)
    assert max(map(len, calls)) == 8


def test_embeddings_that_are_not_finite_are_refused(tiny_model):
    with torch.no_grad():
        tiny_model.pipe.text_encoder.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the text encoder gives values that are not finite for 'one' in float32"):
        PromptEncoder(tiny_model, 64)(["one"])


# ---------------------------------------------------------------- when a text encoder is loaded


def test_a_text_encoder_is_there_only_inside_with(loads):
    loader = PipelineLoader(TINY)
    model = loader.model
    assert loads == []
    with model.text_encoders():
        network = weakref.ref(model.pipe.text_encoder)
        with model.text_encoders():
            assert model.encode(["one"], 64)
        assert model.pipe.text_encoder is network()
    gc.collect()
    assert model.pipe.text_encoder is None
    assert network() is None
    assert loads == ["text_encoder"]
    assert loader.load().pipe.text_encoder is None
    assert loads == ["text_encoder", "vae", "transformer"]


@pytest.mark.parametrize("name", ["tiny_sd3_path", "tiny"])
def test_prompts_need_no_transformer(name, request, tmp_path, loads):
    """Embeddings made before the transformer is read are those of the whole model."""
    path = TINY if name == "tiny" else request.getfixturevalue(name)
    loader = PipelineLoader(path)
    store = opened(tmp_path, loader)
    fill_store(loader.model, store, [of("one two", "three")], alone())
    assert "transformer" not in loads
    stored = PromptEncoder(loader.load(), 64, store)(["three", "one two"])
    exact = PromptEncoder(loading.load_model(path), 64)(["three", "one two"])
    assert stored.mask is exact.mask is None or torch.equal(stored.mask, exact.mask)
    torch.testing.assert_close(stored.embeds, exact.embeds, rtol=1e-5, atol=1e-5)
    assert (stored.pooled is None) == (exact.pooled is None)


def test_a_damaged_text_encoder_is_refused_when_it_is_needed(tmp_path):
    folder = shutil.copytree(resolve_asset(TINY), tmp_path / "model")
    damage.drop_weight(folder, "text_encoder")
    model = PipelineLoader(str(folder)).load()
    with (
        pytest.raises(UnsupportedModelError, match="text_encoder/model.safetensors .* 1 missing"),
        model.text_encoders(),
    ):
        pytest.fail("it was loaded")
    assert model.pipe.text_encoder is None
    damage.cut(damage.weights_of(folder, "text_encoder"))
    with pytest.raises(UnsupportedModelError, match="text_encoder/model.safetensors is cut off"):
        PipelineLoader(str(folder))


@pytest.mark.run
def test_a_second_run_and_a_resumed_one_load_no_text_encoder(small_config, tmp_path, loads):
    store = f"{STORE}={tmp_path / 'store'}"
    guided = "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0"
    settings = (store, guided, "trainer.resume_mode=auto")
    first = FlowGRPOTrainer(small_config(*settings))
    first.train_step()
    first.save()
    first.folder.close()
    assert loads == ["text_encoder", "vae", "transformer"]
    loads.clear()
    FlowGRPOTrainer(small_config(*settings, folder="second")).train_step()
    resumed = FlowGRPOTrainer(small_config(*settings))
    assert resumed.step == 1
    assert resumed.run.fingerprint == first.run.fingerprint
    resumed.train_step()
    assert loads == ["vae", "transformer"] * 2
    # A prompt that no file of the configuration has is encoded all the same.
    resumed.run.encoder(["another prompt"])
    assert loads[-1] == "text_encoder"
    assert resumed.run.model.pipe.text_encoder is None


def test_the_command_fills_the_store_and_says_what_it_did(tmp_path, capsys, loads):
    arguments = ["encode-prompts", "--config-name", "tiny_qwen_image_ocr"]
    overrides = overrides_of(tmp_path / "run", f"{STORE}={tmp_path / 'store'}")
    assert main([*arguments, *overrides]) == 0
    first = capsys.readouterr().out
    assert "of which 84 were encoded now" in first
    assert f"Store: {tmp_path / 'store'}, 84 prompts in 1 file(s)" in first
    assert loads == ["text_encoder"]
    assert main([*arguments, *overrides]) == 0
    assert "of which 0 were encoded now" in capsys.readouterr().out
    assert loads == ["text_encoder"]
    assert not (tmp_path / "run").exists()
    assert main([*arguments, *overrides, "actor_rollout_ref.model.dtype=bfloat16"]) == 2
    assert f"error: {STORE}" in capsys.readouterr().err
