"""First weights from files: the same under every layout, read piece by piece, and refused when they do not fit."""

from __future__ import annotations

import json
import logging
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dtrain.checkpoint import store
from dtrain.checkpoint.initial_weights import HuggingFace
from dtrain.checks import init_from
from dtrain.config import run_file
from dtrain.config.build import build
from dtrain.train import build as models
from dtrain.util.dtensor import flat_chunks
from tests.hf import CASES, VOCAB, apart, load, make, save, tokens, transformers
from tests.world import spawn, summary, train

LAYOUTS = {  # GPT-2's weights are changed on the way, Llama's are only renamed
    "gpt2": ("ddp", "fsdp", "zero1", "zero3", "tensor", "pipeline"),
    "llama": ("fsdp", "zero3", "pipeline"),
    "bert": ("fsdp", "tensor"),
}


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write the weights of a folder anew."""
    file = folder / "model.safetensors"
    save_file({k: v.clone() for k, v in edit(load_file(file)).items()}, file, {"format": "pt"})


# ---- the same under every layout -----------------------------------------------------------------------------


def _save_layouts(run_dirs: list[Path]) -> None:
    for run_dir in run_dirs:
        cfg = run_file.load(run_dir)
        strategy = build(cfg.strategy)
        strategy.setup(
            models.make(cfg),
            build(cfg.optim, global_batch_size=8),
            precision=build(cfg.precision),
            device=torch.device("cpu"),
            first=models.first_weights(cfg),
            micro_batch_size=1,
        )
        meta = {"samples": 0, "data": "", "extra": {}, "size": dist.get_world_size()}
        store.save(run_dir / "checkpoints", 1, strategy.state_dict(), meta, keep=1)


def test_every_layout_begins_with_the_same_weights(tmp_path: Path) -> None:
    runs = {}
    for name, layouts in LAYOUTS.items():
        CASES[name].make(tmp_path / name, max_shard_size="20KB")
        assert (tmp_path / name / "model.safetensors.index.json").exists()
        for layout in layouts:
            more = ["strategy.loss_parallel=true"] if layout == "tensor" else []  # cuts the padded vocabulary, too
            runs[name, layout] = make(
                tmp_path / f"{name}-{layout}", name, f"init_from={tmp_path / name}", f"strategy={layout}",
                "cluster.processes=2", *more,
            )  # fmt: skip
    spawn(2, _save_layouts, list(runs.values()))
    for name, layouts in LAYOUTS.items():
        alone = make(tmp_path / f"{name}-alone", name, f"init_from={tmp_path / name}")
        expected = store.weights_sha256(save(alone, load(alone)))
        found = {x: store.weights_sha256(runs[name, x] / "checkpoints" / "step-00000001") for x in layouts}
        assert found == dict.fromkeys(layouts, expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_part_is_the_part_of_the_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any run of elements of any weight, as ZeRO cuts them: transposed, head by head, padded, plain."""
    source, wholes = _gpt2_source(tmp_path_factory)
    name = data.draw(st.sampled_from(sorted(wholes)))
    whole = wholes[name]
    begin = data.draw(st.integers(0, whole.numel() - 1))
    values = torch.full((data.draw(st.integers(1, whole.numel() - begin)),), math.nan)
    for chunk in flat_chunks(values, tuple(whole.shape), begin):
        source.read(name, chunk)
    assert torch.equal(values, whole.flatten()[begin : begin + len(values)])


_made: list[tuple[HuggingFace, dict[str, torch.Tensor]]] = []


def _gpt2_source(factory: pytest.TempPathFactory) -> tuple[HuggingFace, dict[str, torch.Tensor]]:
    if not _made:
        folder = factory.mktemp("source")
        CASES["gpt2"].make(folder / "hf")
        run = make(folder / "run", "gpt2", f"init_from={folder / 'hf'}")
        wholes = {name: p.detach() for name, p in load(run).named_parameters() if not name.startswith("layers.1")}
        _made.append((HuggingFace(folder / "hf", run_file.load(run).model), wholes))
    return _made[0]


