"""What transformers makes of an exported run: the same logits, and nothing missing or left over."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dtrain.checkpoint import store
from dtrain.cli import main
from dtrain.config import run_file
from dtrain.inference.export import export_file, final_weights
from dtrain.inference.export_hf import export_hf
from dtrain.inference.sample import load_model, load_plain
from dtrain.models import lora
from dtrain.strategies import lora_base
from dtrain.train import build as models
from tests.hf import CASES, VOCAB, apart, load, make, save, transformers
from tests.models import own_models
from tests.own_runs import own_run

OWN = "tests.models.own_models"


def reloaded(folder: Path, name: str, **options: Any) -> nn.Module:
    """By transformers' own way, with nothing missing, unexpected or of another shape."""
    auto = getattr(transformers, CASES[name].auto)
    model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert type(model).__name__ == CASES[name].kind
    assert not any(info.values()), info
    return model.eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_to_transformers_and_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = make(tmp_path / "run", name)
    ours = load(run)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(p)))
    save(run, ours)
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 0
    assert f"wrote {tmp_path / 'out'}" in capsys.readouterr().out
    transformers.utils.logging.get_logger("transformers").propagate = True
    theirs = reloaded(tmp_path / "out", name)
    assert not caplog.records, caplog.text
    assert apart(ours, theirs) < 1e-5
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    # and back, also by way of what transformers writes itself
    theirs.save_pretrained(tmp_path / "again")
    for folder in ("out", "again"):
        back = dict(load(make(tmp_path / f"from-{folder}", name, f"init_from={tmp_path / folder}")).named_parameters())
        for key, weight in ours.named_parameters():
            rows = VOCAB if key in ("embed.weight", "output.weight", "output_bias") else len(weight)
            assert torch.equal(back[key][:rows], weight[:rows]), key


def test_large_models_are_written_in_parts(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "llama")
    ours = load(run)
    save(run, ours)
    export_hf(run, tmp_path / "out", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    largest = max(p.numel() for p in ours.parameters()) * 4
    assert all((tmp_path / "out" / f).stat().st_size < max(30_000, largest) + 4096 for f in files)
    weights = [load_file(tmp_path / "out" / f) for f in files]
    assert index["metadata"]["total_size"] == sum(t.nbytes for w in weights for t in w.values())
    assert apart(ours, reloaded(tmp_path / "out", "llama")) < 1e-5


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_16_bits(form: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    assert main(["export", str(run), "--format", form, "--dtype", "bfloat16"]) == 0
    file = run / "hf" / "model.safetensors" if form == "hf" else run / "model.safetensors"
    assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}
    if form == "hf":
        assert reloaded(run / "hf", "gpt2", dtype="auto").dtype == torch.bfloat16


def written(run: Path, out: Path) -> dict[str, Any]:
    return json.loads((export_hf(run, out) / "config.json").read_text())  # type: ignore[no-any-return]


def test_one_file_is_written_weight_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, too: the header is known before the weights are."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = []

    def watched(weights: Any) -> Any:
        def give(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights(*args):
                alive.append(weakref.ref(weight))
                most.append(sum(ref() is not None for ref in alive))
                yield name, weight
                del weight

        return give

    monkeypatch.setattr(lora_base, "check", lambda *_: None)  # a checkpoint that was not trained has no fingerprint
    for case in ([], ["lora.rank=2"]):
        run = make(tmp_path / f"run-{len(case)}", "gpt2", *case)
        save(run, load(run))
        expected = dict(final_weights(run))
        alive.clear(), most.clear()
        with monkeypatch.context() as patch:
            if case:
                patch.setattr(lora, "merged", watched(lora.merged))
            else:
                patch.setattr(store, "weights", watched(store.weights))
            file = export_file(run, tmp_path / "deep" / "weights.safetensors")
        assert len(most) > 20 and max(most) <= 2, "one that is written, and the next"
        found = load_file(file)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], w) for n, w in expected.items())
        assert sorted((tmp_path / "deep").iterdir()) == [file, file.with_name(f"{file.name}.md")]


def test_one_file_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    whole = store.weights

    def broken(path: Path, *more: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(whole(path)))
        raise OSError("the disk is gone")

    monkeypatch.setattr(store, "weights", broken)
    with pytest.raises(OSError, match="is gone"):
        export_file(run, tmp_path / "out" / "weights.safetensors")
    assert not list((tmp_path / "out").iterdir())


