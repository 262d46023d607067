"""A model that makes rank 1 late for the gradients' all-reduce: it begins a step when rank 0 has ended its own."""

import time
from typing import Any

import torch.distributed as dist

from dtrain.models.gpt2 import GPT2


class Slow(GPT2):
    num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        store, key = dist.distributed_c10d._get_default_store(), f"backward pass {self.num_calls}"
        if dist.get_rank() == 1:
            store.wait([key])
            time.sleep(0.2)
        elif dist.get_rank() == 0:
            first = next(self.parameters())  # its gradient comes last

            def on_gradient(_: Any) -> None:
                handle.remove()
                store.set(key, "")

            handle = first.register_post_accumulate_grad_hook(on_gradient)
        return super().forward(*args, **kwargs)
