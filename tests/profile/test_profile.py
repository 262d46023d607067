"""Profiles: the parts add up to the step, recording changes nothing, and the words for what cannot be recorded."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.cli import main
from dtrain.commands.profile import read_tables
from dtrain.profile import attribute, memory
from dtrain.profile.attribute import MARK, kind_of
from dtrain.profile.record import Profile
from tests.world import SMALL, losses, make_run, spawn, summary, train

RECORD = ["profile=torch", "profile.start=5", "profile.num_steps=2", "train.steps=7"]


def tables(run: Path) -> list[dict[str, Any]]:
    return read_tables(run / "profiles")


def total(values: dict[str, dict[str, float]], key: str = "ms") -> float:
    return sum(value[key] for value in values.values())


# ---- the attribution ---------------------------------------------------------------------------------------------


def event(name: str, cat: str, start: float, end: float, tid: int = 1, launch: int | None = None) -> dict[str, Any]:
    args = {} if launch is None else {"correlation": launch}
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid, "args": args}


def kernel(name: str, launched: float, start: float, end: float, number: int, tid: int = 1) -> list[dict[str, Any]]:
    """The launch on the host and the kernel on a stream."""
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event("cudaLaunchKernel", "cuda_runtime", launched, launched + 5, tid, number),
        event(name, cat, start, end, 7, number),
    ]


def mark(phase: str, start: float, end: float) -> dict[str, Any]:
    return event(MARK + phase, "user_annotation", start, end)


# Two steps after one that only leads in; the GPU runs up to 200 µs behind the host. Times in µs.
GPU_TRACE = [
    mark("update", 0, 100),
    *kernel("multi_tensor_apply_kernel", 90, 95, 300, 1),  # of the step before: the first step begins at 300
    mark("data", 110, 150),
    *kernel("Memcpy HtoD (Pinned -> Device)", 155, 300, 320, 2),
    mark("forward_backward", 160, 400),
    event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 250, 390, 2),
    *kernel("nvjet_hsh_128x256", 170, 320, 420, 3),
    *kernel("ncclDevKernel_AllReduce_Sum_bf16", 260, 400, 520, 4, 2),  # alone from 420 to 450 and from 500 on
    *kernel("sm90_xmma_gemm_bf16", 270, 450, 500, 5, 2),
    mark("update", 410, 560),
    *kernel("multi_tensor_apply_kernel", 550, 600, 700, 6),
    mark("data", 570, 800),
    mark("forward_backward", 800, 960),
    *kernel("pytorch_flash::flash_fwd_kernel", 810, 900, 950, 7),
    mark("update", 960, 1000),
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
]


def test_every_instant_of_a_gpu_belongs_to_one_part() -> None:
    table = attribute.table(GPU_TRACE)
    times = {part: round(2000 * share["ms"]) for part, share in table["parts"].items() if share["ms"]}
    assert times == {
        "copies": 20, "matrix_products": 150, "exposed_communication": 50, "optimizer": 100, "attention": 50,
        "host_gaps": 40 + 150, "between_steps": 10, "data_wait": 30 + 100,
    }  # fmt: skip
    assert table["device"] == "cuda" and table["num_steps"] == 2
    assert table["step_ms"] == pytest.approx(0.350)
    assert table["communication"]["ms"] == pytest.approx(0.060)  # in all: 120 µs in two steps, 50 of them exposed
    phases = {phase: round(2000 * share["ms"]) for phase, share in table["phases"].items()}
    assert phases["backward"] == 30 + 20 + 50 and phases["forward"] == 100 + 100 + 50 + 10
    assert sum(phases.values()) == 700
    assert table["kernels"][0]["name"] == "ncclDevKernel_AllReduce_Sum_bf16"
    assert table["kernels"][0]["calls"] == 0.5
    assert table["kernels"][0]["ms"] == pytest.approx(0.060)


def test_overlapping_kernels_are_counted_once() -> None:
    both = [*GPU_TRACE, *kernel("nvjet_hsh_128x256", 175, 340, 420, 8)]  # on another stream, at the same time
    assert attribute.table(both)["parts"] == attribute.table(GPU_TRACE)["parts"]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix_products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matrix_products"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_nhwc", "matrix_products"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "softmax_and_loss"),
        ("triton_per_fused_native_layer_norm_12", "norms_and_elementwise"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_addmm_4", "norms_and_elementwise"),
        ("triton_tem_fused_mm_7", "matrix_products"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "norms_and_elementwise"),
        ("aten::addmm", "matrix_products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::copy_", "copies"),
        ("aten::native_layer_norm_backward", "norms_and_elementwise"),
        ("aten::sort", "other_compute"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# ---- real runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "tensor", "pipeline"])
def test_the_parts_add_up_to_the_step_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, *RECORD, "profile.ranks=[0,1]", f"strategy={strategy}", "cluster.processes=2")
    assert train(run, 2) == [0, 0]
    assert [table["rank"] for table in tables(run)] == [0, 1]
    for table in tables(run):
        assert table["steps"] == [5, 6] and table["num_steps"] == 2 and table["device"] == "cpu"
        assert total(table["parts"]) == pytest.approx(table["step_ms"])
        assert total(table["phases"]) == pytest.approx(table["step_ms"])
        assert total(table["parts"], "percent") == pytest.approx(100)
        assert table["step_ms_without_profiler"] > 0  # of step 2
        parts, phases = table["parts"], table["phases"]
        for part in ("matrix_products", "attention", "norms_and_elementwise", "optimizer", "host_gaps"):
            assert parts[part]["ms"] > 0, part
        for phase in ("data", "forward", "backward", "optimizer"):
            assert phases[phase]["ms"] > 0, phase
        assert 0 < parts["exposed_communication"]["ms"] <= table["communication"]["ms"] + 1e-9
        assert table["kernels"][0]["ms"] >= table["kernels"][-1]["ms"] > 0
        with gzip.open(run / "profiles" / table["trace"], "rt") as file:
            seen = [e["name"] for e in json.load(file)["traceEvents"]]
        assert seen.count(MARK + "update") == 3  # the two steps, and the one that says where the first begins


def test_recording_changes_no_bit_and_ends_by_itself(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", "train.steps=7", "cluster.processes=1")
    recorded = make_run(tmp_path / "recorded", *RECORD, "train.eval_every=4", "cluster.processes=1")
    assert train(plain) == train(recorded) == [0]
    assert losses(plain) == losses(recorded)
    assert summary(plain)["weights_sha256"] == summary(recorded)["weights_sha256"]
    assert not (plain / "profiles").exists()


class Step:
    """A strategy and a loader of which only the seam is there."""

    def batch(self) -> str:
        return "batch"

    def forward_backward(self) -> str:
        return "loss"

    def update(self) -> str:
        return "result"


@pytest.mark.parametrize("profile, rank", [(Profile(), 0), (Profile("torch", ranks=[1]), 0)])
def test_nothing_is_put_around_a_step_that_is_not_recorded(profile: Profile, rank: int, tmp_path: Path) -> None:
    step = Step()
    profile.begin(tmp_path, rank, torch.device("cpu")).attach(step, step, 0, 100)
    assert vars(step) == {}
    assert not list(tmp_path.iterdir())


def test_what_was_put_around_is_taken_away(tmp_path: Path) -> None:
    step = Step()
    Profile("torch", start=3, num_steps=1).begin(tmp_path, 0, torch.device("cpu")).attach(step, step, 0, 3)
    for _ in range(3):
        assert vars(step)
        assert [step.batch(), step.forward_backward(), step.update()] == ["batch", "loss", "result"]
    assert vars(step) == {}
    assert tables(tmp_path)[0]["steps"] == [3, 3]


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step()
    Profile("torch", start=3, num_steps=1).begin(tmp_path, 0, torch.device("cpu")).attach(step, step, 0, 3)
    (tmp_path / "profiles").rmdir()
    for _ in range(3):
        assert [step.batch(), step.forward_backward(), step.update()] == ["batch", "loss", "result"]
    assert "could not be written" in caplog.text


def test_a_resume_with_too_few_steps_left_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    Profile("torch", start=10, num_steps=3).begin(tmp_path, 0, torch.device("cpu")).attach(step, step, 90, 11)
    assert "only 11 steps are left" in caplog.text
    assert vars(step) == {}


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_prints_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch.json").write_text("{}")
    (tmp_path / "profiles").mkdir()
    table = {"kind": "torch", "rank": 0, "steps": [10, 12], "trace": "t.json.gz", **attribute.table(GPU_TRACE)}
    (tmp_path / "profiles" / "torch-rank-0.json").write_text(json.dumps(table))
    held = {"kind": "memory", "rank": 0, "steps": [10, 12], "snapshot": "s.pickle", **memory.table(SNAPSHOT, 0)}
    (tmp_path / "profiles" / "memory-rank-0.json").write_text(json.dumps(held))
    (tmp_path / "profiles" / "odd.json").write_text('{"kind": "torch", "rank": 3}')
    (tmp_path / "profiles" / "node-0.nsys-rep").touch()
    assert main(["profile", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for word in ("steps 10–12", "0.35 ms a step", "matmuls", "host gaps", "ncclDevKernel", "train.py:7 step"):
        assert word in text, word
    assert "node-0.nsys-rep" in text
    assert main(["profile", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [t["kind"] for t in data["tables"]] == ["torch", "memory"]
    assert data["tables"][0]["parts"]["attention"]["ms"] == pytest.approx(0.025)


ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<{}>, std::array<char*, 3ul> >"
LONG = "void cutlass::device_kernel<" + "cute::tuple<int, int>, " * 8 + "Sm90, {}>"


@pytest.mark.parametrize(
    "form, inside, shown_as",
    [(ADD, ["float", "c10::BFloat16"], "CUDAFunctor_add<{}>"), (LONG, ["[red]", "[blue]"], "Sm90,{}>")],
)
def test_kernels_that_differ_look_different(
    form: str, inside: list[str], shown_as: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch.json").write_text("{}")
    (tmp_path / "profiles").mkdir()
    table = {"kind": "torch", "rank": 0, **attribute.table(GPU_TRACE)}
    alone = "void flash_fwd_kernel<" + "Flash_fwd_kernel_traits<64>, " * 40 + ">"
    table["kernels"] = [
        {"name": name, "ms": 0.1, "percent": 1.0, "calls": 1} for name in (*map(form.format, inside), alone)
    ]
    (tmp_path / "profiles" / "torch-rank-0.json").write_text(json.dumps(table))
    assert main(["profile", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.partition("longest kernels")[2].partition("trace:")[0]
    for text in inside:  # whatever lines the width of the terminal made of it
        assert shown_as.format(text) in re.sub(r"\s", "", shown), text
    assert shown.count("Flash_fwd_kernel_traits") < 6 and "…" in shown  # nothing else is called so: cut


@pytest.mark.parametrize("number", ["-1", "0", "21"])
def test_a_number_of_kernels_that_cannot_be_shown_is_refused(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch.json").write_text("{}")
    assert main(["profile", str(tmp_path), "--kernels", number]) == 2
    said = capsys.readouterr().err
    assert f"--kernels={number}: must be 1 to 20" in said and "fix: --kernels " in said


def test_a_run_without_a_profile_names_the_words_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch.json").write_text("{}")
    assert main(["profile", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "has no profile" in said and "profile=torch" in said and "fix:" in said


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["profile=torch", "profile.ranks=[0,5]"], "profile.ranks=[0, 5]: there is no rank 5 in a run of 2 ranks"),
        (["profile=torch", "profile.ranks=[]"], "profile.ranks=[]: no rank would be recorded"),
        (["profile=torch", "train.steps=11"], "profile.start=10: the run ends after 11 steps"),
        (["profile=torch", "train.stop_after=5"], "profile.start=10: the run ends after 5 steps"),
        (["profile=torch", "train.steps=2"], "last one to record\n  fix: train.steps=12"),
        (["profile=memory", "profile.num_steps=500"], "profile.start=10: the run ends after"),
        (["nsys=true", "profile.start=1000"], "profile.start=1000: the run ends after"),
        (["profile.start=5"], "profile.start=5: profile=none records nothing\n  fix: add profile=torch"),
        (["profile=none", "++profile.num_steps=2"], "profile.num_steps=2: profile=none records nothing"),
        (["profile.ranks=null"], "profile.ranks=null: profile=none records nothing"),
        (["profile=torch", "profile.start=1"], "profile.start=1: must be at least 3"),
        (["profile=torch", "nsys=true"], "nsys=true: profile=torch already records these steps"),
        (["profile=tarch"], "profile=tarch: there is no such option"),
        (["profile.num_stepz=1"], "profile.num_stepz: there is no such setting"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *SMALL, "cluster.processes=2", *words, f"run_dir={tmp_path}/run"]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_profile_of_ones_own_needs_no_settings_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_profile.py").write_text("from dtrain.profile.record import Profile\nclass Mine(Profile): pass\n")
    assert main(["launch", *SMALL, "profile=own_profile.Mine", "dry_run=true"]) == 0, capsys.readouterr().err
    assert main(["launch", *SMALL, "profile=own_profile.Mine", "nsys=true", "dry_run=true"]) == 2
    assert "nsys=true: profile=your own already records these steps" in capsys.readouterr().err


# ---- memory ------------------------------------------------------------------------------------------------------


def frames(line: int) -> list[dict[str, Any]]:
    """The innermost first, as torch has them."""
    inner = {"filename": "/x/site-packages/torch/nn/functional.py", "line": 1, "name": "gelu"}
    return [inner, {"filename": "/home/me/train.py", "line": line, "name": "step"}]


def change(action: str, address: int, size: int, line: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "frames": frames(line) if line else []}


# Held from before the history: 100 at address 1. The peak, 100 + 40 + 50, is in the middle; 30 more come at the end.
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {"device": 0, "address": 1, "total_size": 256, "blocks": [
            {"address": 1, "size": 100, "state": "active_allocated", "frames": frames(3)},
            {"address": 101, "size": 30, "state": "active_allocated", "frames": frames(9)},
            {"address": 131, "size": 126, "state": "inactive", "frames": []},
        ]},
        {"device": 1, "address": 1, "total_size": 999, "blocks": []},
    ],
    "device_traces": [[
        change("free_completed", 500, 20),  # made before the history began
        change("alloc", 101, 40, 7), change("alloc", 141, 50, 8),
        change("free_requested", 141, 50), change("free_completed", 141, 50), change("free_completed", 101, 40),
        change("alloc", 101, 30, 9),
    ]],
}  # fmt: skip


def test_the_holders_of_memory_at_the_peak() -> None:
    table = memory.table(SNAPSHOT, 0)
    assert (table["peak_bytes"], table["reserved_bytes"]) == (190, 256)
    held = {row["where"]: (row["bytes"], row["count"]) for row in table["allocations"]}
    assert held == {f"home/me/train.py:{line} step": (size, 1) for line, size in ((3, 100), (8, 50), (7, 40))}
    assert sum(row["percent"] for row in table["allocations"]) == pytest.approx(100)


def test_memory_that_nobody_asked_for_in_the_history_is_called_unknown() -> None:
    snapshot = SNAPSHOT | {"device_traces": [SNAPSHOT["device_traces"][0][:1]]}
    assert memory.UNKNOWN in {row["where"] for row in memory.table(snapshot, 0)["allocations"]}


@pytest.mark.parametrize(
    "words",
    [
        ["profile=memory"],
        ["profile=memory", "dry_run=true"],
        ["profile=memory", "dry_run=true", "cluster=slurm", "cluster.gpus_per_node=0"],
        ["-m", "profile=memory,none", "dry_run=true"],  # also when the last point of a sweep can be recorded
    ],
)
def test_memory_without_a_gpu_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = "hydra.sweep.dir" if "-m" in words else "run_dir"
    assert main(["launch", *SMALL, *words, f"{folder}={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert "profile=memory" in said and "there is no GPU" in said and "profile=torch" in said


def out_of_memory(folder: Path) -> None:
    recorder = Profile("memory").begin(
        folder, 1, torch.device("cuda", 0)
    )  # not a chosen rank: it is written all the same
    kept = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**45, dtype=torch.uint8, device="cuda")
    assert len(kept) and recorder.rank == 1


@pytest.mark.gpu
def test_memory_that_runs_out_is_written(tmp_path: Path) -> None:
    spawn(1, out_of_memory, tmp_path)
    (table,) = tables(tmp_path)
    assert table["kind"] == "out-of-memory" and table["asked_bytes"] >= 2**45
    assert table["allocations"][0]["bytes"] == 2**28
    assert "test_profile.py" in table["allocations"][0]["where"]
    assert (tmp_path / "profiles" / table["snapshot"]).stat().st_size > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "memory"])
def test_on_a_gpu(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, *RECORD, f"profile={kind}", "cluster.processes=1")
    assert train(run) == [0]
    (table,) = tables(run)
    if kind == "torch":
        assert table["device"] == "cuda"
        assert total(table["parts"]) == pytest.approx(table["step_ms"])
        for part in ("matrix_products", "attention", "norms_and_elementwise", "optimizer", "host_gaps"):
            assert table["parts"][part]["ms"] > 0, part
    else:
        assert 0 < table["peak_bytes"] <= table["reserved_bytes"]
        assert any("dtrain/" in row["where"] for row in table["allocations"])
