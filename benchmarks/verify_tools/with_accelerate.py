"""accelerate's training loop, as its quick tour has it."""

import torch
from accelerate import Accelerator
from task import Model, Tokens, arguments
from torch.utils.data import DataLoader

import dtrain.check

options = arguments()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Tokens(options.uneven), batch_size=options.batch // options.accumulate, shuffle=options.shuffle)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
updates, losses = 0, []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch)
        losses.append(loss.detach())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            dtrain.check.step(sum(losses) / len(losses), model, batch if options.accumulate == 1 else None)
            updates, losses = updates + 1, []
        optimizer.step()
        optimizer.zero_grad()
    if updates == options.steps:
        break
accelerator.end_training()
