"""Population-based training (Jaderberg et al., 2017), as a pure function from the journal to its next event.

Every member trains to the next boundary; there the worst members each copy a good one (exploit: its weights, optimizer
state, data position) and go on with perturbed settings (explore). The members wait for each other at a boundary, so
decisions depend on the results alone, whatever the timing and the number of members that train at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtrain.commands.search.asha import run_name, score
from dtrain.commands.search.space import Space, Values, draw, explore, generator, holds
from dtrain.runs.search_journal import Event


class Member(NamedTuple):
    """Where a member is: its run folder, its settings, and the steps that its newest training ends at."""

    run: str
    values: Values
    steps: int


@dataclass(frozen=True)
class Pbt:
    """The settings, and the decisions that follow from them."""

    space: Space
    boundaries: tuple[int, ...]  # steps, ascending; the last one is the whole run
    population: int
    quantile: float  # the share of members that copy, and of those that are copied from
    factors: tuple[float, ...]
    resample: float
    sign: int  # 1: small values are good, -1: large ones
    seed: int

    def next_event(self, events: Sequence[Event]) -> Event | None:
        """Return the next training or exploit, or None: wait for results, or, if no member is training, the end."""
        members = self.members(events)
        last = max((m.steps for m in members if m), default=0)
        for trial, member in enumerate(members):  # those that have not begun to train to this boundary
            if member is None:
                values = draw(self.space, generator(self.seed, "member", trial))
                return train(trial, self.boundaries[0], run_name(trial, values), values)
        scores = {e["trial"]: score(e, self.sign) for e in events if e["event"] == "result" and e["steps"] == last}
        behind = [trial for trial, member in enumerate(members) if member and member.steps < last]
        if not behind:
            if len(scores) < self.population or last == self.boundaries[-1]:
                return None
            if not any(map(math.isfinite, scores.values())):
                return None  # nobody is left to copy from
            done = {e["trial"] for e in events if e["event"] == "exploit" and e["steps"] == last}
            for trial, donor in exploits(scores, self.quantile, generator(self.seed, "donors", last)):
                if trial not in done:
                    return self.exploit(trial, donor, last, members)
            behind, last = list(range(self.population)), self.boundaries[self.boundaries.index(last) + 1]
        member = members[behind[0]]
        assert member is not None
        return train(behind[0], last, member.run, member.values)

    def allows(self, event: Event) -> bool:
        """Could this search have decided it?"""
        trials = [event.get("trial"), event.get("donor", 0)]
        is_known = all(type(trial) is int and 0 <= trial < self.population for trial in trials)
        values = [event.get(key) for key in ("values", "old_values", "donor_values")]
        kinds = {
            "train": holds(self.space, values[0]), "exploit": all(holds(self.space, v) for v in values), "result": True,
        }  # fmt: skip
        return is_known and event.get("steps") in self.boundaries and kinds.get(event["event"], False)

    def members(self, events: Sequence[Event]) -> list[Member | None]:
        members: list[Member | None] = [None] * self.population
        for e in events:
            if e["event"] in ("train", "exploit"):
                members[e["trial"]] = Member(e["run"], e["values"], e["steps"])
        return members

    def exploit(self, trial: int, donor: int, steps: int, members: Sequence[Member | None]) -> Event:
        old, good = members[trial], members[donor]
        assert old is not None and good is not None
        rng = generator(self.seed, "explore", steps, trial)
        values = explore(good.values, self.space, rng, self.factors, self.resample)
        return {
            "event": "exploit", "trial": trial, "donor": donor, "steps": steps,
            "run": f"{trial}-at-{steps}-from-{donor}", "donor_run": good.run,
            "old_values": old.values, "donor_values": good.values, "values": values,
        }  # fmt: skip


def train(trial: int, steps: int, run: str, values: Values) -> Event:
    return {"event": "train", "trial": trial, "steps": steps, "run": run, "values": values}


def boundary_steps(every: int, steps: int) -> tuple[int, ...]:
    return (*range(every, steps, every), steps)


def exploits(scores: dict[int, float], quantile: float, rng: random.Random) -> list[tuple[int, int]]:
    """Return (member, donor): truncation selection. The worst members, and all that failed, each copy a good one.

    No donor copies: its weights are read after all decisions of a boundary, and must still be there.
    """
    ranked = sorted(scores, key=lambda trial: (scores[trial], trial))
    count = max(1, int(len(ranked) * quantile))
    donors = [trial for trial in ranked[:count] if math.isfinite(scores[trial])]
    worst = [t for i, t in enumerate(ranked) if i >= len(ranked) - count or not math.isfinite(scores[t])]
    return [(trial, rng.choice(donors)) for trial in sorted(worst) if trial not in donors]
