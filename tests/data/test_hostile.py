"""Data that was made to hang a rank or to fill its memory: refused with its name and a fix, in little memory.

All cases run in one process that may not have more than LIMIT of memory; a FIFO that is waited for would run into the
timeout.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 1 << 30
KIND = Callable[[Path], Any]


def text(path: Path, **settings: Any) -> None:
    from dtrain.data.text import Text

    Text(str(path), 8, **settings).dataset("train")


def labelled(path: Path) -> None:
    from dtrain.data.text_classification import read_splits

    read_splits(str(path), 0.1)


def tokens(path: Path) -> None:
    from dtrain.data.tokens import Tokens

    Tokens(str(path), 8, packed=True).dataset("train")


def picture(path: Path) -> None:
    from dtrain.data.images import Images

    images = Images(str(path), 8).dataset("train")
    for name in images.names:
        images.read(name, None)


def mnist(path: Path) -> None:
    from dtrain.data.mnist import read_idx

    read_idx(path, 3)


def cifar(path: Path) -> None:
    from dtrain.data.cifar import Cifar10

    Cifar10(str(path), 8)


# ---- how each is made ----------------------------------------------------------------------------------------


def sparse(path: Path, size: int, start: bytes = b"") -> Path:
    path.write_bytes(start)
    os.truncate(path, size)
    return path


def file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    return path


def fifo(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    os.mkfifo(path)
    return path


def bomb(path: Path) -> Path:
    with gzip.open(path, "wb", compresslevel=6) as out:
        for _ in range(300):
            out.write(bytes(2**20))
    return path


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def pictures(folder: Path, name: str, data: bytes | None) -> Path:
    for c in ("a", "b"):
        if data is None:
            fifo(folder / c / name)
        else:
            file(folder / c / name, data)
    return folder


def token_folder(folder: Path, starts: list[int] | None = None, **meta: Any) -> Path:
    folder.mkdir()
    values = {"dtype": "uint16", "vocab_size": 256, "tokenizer": None, "train_tokens": 20, "val_tokens": 20}
    values |= {"train_documents": 2, "val_documents": 2, **meta}
    (folder / "meta.json").write_text(json.dumps(values))
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(bytes(40))
        (folder / f"{split}.starts").write_bytes(struct.pack("<2q", *(starts or [0, 10])))
    return folder


def saved_folder(folder: Path, files: Any, column: Any = None) -> Path:
    file(folder / "state.json", json.dumps({"_data_files": files}).encode())
    kind = {"dtype": "string", "_type": "Value"} if column is None else column
    file(folder / "dataset_info.json", json.dumps({"features": {"text": kind}}).encode())
    return folder


def crafted_arrow(folder: Path) -> Path:
    """A table of two texts whose offsets point far outside of it."""
    import pyarrow as pa

    batch = pa.record_batch({"text": pa.array(["aaaa", "bbbb"])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    offsets = struct.pack("<3i", 0, 4, 8)
    assert data.count(offsets) == 1
    file(folder / "d.arrow", data.replace(offsets, struct.pack("<3i", 0, 4, 2**30)))
    return saved_folder(folder, [{"filename": "d.arrow"}])


def device(folder: Path) -> Path:
    file(folder / "a.txt", b"t" * 99).with_name("z.txt").symlink_to("/dev/zero")
    return folder


def large_cifar(folder: Path) -> Path:
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        sparse(folder / f"{name}.bin", 3073 * 10**7)
    return folder


def fields(path: Path) -> Path:
    return file(path, json.dumps({f"{i}": i for i in range(10**5)}).encode())


def idx(path: Path, *shape: int, size: int = 16) -> Path:
    return sparse(path, size, bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape))


def tokenizer(path: Path) -> None:
    text(file(path.with_name("some.txt"), b"text " * 99), tokenizer=str(path))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(pwned) print\n"
DEEP = b"[" * 200_000
# what reads it, how it is made, and words of the message
CASES: dict[str, tuple[KIND, KIND, str]] = {
    "a JSON line of 300 MB": (
        text, lambda p: sparse(p / "a.jsonl", 300 * 2**20, b'{"text": "'), "line 1 is longer than",
    ),
    "a later line of 300 MB": (
        text,
        lambda p: sparse(p / "b.jsonl", 300 * 2**20, b'{"text": "a"}\n{"text": "'),
        "line 2 is longer than 67,108,864 bytes",
    ),
    "a label's line of 300 MB": (labelled, lambda p: sparse(p / "c.jsonl", 300 * 2**20), "line 1 is longer than"),
    "a line of empty objects": (
        text, lambda p: file(p / "d.jsonl", b'{"text": [' + b"{}," * 2**22 + b"{}]}"), "besides its",
    ),
    "deep JSON": (text, lambda p: file(p / "e.jsonl", DEEP), "line 1 is not JSON"),
    "deep labels": (labelled, lambda p: file(p / "f.jsonl", DEEP), "line 1 of f.jsonl is not JSON"),
    "a number of a million digits": (
        text, lambda p: file(p / "g.jsonl", b'{"text": ' + b"9" * 10**6 + b"}"), "is not JSON",
    ),
    "no UTF-8": (labelled, lambda p: file(p / "h.jsonl", b'{"text": "\xff", "label": 1}'), "is not JSON"),
    "a million fields": (text, lambda p: fields(p / "i.jsonl"), "no field"),
    "a FIFO": (text, lambda p: fifo(p / "fifo"), "neither a file nor a folder"),
    "a device": (text, lambda p: Path("/dev/zero"), "neither a file nor a folder"),
    "labels of a FIFO": (labelled, lambda p: fifo(p / "labels"), "is neither a file nor a folder"),
    "a folder with a FIFO": (text, lambda p: fifo(p / "folder" / "a.txt").parent, "is empty"),
    "a folder with text and a FIFO": (
        text,
        lambda p: file(fifo(p / "both" / "b.txt").with_name("a.txt"), b"text " * 99).parent,
        "b.txt' cannot be read (it is a FIFO",
    ),
    "a link to a device": (text, lambda p: device(p / "x"), "z.txt' cannot be read (it is a device"),
    "an empty file": (text, lambda p: file(p / "empty.txt", b""), "is empty"),
    "a gzip bomb": (text, lambda p: bomb(p / "bomb.txt.gz"), "unpacks to more than 200 times"),
    "a gzip bomb of lines": (text, lambda p: bomb(p / "bomb.jsonl.gz"), "line 1 is longer than"),
    "a picture of 900 million pixels": (
        picture, lambda p: pictures(p / "big", "a.png", png(30000, 30000)), "a.png cannot be read",
    ),
    "a picture that Pillow only warns of": (
        picture, lambda p: pictures(p / "warn", "a.png", png(10000, 10000)), "10000 x 10000 pixels, and at most 89,"
    ),
    "a picture that is cut off": (picture, lambda p: pictures(p / "cut", "a.png", png(64, 64)), "a.png cannot be read"),
    "a program as a picture": (
        picture, lambda p: pictures(p / "eps", "a.jpg", EPS), "a.jpg cannot be read (its format is none of JPEG",
    ),
    "a FIFO as a picture": (
        picture, lambda p: pictures(p / "pipe", "a.jpg", None), "a.jpg cannot be read (it is a FIFO",
    ),
    "an idx file of 2**96 values": (mnist, lambda p: idx(p / "idx", *[2**32 - 1] * 3), "shorter or longer"),
    "a sparse idx file of 64 GB": (
        mnist, lambda p: idx(p / "sparse", 4, 2**17, 2**17, size=64 * 2**30), "shorter or longer",
    ),
    "an idx file without pixels": (mnist, lambda p: idx(p / "none", 9, 0, 28), "9 x 0 x 28"),
    "a CIFAR of 30 GB": (cifar, lambda p: large_cifar(p), "data_batch_1.bin has 30730000000 bytes"),
    "documents of 2**60 tokens": (
        tokens, lambda p: token_folder(p / "starts", [-(2**60), 0]), "train.starts is not sorted",
    ),
    "documents beyond the end": (
        tokens, lambda p: token_folder(p / "beyond", [0, 2**60]), "train.starts is not sorted",
    ),
    "numbers as texts": (
        tokens, lambda p: token_folder(p / "m1", train_tokens="20"), "train_tokens=20 in meta.json, not a number",
    ),
    "a dtype that is a list": (tokens, lambda p: token_folder(p / "m2", dtype=["uint16"]), "not uint16 or uint32"),
    "a vocabulary of 1e30": (tokens, lambda p: token_folder(p / "m3", vocab_size=1e30), "vocab_size=1e+30"),
    "a tokenizer elsewhere": (
        tokens, lambda p: token_folder(p / "m4", tokenizer="../../etc/passwd"), "not tokenizer.json",
    ),
    "a deep meta.json": (tokens, lambda p: file(p / "m5" / "meta.json", DEEP).parent, "nested too deeply"),
    "a meta.json of 2 GB": (
        tokens, lambda p: sparse(file(p / "m6" / "meta.json", b""), 2**31).parent, "more than 1,048,576 bytes",
    ),
    "a tokenizer of 1 GB": (
        tokenizer, lambda p: sparse(p / "t.json", 2**30), "has more than",
    ),
    "a deep tokenizer": (
        tokenizer, lambda p: file(p / "u.json", DEEP), "is not a `tokenizers`",
    ),
    "a saved folder with files elsewhere": (
        text, lambda p: saved_folder(p / "s1", [{"filename": "../a.jsonl"}]), "lacks ../a.jsonl",
    ),
    "a saved folder of nonsense": (text, lambda p: saved_folder(p / "s2", {"filename": 1}), "is damaged"),
    "a saved folder of odd columns": (text, lambda p: saved_folder(p / "s3", [], column=[1]), "not a text column"),
    "a table that lies": (text, lambda p: crafted_arrow(p / "s4"), "d.arrow' cannot be read"),
    "a table that is none": (
        text, lambda p: saved_folder(file(p / "s5" / "d", b"\xff" * 64).parent, [{"filename": "d"}]), "cannot be read",
    ),
    "a deep description": (text, lambda p: file(saved_folder(p / "s6", []) / "state.json", DEEP).parent, "is damaged"),
}  # fmt: skip


def main(folder: Path) -> None:
    """Every case; prints what each said, and the most memory that all of them took."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT + 2 * 2**30, LIMIT + 2 * 2**30))  # libraries map more than they use
    said = {}
    for name, (read, make, _) in CASES.items():
        path = make(folder)
        try:
            read(path)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    # not ru_maxrss: that begins with what the parent had before this process was executed
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"said": said, "kib": int(peak[1]) if peak else 0}))


def test_hostile_data_is_refused_in_little_memory(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    for name, (_, _, words) in CASES.items():
        message = found["said"][name]
        assert words in message and "fix: " in message and len(message) < 1200, f"{name}: {message[:1500]}"
    assert found["kib"] * 1024 < LIMIT, f"{found['kib'] / 2**20:.2f} GiB"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
