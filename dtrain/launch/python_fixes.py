"""Messages of `dtrain.fit` in Python's spelling: `optim.lr=0.1` of a fix becomes `optim={"lr": 0.1}`."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.config.files import GROUPS, SECRET, SEVERAL, flatten, known_settings, options_of
from dtrain.config.meant_option import OWN
from dtrain.config.unknown_settings import METRICS, unknown_setting
from dtrain.errors import ELSEWHERE, OURS, foreign, unknown
from dtrain.launch.object_fixes import as_function, class_and_settings, name_here, same_option
from dtrain.launch.python_kinds import holds_objects, is_code, is_with_settings

SHORT = {"cluster.processes": "processes", "train.steps": "steps", "train.epochs": "epochs"}
ONLY_HERE = ("recipe", "hydra", "choices")  # they are no settings of conf/config.yaml
# a command, which stays as it is; '…' around a word for the shell; a word, perhaps with another value: 30 or 32
WORD = re.compile(
    r"(?P<command>\b(?:dtrain|python|torchrun|pip|make|export|mv|chmod|def)\s(?:(?!, or )[^;\n])*|`[^`]*`)"
    r"|(?<![\w.\"'/(])'(?P<quoted>[a-z_][\w.]*=(?:[^'\\]|\\.)+)'"
    r"|(?<![\w.\"'/(-])(?P<plain>[a-z_][\w.]*=(?:\[[^\]\n]*\]|\([^)\n]*\)|'[^'\n]*'|\"[^\"\n]*\"|[^\s,;?()'\"\[])+)"
    r"(?P<others>(?:(?:, or | or |, )[\w.+-]+(?![\w=.+-]))*)"
)
TRAIN = ELSEWHERE["data"]  # what other programs call the training data, and the validation data
EVAL = next(names for names in OURS if names.startswith("eval_dataset ")).split()
Pairs = list[tuple[str, str]]  # settings and their values, as on a command line


def in_python(message: str, given: Mapping[str, Any]) -> str:
    """Return the message with its fixes as arguments of fit. given: the arguments of the call."""
    what, found, fix = message.partition("\n  fix: ")
    if not found:
        return message
    wrong = re.split(r"[=:]", what, maxsplit=1)[0]
    fix = re.sub(r", or -m [^;\n]*", "", fix)  # fit starts one run
    names = known_settings()
    if meant := re.match(r"did you mean ([\w.]+(?: or [\w.]+)*)\?", fix):
        plain = {key: with_sections(key, value) for key, value in given.items()}
        value = flatten(plain).get(wrong, ...)
        typed = "…" if value is ... or holds_objects(value) else as_word(value)
        known = [name for name in meant[1].split(" or ") if name.partition(".")[0] in heads(names)]
        fix = f"did you mean {' or '.join(called([(n, typed)], given, wrong) for n in known)}?{fix[meant.end() :]}"
        return f"{what}\n  fix: {fix}" if known else message
    fix, mark, note = fix.partition("   (")
    if note.startswith("or "):
        note = respelled(note, given, wrong, names)
    return f"{what}\n  fix: {respelled(fix, given, wrong, names)}{mark}{note}"


def respelled(text: str, given: Mapping[str, Any], wrong: str, names: Iterable[str]) -> str:
    """Respell the settings in a text; those that only a space separates are typed together."""
    done, start = "", 0
    together: Pairs = []
    ours = heads(names)
    for found in WORD.finditer(text):
        word = found["quoted"] or found["plain"] or ""
        key, _, value = word.partition("=")
        if key.partition(".")[0] not in ours:
            continue
        between, rest = text[start : found.start()], ""
        if not (together and between == " "):
            done += called(together, given, wrong) + between
            together = []
        if not found["quoted"]:
            value, rest = value.rstrip("."), value[len(value.rstrip(".")) :]
        together.append((key, value))
        others = found["others"] or ""
        for other in re.finditer(r"(?:, or | or |, )([\w.+-]+)", others):
            if not (re.fullmatch(r"[\d.e+-]+", other[1]) or (key in GROUPS and other[1] in options_of(key))):
                break
            done += called(together, given, wrong) + f", or {called([(key, other[1])], given, wrong)}"
            together, others = [], others.removeprefix(other[0])
        rest += others
        if rest:
            done += called(together, given, wrong) + rest
            together = []
        start = found.end()
    return done + called(together, given, wrong) + text[start:]


def heads(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names} | {*ONLY_HERE}


def called(pairs: Pairs, given: Mapping[str, Any], wrong: str) -> str:
    """Return arguments of fit for settings of a command line, with what the call has given for the same groups."""
    options = {key: value for key, value in pairs if "." not in key}
    arguments = []
    for name in dict.fromkeys(key.partition(".")[0] for key, _ in pairs):
        settings = {key: value for key, value in pairs if key.startswith(f"{name}.")}
        alone = [key for key in settings if key in given or (key in SHORT and not is_nested(given.get(name), key))]
        arguments += [f"{SHORT.get(k, '')}={as_python(settings[k])}" for k in alone if k not in given]
        dotted = {key: settings[key] for key in alone if key in given}
        inner: dict[str, Any] = {}
        for key in (key for key in settings if key not in alone):
            *parents, leaf = key.split(".")[1:]
            section = inner
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = Literal(as_python(settings[key]))
        if name in options:
            option = as_python(options[name])
            inner = inner.get(options[name], inner) if name in SEVERAL else inner
            arguments.append(f"{name}=({option}, {shown(inner)})" if inner else f"{name}={option}")
        elif inner and (merged := with_given(name, given.get(name), inner, wrong)):
            arguments.append(f"{name}={merged}")
        elif inner:  # what is given cannot be repeated here
            dotted |= {key: settings[key] for key in settings if key not in alone}
        if dotted:
            arguments.append(f"**{{{', '.join(f'{json.dumps(k)}: {as_python(v)}' for k, v in dotted.items())}}}")
    return ", ".join(arguments)


class Literal(str):
    """A value that is spelled in Python already."""


def is_nested(section: Any, key: str) -> bool:
    """Has the call given this setting in a mapping, train={"steps": 5}?"""
    return isinstance(section, Mapping) and key.rpartition(".")[2] in section


def split(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split what is given for a group into its class, function or option, and its settings."""
    if isinstance(value, functools.partial) and not value.args:
        return value.func, value.keywords
    return value if is_with_settings(value) else (None, value) if isinstance(value, Mapping) else (value, {})