# ---- what files may look like --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_names_without_the_prefix(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].make(tmp_path / "hf")
    prefix = f"{theirs.base_model_prefix}."
    change(tmp_path / "hf", lambda state: {k.removeprefix(prefix): v for k, v in state.items()})
    assert apart(load(make(tmp_path / "run", name, f"init_from={tmp_path / 'hf'}")), theirs) < 1e-5


def test_a_tied_head_that_was_saved_and_tables_that_are_no_weights(tmp_path: Path) -> None:
    theirs = CASES["gpt2"].make(tmp_path / "hf")
    change(
        tmp_path / "hf",
        lambda s: s | {"lm_head.weight": s["transformer.wte.weight"], "transformer.h.0.attn.bias": torch.ones(16, 16)},
    )  # fmt: skip
    assert apart(load(make(tmp_path / "run", "gpt2", f"init_from={tmp_path / 'hf'}")), theirs) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_files(dtype: torch.dtype, tmp_path: Path) -> None:
    CASES["llama"].make(tmp_path / "hf")
    change(tmp_path / "hf", lambda state: {k: v.to(dtype) for k, v in state.items()})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ours = load(make(tmp_path / "run", "llama", f"init_from={tmp_path / 'hf'}"))
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    assert apart(ours, theirs) < 1e-5


