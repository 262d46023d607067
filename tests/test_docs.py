"""The pages: generated ones are current, links lead somewhere, and every command shown is accepted as written."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from dtrain import cli
from dtrain.commands import comm
from dtrain.commands.search.request import algorithm, read_request
from dtrain.commands.verify import command as verify
from dtrain.commands.verify.mutants import chosen
from dtrain.commands.verify.script_check import read_request as script_request
from dtrain.config import describe, schema
from dtrain.config.files import CONF, GROUPS, flatten, known_settings, options_of, read_yaml, section, yaml_loader
from dtrain.launch.compose import compose
from dtrain.launch.local import Local
from dtrain.plan.calibrate import command as calibrate
from tests.patience import patience

# Hydra composes a first time only to ask for hydra.mode, which no page sets
COMPOSE_ONCE = ("hydra._internal.hydra.Hydra.get_mode", lambda self, **_: None)
ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIAL = ROOT / "docs" / "getting-started.md"


# ---- the generated pages -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current_and_every_setting_has_a_meaning() -> None:
    """In a process of its own, in which torch cannot be imported."""
    script = "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]"
    script += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", script, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stdout + done.stderr


def test_comments_of_a_file(generate: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text(
        '# A new one.\n_target_: x\n\n# of all ranks\nabove: 1\nbeside: "a # b" # text\nnothing: 2\n'
        "part:\n  inside: 3 # it\n"
    )
    found = generate.comments(path)
    assert found.header == "A new one."
    assert found.settings == {"above": "of all ranks", "beside": "text", "part.inside": "it"}


def test_a_setting_without_a_meaning_is_named(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "GROUPS", ["schedule"])
    assert generate.without_meaning() == []
    monkeypatch.setattr(describe, "meaning", lambda group, option, name: "" if name == "min_ratio" else "text")
    monkeypatch.setattr(generate, "settings_of", describe.settings_of.__wrapped__)  # without its cache
    assert generate.without_meaning() == [
        f"conf/schedule/{option}.yaml: min_ratio" for option in ("cosine", "linear", "polynomial", "wsd")
    ]


# ---- links ---------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    """A page without its code, where brackets are no links."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4,}.*\n?|\n)+", "\n", text)
    return re.sub(r"`[^`]*`", "`code`", text)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_test_file_that_is_named_exists() -> None:
    texts = {path: path.read_text() for folder in ("dtrain", "tests", "benchmarks", "docs") for path in files(folder)}
    texts |= {path: path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md")}
    named = {
        (path.name, name) for path, text in texts.items() for name in re.findall(r"\btests/[\w/]*\w{3}\.py\b", text)
    }
    assert len(named) > 20 and [at for at in named if not (ROOT / at[1]).exists()] == []


def files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]


def test_every_page_is_on_the_map() -> None:
    for file, text in (
        ("docs/index.md", (ROOT / "docs/index.md").read_text()),
        ("mkdocs.yml", (ROOT / "mkdocs.yml").read_text()),
    ):
        missing = [
            page.name for page in (ROOT / "docs").glob("*.md") if page.name not in text and page.name != "index.md"
        ]
        assert missing == [], file


