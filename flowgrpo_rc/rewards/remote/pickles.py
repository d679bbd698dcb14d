"""Reads the pickles that flow_grpo's and verl-omni's reward servers and clients exchange, as data and nothing else.

``pickle.loads`` runs whatever a pickle names, so whoever answers a request, or stands between, could run code here.
``loads`` admits dicts, lists, tuples, texts, bytes, numbers and numpy's arrays and scalars of numbers and texts. What
a pickle does is checked instruction by instruction before any of it is carried out. Of numpy nothing is called with a
pickle's arguments: ``_Dtype`` and ``_Array`` stand in for its classes, and the bytes are read when all is loaded.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

MOST_INSTRUCTIONS = 200_000
"""Instructions of a pickle; an answer for 64 images takes about 1,000."""

MOST_VALUES = 1_000_000
"""Values in what a pickle holds. One that refers to the same list again and again holds it as often."""

DEEPEST = 8
"""Levels of lists and dicts."""

INSTRUCTIONS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
    EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
"""What protocols 3 to 5 need for the data above; no other way to make an object, no text that Python would parse."""

_NUMPY_CODE = re.compile(r"b1|[iuf][1248]|U[0-9]{1,6}")


class PickleError(ValueError):
    """A pickle that is damaged, or holds something else than plain data."""


def loads(data: bytes) -> Any:
    """What the pickle ``data`` holds, with lists for tuples and numpy arrays, and Python's numbers for numpy's.

    Raises:
        PickleError: it is damaged, too large or too deep, or wants more than plain data; says which.
    """
    _check_instructions(data)
    try:
        loaded = _Unpickler(io.BytesIO(data)).load()
    except PickleError:
        raise
    # A pickle can have its instructions in any order, and any of them then fails in its own way.
    except Exception as error:
        raise PickleError(f"the pickle is damaged ({type(error).__name__}: {str(error)[:200]})") from error
    return _Reading().plain(loaded, 0)


def _check_instructions(data: bytes) -> None:
    admitted = INSTRUCTIONS.split()
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
            if instruction.name not in admitted:
                raise PickleError(f"the pickle has the instruction {instruction.name}, which plain data does not need")
            if count >= MOST_INSTRUCTIONS:
                raise PickleError(f"the pickle has more than {MOST_INSTRUCTIONS} instructions")
            # The memo is a table that grows to the largest number in it.
            if instruction.name == "LONG_BINPUT" and argument is not None and argument > count:
                raise PickleError(f"the pickle numbers its values up to {argument}")
    except PickleError:
        raise
    except Exception as error:
        raise PickleError(f"this is no pickle, or a damaged one ({str(error)[:200]})") from error


class _Unpickler(pickle.Unpickler):
    """An unpickler whose names lead to the stand-ins below, or nowhere."""

    def find_class(self, module: str, name: str) -> Any:
        parts = module.split(".")
        known = _STAND_INS.get((parts[0], parts[-1], name)) if len(parts) <= 3 else None
        if known is None:
            raise PickleError(
                f"the pickle names {module}.{name}, which is not loaded: plain lists, dicts, texts, numbers and "
                "numpy's arrays of them are"
            )
        return _Callable(known)


class _Callable:
    """What a pickle can call and nothing else: it is no class, and has no state that could be set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise PickleError("the pickle changes a function")


class _Dtype:
    """Stands in for ``numpy.dtype``: of numbers, booleans or texts."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *_flags: Any) -> None:
        if not isinstance(code, str) or not _NUMPY_CODE.fullmatch(code):
            raise PickleError(f"the pickle has a numpy array of type {str(code)[:40]!r}; numbers and texts are read")
        self._code = code
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise PickleError("the pickle has a numpy type in an unknown form")
        if state[2:5] != (None, None, None):
            raise PickleError("the pickle has a numpy type with fields; numbers and texts are read")
        self._order = state[1]

    def numpy(self) -> np.dtype:
        return np.dtype(self._order + self._code)


class _Array:
    """Stands in for ``numpy.ndarray`` until all is loaded."""

    __slots__ = ("_dtype", "_raw", "_shape")

    def __init__(self) -> None:
        self._dtype: Any = None
        self._raw: Any = None
        self._shape: Any = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise PickleError("the pickle has a numpy array in an unknown form")
        _, self._shape, self._dtype, fortran, self._raw = state
        if fortran:
            raise PickleError("the pickle has a numpy array in Fortran's order; give it in C's")

    @staticmethod
    def reconstruct(*_arguments: Any) -> _Array:
        """numpy's ``_reconstruct``: an empty array, whose state follows."""
        return _Array()

    @staticmethod
    def from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        """numpy's ``_frombuffer``, as protocol 5 has it."""
        array = _Array()
        array.__setstate__((1, shape, dtype, order == "F", raw))
        return array

    @staticmethod
    def scalar(dtype: Any, raw: Any) -> _Array:
        """numpy's ``scalar``: one number."""
        array = _Array()
        array.__setstate__((1, (), dtype, False, raw))
        return array

    def values(self) -> Any:
        """As nested lists of Python's numbers or texts; one of them for a scalar."""
        shape = self._shape
        fits = isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape) and len(shape) < DEEPEST
        if not fits or not isinstance(self._dtype, _Dtype) or not isinstance(self._raw, (bytes, bytearray)):
            raise PickleError("the pickle has a numpy array in an unknown form")
        dtype = self._dtype.numpy()
        count = math.prod(shape)
        if count > MOST_VALUES or not dtype.itemsize or count * dtype.itemsize != len(self._raw):
            raise PickleError(f"the pickle has a numpy array of {count} values in {len(self._raw)} bytes")
        return np.frombuffer(bytes(self._raw), dtype).reshape(shape).tolist() if count else []


def _named_by_numpy(*_arguments: Any) -> Any:
    """``numpy.ndarray`` itself, which a pickle gives to ``_reconstruct`` and has no reason to call."""
    raise PickleError("the pickle makes a numpy array in an unknown way")


_STAND_INS: dict[tuple[str, str, str], Callable[..., Any]] = {
    ("numpy", "numpy", "dtype"): _Dtype,
    ("numpy", "numpy", "ndarray"): _named_by_numpy,
    ("numpy", "multiarray", "_reconstruct"): _Array.reconstruct,
    ("numpy", "multiarray", "scalar"): _Array.scalar,
    ("numpy", "numeric", "_frombuffer"): _Array.from_buffer,
}
"""First and last part of a module's name and the name in it -> what is called. In between numpy 1 has ``core`` and
numpy 2 ``_core``."""


class _Reading:
    """Turns what was loaded into plain data, and counts it."""

    def __init__(self) -> None:
        self._count = 0

    def plain(self, value: Any, depth: int) -> Any:
        """``value``, all of it new, without stand-ins."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise PickleError(f"the pickle holds more than {MOST_VALUES} values")
        if depth > DEEPEST:
            raise PickleError(f"the pickle holds more than {DEEPEST} levels of lists and dicts")
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, (list, tuple)):
            return [self.plain(item, depth + 1) for item in value]
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise PickleError("the pickle holds a dict with keys that are not texts")
            return {key: self.plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, _Array):
            return self.plain(self._decoded(value), depth)
        raise PickleError(f"the pickle holds a {type(value).__name__.strip('_').lower()} where data is expected")

    def _decoded(self, array: _Array) -> Any:
        try:
            return array.values()
        except PickleError:
            raise
        except (TypeError, ValueError) as error:
            raise PickleError(f"the pickle has a numpy array that cannot be read ({error})") from error
