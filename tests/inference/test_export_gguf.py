"""A gguf file: read back with the gguf package, and by llama.cpp itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.cli import main
from dtrain.config import run_file
from dtrain.data.text import ByteTokenizer, FileTokenizer
from dtrain.inference import gguf_vocabulary
from dtrain.inference.sample import generate, load_model
from tests.hf import CASES, VOCAB, load, make, save
from tests.inference.test_sample import greedy

gguf = pytest.importorskip("gguf")
NAMES = [name for name in CASES if name.startswith(("gpt2", "llama"))]
LONG = "model.seq_len=128"
TEXT = ["def f(x):\n", "é€ \t naïve 東京 🙂  x", "it's 12345 words, isn't it?\n\n  'Ā"]


def drawn(run: Path, scale: float = 0.3) -> torch.nn.Module:
    """Weights that are no small matter, so that no two tokens are about as likely."""
    model = load(run)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, scale, generator=torch.Generator().manual_seed(p.numel()))
    save(run, model)
    return model


def export(run: Path, out: Path, *options: str) -> Any:
    assert main(["export", str(run), str(out), "--format", "gguf", *options]) == 0
    return gguf.GGUFReader(out)


def value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def tensors(reader: Any) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def a_tokenizer(path: Path, split: str = "gpt-2", end: str = "<|endoftext|>") -> FileTokenizer:
    """A byte-level BPE of about 300 tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=split == "llama-bpe"))
    pieces, level = tokenizers.pre_tokenizers, tokenizers.pre_tokenizers.ByteLevel
    if split == "llama-bpe":
        pattern = tokenizers.Regex(gguf_vocabulary.LLAMA3)
        made.pre_tokenizer = pieces.Sequence(
            [pieces.Split(pattern, "isolated"), level(add_prefix_space=False, use_regex=False)]
        )
    else:
        made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[end], initial_alphabet=level.alphabet(), show_progress=False
    )
    made.train_from_iterator([Path(__file__).read_text(), *TEXT], trainer)
    made.save(str(path))
    return FileTokenizer(str(path))