def with_given(group: str, value: Any, inner: Mapping[str, Any], wrong: str) -> str:
    """Return the settings of a group together with those that the call has given; "" if they cannot be repeated."""
    thing, settings = split(value)
    is_own = is_code(thing) or (isinstance(thing, str) and OWN.fullmatch(thing))
    if value is None or (group == wrong and not is_own):  # optim=0.1 becomes optim={"lr": 0.1}
        return shown(inner)
    if group in SEVERAL and thing is not None:
        return several_with_given(group, value, inner, wrong)
    kept = {key: item for key, item in settings.items() if key != wrong.removeprefix(f"{group}.")}
    is_named = thing is None or isinstance(thing, str) or is_code(thing)
    if holds_objects(kept) or not is_named:
        return ""
    merged = {**kept, **inner}
    return shown(merged) if thing is None else f"({name_here(thing)}, {shown(merged)})" if merged else name_here(thing)


def several_with_given(group: str, value: Any, inner: Mapping[str, Any], wrong: str) -> str:
    """Do so for hooks or loggers, each of which has a section for its settings."""
    listed = isinstance(value, (list, tuple)) and not is_with_settings(value)
    given = {section_of(one): one for one in (value if listed else [value])}
    if not inner.keys() <= given.keys() or not all(isinstance(one, Mapping) for one in inner.values()):
        return ""
    parts = [with_given(f"{group}.{name}", one, inner.get(name, {}), wrong) for name, one in given.items()]
    return "" if not all(parts) else f"[{', '.join(parts)}]" if listed else parts[0]


def section_of(value: Any) -> str:
    """Return the name of the section that the settings of a hook or logger have."""
    thing = split(value)[0]
    return str(getattr(thing, "__name__", thing)).rpartition(".")[2]


def with_sections(group: str, value: Any) -> Any:
    """Return the settings that a call has given for a group, as nested mappings."""
    thing, settings = split(value)
    if group not in SEVERAL or thing is None:
        return settings if settings else value
    values = value if isinstance(value, (list, tuple)) and not is_with_settings(value) else [value]
    return {section_of(one): dict(split(one)[1]) for one in values}


def shown(value: Any) -> str:
    """Return a value in Python's spelling."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {shown(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def as_python(word: str) -> str:
    """Return a value of a command line in Python's spelling."""
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|…|VALUE", word):
        return word
    if word.lower() in (plain := {"true": "True", "false": "False", "null": "None"}):
        return plain[word.lower()]
    if word[:1] + word[-1:] == "[]":
        return f"[{', '.join(as_python(item.strip()) for item in word[1:-1].split(',') if item.strip())}]"
    text = word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word
    return json.dumps(text, ensure_ascii=False)


