"""Does `make test` catch what `make test-all` catches? Break the code in 60 places and count who notices.

    python -m benchmarks.mutants choose            # writes benchmarks/results/mutants.json: the places, from a seed
    python -m benchmarks.mutants run [--lanes 2]   # tries each place that has no verdict yet

A mutant is one small change of the code: a comparison, a constant, an operator, a condition, a call left out. For each
one the tests that belong to its folder run until one fails: first those of `make test`, then, if none has failed, those
that only `make test-all` runs. A mutant that neither notices is a gap in both, or changes nothing that can be observed:
then write "equivalent" for its verdict by hand, and "why". It counts as noticed by nobody and missed by nobody.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SEED, PER_FOLDER = 21, 10
# where to mutate, and the tests that belong to it beside those of the same name
TESTS = {
    "train": ["tests/train", "tests/parity", "tests/launch/test_local.py", "tests/strategies/test_replicas.py"],
    "strategies": ["tests/strategies", "tests/parity", "tests/models"],
    "checkpoint": ["tests/checkpoint", "tests/parity", "tests/strategies/test_deepspeed.py"],
    "launch": ["tests/launch", "tests/test_bad_inputs.py", "tests/test_cli.py", "tests/test_fit.py"],
    "data": ["tests/data", "tests/parity/test_resume.py", "tests/models"],
    "config": [
        "tests/config", "tests/checks", "tests/launch/test_app.py", "tests/launch/test_recipes.py",
        "tests/launch/test_resume_arguments.py", "tests/test_bad_inputs.py", "tests/plan",
    ],
}
SAYS = ("log.", "bad", "print", "monitor.message")  # calls whose text no test should depend on
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


# ---- places --------------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What this node could be by mistake."""
    other: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        other.ops[0] = OTHER[type(node.ops[0])]()
        yield other
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in OTHER:
        if not any(
            isinstance(part, (ast.JoinedStr, ast.List, ast.Constant)) and not _number(part) for part in parts(node)
        ):
            other.op = OTHER[type(node.op)]()
            yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield other.operand
    elif isinstance(node, ast.Constant) and _number(node):
        other.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield other
    elif isinstance(node, (ast.If, ast.IfExp)):
        other.test = ast.UnaryOp(ast.Not(), other.test)
        yield other
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        other.value = ast.Constant(None)
        yield other


def parts(node: Any) -> list[ast.AST]:
    return node.values if isinstance(node, ast.BoolOp) else [node.value] if isinstance(node, ast.AugAssign) else [
        node.left, node.right
    ]  # fmt: skip


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float))


def places(path: Path) -> list[tuple[ast.AST, ast.AST]]:
    """(node, what it becomes) inside the functions of a file; messages, logs and types are left out."""
    tree = ast.parse(path.read_text())
    found: list[tuple[ast.AST, ast.AST]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        quiet = isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.AnnAssign)) or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).startswith(("log.", "bad", "print", "monitor.message"))
        )
        if quiet:
            return
        if inside and hasattr(node, "lineno"):
            found.extend((node, other) for other in changes(node))
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    visit(child, inside or isinstance(node, ast.FunctionDef))

    visit(tree, False)
    return found


def choose() -> list[dict[str, Any]]:
    """PER_FOLDER places of each folder, from SEED."""
    draw, chosen = random.Random(SEED), []
    for folder in TESTS:
        candidates = [
            (path, node, other)
            for path in sorted((ROOT / "dtrain" / folder).rglob("*.py"))
            for node, other in places(path)
        ]
        for path, node, other in draw.sample(candidates, PER_FOLDER):
            before, code = ast.unparse(node), ast.unparse(ast.fix_missing_locations(other))
            alike = [n for p, n, o in candidates if p == path and (ast.unparse(n), ast.unparse(o)) == (before, code)]
            file = str(path.relative_to(ROOT))
            chosen.append({"file": file, "before": before, "code": code, "nth": alike.index(node)})
    return chosen


def place(mutant: dict[str, Any]) -> Any:
    """The node that a mutant changes: the n-th that reads alike, wherever its line is by now."""
    alike = [
        node
        for node, other in places(ROOT / mutant["file"])
        if (ast.unparse(node), ast.unparse(ast.fix_missing_locations(other))) == (mutant["before"], mutant["code"])
    ]
    if mutant["nth"] >= len(alike):
        raise SystemExit(f"{mutant['file']} no longer has {mutant['before']!r}: choose again")
    return alike[mutant["nth"]]


