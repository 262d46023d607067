"""Ranks that compile nothing do not import torch's compiler; those that do get all that torch has for it."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
import dtrain.train.loop
from torch import nn
from dtrain.config.build import build
from dtrain.config.files import section
from dtrain.kernels import cross_entropy
from dtrain.models import user_model
from dtrain.optim.adamw import AdamW
from dtrain.strategies.materialize import materialize
from dtrain.util import late_dynamo

model = user_model.construct(lambda: build(section("model", "gpt2-tiny")), 0)
assert all(p.is_meta for p in model.parameters())
materialize(model, torch.device("cpu"))
for p in model.parameters():
    nn.init.normal_(p, std=0.02)
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
with late_dynamo.ddp_default():
    wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = AdamW(model.parameters(), lr=1e-3)
x = torch.randint(0, 256, (2, 16))
def loss():
    return wrapped(x, x)[0] if isinstance(wrapped(x, x), tuple) else wrapped(x, x)
loss().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
heavy = [name for name in ("torch._dynamo", "sympy", "torch.distributed.tensor") if name in sys.modules]
assert not heavy, heavy

# the same values as torch's own step, which imports the compiler
weights, sums = torch.randn(3, 4), torch.randn(3, 4)
ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
ours.grad = theirs.grad = sums
mine = AdamW([ours], lr=0.1)
mine.step()
assert "torch._dynamo" not in sys.modules
torch.optim.AdamW([theirs], lr=0.1).step()
assert "torch._dynamo" in sys.modules
assert torch.equal(ours, theirs)

# now everything is shielded, as torch has it
assert "_dynamo" in vars(torch) and not late_dynamo._waiting
shielded = cross_entropy._linear_cross_entropy
assert shielded is not cross_entropy.LinearCrossEntropy.apply
assert getattr(shielded, "_torchdynamo_disable", False)
mine.step()
mine.zero_grad()
function = torch.optim.Optimizer.zero_grad.__wrapped__
assert getattr(function, "__dynamo_disable") is not function
eager = loss()
assert torch.allclose(torch.compile(loss, backend="eager")(), eager)
print("passed")
"""


def test_the_compiler_is_imported_late(tmp_path: object) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, f"{tmp_path}/store"], capture_output=True, text=True)
    assert ran.stdout.endswith("passed\n"), ran.stderr
