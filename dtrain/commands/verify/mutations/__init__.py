"""What each mutant of ../mutants.py changes, in the processes of one run of `dtrain verify` only.

Each function replaces a function of the real code, as the bug would have it. The training code has no switch for it.
The modules are named by what the bugs are in; importing one enters its mutations into MUTATIONS.
"""

from dtrain.commands.verify.mutations import (  # noqa: F401
    data,
    gradients,
    loss_and_norm,
    model_parallel,
    optimizer,
    random_numbers,
    resume,
)
from dtrain.commands.verify.mutations.registry import MUTATIONS as MUTATIONS
