"""`dtrain runs --where 'val_loss<2 and strategy=fsdp'`: a condition on runs, parsed here; nothing is executed.

    condition   = and-part { "or" and-part }
    and-part    = part { "and" part }
    part        = "not" part | "(" condition ")" | NAME OPERATOR VALUE
    OPERATOR    = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~" (contains)

A NAME is a key of summary.json, a group (data=stdlib) or a setting (optim.lr), or tag, status, started, age, name. A
value that a run does not have makes a comparison false, except `!=`. The headings of the table are names, too: val
loss, accuracy, tok/s.
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dtrain.config.files import flatten, known_settings
from dtrain.config.run_file import flat_config
from dtrain.errors import bad, unknown
from dtrain.runs.record import Record
from dtrain.util.format import as_dict, finite

TOKEN = re.compile(
    r"""\s*(?:(?P<op><=|>=|!=|==|[=<>~()])|'(?P<one>[^']*)'|"(?P<two>[^"]*)"|(?P<word>[^\s()<>=!~'"]+))"""
)
ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
AND, OR = ("and", "&", "&&"), ("or", "|", "||")
WORDS = (*AND, *OR, "not")
# headings of the table that are not the name with spaces
HEADINGS = {
    "accuracy": "val_accuracy", "tok/s": "tokens_per_s", "MFU": "mfu", "memory": "peak_mem_gib", "wall": "wall_s",
    "ranks": "world_size", "job": "job_id", "time_error": "step_error",
}  # fmt: skip
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
EXAMPLE = "--where 'val_loss<2 and strategy=fsdp'"
MOST = 2000  # characters
DEEPEST = 50

Values = Callable[[str], Any]  # of one run, by name
Condition = Callable[[Values], bool]


@dataclass(frozen=True)
class Token:
    text: str
    kind: str  # op, word or text (in quotes)


# ---- parse -------------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """NAME OPERATOR VALUE. A run whose value is of another type does not meet it; see `check`."""

    name: str
    sign: str
    given: str
    is_used: bool = False  # has any run a value of the right type?
    misfit: ValueError | None = None

    def __call__(self, values: Values) -> bool:
        value = values(self.name)
        try:
            met = compare(self.name, value, self.sign, self.given)
        except ValueError as error:
            self.misfit = error
            return False
        self.is_used = self.is_used or value is not None
        return met

    def check(self) -> None:
        """Raise the error of a value that fits no run: it is a mistake."""
        if self.misfit and not self.is_used:
            raise self.misfit


class Parser:
    def __init__(self, text: str) -> None:
        self.text, self.comparisons = text, list[Comparison]()
        if len(text) > MOST:
            raise bad("--where", text, f"has more than {MOST} characters", EXAMPLE)
        self.tokens: list[Token] = []
        place = 0
        while text[place:].strip():
            found = TOKEN.match(text, place)
            if not found:
                raise self.wrong(f"cannot be read from {text[place:].strip()[:20]!r} on")
            kind = "text" if found["one"] is not None or found["two"] is not None else "op" if found["op"] else "word"
            value = next(part for part in (found["op"], found["one"], found["two"], found["word"]) if part is not None)
            self.tokens.append(Token(value, kind))
            place = found.end()
        self.at = self.depth = 0

    def wrong(self, rule: str, fix: str = EXAMPLE) -> ValueError:
        return bad("--where", self.text, rule, fix)

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, *texts: str) -> bool:
        token = self.peek()
        if token and token.kind != "text" and (token.text if token.kind == "op" else token.text.lower()) in texts:
            self.at += 1
            return True
        return False

    def whole(self) -> Condition:
        condition = self.any_of()
        if token := self.peek():
            rule = f"expected `and` or `or` before {token.text!r}"
            raise self.wrong(rule, "quote a value with spaces: name='my run'" if token.kind == "word" else EXAMPLE)
        return condition

    def any_of(self) -> Condition:
        parts = [self.all_of()]
        while self.take(*OR):
            parts.append(self.all_of())
        return lambda values: any([part(values) for part in parts])  # a list: wrong types are found in all parts

    def all_of(self) -> Condition:
        parts = [self.part()]
        while self.take(*AND):
            parts.append(self.part())
        return lambda values: all([part(values) for part in parts])

    def part(self) -> Condition:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.wrong(f"is nested more than {DEEPEST} deep")
        try:
            return self.inner_part()
        finally:
            self.depth -= 1

    def inner_part(self) -> Condition:
        if self.take("not"):
            inner = self.part()
            return lambda values: not inner(values)
        if self.take("("):
            inner = self.any_of()
            if not self.take(")"):
                raise self.wrong("a parenthesis is not closed", "--where '(val_loss<2 or tag=good) and status=done'")
            return inner
        return self.comparison()

    def comparison(self) -> Condition:
        name = self.peek()
        if name is None or name.kind != "word" or name.text.lower() in WORDS:
            raise self.wrong(f"expected a name {'at the end' if name is None else f'before {name.text!r}'}")
        self.at += 1
        sign = self.peek()
        after = self.tokens[self.at + 1 : self.at + 2]
        if sign and sign.kind == "word" and after and after[0].kind == "op" and after[0].text not in "()":
            self.at += 1
            name, sign = Token(f"{name.text}_{sign.text}", "word"), after[0]  # a heading of two words: val loss
        if sign is None or sign.kind != "op" or sign.text in "()":
            fix = f"--where '{name.text}>VALUE', in quotes: the shell takes < and > for files"
            fix = fix if "." in name.text else f"tag={name.text}, or {fix}"
            raise self.wrong(f"{name.text} is not compared with anything", fix)
        self.at += 1
        value = self.peek()
        if value and value.kind == "op" and value.text not in "()":  # <<, =<, ===
            both = sign.text + value.text
            right = (
                "!=" if both == "<>" else sign.text if "=" not in both or both[:2] == "==" else f"{both.strip('=')}="
            )
            doubled = rf"{re.escape(sign.text)}\s*{re.escape(value.text)}"
            fixed = re.sub(doubled, "=" if right == "==" else right[:2], self.text, count=1)
            raise self.wrong(f"has two operators, {sign.text} {value.text}", f"--where {shlex.quote(fixed)}")
        if value is None or value.kind == "op":
            raise self.wrong(f"{name.text}{sign.text} has no value", f"{name.text}{sign.text}1")
        self.at += 1
        self.comparisons.append(Comparison(name.text, sign.text.replace("==", "="), value.text))
        return self.comparisons[-1]


