"""The reader of pickles: everything a reward server sends by right, and nothing that a hostile one does."""

import os
import pickle
import struct
from collections import OrderedDict

import numpy as np
import pytest

from flowgrpo_rc.rewards.remote.pickles import PickleError, loads

ANSWERS = [
    {"scores": [0.5, 1, True, None, -3e300, 2**70, -1]},
    {"outputs": ["Final Score: 4.2", "ä", ""], "error": "x" * 300},
    {"images": [b"\xff\xd8", b"x" * 70000], "prompts": ["a"] * 300, "metadata": {}},
    {"group_rewards": {"counting": [1.0, -10.0], "colors": [-10.0, 0.0]}, "scores": [1.0, 1 / 3]},
    [],
]
ARRAYS = [
    np.linspace(-1, 1, 7, dtype=np.float32),
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.array([True, False]),
    np.array([1.5], dtype=">f8"),
    np.array(["a dog", "ä"]),
    np.array([], dtype=np.float64),
    np.array(0.25, dtype=np.float16),
]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_data_comes_back_and_arrays_come_as_lists(protocol):
    for answer in ANSWERS:
        assert loads(pickle.dumps(answer, protocol)) == answer
    for array in ARRAYS:
        assert loads(pickle.dumps({"scores": array}, protocol)) == {"scores": array.tolist()}


@pytest.mark.parametrize("scalar", [np.float32(0.1), np.float64(1 / 3), np.int32(-7), np.bool_(True), np.str_("ä")])
def test_numpy_scalars_come_as_numbers(scalar):
    loaded = loads(pickle.dumps([scalar, scalar]))
    assert loaded == [scalar.item()] * 2
    assert type(loaded[0]) is type(scalar.item())


def test_both_layouts_of_numpys_modules_are_known():
    data = pickle.dumps(np.float32(0.5), 4)
    modern = b"\x8c\x16numpy._core.multiarray"
    old = b"\x8c\x15numpy.core.multiarray"
    assert (modern in data) != (old in data)
    other = data.replace(modern, old) if modern in data else data.replace(old, modern)
    # The frame's length, eight bytes after its mark, grows or shrinks by the one letter.
    (length,) = struct.unpack("<Q", data[3:11])
    other = other[:3] + struct.pack("<Q", length + len(other) - len(data)) + other[11:]
    assert loads(other) == loads(data) == 0.5