def test_the_layers_are_those_of_the_contract() -> None:
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    want = [name.strip().removeprefix("dtrain.") for layer in layers for name in layer.split("|")]
    page = (ROOT / "docs/architecture.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    shown = [name for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)]
    assert shown == want


# ---- commands ------------------------------------------------------------------------------------------------

BEGINS = re.compile(r"(?:python launch\.py|dtrain|make)(?= |$)")

# words of the pages that stand for something of the reader's, and what the test has in its place
STAND_INS = {
    "RUN": "run", "SWEEP": "sweep", "latest": "run", "multirun/<date>/<time>": "sweep", "multirun/…": "sweep",
    "SOURCE": "texts", "FOLDER": "texts", "PATH": "texts", "FILE.jsonl": "labelled.jsonl", "mine.json": "mine.json",
    "HOST": "127.0.0.1", "SHARED": "shared", "NAME": "ddp", "12-23-01-gpt2-tiny-ddp": "run",
}  # fmt: skip

# launches that need something which a test machine may lack: what is added so that they can be shown, and why
ADDED = {
    "python launch.py strategy=auto model=llama-7b": (["cluster=infiniband"], "does not fit here"),
    "python launch.py strategy=auto": (["cluster=infiniband"], "layouts are compared for GPUs"),
    "python launch.py nsys=true": (["cluster=slurm"], "SLURM's nodes, not this machine, need nsys"),
}

# what the … of such a command may be, where it cannot do without
MORE = {"dtrain plan strategy=3d strategy.tp=8 strategy.pp=4": ["model=llama-7b", "cluster=aws-ib", "cluster.nodes=4"]}

# options of `dtrain plan` that are accepted and left out: each tries many plans, for ten seconds
LONG = {"--largest-model": 1, "--gpus-for": 2}  # with how many words

# launches that are only composed: names and types are checked, the rules are not
COMPOSED = {
    "python launch.py profile=memory": "needs a GPU",
    "python launch.py model=llama-8b init_from=LLAMA strategy=fsdp lora.rank=16 'lora.targets=[q,v]'": "needs weights",
}


@dataclass(frozen=True)
class Command:
    page: str
    text: str
    output: tuple[str, ...] = ()  # the lines that the page shows below it

    @property
    def plain(self) -> str:
        return " ".join(word for word in self.text.split() if word not in ("…", "..."))

    @property
    def words(self) -> list[str]:
        """As a shell would split them, without the page's own signs: … and [optional] and a|b."""
        text = re.sub(r"(?<= )\[([^\]]*)\]", r"\1", self.text)
        words = [word for word in shlex.split(text) if word not in ("…", "...", "…]")]
        return [re.split(r"\|", word)[0] for word in words]


def code_lines(text: str) -> list[str]:
    """The lines of a page's code blocks, fenced or indented, with continued lines joined; '' between two blocks."""
    lines: list[str] = []
    fence = None
    for line in text.splitlines():
        if match := re.match(r" *(```|~~~)", line):
            fence = None if fence else match[1]
            lines.append("")
        elif fence or line.startswith("    "):
            if lines and lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\") + line.strip()
            else:
                lines.append(line)
        else:
            lines.append("")
    return lines


def commands_of(page: Path) -> Iterator[Command]:
    text = page.read_text()
    lines = [line.strip() for line in code_lines(text)]
    for i, line in enumerate(lines):
        shown = line.removeprefix("$ ")
        if BEGINS.match(shown) and " " in shown:
            rest = lines[i + 1 :]
            end = next(
                (k for k, other in enumerate(rest) if not other or BEGINS.match(other.removeprefix("$ "))), len(rest)
            )
            yield Command(page.name, re.split(r" {3,}| +# ", shown)[0].strip(), tuple(rest[:end]))
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose):
        if BEGINS.match(span) and " " in span:
            yield Command(page.name, " ".join(span.split()))


# each once, on the first page that shows it
COMMANDS = list({(c.text, c.output): c for page in reversed(PAGES) for c in commands_of(page)}.values())


class Accepted(Exception):
    """A parser has accepted a command line."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh folder with a run, a sweep, and files for the words of STAND_INS. Nothing is trained."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text("words and words\n" * 400)
    (folder / "labelled.jsonl").write_text('{"text": "a", "label": 0}\n' * 20)
    (folder / "mine.json").write_text("{}")
    (folder / "my.yaml").write_text((ROOT / "recipes" / "cpu-tiny.yaml").read_text())
    for name in ("your-own.md", "getting-started.md"):
        for file, code in files_of((ROOT / "docs" / name).read_text()).items():
            (folder / file).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*COMPOSE_ONCE)
        patch.setattr(Local, "launch", lambda self, run_dir: 0)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("DTRAIN_CPU_FP16", "1")
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for argv in (["run_dir=run"], ["-m", "train.seed=1,2", "hydra.sweep.dir=sweep"]):
            assert cli.main(["launch", *argv]) == 0
        saved = folder / "run" / "checkpoints" / "step-00000200"  # for a fork; only its ranks would read it
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, accepting(getattr(argparse.ArgumentParser, name)))
        yield folder


def accepting(parse: Any) -> Any:
    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        parsed = parse(self, *args, **options)
        if self.prog.startswith("dtrain "):
            raise Accepted
        return parsed

    return parse_and_stop


def files_of(page: str) -> dict[str, str]:
    """The files that a page shows: `NAME.py:` and then a code block."""
    import textwrap

    found = {}
    for name, block in re.findall(r"\b([\w]+\.py):\n\n((?: {4}.*\n|\n)+)", page):
        found[name] = textwrap.dedent(block).strip() + "\n"
    return found


def replaced(words: list[str]) -> list[str]:
    """With the stand-ins in place of the reader's own names."""
    parts = [[part.partition("@") for part in word.split("=")] for word in words]  # latest@200
    return ["=".join(STAND_INS.get(name, name) + at + step for name, at, step in found) for found in parts]