def with_data(run: Path, tmp_path: Path, **data: Any) -> None:
    cfg = run_file.load(run)
    (tmp_path / "text.txt").write_text("text")
    base = {"_target_": "dtrain.data.text.Text", "path": str(tmp_path / "text.txt"), "seq_len": cfg.model.seq_len}
    run_file.save(run, {**cfg, "data": base | data})


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_settings(name: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", name)
    weights = dict(drawn(run).named_parameters())
    reader = export(run, tmp_path / "m.gguf")
    found, arch = tensors(reader), name.partition("-")[0]
    assert value(reader, "general.architecture") == arch and value(reader, "dtrain.step") == 1
    sizes = {"context_length": 16, "embedding_length": 32, "block_count": 2, "attention.head_count": 4}
    sizes |= {"vocab_size": VOCAB, "feed_forward_length": 128 if arch == "gpt2" else 48}
    sizes |= {"attention.head_count_kv": 2, "rope.dimension_count": 8} if arch == "llama" else {}
    assert {key: value(reader, f"{arch}.{key}") for key in sizes} == sizes
    assert np.array_equal(found["token_embd.weight"], weights["embed.weight"][:VOCAB].detach())
    assert np.array_equal(found["blk.1.ffn_down.weight"], weights["layers.1.mlp.down.weight"].detach())
    assert ("output.weight" in found) == (name == "llama")
    assert ("rope_freqs.weight" in found) == (name == "llama-scaled-tied")
    if arch == "gpt2":  # head by head becomes q, k, v
        ours = weights["layers.0.attention.qkv.weight"].detach().unflatten(0, (4, 3, 8))
        assert np.array_equal(found["blk.0.attn_qkv.weight"], ours.transpose(0, 1).flatten(0, 2))
        assert np.array_equal(found["position_embd.weight"], weights["positions.weight"].detach())
    else:  # pairs become neighbours
        ours = weights["layers.0.attention.k.weight"].detach().numpy().reshape(2, 8, 32)
        theirs = found["blk.0.attn_k.weight"].reshape(2, 8, 32)
        assert np.array_equal(theirs[:, 0::2], ours[:, :4]) and np.array_equal(theirs[:, 1::2], ours[:, 4:])
        assert value(reader, "llama.rope.freq_base") == (500 if "scaled" in name else 10000)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", "llama")
    weights = dict(drawn(run).named_parameters())
    reader = export(run, tmp_path / "m.gguf", "--dtype", dtype)
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    short = {"float16": "F16", "bfloat16": "BF16"}[dtype]
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {short}
    expected = weights["layers.0.mlp.up.weight"].detach().to(getattr(torch, dtype)).float()
    assert np.array_equal(tensors(reader)["blk.0.ffn_up.weight"], expected)


def test_bytes_are_a_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    assert set(gguf_vocabulary.characters()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    run = make(tmp_path / "run", "gpt2")
    drawn(run)
    with_data(run, tmp_path)
    reader = export(run, tmp_path / "m.gguf")
    words, kinds = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    assert len(words) == len(kinds) == VOCAB and len(set(words)) == VOCAB
    assert (words[ord("a")], words[32], words[0]) == ("a", "Ġ", "<|endoftext|>")
    assert kinds[0] == gguf.TokenType.CONTROL and set(kinds[256:]) == {gguf.TokenType.UNUSED}
    assert value(reader, "tokenizer.ggml.eos_token_id") == 0 == ByteTokenizer.separator
    assert value(reader, "tokenizer.ggml.add_bos_token") is False


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe"])
def test_a_tokenizer_file_travels_along(split: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", "llama")
    drawn(run)
    ours = a_tokenizer(tmp_path / "tokenizer.json", split)
    with_data(run, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    reader = export(run, tmp_path / "m.gguf")
    words = value(reader, "tokenizer.ggml.tokens")
    known = ours.tokenizer.get_vocab(with_added_tokens=True)
    assert {words[index]: index for index in known.values()} == known
    assert (
        value(reader, "tokenizer.ggml.pre") == split and value(reader, "tokenizer.ggml.eos_token_id") == ours.separator
    )
    merges = [" ".join(m) for m in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]]
    assert value(reader, "tokenizer.ggml.merges") == merges and merges


def test_a_tokenizer_that_llama_cpp_would_read_differently_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run", "gpt2")
    drawn(run)
    file = tmp_path / "tokenizer.json"
    a_tokenizer(file)
    good = json.loads(file.read_text())
    without_end = {word.replace("<|", "<"): index for word, index in good["model"]["vocab"].items()}
    for change, reason in (
        ({"normalizer": {"type": "NFC"}}, "not a byte-level BPE"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, "not a byte-level"),
        ({"model": good["model"] | {"ignore_merges": True}}, "not a byte-level"),
        ({"added_tokens": [], "model": good["model"] | {"vocab": without_end}}, "no token that ends"),
        (None, "is not there any more"),
    ):  # fmt: skip
        if change is None:
            file.unlink()
        else:
            file.write_text(json.dumps(good | change))
        with_data(run, tmp_path, tokenizer=str(file))
        reader = export(run, tmp_path / "m.gguf")
        assert value(reader, "tokenizer.ggml.model") == "none" and "tokenizer.ggml.tokens" not in reader.fields
        out = capsys.readouterr().out
        assert reason in out and "token ids" in out, out
        assert "has no tokenizer" in (tmp_path / "m.gguf.md").read_text()


def test_adapters_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrain.strategies import lora_base

    monkeypatch.setattr(lora_base, "check", lambda *_: None)  # a checkpoint that was not trained has no fingerprint
    run = make(tmp_path / "run", "llama", "lora.rank=2")
    model = load(run)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.normal_(0.0, 0.3)
    save(run, model)
    found = tensors(export(run, tmp_path / "m.gguf"))
    merged = load_model(run, [])[0].get_parameter("layers.1.mlp.up.weight").detach().cpu().numpy()
    plain: Any = model.get_submodule("layers.1.mlp.up")
    assert np.array_equal(found["blk.1.ffn_up.weight"], merged)
    assert not np.array_equal(merged, plain.weight.detach().numpy())


def test_what_has_no_gguf_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", "bert")
    save(run, load(run))
    assert main(["export", str(run), str(tmp_path / "m.gguf"), "--format", "gguf"]) == 2
    assert "gguf: is for models of gpt2, llama" in capsys.readouterr().err.replace("=gguf", "gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("split", ["bytes", "gpt-2", "llama-bpe"])
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_gives_the_same_64_tokens(name: str, split: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled when it is installed")
    run = make(tmp_path / "run", name, LONG)
    drawn(run)
    data: dict[str, str] = {}
    tokenizer: Any = ByteTokenizer()
    if split != "bytes":
        tokenizer, data = (
            a_tokenizer(tmp_path / "tokenizer.json", split),
            {"tokenizer": str(tmp_path / "tokenizer.json")},
        )
    with_data(run, tmp_path, **data)
    export(run, tmp_path / "m.gguf")
    model, _ = load_model(run, [])
    llm = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, n_threads=1, type_k=0, type_v=0, verbose=False)
    try:
        for prompt in TEXT:
            ids = list(tokenizer.encode(prompt))
            assert llm.tokenize(prompt.encode(), add_bos=False, special=False) == ids
            assert llm.detokenize(ids) == prompt.encode()
            ours = generate(model, torch.tensor([ids]), 64, 128, greedy)[0, len(ids) :].tolist()
            theirs = [token for token, _ in zip(llm.generate(ids, temp=0.0), range(64), strict=False)]
            assert theirs == ours
    finally:
        llm.close()