def as_word(value: Any) -> str:
    """Return a plain value as a word of a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(as_word, value))}]" if isinstance(value, (list, tuple)) else str(value)


# ---- arguments that fit does not have ------------------------------------------------------------------------


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are no settings, all in one message if each has a fix."""
    ours = heads(known_settings())
    wrong = {k: v for k, v in given.items() if re.fullmatch(r"[^\W\d][\w.]*", k) and k.partition(".")[0] not in ours}
    if any(map(SECRET.search, wrong)):
        return  # refused with other words
    right = {key: value for key, value in given.items() if key not in wrong}
    splits = [k for names in (TRAIN.split(), [w for w in EVAL if w in wrong][:1]) for k in names if k in wrong]
    if len(splits) == 2 and any(map(holds_objects, (wrong[key] for key in splits))):
        made = ", ".join(
            f"{name_here(v)}()" if is_code(v) else f"{type(v).__name__}(…)" for v in map(wrong.get, splits)
        )
        fix = f"def my_data(): return {made} at the top level of the file, and data=my_data"
        raise ValueError(f"{', '.join(splits)}: there are no such arguments\n  fix: {fix}")
    messages: dict[str, str] = {}
    together: dict[str, str] = {}  # of a command line: settings of one group are one argument
    fixes: list[str] = []
    objects: set[str] = set()
    for name, value in flatten(wrong).items() if wrong else ():
        if holds_objects(value) or is_with_settings(value):
            objects.add(name)
            messages[name], fix = with_an_object(name, value, ours)
            fixes += [fix] if fix else []
            continue
        leaf, word = name.rpartition(".")[2], as_word(value)
        is_models = leaf in parameters_of(right.get("model"))
        message = (
            f"{name}: is one of the model's\n  fix: model.{leaf}={word}" if is_models else unknown_setting(name, word)
        )
        messages[name] = in_python(message, {**right, name: value})
        fix = message.partition("\n  fix: ")[2].partition("   (")[0]
        if re.fullmatch(r"[a-z_][\w.]*=[\w.+…-]+( [a-z_][\w.]*=[\w.+…-]+)*", fix):
            for key, _, typed in (word.partition("=") for word in fix.split()):
                together.setdefault(key, typed)
            fixes.append(fix)
    if len(messages) > 1 and len(fixes) == len(messages):
        spelled = [fix for name, fix in zip(messages, fixes, strict=True) if name in objects]
        fix = ", ".join([*spelled, called([*together.items()], right, "")] if together else spelled)
        raise ValueError(f"{', '.join(messages)}: there are no such arguments\n  fix: {fix}")
    if messages:
        raise ValueError(next(iter(messages.values())))


def parameters_of(thing: Any) -> set[str]:
    """Return the names of the arguments of the given model: fit(Net, data, depth=3) is meant for it."""
    thing = thing[0] if is_with_settings(thing) else thing
    try:
        return {*inspect.signature(thing).parameters} if is_code(thing) else set()
    except (TypeError, ValueError):  # a builtin
        return set()


def with_an_object(key: str, value: Any, ours: set[str]) -> tuple[str, str]:
    """Explain an argument of another program, or a misspelled one, whose value is an object; return also its fix."""
    several = isinstance(value, (list, tuple)) and not is_with_settings(value)
    parts = value if several else [value]
    pairs = [split(part) for part in parts]
    named = all((isinstance(p, str) or is_code(p)) and not holds_objects(more) for p, more in pairs)
    group, text = foreign(key), ""
    if key in METRICS:
        fix = "hooks=MyMetrics, a class with eval_metrics(self, outputs, targets): docs/your-own.md#hooks"
        return f"{key}: there is no such argument\n  fix: {fix}", ""
    if group not in GROUPS:
        text = str(unknown(key, [*GROUPS, *ours]))
        near = re.search(r"did you mean (\w+)", text)
        group = near[1] if near and near[1] in GROUPS else None
    if group and named and (len(parts) == 1 or group in SEVERAL):
        names = ", ".join(f"({name_here(p)}, {shown(more)})" if more else name_here(p) for p, more in pairs)
        fix = f"{group}=[{names}]" if group in SEVERAL else f"{group}={names}"
        alone = pairs[0][0] if len(pairs) == 1 and not pairs[0][1] else None
        fix = same_option(group, getattr(alone, "__name__", "")) or fix
        return f"{key}: there is no such argument\n  fix: {fix}", fix
    if group in SEVERAL and len(parts) > 1:
        fix = f"{group}=[{', '.join(map(class_and_settings, parts))}]"
    elif group:
        fix = as_function(group, parts[0] if group in SEVERAL else value)
    else:
        fix = text.partition("\n  fix: ")[2] if "leave out" in text and ";" in text else f"leave out {key}"
        fix += "" if ";" in fix else "; docs/your-own.md has examples"
    return f"{key}: there is no such argument\n  fix: {fix}", ""