def mutated(text: str, mutant: dict[str, Any]) -> str:
    """The file with the place changed. A statement that spans lines keeps its indentation."""
    node = place(mutant)
    lines = text.encode().splitlines(keepends=True)  # columns of ast count bytes
    start, end = node.lineno - 1, node.end_lineno - 1
    indent, code = lines[start][: node.col_offset], mutant["code"].encode()
    if not indent.strip():
        code = code.replace(b"\n", b"\n" + indent)
    elif b"\n" not in code and mutant["code"] != "pass":
        code = b"(" + code + b")"
    changed = indent + code + lines[end][node.end_col_offset :]
    return b"".join([*lines[:start], changed, *lines[end + 1 :]]).decode()


# ---- who notices ---------------------------------------------------------------------------------------------


def related(file: str) -> list[str]:
    """Test files, the one of the same name first."""
    folder, stem = file.split("/")[1], Path(file).stem
    files = [str(p.relative_to(ROOT)) for t in TESTS[folder] for p in sorted(found(ROOT / t))]
    return sorted(dict.fromkeys(files), key=lambda name: (Path(name).stem != f"test_{stem}", files.index(name)))


def found(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("test_*.py"))


def verdict(mutant: dict[str, Any], tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By which suite it is noticed, and by which test. A suite that does not end in time has noticed."""
    target = tree / mutant["file"]
    good = target.read_text()
    target.write_text(mutated(good, mutant))
    began = time.monotonic()
    try:
        for suite, more in (("test", []), ("test-all", ["--all"])):
            command = [
                options.python, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu", *more,
                *(word for name in options.deselect for word in ("--deselect", name)), *related(mutant["file"]),
            ]  # fmt: skip
            env = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
            try:
                done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=options.limit)
            except subprocess.TimeoutExpired:
                return {"noticed_by": "none in time" if suite == "test" else "none", "test": f"{suite}: out of time"}
            if done.returncode not in (0, 5):
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return {"noticed_by": suite, "test": failed[0][:160] if failed else done.stdout[-160:]}
        return {"noticed_by": "none", "test": ""}
    finally:
        target.write_text(good)
        mutant["seconds"] = round(time.monotonic() - began)


def run(options: argparse.Namespace) -> None:
    record = json.loads(RESULTS.read_text())
    waiting = [mutant for mutant in record["mutants"] if "noticed_by" not in mutant]
    stop_at = time.monotonic() + options.minutes * 60
    lanes = [Path(tempfile.mkdtemp(prefix="dtrain-mutants-")) / "tree" for _ in range(options.lanes)]
    for tree in lanes:
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "outputs", ".gpu"))

    def work(tree: Path) -> None:
        while waiting and time.monotonic() < stop_at:
            mutant = waiting.pop(0)
            mutant |= verdict(mutant, tree, options)
            before, after = (mutant[key].splitlines()[0] for key in ("before", "code"))
            print(f"{mutant['file']}:{place(mutant).lineno} {before!r} -> {after!r}: ", end="")
            print(f"{mutant['noticed_by']} ({mutant['seconds']} s) {mutant['test']}", flush=True)
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n")

    with ThreadPoolExecutor(options.lanes) as pool:
        list(pool.map(work, lanes))
    verdicts = [mutant.get("noticed_by") for mutant in record["mutants"]]
    counts = {who: verdicts.count(who) for who in ("test", "test-all", "none", "equivalent")}
    print(
        f"noticed by make test {counts['test']}, only by make test-all {counts['test-all']}, by none {counts['none']}; "
        f"equivalent {counts['equivalent']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choose", "run"])
    parser.add_argument("--lanes", type=int, default=1, help="mutants at a time, each in a copy of the tree")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of one mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no other mutant after that")
    parser.add_argument("--deselect", action="append", default=[], help="a test that fails here without a mutant")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    if options.what == "choose":
        RESULTS.write_text(json.dumps({"seed": SEED, "mutants": choose()}, indent=1) + "\n")
    else:
        run(options)


if __name__ == "__main__":
    main()
