"""The plan on paper: every figure of a row, the parts that add up, and the arithmetic with its numbers."""

import re

import pytest

from dtrain.plan import report
from dtrain.plan.ledger import Item
from dtrain.plan.predict import GIB
from dtrain.plan.search.search import rank
from tests.commands.plan.capacity import question
from tests.plan.test_predict import made


def test_a_row_has_a_text_for_every_heading() -> None:
    row = report.row(made(hardware={"price_per_gpu_hour": 90.0}))
    assert set(row) == set(report.HEADINGS)
    assert row["memory"] == "30.0 GiB" and row["states"] == "10.0" and row["activations"] == "20.0"
    assert (row["step"], row["compute"], row["communication"]) == ("500 ms", "375 ms", "125 ms")
    assert row["tokens"] == "256" and row["mfu"] == "4.0%" and row["time"] == "50s" and row["cost"] == "5.00"
    assert row["fits"] == "yes" and row["degrees"] == "dp 4" and row["more"] == "-"


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (None, "-"),
        (0.0034, "0.0034"),
        (0.37, "0.37"),
        (4.6, "4.60"),
        (23.456, "23.46"),
        (559.2, "559"),
        (1e6, "1,000,000"),
    ],
)
def test_money_is_written_one_way(cost: float | None, text: str) -> None:
    assert report.money(cost) == text


def test_what_lacks_memory_says_how_much_and_of_which() -> None:
    assert report.lacking(made(50.0)) == "lacks 12.0 GiB"
    assert report.lacking(made(1.0, offload="cpu", hardware={"host_memory_gib": 1e-6})).endswith("of host memory")
    assert report.lacking(made(50.0, offload="cpu", hardware={"host_memory_gib": 1e-6})) == "lacks 12.0 GiB"
    assert report.lacking(made(38.00001, offload="cpu", hardware={"host_memory_gib": 1e-6})).endswith("of host memory")
    assert report.lacking(made(1.0, offload="cpu", hardware={"host_memory_gib": None})) == "host memory not known"
    assert report.lacking(made(1.0, offload="cpu", hardware={"host_memory_gib": 512})) == "yes"
    assert report.lacking(made(hardware={"gpu_memory_gib": None, "usable_memory_gib": None})) == "-"


@pytest.mark.parametrize(
    ("memory", "text"), [(36.4, "yes"), (36.5, "tight"), (38.0, "tight"), (38.1, "lacks 0.10 GiB")]
)
def test_what_leaves_less_than_4_percent_of_the_card_is_tight(memory: float, text: str) -> None:
    """39 GiB a GPU, 1 of them for what is beside."""
    assert report.row(made(memory))["fits"] == text


def test_a_cpu_has_no_cuda() -> None:
    cpu = dict.fromkeys(("gpu", "gpu_memory_gib", "usable_memory_gib"))
    words = "\n".join([*report.explained(made(hardware=cpu)), *report.details(made(hardware=cpu))])
    assert "CUDA" not in words and "fullest rank" in words
    assert "CUDA" in "\n".join(report.explained(made()))


def test_without_a_time_and_a_price_there_are_dashes() -> None:
    row = report.row(made(step_s=None))
    assert {row[key] for key in ("step", "compute", "tokens", "mfu", "time", "hours", "cost")} == {"-"}


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"data": "grad_op"}, "grad_op"),
        ({"replica_size": 2}, "hybrid 2"),
        ({"strategy": "3d", "tp": 2, "pp": 2, "dp": 1, "schedule": "zbv"}, "zbv"),
        (
            {"strategy": "3d", "pp": 2, "dp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
            "interleaved_1f1b ×2 data=fsdp",
        ),
        ({"tp": 2, "sequence_parallel": True, "loss_parallel": True}, "seq+loss parallel"),
        ({"offload": "cpu", "offload_params": "nvme"}, "offload=cpu offload_params=nvme"),
    ],
)  # fmt: skip
def test_variants_are_named(layout: dict[str, object], text: str) -> None:
    assert report.variants(made(**layout)) == text


