"""Write the tables of docs/verify.md.

dtrain verify mutants=all --json > benchmarks/results/verify-mutants.json
python -m benchmarks.verify_page tools PYTHON     run benchmarks/verify_tools with a Python that has the tools
python -m benchmarks.verify_page                  write both tables from the results
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "verify.md", ROOT / "benchmarks" / "results"
MUTANTS, TOOLS = RESULTS / "verify-mutants.json", RESULTS / "verify-tools.json"
CLEAN = RESULTS / "verify-clean.json"
PACKAGES = {
    "ddp": "torch", "fsdp2": "torch", "with_accelerate": "accelerate", "with_lightning": "lightning",
    "with_deepspeed": "deepspeed", "with_trainer": "transformers",
}  # fmt: skip
CASES = ("--uneven", "", "--shuffle")


def measure(python: str) -> None:
    rows = []
    for case, (script, package) in itertools.product(CASES, PACKAGES.items()):
        if case != "--shuffle" or script in ("with_accelerate", "with_lightning"):
            rows.append(row_of(python, script, package, case))
            print(rows[-1], flush=True)
            TOOLS.write_text(json.dumps(rows, indent=1) + "\n")


def row_of(python: str, script: str, package: str, case: str) -> dict[str, Any]:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    command = [
        sys.executable, "-m", "dtrain", "verify", f"script=benchmarks/verify_tools/{script}.py", "processes=1,2",
        f"script_args=--batch {{batch_per_process}} {case}", "batch=8", f"script.python={python}", "--json",
        "--timeout", "600",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    verdict = json.loads(done.stdout)[0] if done.stdout else {"follows": False, "reason": done.stderr[-300:]}
    return {"script": script, "tool": f"{package} {version}", "case": case, **verdict}


def replaced(text: str, name: str, table: list[str]) -> str:
    begin, end = rf"(<!-- {name}: [^\n]*-->\n)", rf"(<!-- end of {name} -->)"
    return re.sub(f"{begin}.*?{end}", lambda m: "\n".join([m[1], *table, "", m[2]]), text, flags=re.S)


def shortened(text: str) -> str:
    """Return the first of several differences, without what depends on the machine."""
    parts = re.split(r", (?=losses differ|gradient norms differ|weights differ|step \d)", text)
    if "ReplicaError" in parts[0]:
        step = re.search(r"step \d+", parts[0])
        before = f"; before: {parts[1]}" if parts[1:] else ""
        parts = [f"replicas differ at {step[0] if step else 'a save'}{before}"]
    return parts[0].replace("|", "/")


def main() -> None:
    if sys.argv[1:2] == ["tools"]:
        measure(sys.argv[2])
    text = PAGE.read_text()
    if MUTANTS.exists():
        rows = json.loads(MUTANTS.read_text())
        killed = sum(row["right"] for row in rows)
        seconds = sum(row["seconds"] for row in rows)
        table = [f"{killed} of {len(rows)} are killed, in {seconds / 60:.1f} minutes on two cores."]
        if CLEAN.exists():
            clean = json.loads(CLEAN.read_text())
            table += [f"{sum(row['right'] for row in clean)} of {len(clean)} clean configurations pass."]
        table += [""]
        table += ["| mutant | what is wrong | source | row | named | how it was found |", "|---|---|---|---|---|---|"]
        for row in rows:
            how = shortened(row["how"]) if row["right"] else "**survived**"
            cells = (row["name"], row["what"], row["source"], f"`{row['row']}`", row["named"], how)
            table.append(f"| {' | '.join(cells)} |")
        text = replaced(text, "mutants", table)
    if TOOLS.exists():
        table = ["| tool | script | samples | follows one process | what differs |", "|---|---|---|---|---|"]
        names = {"": "of one length", "--uneven": "of different lengths", "--shuffle": "shuffled by the tool"}
        for row in json.loads(TOOLS.read_text()):
            follows = "yes" if row["follows"] else "no"
            reason = row["reason"].replace("|", "/")
            table.append(f"| {row['tool']} | {row['script']}.py | {names[row['case']]} | {follows} | {reason} |")
        text = replaced(text, "tools", table)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