def check_launch(command: Command, argv: list[str]) -> int:
    if command.plain in COMPOSED:
        compose(argv)
        return 0
    added = ADDED.get(command.plain, ([], ""))[0]
    if argv == ["--help"]:
        return 0  # docs/generate.py has printed it for cli.md, which takes Hydra seconds
    if "--cfg" in argv:
        return cli.main(["launch", *argv])
    return cli.main(["launch", *argv, *added, *([] if "--dry-run" in argv else ["dry_run=true"])])


def check(command: Command) -> int:
    """Compose it, show it or parse it; give the exit code."""
    words = [*replaced(command.words), *MORE.get(command.plain, [])]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"the Makefile has no {words[1]}"
        for path in re.findall(r"tests/[\w/.]+", command.text):
            assert (ROOT / path).exists(), path
        return 0
    if words[0] == "python":
        return check_launch(command, words[2:])
    name, argv = words[1], words[2:]
    if name in ("COMMAND", "--help", "version"):
        return 0
    assert name in cli.COMMANDS, f"there is no dtrain {name}"
    if not argv:
        return 0  # the name of a command in a sentence
    if name == "launch":
        return check_launch(command, argv)
    if name == "preflight":
        compose(argv)
        return 0
    if name == "comm":
        compose(comm.read_options(argv[1:]).overrides)
        return 0
    if name == "search":
        if "--help" in argv:
            return 0
        request = read_request(argv)
        compose(request.fixed)
        if request.options["algorithm"] != "optuna":
            algorithm(request)
        for override in request.space:
            assert override.key_or_group in known_settings(), override.key_or_group
        return 0
    if name == "verify" and "--help" not in argv:
        options = argparse.ArgumentParser.parse_known_args(verify.argument_parser(), argv)[0]
        words = dict(word.partition("=")[::2] for word in options.settings)
        if "script" in words:  # tests/commands/verify/test_script_check.py runs one
            script_request(
                [word for word in options.settings if not word.startswith("script=")] + [f"script={__file__}"]
            )
            return 0
        if "mutants" in words or "clean" in words:
            assert not words.get("mutants") or chosen(words["mutants"].split(","))
            return 0
        compose(verify.read_request(options).overrides)
        return 0
    for option, size in LONG.items():
        if name == "plan" and option in argv:
            first = argv.index(option)
            del argv[first : first + size]
    if argv[0] == "calibrate":
        if "--help" not in argv:
            calibrate.parse(argv[1:])
        return 0
    try:
        return cli.main([name, *argv])
    except Accepted:
        return 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")
def test_a_command_is_accepted_as_written(command: Command, world: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = check(command)
        except SystemExit as stop:
            code = stop.code
    message = [line for line in command.output if line.startswith(("error: ", "fix: "))]
    assert code == (2 if message else 0), out.getvalue() + err.getvalue()
    shown = [line.strip() for line in err.getvalue().splitlines()]
    assert [line for line in message if line not in shown] == []


def test_the_tables_of_exceptions_have_no_leftovers() -> None:
    assert {*ADDED, *MORE, *COMPOSED} <= {command.plain for command in COMMANDS}


# ---- overrides in sentences and tables -----------------------------------------------------------------------

# settings of the pages whose value stands for something else
FREE = re.compile(r"…|\.\.\.|[A-Z]{2,}|\$\{")
KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*")
NOT_OURS = ("hydra", "oc", "tests", "torch", "sys")


def override_spans() -> list[tuple[str, str]]:
    """Code spans that consist of overrides: (page, span)."""
    found = []
    names = {*known_settings(), *(name.rpartition(".")[2] for name in known_settings())}  # tp=2: strategy.tp=2 is meant
    for page in PAGES:
        prose = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        prose = "\n".join(line for line in prose.splitlines() if not line.startswith("    "))
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose):
            if BEGINS.match(span) or re.search(r"\(|: |=$|\{\"|\"$", span):
                continue  # a command; or Python, a message, a name
            try:
                words = shlex.split(span)
            except ValueError:
                continue
            keys = [word.partition("=")[0] for word in words if "=" in word]
            ours = [key for key in keys if KEY.fullmatch(key) and ("." in key or key in names)]
            if ours and ours[0].partition(".")[0] not in NOT_OURS:
                found.append((page.name, span))
    return list(dict.fromkeys(found))


def value_of(text: str) -> Any:
    try:
        return yaml.load(text, yaml_loader())
    except yaml.YAMLError:  # **/*.md
        return text