def test_padding_rows_leave_the_loss_alone(tmp_path: Path) -> None:
    """Where all logits are far below 0, a padding row of zeros would take the whole probability."""
    theirs = CASES["gpt2"].make(tmp_path / "hf")
    # one constant feature, as the last norm's bias, makes every logit about -100
    change(
        tmp_path / "hf",
        lambda s: s
        | {"transformer.ln_f.bias": s["transformer.ln_f.bias"].index_fill(0, torch.tensor(0), 100.0),
           "transformer.wte.weight": s["transformer.wte.weight"].index_fill(1, torch.tensor(0), -1.0)},
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours = load(make(tmp_path / "run", "gpt2", f"init_from={tmp_path / 'hf'}", "model.vocab_multiple=64"))
    x, y = tokens(), tokens(1)
    with torch.inference_mode():
        logits = theirs(x).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        assert logits.max() < -50
        assert 0 <= ours(x, y) - expected <= math.log(320 / VOCAB), "rows of the mean logit, and Jensen"


def test_more_tokens_and_fewer_positions_than_the_file_has(tmp_path: Path) -> None:
    theirs = CASES["bert"].make(tmp_path / "hf")
    ours = load(
        make(tmp_path / "run", "bert", f"init_from={tmp_path / 'hf'}", "model.vocab_size=278", "model.seq_len=12")
    )
    x = tokens()[:, :12]
    with torch.inference_mode():
        a, b = ours(x), theirs(x).logits
    assert a.shape[-1] == 278
    torch.testing.assert_close(a[..., :VOCAB], b, rtol=0, atol=1e-5)
    torch.testing.assert_close(a[..., VOCAB:], b.mean(dim=-1, keepdim=True).expand(-1, -1, 9), rtol=0, atol=1e-4)


def test_a_new_task_draws_its_head_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CASES["bert"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "bert-classify", f"init_from={tmp_path / 'hf'}")
    with caplog.at_level(logging.INFO, "dtrain"):
        ours = load(run)
    assert "randomly initialized: pooler.weight, pooler.bias, classifier.weight, classifier.bias" in caplog.text
    assert torch.equal(ours.classifier.weight, load(make(tmp_path / "drawn", "bert-classify")).classifier.weight)
    file = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(ours.segments.weight, file["bert.embeddings.token_type_embeddings.weight"])


def test_other_classes_draw_a_new_head(tmp_path: Path) -> None:
    CASES["bert-classify"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "bert-classify", f"init_from={tmp_path / 'hf'}", "model.num_classes=5")
    source = models.original_weights(run_file.load(run), [])
    assert source.drawn == ["classifier.weight", "classifier.bias"]
    assert load(run).pooler.bias.abs().max() > 0, "the rest is read: a drawn bias is 0"


def test_adapters_are_drawn_beside_weights_from_the_file(tmp_path: Path) -> None:
    CASES["llama"].make(tmp_path / "hf")
    run = make(tmp_path / "run", "llama", f"init_from={tmp_path / 'hf'}", "lora.rank=2", "lora.targets=[q]")
    ours = dict(load(run).named_parameters())
    assert ours["layers.0.attention.q.lora_b"].abs().max() == 0 and ours["layers.0.attention.q.lora_a"].std() > 0
    theirs = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(ours["layers.0.attention.q.weight"], theirs)


# ---- a run of dtrain -----------------------------------------------------------------------------------------


def test_a_run_begins_where_another_ended_and_a_resume_needs_it_no_more(tmp_path: Path) -> None:
    CASES["gpt2"].make(tmp_path / "hf")
    folders = {"init_from": tmp_path / "hf"}
    first = make(
        tmp_path / "first", "gpt2", f"init_from={folders['init_from']}", "strategy=fsdp", "cluster.processes=2",
        "train.steps=4", "train.stop_after=2",
    )  # fmt: skip
    assert train(first, 2) == [0, 0]
    shutil.rmtree(tmp_path / "hf")
    cfg = run_file.load(first)
    cfg.train["stop_after"] = None
    run_file.save(first, cfg)
    assert train(first) == [0], "the checkpoint wins, and init_from is gone"
    assert summary(first)["start_step"] == 2

    trained = dict(store.weights(first / "checkpoints" / "step-00000004"))
    for path in (first, first / "checkpoints" / "step-00000004"):
        second = load(make(tmp_path / f"second-{path.name}", "gpt2", f"init_from={path}"))
        assert all(torch.equal(p, trained[name]) for name, p in second.named_parameters())
    third = load(make(tmp_path / "third", "gpt2", f"init_from={first}", "model.seq_len=12"))
    assert torch.equal(third.positions.weight, trained["positions.weight"][:12])


def test_a_run_of_another_task_and_a_damaged_one(tmp_path: Path) -> None:
    run = make(tmp_path / "mlm", "bert")
    folder = save(run, load(run))
    ours = load(make(tmp_path / "classify", "bert-classify", f"init_from={run}"))
    assert torch.equal(ours.embed.weight, dict(store.weights(folder))["embed.weight"])
    file = folder / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ValueError, match=r"damaged .*checksum"):
        load(make(tmp_path / "damaged", "bert", f"init_from={folder}"))


# ---- refused before a launch ---------------------------------------------------------------------------------


