"""Counts where code waits for an accelerator, on a machine without one.

``OnDevice`` tensors say that they lie on a CUDA device and compute on the processor. Inside ``Crossings`` whatever is
made on that device or brought there becomes one, and what would make the host wait for it is noted with the file that
asked: a value read, a copy to the host, a copy from host memory that is not page-locked, an operation whose result has
a size that only the data tell. A copy from or to page-locked memory that is asked not to block is queued, and no wait.
Mixing tensors of both sides raises, as it does on a real device.

To count another piece of code: make everything it has on the device with ``put_on_device``, run it inside
``with Crossings() as crossings`` and compare ``crossings.found`` with a table.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)
READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "is_pinned")
"""Operations that end with a number on the host."""
PASSED_ON = ("transfers.py", "dtypes.py")
"""Files of the package whose callers are the ones to name."""


class OnDevice(torch.Tensor):
    """A tensor that is computed on the processor and counts as one of ``DEVICE``.

    Torch's own code below Python takes it for one of the device ``meta``, which needs no driver.
    """

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device="meta", requires_grad=False
        )

    def __init__(self, values):
        self.values = values

    @property
    def device(self):
        return DEVICE

    @property
    def is_cuda(self):
        return True

    @property
    def is_meta(self):
        return False

    def untyped_storage(self):
        return self.values.untyped_storage()

    def __repr__(self):
        return f"OnDevice({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        stays = _note_operation(name, args, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        result = function(*map(_computed, args), **{key: _computed(value) for key, value in kwargs.items()})
        if result is None:  # lists of tensors are changed in place
            return None
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        if isinstance(result, torch.Tensor):
            return OnDevice(result) if stays else result
        return tree_map_only(torch.Tensor, OnDevice, result) if stays else result


class Crossings(TorchFunctionMode):
    """Notes the waits of what runs inside, in ``found``: how many by file and kind."""

    active = None

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self._locked = {}

    def __enter__(self):
        Crossings.active = self
        return super().__enter__()

    def __exit__(self, *error):
        Crossings.active = None
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        first = args[0] if args else None
        if name == "pin_memory":
            return self._lock(first.clone())
        if kwargs.pop("pin_memory", False):
            return self._lock(function(*args, **kwargs))
        if name == "backward":
            return self._backward(first)
        if name == "new_tensor" and isinstance(first, OnDevice):  # of numbers that Python holds
            note("to device")
            return OnDevice(function(first.values, *args[1:], **kwargs))
        if name in ("tolist", "numpy") and isinstance(first, OnDevice):
            note(name)
            return getattr(first.values, name)(*args[1:])
        if name == "copy_":  # torch looks for the device before it dispatches
            return self._copied(*args, **kwargs)
        if name == "where":  # of numbers torch makes tensors below Python, on its own device
            args = tuple(torch.tensor(one) if isinstance(one, (int, float)) else one for one in args)
        if name == "__setitem__" and isinstance(first, OnDevice) and isinstance(args[2], (int, float)):
            return first.values.__setitem__(args[1], args[2])  # likewise
        if name == "pad_sequence" and isinstance(first[0], OnDevice):  # torch makes its result below Python
            return OnDevice(function([_computed(tensor) for tensor in first], *args[1:], **kwargs))
        if name == "scaled_dot_product_attention" and isinstance(kwargs.get("attn_mask"), OnDevice):
            kwargs["attn_mask"] = _added_mask(kwargs["attn_mask"])
        wanted = _asked_device(name, args, kwargs)
        if wanted is None or wanted.type != "cuda":
            return function(*args, **kwargs)
        if isinstance(first, OnDevice):
            return _without_device(function, args, kwargs)
        if isinstance(first, torch.Tensor):
            if name == "to":
                if not (kwargs.get("non_blocking") and self._is_locked(first)):
                    note("to device")
            elif not name.endswith("_like") and not name.startswith("new_"):
                raise AssertionError(f"{name} of a host tensor for the device")
        elif name in ("tensor", "as_tensor"):
            note("to device")
        with torch._C.DisableTorchFunction():
            args = tuple(_on_host(argument) for argument in args)
            kwargs = {key: _on_host(value) for key, value in kwargs.items()}
            return OnDevice(function(*args, **kwargs))

    def _backward(self, loss):
        """With this mode on, for activations are recomputed: torch takes a mode off while it handles a call."""
        super().__enter__()
        try:
            torch.autograd.graph._engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            super().__exit__(None, None, None)

    def _copied(self, target, source, non_blocking=False):
        sides = [isinstance(tensor, OnDevice) for tensor in (target, source)]
        host = source if sides[0] else target
        if sides[0] != sides[1] and not (non_blocking and self._is_locked(host)):
            note("to device" if sides[0] else "to host")
        _computed(target).copy_(_computed(source))
        return target

    def _lock(self, tensor):
        """Take the memory of a host tensor for page-locked; it is held, so that no other tensor is given it."""
        storage = tensor.untyped_storage()
        self._locked[storage.data_ptr()] = storage
        return tensor

    def _is_locked(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._locked


def note(kind):
    """Count one wait of the caller."""
    if Crossings.active is not None:
        Crossings.active.found[_asking(), kind] += 1


def put_on_device(module):
    """Let every parameter and buffer of a module count as one of the device, in place."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, OnDevice):
                moved = torch.nn.Parameter(OnDevice(parameter.data), parameter.requires_grad)
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, OnDevice):
                part._buffers[name] = OnDevice(buffer)


