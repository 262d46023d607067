"""DeepSpeed's engine with ZeRO, as its getting-started page has it."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from task import Model, Tokens, arguments

import dtrain.check

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
options = arguments()
size = int(os.environ["WORLD_SIZE"])
config = {
    "train_batch_size": options.batch * size,
    "train_micro_batch_size_per_gpu": options.batch // options.accumulate,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
del config["optimizer"]
engine, _, loader, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=config, training_data=Tokens(options.uneven), dist_init_required=None
)
losses = []
for batch in loader:
    loss = engine(**batch)
    losses.append(loss.detach())
    engine.backward(loss)
    if engine.is_gradient_accumulation_boundary():
        dtrain.check.step(sum(losses) / len(losses), engine.module, batch if options.accumulate == 1 else None)
        losses = []
    engine.step()
    if engine.global_steps == options.steps:
        break
