"""`dtrain completion bash|zsh|fish`: a script for the shell, which asks this module what can follow at each Tab.

It answers from conf/, from the sources of the commands and from the run folders, and imports neither Hydra nor torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from dtrain.commands.table import COMMANDS
from dtrain.errors import bad

SCRIPTS = {
    "bash": """# bash completion of dtrain:  eval "$(dtrain completion bash)"
_dtrain() {
    local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}"
    local line="${COMP_LINE:0:COMP_POINT}"
    mapfile -t COMPREPLY < <(dtrain completion --line "$line" --breaks "$COMP_WORDBREAKS" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} != *[=/.] ]] || compopt -o nospace
}
complete -o default -F _dtrain dtrain
""",
    "zsh": """#compdef dtrain
# zsh completion of dtrain:  eval "$(dtrain completion zsh)"
_dtrain() {
    local -a lines words_only shown
    lines=("${(@f)$(dtrain completion --line "${(j: :)words[1,CURRENT]}" --describe 2>/dev/null)}")
    local line
    for line in $lines; do words_only+=("${line%%$'\\t'*}"); shown+=("${line/$'\\t'/  -- }"); done
    if (( $#words_only )); then compadd -Q -l -S '' -d shown -- $words_only; else _files; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
compdef _dtrain dtrain
""",
    "fish": """# fish completion of dtrain:  dtrain completion fish | source
complete -c dtrain -f -a '(dtrain completion --line (commandline -cp | string collect) --describe 2>/dev/null)'
""",
}
USAGE = """usage: dtrain completion bash|zsh|fish

Print a script that completes commands, their options, groups, settings, recipes and run folders with Tab.

  eval "$(dtrain completion bash)"              in ~/.bashrc
  eval "$(dtrain completion zsh)"               in ~/.zshrc
  dtrain completion fish | source               in ~/.config/fish/config.fish

`python launch.py` has Hydra's own: eval "$(python launch.py --shell-completion install=bash)".

Exit codes: 0 done, 2 there is no such shell."""
MOST_RUNS = 30
HARMLESS = re.compile(r"[\w./@=,+:-]+", re.ASCII)
COMPOSING = ("launch", "plan", "verify", "search", "env", "preflight", "comm", "chaos")  # take settings


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv[:1]):
        print(USAGE)
        return 0
    if argv[0] == "--line" and len(argv) > 1:
        breaks = argv[argv.index("--breaks") + 1] if "--breaks" in argv[:-1] else ""
        typed = re.split(r"\s+", argv[1].lstrip())[1:]
        for word, meaning in candidates(typed or [""]):
            whole = word + (f"\t{meaning}" if meaning and "--describe" in argv else "")
            print(whole[len(broken_off(typed[-1] if typed else "", breaks)) :])
        return 0
    if argv[0] not in SCRIPTS:
        raise bad("completion", argv[0], "there is no script for this shell", "dtrain completion bash (or zsh, fish)")
    print(SCRIPTS[argv[0]], end="")
    return 0


def broken_off(word: str, breaks: str) -> str:
    """What bash takes for earlier words: it breaks strategy=fs at the equals sign, and completes fs alone."""
    at = max((word.rfind(c) for c in breaks if c in "=:"), default=-1)
    return word[: at + 1]


def candidates(typed: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (word, meaning) for the last of the typed words, which may be empty."""
    *before, word = typed
    if not before:
        yield from starting(word, [(name, command.summary) for name, command in COMMANDS.items()])
        return
    command = before[0]
    if command not in COMMANDS:
        return
    if word.startswith("-"):
        yield from starting(word, [(option, "") for option in options(command)])
    elif command == "explain":
        yield from starting(word, [(name.rstrip("="), meaning) for name, meaning in settings(word)])
    elif command == "recipes":
        yield from starting(word, [(w, "") for w in (["ls", "show", "cp"] if len(before) == 1 else recipes())])
    elif command == "completion":
        yield from starting(word, [(shell, "") for shell in SCRIPTS])
    elif command in ("metrics", "data", "comm") and len(before) == 1:
        action = {"metrics": "serve", "data": "prepare", "comm": "bench"}[command]
        yield from starting(word, [(action, "")])
    elif command in COMPOSING and (command != "chaos" or len(before) > 1):
        name, equals, value = word.partition("=")
        if equals:
            yield from starting(word, [(f"{name}={v}", meaning) for v, meaning in values(name, value)])
        else:
            yield from starting(word, settings(word))
    elif re.search(r"\bRUN\b", COMMANDS[command].arguments):
        yield from starting(word, [(run, "") for run in ["latest", *runs()]])


def starting(word: str, found: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    yield from ((text, meaning) for text, meaning in found if text.startswith(word))


def options(command: str) -> list[str]:
    """The options of a command, from the source of its module: importing it may take seconds."""
    spec = importlib.util.find_spec(COMMANDS[command].module)
    assert spec is not None and spec.origin is not None
    found = {"--help"}
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "USAGE":
            found |= set(re.findall(r"^\s+(--[a-z][a-z-]*)", str(getattr(node.value, "value", "")), re.MULTILINE))
    return sorted(found | ({"--multirun", "--cfg", "--dry-run"} if command == "launch" else set()))


def settings(word: str) -> list[tuple[str, str]]:
    """Groups and settings with an equals sign; those of a section only once its name is typed."""
    from dtrain.config.describe import first_sentence, group_meanings, top_settings
    from dtrain.config.files import known_settings

    meanings = {s.name: first_sentence(s.meaning) for s in top_settings()} | group_meanings()
    names = [*known_settings(), "recipe"]
    sections = {name.partition(".")[0] for name in names}
    shown = [n for n in names if "." not in n or "." in word]
    shown += [f"{section}." for section in sections if "." not in word and f"{section}." not in shown]
    ends = {name: name if name.endswith(".") else f"{name}=" for name in shown}
    return [
        (ends[name], meanings.get(name, "")) for name in sorted(set(shown)) if name not in sections or name in names
    ]


def values(name: str, typed: str) -> list[tuple[str, str]]:
    """The options of a group, recipes, runs, or the words that a setting can be; after a comma, the next one."""
    from dtrain.config.describe import description, first_sentence, settings_of, top_settings
    from dtrain.config.files import GROUPS, options_of, setting_prefix

    before = typed[: typed.rfind(",") + 1]
    if name in GROUPS:
        extra = [("auto", "The planner's choice.")] if name == "strategy" else []
        found = [(option, first_sentence(description(name, option))) for option in options_of(name)] + extra
    elif name == "recipe":
        found = [(recipe, "") for recipe in recipes()]
    elif name in ("resume", "init_from", "fork"):
        found = [(run, "") for run in ["latest", *runs()]]
    else:
        group = name.partition(".")[0]
        all_of_group = [
            (f"{setting_prefix(group, option)}.{s.name}", s.type)
            for option in (options_of(group) if group in GROUPS else [])
            for s in settings_of(group, option)
        ]
        types = [kind for known, kind in [*((s.name, s.type) for s in top_settings()), *all_of_group] if known == name]
        found = [(word, "") for word in dict.fromkeys(re.findall(r"`([^`]+)`", " ".join(types)))]
    return [(before + word, meaning) for word, meaning in found]


def recipes() -> list[str]:
    from dtrain.config.files import RECIPES

    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def runs() -> list[str]:
    """Run folders below the working folder, the newest first; only names that a shell takes as they are."""
    found = [path.parent for root in ("outputs", "multirun") for path in Path(root).glob("*/*/**/launch.json")]
    names = [str(path) for path in sorted(found, reverse=True)]
    return [name for name in names if HARMLESS.fullmatch(name)][:MOST_RUNS]