def problem(word: str, chosen: dict[str, str]) -> str:
    """What is wrong with an override; empty if some option of its group takes it."""
    key, _, text = word.partition("=")
    own = "." in chosen.get(key.partition(".")[0], "") or "." in (text if key in GROUPS else "")
    if own or key in ("recipe", "script", "script_args") or key.partition(".")[0] in NOT_OURS:
        return ""  # the reader's own code
    if key in GROUPS:
        options = [*options_of(key), *(["auto"] if key == "strategy" else [])]
        wrong = [
            name
            for name in text.strip("[]").split(",")
            if name not in options and not FREE.search(name) and "|" not in name
        ]
        return f"{key} has no option {wrong[0]}" if wrong and wrong != ["mine"] else ""
    both = [item for file in ("script.yaml", "config.yaml") for item in read_yaml(CONF / file).items()]
    base = {k: v for k, v in both if k not in ("defaults", "hydra")}
    free = FREE.search(text) is not None or text == ""
    values = [value_of(part) for part in re.split(r"[,|](?![^\[{]*[\]}])", text)] if not free else []
    if key in flatten(base):
        for value in values:
            schema.check_plain(key, value, flatten(base)[key])
        return ""
    group, _, name = key.partition(".")
    if group not in GROUPS:
        return f"there is no {key}"
    options = [chosen[group]] if chosen.get(group) in options_of(group) else options_of(group)
    takers = [option for option in options if name.partition(".")[0] in parameters_of(group, option)]
    if not takers:
        return f"no option of {group} has {name}"
    if "." in name or not values:
        return ""
    for option in takers:
        annotation = parameters_of(group, option)[name][0]
        if all(not annotation or schema.fits(v, ast.parse(annotation, mode="eval").body) for v in values):
            return ""
    return f"{key}={text} has another type"


def parameters_of(group: str, option: str) -> dict[str, tuple[str, Any]]:
    whole = section(group, option)
    found = (schema.signature(whole["_target_"], group) if "_target_" in whole else None) or {}
    return {name: found.get(name, ("", None)) for name in ({*whole} if whole.get("_partial_") else {*whole, *found})}


def test_overrides_in_sentences_and_tables() -> None:
    wrong = []
    for page, span in override_spans():
        words = [word for word in shlex.split(span) if "=" in word and not word.startswith("-")]
        chosen = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        for word in words:
            try:
                found = problem(word, chosen)
            except ValueError as error:
                found = str(error)
            if found:
                wrong.append(f"{page}: `{span}`: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "span",
    ["train.stpes=3", "strategy=fsdq", "strategy.shardin=full", "strategy=ddp strategy.tp=2", "train.steps=many"],
)
def test_a_misspelt_override_is_found(span: str) -> None:
    words = span.split()
    chosen = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    found = []
    for word in words:
        try:
            found.append(problem(word, chosen))
        except ValueError as error:
            found.append(str(error))
    assert any(found)


# ---- the tutorial, for real ----------------------------------------------------------------------------------

STOP = "^C"  # what the page shows where the reader presses Ctrl-C
SHORTER = {"make train": "python launch.py recipe=cpu-tiny train.steps=5"}  # make would install everything


def test_the_tutorial_shows_each_step() -> None:
    commands = [command.text for command in commands_of(TUTORIAL) if command.output]
    assert len(commands) >= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_trains(tmp_path: Path) -> None:
    """Every command of the page, in its order and as written, in a folder with the page's own files."""
    (tmp_path / "launch.py").symlink_to(ROOT / "launch.py")
    for file, code in files_of(TUTORIAL.read_text()).items():
        (tmp_path / file).write_text(code)
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for command in commands_of(TUTORIAL):
        if not command.output:
            continue  # a name in a sentence, or a command that only other machines can run
        words = shlex.split(SHORTER.get(command.text, command.text))
        words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", "dtrain", *words[1:]]
        process = subprocess.Popen(
            words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores Ctrl-C
        )  # fmt: skip
        assert process.stdout is not None
        want, text = (2 if any(line.startswith("error: ") for line in command.output) else 0), ""
        if STOP in command.output:
            want = 75
            while "step " not in (line := process.stdout.readline()):
                assert line, f"{command.text}: ended before its first step\n{text}"
                text += line
            time.sleep(1)
            process.send_signal(signal.SIGINT)
        text += process.communicate(timeout=patience(120))[0]
        assert process.returncode == want, f"{command.text}\n{text}"
