"""The page of the planner's errors: README.md's tables between two marks, and a figure for each source."""

from __future__ import annotations

from pathlib import Path

import our_steps
from choose import Choice, ways
from figure import draw
from score import Errors, Scored

FOLDER = Path(__file__).resolve().parent
BEGIN, END = "<!-- written by report.py --page: from here -->", "<!-- to here -->"
TITLES = {
    "megatron_sc21_table1": "Megatron-LM SC21, table 1: 1.7 to 1,008 billion parameters on A100",
    "megatron_sc21_table2": "Megatron-LM SC21, table 2: ZeRO-3 and 3D on A100",
    "llm_foundry": "llm-foundry: MPT under FSDP on A100 and H100",
    "vtrain_single_node": "vTrain: small GPTs on one node of A100 (computed: see below)",
    "megatron_2020": "Megatron-LM of 2020: tensor parallel on V100 and A100",
    "mt_nlg": "Megatron-Turing NLG 530B on A100",
    "torchtitan": "torchtitan: Llama under FSDP2 on A100 and H100",
    "llama3": "Llama 3 405B on H100",
    "deepspeed_azure": "DeepSpeed on Azure: ZeRO-3 on A100",
    "single_node": "GPT-2 on one node: llm.c and nanoGPT",
    "resnet_bert": "BERT and ResNet-50 on one GPU",
    our_steps.SOURCE: "dtrain itself: GPT-2, Llama, BERT, ViT and ResNet on one H200",
}


def write_page(scored: list[Scored], verdicts: list[tuple[str, Errors, str]]) -> None:
    """figures/SOURCE.svg for each source, and README.md's part between the marks."""
    names = sorted({one.row.source for one in scored}, key=_rank)
    (FOLDER / "figures").mkdir(exist_ok=True)
    for name in names:
        rows = [one for one in scored if one.row.source == name]
        (FOLDER / "figures" / f"{name}.svg").write_text(draw(TITLES.get(name, name), rows))
    readme = FOLDER / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(before + BEGIN + "\n\n" + tables(scored, names, verdicts) + "\n" + END + after)


def tables(scored: list[Scored], names: list[str], verdicts: list[tuple[str, Errors, str]]) -> str:
    """The limits, the choices, and every source with its figure, in Markdown."""
    lines = ["| promised | rows | mean | median | worst | bias | |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {title} | {figures(errors)} | {verdict} |" for title, errors, verdict in verdicts]
    lines += [
        "",
        "| choosing among rows of | groups | best chosen | slower on average | at worst |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {title} | {chosen(found)} |" for title, found in ways(scored)]
    lines += ["", "| source | rows | mean | median | worst | bias |", "|---|---|---|---|---|---|"]
    for name in names:
        errors = Errors.of(one.error for one in scored if one.row.source == name)
        link = "../results/planner-h200.json" if name == our_steps.SOURCE else f"data/{name}.csv"
        lines.append(f"| [{TITLES.get(name, name)}]({link}) | {figures(errors)} |")
    lines += ["", "Predicted against measured. Each point is a row; the band is 10% either side.", ""]
    lines += [f"![{TITLES.get(name, name)}](figures/{name}.svg)" for name in names]
    return "\n".join(lines) + "\n"


def figures(errors: Errors) -> str:
    return f"{errors.count} | {errors.mean:.1%} | {errors.median:.1%} | {errors.worst:.1%} | {errors.bias:+.1%}"


def chosen(found: list[Choice]) -> str:
    slowdowns = [choice.slowdown for choice in found]
    right = sum(slowdown == 0 for slowdown in slowdowns)
    return f"{len(found)} | {right} | {sum(slowdowns) / len(found):.2%} | {max(slowdowns):.1%}"


def _rank(name: str) -> int:
    order = list(TITLES)
    return order.index(name) if name in order else len(order)
