"""The division of the frozen base, and settings refused before it is loaded."""

import pytest
import torch
from tests_support import resident_bytes
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from flowgrpo_rc.models import ModelConfig
from flowgrpo_rc.models.config import FSDPConfig
from flowgrpo_rc.models.lora import adapter_parameters, attach_lora, base_parameters
from flowgrpo_rc.models.sharding import check_sharding, shard_base

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def four_processes(monkeypatch):
    """This process as the first of four on two nodes; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("size", "share"), [(-1, 2), (2, 2), (1, 1)])
def test_a_copy_is_divided_within_a_node_and_repeated_between(four_processes, tiny_model, size, share):
    """The adapter, which comes after, is whole, in shape and on every process."""
    transformer = tiny_model.transformer
    before = {name: p.detach().clone() for name, p in transformer.named_parameters()}
    config = FSDPConfig(shard=True, fsdp_size=size)
    check_sharding(config, 4, CPU)
    shard_base(transformer, config, CPU)
    assert isinstance(transformer, FSDPModule)
    attach_lora(transformer, tiny_model, ModelConfig(lora_rank=4), dtype=torch.float32)
    base = base_parameters(transformer)
    assert base.keys() == before.keys()
    for name, parameter in base.items():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.device_mesh.mesh.tolist() == list(range(share))
        first = before[name].chunk(share)[0]
        assert torch.equal(parameter.to_local(), first), name
    whole = sum(p.numel() * 4 for p in before.values())
    assert resident_bytes(base.values()) == pytest.approx(whole / share, rel=0.02)
    for name, parameter in adapter_parameters(transformer).items():
        layer = transformer.get_submodule(name.split(".lora_")[0])
        assert not isinstance(parameter, DTensor)
        assert tuple(parameter.shape) == ((4, layer.in_features) if "lora_A" in name else (layer.out_features, 4))


@pytest.mark.parametrize(
    ("settings", "processes", "device", "on_node", "message"),
    [
        ({}, 1, CPU, 1, r"fsdp_config.shard: got true with one process.*torchrun"),
        ({"param_offload": True}, 2, CPU, 2, r"fsdp_config.param_offload: got true on a CPU.*set it to false"),
        ({"fsdp_size": 3}, 4, GPU, 4, r"fsdp_config.fsdp_size: got 3, which does not divide the 4 processes of this"),
        ({"fsdp_size": 4}, 8, GPU, 2, r"fsdp_size: got 4, which does not divide the 2 processes of this node \(of 8"),
        ({}, 5, GPU, 3, r"fsdp_size: got 3, which does not divide .* equally many on every node"),
    ],
)
def test_what_cannot_be_divided_is_refused(settings, processes, device, on_node, message, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_node))
    with pytest.raises(ValueError, match=message):
        check_sharding(FSDPConfig(shard=True, **settings), processes, device)
    check_sharding(FSDPConfig(**settings), processes, device)  # without ``shard`` they act on nothing