def refused(name: str, path: Path | str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        make(Path(path).parent / "refused" if str(path) else Path("refused"), name, f"init_from={path}", *overrides)
    assert str(caught.value).startswith("init_from=") and "\n  fix: " in str(caught.value)
    return str(caught.value)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "dtrain downloads nothing" in refused("gpt2", tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("gpt2", tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "neither a Hugging Face model nor a run" in refused("gpt2", tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "adapters only" in refused("gpt2", tmp_path / "empty")
    for text, word in (("{", "cannot be read"), ("[]", "not an object"), ('{"model_type": "t5"}', "model_type=t5")):
        (tmp_path / "empty" / "config.json").write_text(text)
        assert word in refused("gpt2", tmp_path / "empty")


def test_sizes_that_differ_are_all_named_with_what_to_type(tmp_path: Path) -> None:
    CASES["llama-scaled-tied"].make(tmp_path / "hf")
    message = refused("llama", tmp_path / "hf", "model.num_layers=3", "model.hidden_dim=64", "model.vocab_size=50")
    fix = message.partition("fix: ")[2]
    assert "model.num_layers is 3 and 2 in init_from" in message
    typed = {"model.num_layers=2", "model.hidden_dim=48", f"model.vocab_size={VOCAB}", "model.rope_theta=500.0"}
    assert set(fix.split()) == typed | {"model.tied=true", "model.rope_factor=8.0", "model.rope_original_len=8"}
    changed = [o for o in fix.split() if not o.startswith("model.vocab")]
    load(make(tmp_path / "run", "llama", f"init_from={tmp_path / 'hf'}", *changed))  # what it says works


def test_another_family_names_a_model_of_it(tmp_path: Path) -> None:
    CASES["bert"].make(tmp_path / "hf")
    message = refused("gpt2", tmp_path / "hf")
    assert "it is a bert" in message and "fix: model=bert-base model.num_layers=2 model.dim=32" in message


def test_a_model_that_we_have_by_name_is_named(tmp_path: Path) -> None:
    transformers.GPT2Config().save_pretrained(tmp_path / "hf")  # the smallest one that was published
    save_file({"transformer.wte.weight": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    assert refused("gpt2", tmp_path / "hf").endswith("fix: model=gpt2-124m")
    assert refused("llama", tmp_path / "hf").endswith("fix: model=gpt2-124m")


def test_longer_than_the_files_positions(tmp_path: Path) -> None:
    CASES["gpt2"].make(tmp_path / "hf")
    assert "fix: model.seq_len=16" in refused("gpt2", tmp_path / "hf", "model.seq_len=32")


def test_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    CASES["gpt2"].make(tmp_path / "hf", max_shard_size="20KB")
    parts = sorted((tmp_path / "hf").glob("*.safetensors"))
    whole = parts[1].read_bytes()
    parts[1].unlink()
    assert f"{parts[1].name} is missing; 1 of its {len(parts)} files" in refused("gpt2", tmp_path / "hf")
    parts[1].write_bytes(whole[:-5])
    assert "its header says" in refused("gpt2", tmp_path / "hf")
    parts[1].write_bytes(whole[:4])
    assert "truncated" in refused("gpt2", tmp_path / "hf")
    parts[1].write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git-lfs" in refused("gpt2", tmp_path / "hf")
    parts[1].write_bytes(parts[0].read_bytes())
    assert "but in no file" in refused("gpt2", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    assert "no weight_map" in refused("gpt2", tmp_path / "hf")
    for file in (tmp_path / "hf").glob("model*"):
        file.unlink()
    assert "no model.safetensors" in refused("gpt2", tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"")
    message = refused("gpt2", tmp_path / "hf")
    assert "pickled weights only (pytorch_model.bin)" in message and "save_pretrained" in message
    assert "transformers.GPT2LMHeadModel.from_pretrained" in message, "AutoModel would leave the head out"
    edit_config(tmp_path / "hf", architectures=["x; y"])
    assert "transformers.AutoModel.from_pretrained" in refused("gpt2", tmp_path / "hf")


def test_the_advice_for_pickled_weights_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = CASES["llama"].make(tmp_path / "hf")
    torch.save(theirs.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "model.safetensors").unlink()
    message = refused("llama", tmp_path / "hf")
    _, _, script = shlex.split(message.partition("fix: ")[2].partition(" where you trust")[0])
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    assert apart(load(make(tmp_path / "run", "llama", f"init_from={tmp_path / 'NEW'}")), theirs) < 1e-5


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_weights_of_another_shape_name_or_number_are_refused(tmp_path: Path) -> None:
    CASES["llama"].make(tmp_path / "hf")
    original = load_file(tmp_path / "hf" / "model.safetensors")
    key = "model.layers.1.self_attn.q_proj.weight"

    def with_weights(state: dict[str, torch.Tensor]) -> None:
        change(tmp_path / "hf", lambda _: state)

    with_weights({k: v for k, v in original.items() if "layers.1" not in k})
    message = refused("llama", tmp_path / "hf")
    assert "(layers.1.norm1.weight in dtrain) is missing; 9 missing in all" in message
    with_weights(original | {f"model.layers.2.{k}.weight": torch.ones(1) for k in ("a", "b")})
    assert "it has 3 layers, the model 2: model.layers.2.a.weight; 2 extra weights" in refused("llama", tmp_path / "hf")
    with_weights(original | {key: original[key][:8]})
    message = refused("llama", tmp_path / "hf")
    assert f"{key} has shape [8, 32], but [32, 32] by its config.json; 1 such in all" in message
    embed = "model.embed_tokens.weight"
    with_weights(original | {embed: original[embed][:-4]})
    assert f"[{VOCAB - 4}, 32], but [{VOCAB}, 32]" in refused("llama", tmp_path / "hf"), "not as if tokens were new"
    with_weights(original | {key: original[key].to(torch.int8)})
    assert "is of type I8" in refused("llama", tmp_path / "hf")
    CASES["gpt2"].make(tmp_path / "gpt2")
    key = "transformer.h.1.mlp.c_fc.bias"
    change(tmp_path / "gpt2", lambda state: state | {key: state[key][1:]})
    assert f"{key} has shape [127], but [128]" in refused("gpt2", tmp_path / "gpt2")


def test_a_bias_that_is_missing_is_found_by_the_ranks(tmp_path: Path) -> None:
    CASES["gpt2"].make(tmp_path / "hf")
    change(tmp_path / "hf", lambda state: {k: v for k, v in state.items() if not k.endswith("c_fc.bias")})
    message = refused_by_ranks("gpt2", tmp_path)
    assert "layers.0.mlp.up.bias is missing in init_from; 2 differences in all" in message


def refused_by_ranks(name: str, folder: Path) -> str:
    """A launch does not build the model; a rank does, and compares every name and shape before it reads."""
    run = make(folder / "run", name, f"init_from={folder / 'hf'}")
    with pytest.raises(ValueError) as caught:
        load(run)
    assert "\n  fix: " in str(caught.value)
    return str(caught.value)


def test_runs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = make(tmp_path / "run", "gpt2")
    assert "no checkpoint yet" in refused("gpt2", run)
    save(run, load(run))
    assert "fix: model.num_layers=2 model.dim=32" in refused("gpt2", run, "model.num_layers=3", "model.dim=64")
    assert "fix: model=gpt2-tiny" in refused("llama", run)
    message = refused("gpt2", run, "model.vocab_size=280")
    assert (
        f"model.vocab_size is 280 here and {VOCAB} there" in message
        and f"dtrain export {run} OUT --format hf" in message
    )
    shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "alone")  # says no settings: the ranks compare
    with pytest.raises(ValueError, match=r"embed.weight has shape \[272, 32\] in init_from, \[288, 32\] in the model"):
        load(make(tmp_path / "more", "gpt2", f"init_from={tmp_path / 'alone'}", "model.vocab_size=280"))
    adapters = make(tmp_path / "adapters", "gpt2", "lora.rank=2")
    save(adapters, load(adapters))
    assert "trained LoRA adapters" in refused("gpt2", adapters)


def test_a_resume_asks_for_nothing_but_frozen_weights(tmp_path: Path) -> None:
    values = {"init_from": str(tmp_path / "gone"), "resume": "x", "model": {}, "lora": {"rank": 0}}
    init_from.check(values)
    with pytest.raises(ValueError, match="is not a folder"):
        init_from.check(values | {"lora": {"rank": 2}})
    with pytest.raises(ValueError, match="must name a folder"):
        init_from.check(values | {"init_from": "", "resume": None})


def test_the_path_is_kept_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["gpt2"].make(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert run_file.load(make(tmp_path / "run", "gpt2", "init_from=hf")).init_from == str(tmp_path / "hf")
    text = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert text["model_type"] == "gpt2"
