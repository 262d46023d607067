"""torch's fully_shard, as its tutorial has it."""

import torch
import torch.distributed as dist
from task import Model, Tokens, arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import dtrain.check

options = arguments()
dist.init_process_group("gloo")
model = Model()
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Tokens(options.uneven)
loader = DataLoader(data, options.batch, sampler=DistributedSampler(data))
for _, batch in zip(range(options.steps), loader, strict=False):
    loss = model(**batch)
    loss.backward()
    dtrain.check.step(loss, model, batch)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