class Bomb:
    """Unpickled, it calls a function with arguments."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def instructions(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


GLOBALS = b"cnumpy\ndtype\n"
# A pair of itself, 40 times: 2**40 parts to hash, in 200 bytes.
DOUBLED = b")" + b"".join(b"\x94h%c\x86" % n for n in range(40))
NESTED = b")" + b"\x85" * 180_000
SHARED = {"scores": 1.0}
for _ in range(12):
    SHARED = [SHARED] * 10

HOSTILE = {
    "os.system": (pickle.dumps(Bomb(os.system, "true")), "names (posix|nt).system"),
    "os.system, protocol 0": (pickle.dumps(Bomb(os.system, "true"), 0), "does not need"),
    "eval": (pickle.dumps(Bomb(eval, "1")), "names builtins.eval"),
    "a loader of numpy": (instructions(b"cnumpy\nload\n", b"X\x01\0\0\0x\x85R"), "names numpy.load"),
    "a path through an admitted module": (
        instructions(b"\x8c\x16numpy._core.multiarray\x8c\x0bscalar.real\x93", b")R"),
        "names numpy._core.multiarray.scalar.real",
    ),
    "an ordered dict": (pickle.dumps(OrderedDict(a=1)), "names collections.OrderedDict"),
    "a set": (pickle.dumps({1, 2}), "EMPTY_SET, which plain data does not need"),
    "an array of objects": (pickle.dumps(np.array([{}, None], dtype=object)), "type 'O8'"),
    "an array of records": (pickle.dumps(np.zeros(2, dtype=[("a", "f4")])), "type 'V4'"),
    "an array in Fortran's order": (pickle.dumps(np.asfortranarray(np.ones((2, 3))), 4), "Fortran's order"),
    "a state for a function": (instructions(GLOBALS, b"}X\x01\0\0\0a]sb"), "damaged"),
    "a function as the answer": (instructions(GLOBALS), "holds a type"),
    "an array that says it is larger": (
        pickle.dumps(np.zeros(3, np.uint8), 3).replace(b"K\x03\x85", b"J\0\0\0\x7f\x85"),
        "shape does not fit its 3 bytes",
    ),
    "a deep list": (instructions(b"]" * 5000 + b"a" * 4999), "more than 8 levels"),
    "lists within lists, again and again": (pickle.dumps(SHARED), "more than (8 levels|1000000 values)"),
    "a list that holds itself": (instructions(b"]\x94h\0a"), "more than 8 levels"),
    "more instructions than an answer needs": (instructions(b"]" + b"Na" * 150_000), "more than 200000 instructions"),
    "bytes that are not there": (instructions(b"\x96" + b"\xff" * 8), "damaged"),
    "keys that are not texts": (pickle.dumps({1: 2}), "keys that are not texts"),
    "keys that take for ever to hash": (instructions(b"}", DOUBLED, b"Ns"), "keys that are not texts"),
    "the same, several at once": (instructions(b"}(", DOUBLED, b"Nu"), "keys that are not texts"),
    "keys nested too deep to hash": (instructions(b"}", NESTED, b"Ns"), "keys that are not texts"),
    "a dtype that takes for ever to print": (
        instructions(b"cnumpy.core.multiarray\nscalar\n", GLOBALS, DOUBLED, b"\x85RC\x01x\x86R"),
        "type 'tuple'",
    ),
    "persistent objects": (instructions(b"X\x01\0\0\0aQ"), "BINPERSID, which plain data does not need"),
    "an object of a class": (instructions(b"cnumpy\nndarray\n", b")\x81"), "NEWOBJ, which plain data does not need"),
    "nothing": (b"", "no pickle, or a damaged one"),
    "cut off": (pickle.dumps({"scores": [0.5] * 9})[:-5], "no pickle, or a damaged one"),
    "a web page": (b"<html>502 Bad Gateway</html>", "no pickle, or a damaged one"),
    "JSON": (b'{"scores": [1.0]}', "no pickle, or a damaged one|does not need"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused(case):
    data, message = HOSTILE[case]
    with pytest.raises(PickleError, match=message) as caught:
        loads(data)
    assert len(str(caught.value)) < 400


def test_a_bomb_does_what_it_says_elsewhere(tmp_path):
    """``pickle`` itself runs what the reader refuses."""
    marker = tmp_path / "marker"
    data = pickle.dumps(Bomb(os.mkdir, str(marker)))
    with pytest.raises(PickleError, match="mkdir"):
        loads(data)
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()


def test_flipped_bytes_are_refused_or_read_as_other_data():
    """No byte changed at random makes anything but an error of ours or plain data."""
    good = bytearray(pickle.dumps({"scores": [0.5, np.float32(2)], "x": np.arange(3.0)}))
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(good)
        data[generator.integers(len(data))] = generator.integers(256)
        try:
            assert isinstance(loads(bytes(data)), (dict, list, str, bytes, int, float, bool, type(None)))
        except PickleError:
            refused += 1
    assert 500 < refused < 2000


class SharedBytes:
    """Pickles as a numpy array of these bytes, which the pickle holds once however many arrays have them."""

    def __init__(self, raw):
        self.raw = raw

    def __reduce__(self):
        reconstruct, arguments, (version, _, dtype, fortran, _) = np.zeros(1, np.uint8).__reduce__()
        return reconstruct, arguments, (version, (len(self.raw),), dtype, fortran, self.raw)


def test_arrays_that_share_their_bytes_decode_to_no_more_than_the_pickle_holds():
    raw = bytes(5000)
    assert loads(pickle.dumps([SharedBytes(raw)], 4)) == [[0] * 5000]
    scores = np.arange(3000.0)
    assert loads(pickle.dumps([scores, scores], 4)) == [scores.tolist()] * 2
    shared = pickle.dumps([SharedBytes(raw) for _ in range(50)], 4)
    assert len(shared) < 3 * len(raw)
    with pytest.raises(PickleError, match="hold more bytes than the pickle itself"):
        loads(shared)