def test_the_table_is_short_and_has_every_strategy() -> None:
    found = [made(step_s=0.5 + i / 100, strategy="fsdp", micro_batch_size=i + 1) for i in range(9)]
    found += [made(step_s=5.0, strategy="3d", tp=2, dp=2), made(90.0, strategy="ddp", data="ddp")]
    ranked = rank(found)
    shown = report.shown(ranked)
    assert [p.layout.strategy for p in shown] == ["fsdp"] * report.TOP + ["3d", "ddp"]
    assert report.shown(ranked, everything=True) == ranked


def test_of_what_does_not_fit_the_nearest_few_are_shown() -> None:
    ranked = rank([made(50.0 + i, micro_batch_size=i + 1) for i in range(9)])
    assert report.shown(ranked) == ranked[: report.UNFIT]


def test_plain_tables_align_and_leave_out_what_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_predictions([made(), made(8.0, 12.0, micro_batch_size=128)])
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "cost" not in heading and "bubble" not in heading and "tok/s" in heading
    assert len(lines) == 2 and "12.0s" in lines[1]
    end = heading.index("micro") + len("micro")
    assert lines[0][:end].endswith("    2") and lines[1][:end].endswith("128")


def test_details_add_up_to_their_totals() -> None:
    memory, step = report.details(made())
    numbers = [float(n) for n in re.findall(r"([\d.]+) GiB", memory)]
    assert numbers[0] == pytest.approx(sum(numbers[1:3])) and numbers[3:] == [1.0, 39.0]
    assert step == "step    500 ms = compute 375 ms + communication 125 ms"


def test_explained_puts_the_numbers_in() -> None:
    prediction = made(hardware={"price_per_gpu_hour": 2.0})
    prediction.memory.append(Item("logits", "logits", GIB, "{} tokens × {} bytes", (2**20, 1024)))
    text = "\n".join(report.explained(prediction))
    assert "1.000  logits, logits: 1048576 tokens × 1024 bytes" in text
    assert "31.000  in all" in text and "500.000  in all" in text
    assert "MFU 4.0% = 1e+12 FLOP a sample × 8 samples ÷ 0.5 s ÷ (4 GPUs × 100 TFLOP/s)" in text
    assert "GPU-hours = 4 GPUs × 100 steps × 0.5 s ÷ 3600" in text and "cost 0.11" in text


def test_the_heading_says_what_is_planned_for() -> None:
    asked = question("model=llama-7b", "hardware=h100", "cluster.nodes=4")
    text = report.heading(made(), asked.config)
    assert text.startswith("llama-7b, ") and "4 nodes, 32 × X (39.0 GiB usable)" in text
    assert "bf16" in text and "batch 8 × 16 tokens" in text and "100 steps = 12.8K tokens" in text


def test_on_a_terminal_the_first_row_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [{"strategy": "fsdp", "step": "1.0 s"}, {"strategy": "ddp", "step": "2.0 s"}]
    report.print_table({"strategy": "strategy", "step": "step"}, rows, {"step"}, ())
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "fsdp" in first and "\x1b[1;32m" in first and "ddp" in second and "\x1b[1;32m" not in second


@pytest.mark.parametrize("priced", [True, False])
def test_80_columns_keep_the_layout_its_time_and_its_cost(
    priced: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    hardware = {"price_per_gpu_hour": 90.0 if priced else None}
    third = {"strategy": "3d", "tp": 2, "pp": 2, "dp": 1, "schedule": "interleaved_1f1b", "sequence_parallel": True}
    found = [made(hardware=hardware), made(hardware=hardware, data="grad_op"), made(90.0, hardware=hardware, **third)]
    report.print_predictions(found)
    heading, *rows, hidden = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert len(heading) <= 80 and len(rows) == 3, "no row is folded"
    assert heading.split()[:4] == ["strategy", "degrees", "micro", "checkpoint"] and ("cost" in heading) == priced
    assert "time" in heading and heading.index("time") + 4 == rows[0].index("50s") + 3, (
        "numbers end under their heading"
    )
    assert [row[: row.index("tp 2" if row.startswith("3d") else "dp 4")].strip() for row in rows] == [
        "fsdp", "fsdp, grad_op", "3d",
    ]  # fmt: skip
    headings = hidden.removeprefix("hidden to fit 80 columns: ").split(", ")
    assert {"with", "comm"} <= {*headings} <= {*report.HEADINGS.values()}
