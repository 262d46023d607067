"""Parameter groups: which weights decay, and whose learning rate differs. By names, so every layout groups alike."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtrain.errors import bad
from dtrain.util.collective import distinct

LAYER = re.compile(r"(?:^|\.)(\d+)\.")  # layers.3.mlp.up.weight


@dataclass(frozen=True)
class Rules:
    """The settings of an optimizer that divide the weights into groups; by default only matrices decay."""

    no_decay: list[str] | None = None
    layer_decay: float = 1.0
    lr_multipliers: list[str] | None = None

    def decays(self, name: str, p: nn.Parameter) -> bool:
        return p.dim() >= 2 if self.no_decay is None else not matches(name, self.no_decay)

    def lr_factors(self, names: list[str]) -> dict[str, float]:
        """Return by which factor each weight's rate differs. All ranks must call it: a rank may know a part only.

        With `layer_decay`, a layer has this factor of the rate of the next one. What is defined before the layers
        counts as a layer before them, what is defined after them has the full rate.
        """
        factors = dict.fromkeys(names, 1.0)
        if self.no_decay is None and self.layer_decay == 1.0 and self.lr_multipliers is None:
            return factors
        first = next((i for i, name in enumerate(names) if LAYER.search(name)), 0)
        parts = distinct([names, names[:first]])
        known, before = ({name for part in parts for name in part[i]} for i in (0, 1))
        check_patterns("optim.no_decay", self.no_decay or [], known)
        multipliers = [multiplier(text) for text in self.lr_multipliers or []]
        check_patterns("optim.lr_multipliers", [pattern for pattern, _ in multipliers], known, ":0.1")
        layers = [int(found[1]) for name in known if (found := LAYER.search(name))]
        if self.layer_decay != 1.0 and not layers:
            rule = "no weight is in a numbered layer, such as blocks.3.weight"
            raise bad("optim.layer_decay", self.layer_decay, rule, "optim.layer_decay=1, or optim.lr_multipliers")
        for name in names:
            found = LAYER.search(name)
            if found:
                factors[name] = self.layer_decay ** (max(layers) + 1 - int(found[1]))
            elif name in before:
                factors[name] = self.layer_decay ** (max(layers, default=0) + 2)
            factors[name] *= next((by for pattern, by in multipliers if fnmatch.fnmatchcase(name, pattern)), 1.0)
        return factors


def grouped(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, peak: float, rules: Rules | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Group the trained parameters by weight decay and rate; also return whether a fused kernel supports them.

    Each group keeps its peak rate under "peak_lr"; the loop sets "lr" from it before every step.
    """
    rules = rules or Rules()
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    factors = rules.lr_factors([name for name, _ in trained])
    # a fused kernel needs parameters of one kind: plain tensors, or DTensors of one mesh
    groups: dict[tuple[bool, float, Any], list[nn.Parameter]] = {}
    for name, p in trained:
        groups.setdefault((rules.decays(name, p), factors[name], getattr(p, "device_mesh", None)), []).append(p)
    options = [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "peak_lr": peak * factor}
        for (decays, factor, _), parameters in sorted(groups.items(), key=lambda item: (not item[0][0], -item[0][1]))
    ]
    return options, all(p.device.type == "cuda" for _, p in trained)


def hidden_matrices(named: list[tuple[str, nn.Parameter]], patterns: list[str] | None) -> set[str]:
    """Return the names of the matrices that Muon updates: those of the patterns, or those of numbered layers.

    An embedding, or a head, is a table with a row for each token: its rows have a meaning, and not the matrix.
    """
    found = {name for name, p in named if p.dim() == 2}
    known = {name for part in distinct(sorted(found)) for name in part}
    if patterns is not None:
        check_patterns("optim.matrices", patterns, known)
        return {name for name in found if matches(name, patterns)}
    if not any(map(LAYER.search, known)):
        rule = "orthogonalizes the matrices of numbered layers, such as blocks.3.weight, and this model has none"
        fix = f"optim.matrices=[{min(known)}], or optim=adamw" if known else "optim=adamw"
        raise bad("optim", "muon", rule, fix)
    return {name for name in found if LAYER.search(name)}


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def multiplier(text: str) -> tuple[str, float]:
    """Split PATTERN:FACTOR, which the launcher has checked."""
    pattern, _, factor = text.rpartition(":")
    return pattern, float(factor)


def check_patterns(setting: str, patterns: list[str], names: set[str], suffix: str = "") -> None:
    """Refuse a pattern that matches no weight: it is a typing error."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, sorted(names), 1, 0.0)
            fix = f"{setting}=[{near[0]}{suffix}]" if near else f"leave {setting} out"
            raise bad(setting, pattern, "matches the name of no trained weight", fix)
