"""Restricted reader of the pickles that verl-omni's and flow_grpo's reward servers and clients exchange.

``pickle.loads`` runs whatever a pickle names. ``loads`` returns lists, dicts with text keys, texts, bytes, numbers and
numpy arrays of numbers or texts as lists, and refuses everything else. The instructions are checked before the first
one runs, and numpy's functions are replaced by those of ``_Unpickler``.
"""

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

MOST_INSTRUCTIONS = 200_000
"""Longest pickle, in instructions; an answer for 64 images takes about 1,000."""
MOST_VALUES = 1_000_000
"""Most values in a pickle's data. A list that is referred to several times counts each time."""
DEEPEST = 8
"""Deepest nesting of lists and dicts."""
_NAMES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
INSTRUCTIONS = frozenset(_NAMES.split())
"""Instructions of protocols 3 to 5 that plain data and numpy arrays need."""


class PickleError(ValueError):
    """A pickle is damaged, too large, or holds more than plain data."""


def loads(data: bytes) -> Any:
    """Return the data of a pickle, with lists for tuples and numpy arrays, and Python's numbers for numpy's.

    Raises:
        PickleError: the pickle is damaged, too large or too deep, or needs more than plain data.
    """
    try:
        for count, (instruction, _, _) in enumerate(pickletools.genops(data)):
            if instruction.name not in INSTRUCTIONS:
                raise PickleError(f"the pickle has the instruction {instruction.name}, which plain data does not need")
            # Each one costs time in Python, and the server's limit on a request's size allows many millions.
            if count >= MOST_INSTRUCTIONS:
                raise PickleError(f"the pickle has more than {MOST_INSTRUCTIONS} instructions")
        # Depth and size can only be counted now, since a list may be put into itself after it was built.
        return _Plain().of(_Unpickler(data).load())
    except PickleError:
        raise
    # Instructions may come in any order, so each of them can fail in its own way.
    except Exception as error:
        raise PickleError(f"this is no pickle, or a damaged one ({type(error).__name__}: {str(error)[:200]})") from None


class _TextKeys(dict[str, Any]):
    """A dict that refuses other keys before Python hashes them.

    The hash of nested tuples takes exponential time, or overflows the C stack.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is not str:
            raise PickleError("the pickle holds a dict with keys that are not texts")
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler in Python, since the one in C offers no hook for dicts and states."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    append: Callable[[Any], None]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._bytes_left = len(data)
        # numpy 1 has the functions in ``numpy.core``, numpy 2 in ``numpy._core``.
        self._replaced: dict[str, Any] = {
            "numpy.dtype": _Dtype,
            "numpy.ndarray": None,  # only ever an argument of ``_reconstruct``
            "multiarray._reconstruct": lambda *_: _Array(self._values),
            "multiarray.scalar": lambda dtype, raw: self._values((), dtype, False, raw),
            "numeric._frombuffer": lambda raw, dtype, shape, order: self._values(shape, dtype, order == "F", raw),
        }

    def load_empty_dict(self) -> None:
        # SETITEM and SETITEMS assign to this one item by item.
        self.append(_TextKeys())

    def load_build(self) -> None:
        # Only the two classes below have the method; Python's own would set attributes of anything.
        state = self.stack.pop()
        self.stack[-1].__setstate__(state)

    dispatch[pickle.EMPTY_DICT[0]] = load_empty_dict
    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        # A fixed table and no import, so that a module's other functions stay out of reach.
        parts = module.split(".")
        key = f"{parts[-1]}.{name}"
        if parts[0] != "numpy" or len(parts) > 3 or key not in self._replaced:
            raise PickleError(f"the pickle names {f'{module}.{name}'[:100]}, which is not loaded; only plain data is")
        return self._replaced[key]

    def _values(self, shape: Any, dtype: Any, fortran: Any, raw: Any) -> Any:
        """The data of an array as nested lists of Python's numbers or texts; one of them for a scalar."""
        if type(dtype) is not _Dtype or type(raw) not in (bytes, bytearray) or type(shape) is not tuple:
            raise PickleError("the pickle has a numpy array in an unknown form")
        # Rare, and another order of the same bytes.
        if fortran:
            raise PickleError("the pickle has a numpy array in Fortran's order; send it in C's")
        # Before the product, which Python computes in full for integers of any size.
        sized = len(shape) <= DEEPEST and all(type(length) is int and 0 <= length <= MOST_VALUES for length in shape)
        if not sized or math.prod(shape) > MOST_VALUES or math.prod(shape) * dtype.numpy.itemsize != len(raw):
            raise PickleError(f"the pickle has a numpy array whose shape does not fit its {len(raw)} bytes")
        # A pickle may refer to the same bytes any number of times.
        self._bytes_left -= len(raw)
        if self._bytes_left < 0:
            raise PickleError("the pickle's numpy arrays hold more bytes than the pickle itself")
        return np.frombuffer(raw, dtype.numpy).reshape(shape).tolist() if raw else []


class _Dtype:
    """Stands for ``numpy.dtype``, of numbers, booleans or texts."""

    def __init__(self, code: Any, *_flags: Any) -> None:
        if type(code) is not str or not re.fullmatch(r"b1|[iuf][1248]|U[0-9]{1,6}", code):
            # The text of nested tuples could be as large as their hash is slow.
            name = code[:20] if type(code) is str else type(code).__name__
            raise PickleError(f"the pickle has a numpy array of type {name!r}; only numbers and texts are read")
        self.numpy = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        # Version and byte order, then the subtype, names and fields of records.
        order, *fields = state[1:5]
        if order not in ("<", ">", "|", "=") or any(field is not None for field in fields):
            raise PickleError("the pickle has a numpy dtype in an unknown form")
        self.numpy = self.numpy.newbyteorder(order)


class _Array:
    """Stands for a numpy array, whose data follow as its state."""

    values: Any = None

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read

    def __setstate__(self, state: Any) -> None:
        _version, *content = state
        self.values = self._read(*content)


class _Plain:
    """Copies unpickled data and counts it: a list may hold itself, or another one many times."""

    count = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        """``value`` as plain data, which is ``depth`` levels below the top."""
        self.count += 1
        if self.count > MOST_VALUES:
            raise PickleError(f"the pickle holds more than {MOST_VALUES} values")
        if depth > DEEPEST:
            raise PickleError(f"the pickle holds more than {DEEPEST} levels of lists and dicts")
        match value:
            case None | bool() | int() | float() | str() | bytes():
                return value
            case list() | tuple():
                return [self.of(item, depth + 1) for item in value]
            case dict():
                return {key: self.of(item, depth + 1) for key, item in value.items()}
            case _Array():
                return self.of(value.values, depth)
        raise PickleError(f"the pickle holds a {type(value).__name__.strip('_').lower()} where data is expected")
