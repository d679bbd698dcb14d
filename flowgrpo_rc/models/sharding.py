"""Shard the frozen base over the processes of a node with PyTorch's FSDP2: each keeps a slice of every block.

A block's weights are gathered during its computation and in their own precision, so that the numbers equal those of a
whole model. Only the frozen base is sharded. Adapters are attached afterwards, and every process holds them whole:
optimizer, average, checkpoints and the engine's sync are unaffected. Nodes repeat the slices, so that weights never
travel between them.

Gathering is collective: every process must call the transformer equally often, in the same order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flowgrpo_rc.models.config import FSDP_FIELD, FSDPConfig


def check_sharding(config: FSDPConfig, processes: int, device: torch.device) -> None:
    """Raise ``ValueError`` unless the ``processes`` of the run, on all nodes, and the device allow this sharding."""
    if config.shard and config.param_offload and device.type == "cpu":
        raise ValueError(
            f"{FSDP_FIELD}.param_offload: got true on a CPU, where the weights are in the host's memory anyway; set it "
            "to false"
        )
    check_division(config, processes, processes_on_node(processes))


def check_division(config: FSDPConfig, processes: int, on_node: int) -> None:
    """Raise ``ValueError`` unless ``processes``, ``on_node`` of them on each node, can shard the weights."""
    if not config.shard:
        return
    # FSDP would run, with all of its cost and nothing saved.
    if processes == 1:
        raise ValueError(
            f"{FSDP_FIELD}.shard: got true with one process, which has nobody to share the weights with; "
            "start several, e.g. torchrun --nproc_per_node 4 -m flowgrpo_rc.cli.main train, or set it to false"
        )
    size = config.processes_to_a_copy(on_node)
    # A copy that spans nodes would gather every block over the slow network.
    if processes % size or on_node % size:
        raise ValueError(
            f"{FSDP_FIELD}.fsdp_size: got {size}, which does not divide the {on_node} processes of this node (of "
            f"{processes} in all); every copy of the weights is shared by so many processes of one node. Give a "
            "divisor, or -1 for all of a node, and start equally many on every node"
        )


def shard_base(transformer: Any, config: FSDPConfig, device: torch.device) -> None:
    """Shard a frozen transformer without adapters, in place; from the host, so that no device ever holds it whole.
    Raises ``ValueError`` if the transformer's class names no blocks."""
    kinds = set(transformer._no_split_modules or ())
    blocks = [module for module in transformer.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise ValueError(
            f"{FSDP_FIELD}.shard: got true, but {type(transformer).__name__} names no blocks that could be divided; "
            "set it to false"
        )
    processes = torch.distributed.get_world_size()
    size = config.processes_to_a_copy(processes_on_node(processes))
    # The other copies are left out, because frozen weights have no gradients to reduce over them. By the name ``fsdp``
    # peft knows that a layer computes with whole weights, to which its LoRA must fit.
    mesh = init_device_mesh(device.type, (processes // size, size), mesh_dim_names=("copies", "fsdp"))["fsdp"]
    offload = CPUOffloadPolicy() if config.param_offload else OffloadPolicy()
    # Every block by itself, and at last the embeddings, norms and projections that belong to none.
    for module in [*blocks, transformer]:
        fully_shard(module, mesh=mesh, reshard_after_forward=config.reshard_after_forward, offload_policy=offload)

    def copied(_module: Any, _inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        answer = output[0]  # a list, if the transformer gives one tensor for each image
        return [part.clone() for part in answer] if isinstance(answer, list) else answer.clone(), *output[1:]

    # FSDP hangs the backward pass of its root on the output, which is a view: an operation in place would lose that.
    transformer.register_forward_hook(copied)


def is_sharded(transformer: object) -> bool:
    """True if this process holds a slice of the transformer's weights."""
    return isinstance(transformer, FSDPModule)


@contextmanager
def gathered_once(transformer: nn.Module) -> Iterator[None]:
    """Inside, gathered weights stay for the next forwards; afterwards they are sharded again. A transformer that is not
    sharded is left alone."""
    if not isinstance(transformer, FSDPModule):  # for the type checker, in place of ``is_sharded``
        yield
        return
    # Sampling repeats the forward many times between two updates; each would gather all weights again.
    transformer.set_reshard_after_forward(False)
    try:
        yield
    finally:
        transformer.set_reshard_after_forward(True)
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a parameter that may be sharded. It is collective: every process must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:  # offloaded: the processes meet on their devices
        moved = local.to(tensor.device_mesh.device_type)
        tensor = DTensor.from_local(
            moved, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
        )
    return tensor.full_tensor()


def processes_on_node(processes: int) -> int:
    """Processes on this node, from the launcher; without its variable, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes))
