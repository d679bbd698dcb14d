"""What an update moves between host and device, and when: counted on tensors that are marked as on a device."""

from types import SimpleNamespace

import pytest
import torch
from test_rows import IMAGES, LEVELS, MODES, WINDOW, Rig, config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flowgrpo_rc.batch import MiniBatch

DEVICE = torch.device("cpu", 0)
"""Stands for a GPU."""
_READS = {"tolist", "item", "__bool__", "__float__", "__int__", "numpy", "__index__"}


def marked(tensor):
    """Whether a tensor is taken to be on the device."""
    return getattr(tensor, "_on_device", False)


def mark(tensor):
    """Take a tensor to be on the device; returns it."""
    tensor._on_device = True
    return tensor


class Crossings(TorchFunctionMode):
    """``log`` lists what crossed, ``("host", shape)`` or ``("device", shape)``, and what was noted in between.

    Whatever is computed from marked tensors is marked. A read of a marked tensor's values, and a move of it, is a
    transfer to the host; a move of an unmarked one to ``DEVICE`` is a transfer there. An operation that mixes both
    kinds is an error, as on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.log = []

    def shapes(self, kind):
        """What crossed in one direction."""
        return [entry[1] for entry in self.log if isinstance(entry, tuple) and entry[0] == kind]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func == torch.Tensor.device.__get__ and marked(args[0]):
            return DEVICE
        if name in ("to", "cpu"):
            return self._move(func, args, kwargs)
        there = [marked(x) for x in inputs]
        if name in _READS and any(there):
            self.log.append(("host", tuple(inputs[0].shape)))
        elif any(there) and not all(there) and name not in ("__get__", "__set__"):
            strangers = [tuple(x.shape) for x, on in zip(inputs, there, strict=True) if not on and x.dim()]
            assert not strangers, f"{name} mixes tensors on the device with {strangers} on the host"
        result = func(*args, **kwargs)
        if (any(there) and name not in _READS) or kwargs.get("device") == DEVICE:
            for output in tree_leaves(result):
                if isinstance(output, torch.Tensor):
                    mark(output)
        return result

    def _move(self, func, args, kwargs):
        tensor = args[0]
        named = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (torch.device, str))]
        goes_there = func.__name__ == "to" and marked(tensor)
        if named:
            goes_there = torch.device(named[0]) == DEVICE
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if goes_there != marked(tensor):
            self.log.append(("device" if goes_there else "host", tuple(tensor.shape)))
            result = torch.ops.aten.alias(result)
        if goes_there:
            mark(result)
        return result


@pytest.fixture(scope="module")
def rig():
    torch.set_num_threads(1)
    rig = Rig()
    real = rig.actor._accelerator
    rig.actor._accelerator = SimpleNamespace(
        device=DEVICE, autocast=real.autocast, backward=real.backward, num_processes=1
    )
    return rig


def update(rig, settings, mini_batches):
    """The crossings of an update, with a note at the beginning and the end of each micro-batch's passes."""
    rig.reset(settings)
    actor = rig.actor
    for tensor in (*actor.transformer.parameters(), *actor.transformer.buffers()):
        mark(tensor)
    crossings = Crossings()
    forward = actor._forward
    backward = actor._accelerator.backward

    def noted_forward(micro, **options):
        if torch.is_grad_enabled():
            crossings.log.append("forward")
        return forward(micro, **options)

    def noted_backward(loss):
        backward(loss)
        crossings.log.append("backward")

    with pytest.MonkeyPatch.context() as patch, crossings:
        patch.setattr(actor, "_forward", noted_forward)
        patch.setattr(actor._accelerator, "backward", noted_backward)
        actor.update(rig.batch, rig.cond, mini_batches)
    return crossings


def between_forward_and_backward(log):
    inside = False
    found = []
    for entry in log:
        inside = entry == "forward" if isinstance(entry, str) else inside
        if inside and isinstance(entry, tuple):
            found.append(entry)
    return found


@pytest.mark.parametrize(("mode", "level"), [("bypass", "sequence"), ("reinforce", "token"), ("decoupled", "both")])
def test_an_optimizer_step_waits_for_its_device_once(rig, mode, level):
    """For log-probs, metrics and the gradient's norm together; nothing is read between forward and backward."""
    settings = config(ppo_micro_batch_size_per_gpu=1, correction=MODES[mode] | LEVELS[level])
    crossings = update(rig, settings, [MiniBatch(torch.arange(IMAGES))])
    assert crossings.log.count("backward") == IMAGES
    assert [entry for entry in between_forward_and_backward(crossings.log) if entry[0] == "host"] == []
    to_host = crossings.shapes("host")
    assert len(to_host) == 1
    assert to_host[0][0] > IMAGES * WINDOW