def _note_operation(name, args, kwargs):
    """Count the operation if it makes the host wait and refuse mixed sides; returns whether its result stays there."""
    wanted = kwargs.get("device")
    if name == "_to_copy" and wanted is not None and torch.device(wanted).type == "cpu":
        note("to host")
        return False
    if name in READS:
        note(name)
        return name not in ("_local_scalar_dense", "equal")
    if name in ("index", "index_put", "index_put_"):
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in indices):
            note("index by a mask")
        if not all(isinstance(index, OnDevice) for index in indices):
            note("to device")
        return True
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, torch.Tensor) and tensor.is_cpu and tensor.dim():
            raise AssertionError(f"{name} of tensors on the device and on the host")
    return True


def _asked_device(name, args, kwargs):
    """The device that a call names, if it names one."""
    wanted = kwargs.get("device")
    if name == "cuda":
        return DEVICE
    if wanted is None and name == "to":
        wanted = next((argument for argument in args[1:] if isinstance(argument, (torch.device, str))), None)
        wanted = wanted or next((other.device for other in args[1:] if isinstance(other, torch.Tensor)), None)
    return None if wanted is None else torch.device(wanted)


def _added_mask(mask):
    """A mask of numbers; of truth values torch makes one below Python, on its own device."""
    if mask.dtype != torch.bool:
        return mask
    return OnDevice(torch.zeros(mask.shape).masked_fill(~mask.values, -torch.inf))


def _computed(value):
    """An argument as the processor computes with it."""
    if isinstance(value, OnDevice):
        return value.values
    if isinstance(value, list | tuple):
        return [_computed(one) for one in value]
    if isinstance(value, torch.Tensor) and value.is_meta:
        # Zeros that autograd makes itself: what Python hands to an operation has been made a tensor before.
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _without_device(function, args, kwargs):
    """The call on a tensor that is on the named device already; naming it makes torch look for a real one."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
    named = function is torch.Tensor.to
    others = [other.dtype if named and isinstance(other, torch.Tensor) else other for other in args[1:]]
    others = [other for other in others if not isinstance(other, (torch.device, str))]
    if function is torch.Tensor.to and not others and set(kwargs) <= {"copy"}:
        return args[0]
    return function(args[0], *others, **kwargs)


def _on_host(argument):
    if isinstance(argument, OnDevice):
        return argument.values
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _asking():
    """The innermost file outside of torch and of this one, from the package's folder on."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        package = next((p for p in ("flowgrpo_rc", "diffusers", "peft", "transformers") if p in path.parts), None)
        if package is not None and path.name not in PASSED_ON and "tests" not in path.parts:
            parts = path.parts
            start = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[start + (package == "flowgrpo_rc") :])
        frame = frame.f_back
    return "elsewhere"
