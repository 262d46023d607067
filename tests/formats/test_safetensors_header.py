"""Headers of safetensors files: what safetensors writes is read, anything else is a HeaderError, at once."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save_file

from dtrain.formats.safetensors_header import LONGEST, Entry, HeaderError, read_header

NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16", "U32": "uint32",
    "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def one(**changed: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}


shapes = st.lists(st.integers(0, 3), max_size=4)
kinds = st.tuples(st.sampled_from(sorted(NUMPY)), shapes)
tensors = st.dictionaries(st.text(min_size=1, max_size=9), kinds, max_size=6)


@given(tensors, st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_safetensors_writes_is_read_as_it_was_written(
    tmp_path: Path, given: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    given.pop("__metadata__", None)
    metadata = metadata or None  # safetensors 0.8.0 writes broken JSON for no tensors with empty metadata
    values = {name: np.full(shape, i, NUMPY[dtype]) for i, (name, (dtype, shape)) in enumerate(given.items())}
    file = tmp_path / "t.safetensors"
    save_file(values, file, metadata)
    read, whole = read_header(file), file.read_bytes()
    assert {n: (e.dtype, list(e.shape)) for n, e in read.items()} == given
    assert all(whole[e.begin : e.end] == values[n].tobytes() for n, e in read.items())


VALUES = [0, -1, 1, 2**31, 2**63, 10**30, 1.0, 1e30, float("nan"), True, None, "", "F32", [], [0, 8], {}, [[]], "../x"]


def mutated(draw: random.Random) -> bytes:
    """A valid file with one to three faults: in a value, a key, a byte, or its length."""
    header: Any = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    }
    for _ in range(draw.randrange(3)):
        place, key = header, draw.choice(sorted(header))
        while isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.8:
            place = place[key]
            key = draw.choice(sorted(place)) if isinstance(place, dict) else draw.randrange(len(place))
        if isinstance(place, dict) and draw.random() < 0.2:
            del place[key]
        else:
            place[key] = copy.deepcopy(draw.choice(VALUES))
        if not header:
            break
    text = json.dumps(header).encode()
    whole = bytearray(struct.pack("<Q", len(text)) + text + bytes(40))
    for _ in range(draw.randrange(3)):
        whole[draw.randrange(len(whole))] = draw.randrange(256)
    return bytes(whole[: draw.randrange(len(whole))] if draw.random() < 0.1 else whole)


def test_a_mutated_file_is_refused_or_what_safetensors_makes_of_it(tmp_path: Path, request: Any) -> None:
    """Never another error; what is accepted, safetensors accepts, too, with the same shapes."""
    file, accepted = tmp_path / "t.safetensors", 0
    file.touch()
    for seed in range(40_000 if request.config.getoption("--all") else 2_500):
        whole = mutated(random.Random(seed))
        with open(file, "r+b") as out:  # not from nothing: ext4 flushes a file that is emptied and written again
            out.write(whole)
            out.truncate()
        try:
            read = read_header(file)
        except HeaderError as error:
            assert str(error).startswith("t.safetensors ") and len(str(error)) < 600, seed
            continue
        theirs = {name: (spec["dtype"], tuple(spec["shape"]), bytes(spec["data"])) for name, spec in deserialize(whole)}
        assert {n: (e.dtype, e.shape, whole[e.begin : e.end]) for n, e in read.items()} == theirs, seed
        accepted += 1
    assert accepted > 100  # else the faults hide each other


CRAFTED: dict[str, tuple[Any, int, str]] = {  # header, bytes of data, what the message says
    "more than the file": (one(shape=[2**40], data_offsets=[0, 2**42]), 8, "its header says"),
    "the wrong way round": (one(data_offsets=[8, 0]), 8, "data_offsets"),
    "shape larger than its bytes": (one(shape=[2**40]), 8, "its shape needs"),
    "overlap": (one() | {"b": one()["a"]}, 8, "overlaps"),
    "gap": (one() | {"b": {**one()["a"], "data_offsets": [16, 24]}}, 24, "gap"),
    "rest": (one(), 9, "its header says"),
    "negative": (one(shape=[-2]), 8, "shape"),
    "bool": (one(shape=[True, 2]), 8, "shape"),
    "float": (one(shape=[2.0]), 8, "shape"),
    "overflow": (one(shape=[2**62, 4, 0], data_offsets=[0, 0]), 0, "shape"),
    "rank": (one(shape=[1] * 65 + [2]), 8, "shape"),
    "dtype": (one(dtype="F33"), 8, "dtype"),
    "dtype list": (one(dtype=["F32"]), 8, "dtype"),
    "more keys": (one(code="x"), 8, "nothing else"),
    "twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0, "comes twice"),
    "deep": (b'{"a":' + b"[" * 200_000, 0, "nested too deeply"),
    "deep shape": (b'{"a":{"dtype":"U8","shape":' + b"[" * 500 + b"]" * 500 + b',"data_offsets":[0,0]}}', 0, "shape"),
    "digits": (
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
        0,
        "not a safetensors file",
    ),
    "not UTF-8": (b'{"\xff":{}}', 0, "not a safetensors file"),
    "list": ([1], 0, "not a JSON object"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    "many values": (b'{"a":[' + b"1," * 3_000_000 + b"1]}", 0, "more than"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_headers(tmp_path: Path, name: str) -> None:
    header, num_bytes, said = CRAFTED[name]
    with pytest.raises(HeaderError, match=said):
        read_header(write(tmp_path / "t.safetensors", header, bytes(num_bytes)))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    good = write(tmp_path / "good", one(), bytes(8))
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "link", "zero", "absent", ""):
        with pytest.raises(HeaderError, match="cannot be read"):
            read_header(tmp_path / name)
    with pytest.raises(HeaderError, match="a device"):
        read_header(tmp_path / "zero", follow_symlinks=True)
    assert read_header(tmp_path / "link", follow_symlinks=True) == {
        "a": Entry("F32", (2,), good.stat().st_size - 8, good.stat().st_size)
    }
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(HeaderError, match="git-lfs"):
        read_header(tmp_path / "pointer")
    for length in range(9):
        (tmp_path / "short").write_bytes(bytes([1] * length))
        with pytest.raises(HeaderError, match="truncated"):
            read_header(tmp_path / "short")


def test_a_sparse_file_of_20_gb_is_not_read(tmp_path: Path) -> None:
    """Whatever length it names: refused within 500 MB of address space."""
    names = []
    for i, length in enumerate([2**64 - 1, 20 * 2**30 - 8, LONGEST + 1, LONGEST]):
        file = write(tmp_path / f"sparse-{i}", b"{", length=length)
        os.truncate(file, 20 * 2**30)
        names.append(str(file))
    code = (
        "import sys; from pathlib import Path; from dtrain.formats.safetensors_header import HeaderError, read_header\n"
        "for name in sys.argv[1:]:\n"
        "    try: read_header(Path(name)); sys.exit('read')\n"
        "    except HeaderError as error: print(error)\n"
    )
    before = lambda: resource.setrlimit(resource.RLIMIT_AS, (500 * 2**20,) * 2)  # noqa: E731
    ended = subprocess.run(
        [sys.executable, "-c", code, *names], preexec_fn=before, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0 and ended.stdout.count("sparse-") == 4, ended.stderr