def test_out_may_be_a_link_or_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (tmp_path / "link", Path()):
        assert main(["export", str(run), str(out), "--format", "hf"]) == 0
        assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (tmp_path / "link").is_symlink()
    assert sorted(p.name for p in Path().iterdir()), "the folder is the one that a shell is in, and not a new one"
    capsys.readouterr()
    assert main(["export", str(run), "."]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("old")
    (tmp_path / "to-file").symlink_to(tmp_path / "file")
    assert main(["export", str(run), str(tmp_path / "to-file")]) == 0
    assert (tmp_path / "to-file").is_symlink() and load_file(tmp_path / "file")


def test_what_the_first_model_said_of_itself_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["llama"].make(tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    values |= {"bos_token_id": 7, "eos_token_id": [8, 9], "max_position_embeddings": 4096}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    run = make(tmp_path / "run", "llama", f"init_from={tmp_path / 'hf'}")
    save(run, load(run))
    found = written(run, tmp_path / "out")
    assert (found["bos_token_id"], found["eos_token_id"]) == (7, [8, 9])
    assert found["max_position_embeddings"] == 4096, "trained on 16, and rotary positions have no end"
    # a run that began with nothing asks nobody, not even the folder one happens to be in
    monkeypatch.chdir(tmp_path / "hf")
    run = make(tmp_path / "drawn", "llama")
    save(run, load(run))
    found = written(run, tmp_path / "out-drawn")
    assert (found["bos_token_id"], found["eos_token_id"], found["max_position_embeddings"]) == (None, None, 16)


def test_what_the_first_model_cannot_have_said_is_left_out(tmp_path: Path) -> None:
    CASES["llama"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "llama", f"init_from={tmp_path / 'hf'}")
    save(run, load(run))
    odd = {"bos_token_id": {"a": 1}, "eos_token_id": [8, -9], "max_position_embeddings": "4096"}
    for i, text in enumerate((json.dumps(odd), "[" * 10**5, "[]")):
        (tmp_path / "hf" / "config.json").write_text(text)
        found = written(run, tmp_path / f"out-{i}")
        assert (found["bos_token_id"], found["eos_token_id"], found["max_position_embeddings"]) == (None, None, 16)


def test_crafted_adapters_are_not_multiplied_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B [1000000, 1] and A [1, 1000000] are 8 MB, and 8 TB as a matrix."""
    run = make(tmp_path / "run", "gpt2", "lora.rank=1", "lora.targets=[up]")
    (run / "launch.json").write_text('{"launches": []}')
    model = load(run)
    layer: Any = model.get_submodule("layers.0.mlp.up")
    original = layer.lora_a, layer.lora_b
    layer.lora_a, layer.lora_b = nn.Parameter(torch.ones(1, 10**6)), nn.Parameter(torch.ones(10**6, 1))
    save(run, model)
    for command in (["export", str(run), str(tmp_path / "out")], ["sample", str(run)], ["evaluate", str(run)]):
        assert main(command) == 2
        message = capsys.readouterr().err
        assert "layers.0.mlp.up.lora_a has shape [1, 1000000], and [1, 32] in the model; 2 differences" in message
    assert not (tmp_path / "out").exists()
    # the same of a configuration: what it would draw does not fit into any host
    layer.lora_a, layer.lora_b = original
    shutil.rmtree(run / "checkpoints")
    save(run, model)
    cfg = run_file.load(run)
    run_file.save(run, {**cfg, "model": {**cfg.model, "vocab_size": 2**40}})
    for command in (["export", str(run), str(tmp_path / "out")], ["sample", str(run)]):
        assert main(command) == 2
        assert "GiB of memory, and" in capsys.readouterr().err


def test_learned_positions_are_as_many_as_there_are(tmp_path: Path) -> None:
    CASES["gpt2"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "gpt2", f"init_from={tmp_path / 'hf'}", "model.seq_len=12")
    save(run, load(run))
    assert written(run, tmp_path / "out")["n_positions"] == 12


def test_the_tokenizer_and_its_end_token_travel_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    run = make(tmp_path / "run", "gpt2")
    save(run, load(run))
    cfg = run_file.load(run)
    (tmp_path / "tokens").mkdir()
    for end, data in (
        (1, {"path": str(tmp_path / "tokens")}),
        (2, {"path": "text.txt", "tokenizer": str(tmp_path / "mine.json")}),
    ):
        source = Path(data["tokenizer"]) if "tokenizer" in data else tmp_path / "tokens" / "tokenizer.json"
        words = {"a": 0, "</s>": end, "b": 3 - end}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(source))
        run_file.save(run, {**cfg, "data": {**cfg.data, **data}})
        assert written(run, tmp_path / f"out-{end}")["eos_token_id"] == end
        assert (tmp_path / f"out-{end}" / "tokenizer.json").read_text() == source.read_text()
    source.write_text("{}")
    assert written(run, tmp_path / "out-odd")["eos_token_id"] is None
    assert "end token" in caplog.text
    source.write_text('{"client_secret": "hunter2"}')
    written(run, tmp_path / "out-secret")
    assert not (tmp_path / "out-secret" / "tokenizer.json").exists(), "what config.yaml names may be any file"


def test_classes_keep_their_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"text": f"text {i}", "label": ("no", "so so", "yes")[i % 3]} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = make(tmp_path / "run", "bert-classify", "data=labelled", f"data.path={tmp_path / 'data.jsonl'}")
    save(run, load(run))
    export_hf(run, tmp_path / "out")
    theirs = reloaded(tmp_path / "out", "bert-classify").config
    assert theirs.id2label == {0: "no", 1: "so so", 2: "yes"} and theirs.label2id == {"no": 0, "so so": 1, "yes": 2}
    (tmp_path / "data.jsonl").unlink()
    assert written(run, tmp_path / "out-gone")["id2label"]["1"] == "LABEL_1"
    assert "names of the classes" in caplog.text


def test_refused_exports_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run", "gpt2")
    (run / "launch.json").write_text('{"launches": []}')
    assert main(["export", str(run), "--format", "hf"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    save(run, load(run))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "full"), "--format", "hf"]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    cfg = run_file.load(run)
    run_file.save(run, {**cfg, "model": {**cfg.model, "_target_": "my.Model"}})
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 2
    assert "my.Model: only dtrain's own code and the modules you trust may be called" in capsys.readouterr().err
    run_file.save(run, {**cfg, "model": {**cfg.model, "_target_": "dtrain.models.resnet.ResNet"}})
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 2
    message = capsys.readouterr().err
    assert "no counterpart of dtrain.models.resnet.ResNet" in message and "--format safetensors" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run"]
    assert not list(run.glob(".*partial*"))


def test_final_weights_and_the_original_ones(tmp_path: Path) -> None:
    """What a run began with can be had again when it has a checkpoint: adapters are merged into that."""
    CASES["gpt2"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "gpt2", f"init_from={tmp_path / 'hf'}")
    first = load(run)
    began = {name: p.detach().clone() for name, p in first.named_parameters()}
    with torch.no_grad():
        for p in first.parameters():
            p.add_(1.0)
    save(run, first)
    now = dict(final_weights(run))
    assert now.keys() == began.keys() and all(torch.equal(w, began[n] + 1.0) for n, w in now.items())
    assert all(torch.equal(p.cpu(), began[n] + 1.0) for n, p in load_model(run, [])[0].named_parameters())
    cfg = run_file.load(run)
    model, source = models.make(cfg), models.original_weights(cfg, [])
    for name, weight in began.items():
        again = torch.empty_like(weight)
        source.fill(model, name, again, torch.device("cpu"))
        assert torch.equal(again, weight)


# ---- a user's own model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ones_own_model_comes_back_as_it_was(strategy: str, tmp_path: Path) -> None:
    words = (f"model={OWN}.Shares", f"data={OWN}.triples", f"strategy={strategy}", "train.steps=2")
    run = own_run(tmp_path / "run", 2, *words)
    plain: Any = own_models.Shares()
    loaded: Any = load_plain(run, [OWN])
    assert type(loaded) is own_models.Shares and not loaded.training
    for (name, ours), theirs in zip(loaded.named_modules(), plain.modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys(), name
    assert loaded.head.weight is loaded.embed.weight and loaded.blocks[0].norm is loaded.blocks[1].norm
    assert list(loaded.state_dict()) == list(plain.state_dict()) and loaded.scale.tolist() == [0.5]

    export_file(run, tmp_path / "own.safetensors")  # without the user's code
    weights = load_file(tmp_path / "own.safetensors")
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    row, keep = torch.arange(16).view(2, 8), torch.ones(2, 8)
    assert torch.equal(plain.eval()(row, keep)[0], loaded(row, keep)[0]) and plain.head.weight is plain.embed.weight
    assert "model.load_state_dict(load_file(" in (tmp_path / "own.safetensors.md").read_text()

    with pytest.raises(
        ValueError, match=r"gives a Shares, which is not a model of transformers\n  fix: --format safet"
    ):
        export_hf(run, tmp_path / "no", trust=[OWN])
    assert not (tmp_path / "no").exists()


def test_a_model_of_transformers_is_exported_by_its_own_method(tmp_path: Path) -> None:
    """Of a function of the user, and of a folder, whose settings stay."""
    own_models.gpt2().save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    for model, trust in ((f"{OWN}.gpt2", [OWN]), (f"hf:{tmp_path / 'folder'}", [])):
        run = own_run(tmp_path / f"run-{len(trust)}", 1, f"model={model}", f"data={OWN}.Tokens", "train.steps=2")
        out = tmp_path / f"out-{len(trust)}"
        export_hf(run, out, trust=trust)
        loaded: Any = load_plain(run, trust)
        assert type(loaded) is transformers.GPT2LMHeadModel and loaded.config.use_cache
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()) and theirs.config.use_cache
        row = torch.arange(8)[None]
        with torch.no_grad():
            assert torch.equal(theirs.eval()(row).logits, loaded(row).logits)
        assert "GPT2LMHeadModel.from_pretrained" in (out / "README.md").read_text()