def parse(text: str) -> tuple[Condition, list[Comparison]]:
    """Return the condition, and the comparisons in it."""
    parser = Parser(text)
    return parser.whole(), parser.comparisons


# ---- compare -----------------------------------------------------------------------------------------------------


def compare(name: str, value: Any, sign: str, given: str) -> bool:
    if isinstance(value, (list, tuple)):  # tags, or a setting that is a list
        if sign == "!=":
            return all(compare(name, item, sign, given) for item in value)
        return any(compare(name, item, sign, given) for item in value)
    if value is None:
        return (sign == "=") == (given.lower() in ("null", "none")) if sign in ("=", "!=") else False
    if sign == "~":
        return given.lower() in text_of(value).lower()
    read = {"age": seconds, "started": moment}.get(name, plain)
    number, wanted = finite(value), read(given)
    if number is not None and wanted is not None:
        return ORDER[sign](number, wanted) if sign in ORDER else (number == wanted) == (sign == "=")
    if sign in ORDER:
        if number is not None:
            rule = f"{name} is a number ({text_of(value)})"
            hint = {"age": "age<2d", "started": "started>2026-11-01"}.get(name, f"{name}{sign}1")
            raise bad("--where", f"{name}{sign}{given}", rule, hint)
        fix = f"val_loss{sign}{given}, or train_loss{sign}{given}" if name == "loss" else f"{name}={text_of(value)}"
        raise bad("--where", f"{name}{sign}{given}", f"{name} is text ({text_of(value)})", fix)
    return (text_of(value).lower() == given.lower()) == (sign == "=")


def text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(text: str) -> float | None:
    """Read 2, 1e-3, 124M."""
    factor = FACTORS.get(text[-1:], 1.0)
    try:
        return float(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        return None


def seconds(text: str) -> float | None:
    """Read 90s, 15m, 2h, 3d, 1w."""
    number = plain(text[:-1])
    return None if number is None or text[-1:] not in UNITS else number * UNITS[text[-1]]


def moment(text: str) -> float | None:
    """Read a date, perhaps with a time, of this machine's time zone."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


# ---- the values of a run -----------------------------------------------------------------------------------------


class RunValues:
    """The values of one run by name. config.yaml is read only for a name that nothing else has."""

    def __init__(self, record: Record, row: Mapping[str, Any], now: float) -> None:
        begun = datetime.fromisoformat(row["started"]).timestamp()
        special = {"tag": row.get("tags") or [], "age": now - begun, "started": begun}
        choices = as_dict(record.launch.get("choices"))
        status = {"status": str(row["status"]).rstrip("?")}
        row = {key: value for key, value in row.items() if value is not None}
        self.record = record
        self.known: dict[str, Any] = {
            **choices,
            **flatten(record.summary),
            **record.summary,
            **row,
            **status,
            **special,
        }
        self.config: dict[str, Any] | None = None

    def __call__(self, name: str) -> Any:
        if name in self.known:
            return self.known[name]
        if self.config is None:
            self.config = flat_config(self.record.run_dir) or {}
        return self.config.get(name)

    def has(self, name: str) -> bool:
        return name in self.known or self(name) is not None or name in (self.config or {})

    def names(self) -> set[str]:
        return {*self.known, *(self.config or {})}


def chosen(text: str, records: Iterable[Record], rows: Iterable[Mapping[str, Any]], now: float) -> list[bool]:
    """Return for each run whether it meets the condition. A name that no run has is an error."""
    condition, comparisons = parse(text)
    runs = [RunValues(record, row, now) for record, row in zip(records, rows, strict=True)]
    for comparison in comparisons:
        name = comparison.name
        if runs and not any(run.has(name) for run in runs):
            settings = known_settings()
            if name in HEADINGS:
                comparison.name = HEADINGS[name]
            elif name not in settings:
                error = str(unknown(name, {*settings, *(known for run in runs for known in run.names())}))
                said = error.replace(f"{name}: there is no such setting", f"no run has {name}")
                raise ValueError(f"--where={text}: {said}")
    met = [condition(run) for run in runs]
    for comparison in comparisons:
        comparison.check()
    return met
