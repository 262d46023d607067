"""ZeRO (DeepSpeed): optimizer state (1), gradients too (2), weights too (3) sharded over data ranks as flat tensors.

DeepSpeed's engine reduces, clips and steps. dtrain keeps the optimizer, the learning rate, the loss scale, the initial
weights and the checkpoint, so that a run can switch from and to any other strategy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.hardware import no_cpu_fp16
from dtrain.errors import bad
from dtrain.optim.adafactor import Adafactor
from dtrain.optim.average import WeightAverage
from dtrain.optim.muon import Muon
from dtrain.optim.precision import autocast_inside
from dtrain.strategies import deepspeed_config as zero_config
from dtrain.strategies import first_pass, lora_base
from dtrain.strategies.base import StepResult, Strategy
from dtrain.strategies.compile import compile_layers
from dtrain.strategies.deepspeed_state import (
    Masters,
    cpu_accepts_fp16,
    import_deepspeed,
    optimizer_of_shapes,
    partition,
)
from dtrain.strategies.materialize import materialize, tied_once
from dtrain.util.dtensor import Held, chunks_of


def preload() -> None:
    """Import DeepSpeed in the fork server of dtrain/commands/verify/world.py: 1,200 modules, 3 s for each rank.

    DeepSpeed picks its accelerator at import, so this is done only where torch has no GPU support.
    """
    if torch.version.cuda or torch.version.hip:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (which imports torch's compiler)


def look_once(zero: Any) -> None:
    """Make DeepSpeed compute one gradient norm per step over all gradients, and derive overflow from it.

    By default it checks whether each gradient is finite and then computes its norm, which already shows that: for
    gpt2-1.5b 5,000 calls, half of the CPU time of a step. DeepSpeed already treats a non-finite norm as an overflow.
    """

    def norm(gradients: list[Tensor], parameters: Any, norm_type: float = 2) -> Tensor:
        counted = [g.detach() for g in gradients if not getattr(g, "_zero_padding", False)]
        square = torch.zeros((), device=zero.device)
        if counted:
            square = torch.stack(torch._foreach_norm(counted, dtype=torch.float32)).square().sum()
        dist.all_reduce(square, group=zero.dp_process_group)
        return torch.where(torch.isfinite(square), square.sqrt(), -1.0)  # DeepSpeed's code for a non-finite norm is -1

    zero.has_overflow = lambda partition_gradients=True: False
    zero.get_grad_norm_direct = norm


class Zero(Strategy):
    compiles = "blocks"

    def __init__(
        self,
        stage: Literal[1, 2, 3],
        dp: int = -1,
        offload: Literal["none", "cpu", "nvme"] = "none",
        offload_params: Literal["none", "cpu", "nvme"] = "none",
        nvme_path: str | None = None,
        bucket_mb: int = 100,
        gather_mb: int = 100,
        whole_below: int = 100_000,
        overlap_comm: bool = True,
        deepspeed_config: str | None = None,
    ) -> None:
        super().__init__(dp=dp)
        self.stage = stage
        self.settings: dict[str, Any] = {
            "stage": stage, "offload": offload, "offload_params": offload_params, "nvme_path": nvme_path,
            "bucket_mb": bucket_mb, "gather_mb": gather_mb, "whole_below": whole_below, "overlap_comm": overlap_comm,
        }  # fmt: skip
        self.user_config = zero_config.read(deepspeed_config) if deepspeed_config else {}

    def for_world(self, world_size: int) -> Strategy:
        needed = zero_config.needs_engine(self.settings, self.user_config, world_size)
        return self if needed or type(self) is not Zero else Strategy()

    def setup(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        self.deepspeed = import_deepspeed(options["device"])
        is_half = options["precision"].dtype == torch.float16
        if is_half and options["device"].type == "cpu" and not cpu_accepts_fp16(self.deepspeed):
            raise no_cpu_fp16(f"zero{self.stage}")
        if self.stage == 3 and options.get("compile") == "auto":
            options["compile"] = "none"  # its hooks compute wrong gradients inside a graph (zero_config.check)
        super().setup(model, functools.partial(optimizer_of_shapes, make_optimizer), **options)
        with contextlib.redirect_stdout(io.StringIO()):  # discards what DeepSpeed prints; warnings still show
            self.engine, self.zero, _, _ = self.deepspeed.initialize(
                model=self.module, optimizer=self.optimizer, config=self.config, dist_init_required=False
            )
        if self.stage < 3 and self.settings["offload"] == "none":
            look_once(self.zero)
        self.model = self.engine
        self.masters = Masters(self.zero, self.optimizer, self.module, self.stage, self.data_rank)
        if isinstance(self.optimizer, Muon | Adafactor):
            self.optimizer.share(self.masters.pieces(), self.device)
        for name, held in self.masters.walk(write=True):
            if name.startswith("model."):
                self.first.fill(self.module, name.removeprefix("model."), held, self.device)

    def parallelize(self, model: nn.Module) -> nn.Module:
        # DeepSpeed keeps no fp32 values of frozen weights that we could save; adapters' base weights need no saving
        others = [n for n, p in model.named_parameters() if not p.requires_grad and n not in self.first.base]
        if others:
            raise ValueError(
                f"strategy=zero{self.stage}: {others[0]} is frozen, but ZeRO keeps masters of trained weights only\n"
                "  fix: strategy=fsdp"
            )
        if self.settings["nvme_path"]:
            self.settings["nvme_path"] = str(zero_config.swap_folder(self.settings["nvme_path"]))
        # We mark the gradient accumulation boundary at every micro-batch, so the engine need not count them.
        dtype, batches = str(self.precision.dtype).removeprefix("torch."), (self.micro_batch_size, 1)
        ours = zero_config.generate(self.settings, dtype, self.sizes.dp, *batches, self.max_grad_norm)
        self.config = zero_config.merged(ours, self.user_config)
        if self.settings["offload_params"] == "nvme":  # each buffer must hold the largest weight's shard
            largest = max(-(-p.numel() // self.sizes.dp) for p in model.parameters())
            self.config["zero_optimization"]["offload_param"].setdefault("buffer_size", largest)
        if self.compile != "none":  # layer by layer: the engine's hooks around the model cannot be in a graph
            compile_layers(model)
        # The engine disables any autocast around itself, so ours goes inside.
        model.forward = autocast_inside(model.forward, super().autocast)
        return model

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def materialize(self, model: nn.Module) -> None:
        """Allocate the weights in their compute dtype; under zero3 for no more than one module at a time.

        Initial values go into the fp32 masters, because here they would be rounded to 16 bits. Frozen weights have no
        masters, so only they are filled here.
        """
        materialize(model, torch.device("meta"))
        for p in model.parameters():
            p.data = p.data.to(self.precision.dtype)
        with tied_once(model):
            self.allocate(model)
        for name, buffer in model.named_buffers():
            self.first.fill(model, name, buffer, self.device)
        for name, p in model.named_parameters():
            if not p.requires_grad:
                held = partition(p, self.data_rank) if self.stage == 3 else p.detach()
                self.first.fill(model, name, held, self.device)

    def allocate(self, model: nn.Module) -> None:
        first: Any = None
        for module in model.modules():
            module.to_empty(device=self.device, recurse=False)
            own = list(module.parameters(recurse=False))
            if self.stage < 3 or not own:
                continue
            if first is None:
                first = own[0]
                self.deepspeed.zero.Init(nn.ParameterList(own), config_dict_or_path=self.config, dtype=first.dtype)
            else:  # another Init would allocate its own buffers and clear the disk
                first.convert_to_zero_parameters(param_list=own)

    def splits_weights(self) -> bool:
        return True

    def share_matrices(self, optimizer: Muon | Adafactor) -> None:
        if "nvme" in (self.settings["offload"], self.settings["offload_params"]):
            rule = "needs whole matrices, and its rank may hold only parts of them in memory"
            name = type(optimizer).__name__.lower()
            raise bad("strategy.offload", "nvme", f"optim={name} {rule}", "strategy.offload=cpu, or optim=adamw")

    def average_weights(self, decay: float, evaluate: bool) -> None:
        """Average the masters. The launcher refuses to evaluate with them: the model has copies of the masters."""
        flats = self.masters.flats()
        for i, flat in enumerate(flats):
            self.masters.optimizer_state(i, flat)  # creates it
        WeightAverage(self.optimizer, decay, flats)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model  # the engine wraps it, once the optimizer exists

    # ---- a step ----------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if not self.module.training:  # the engine's own flag is always true
            self.module.train()
        if self.precision.scaled:
            self.zero.override_loss_scale(self.precision.scale)
        if not self.gradients_checked:
            self.gradients_checked = True
            found: list[str] = []
            with first_pass.watched(self.module, found):
                total = self.forward_backward(inputs, targets)
            self.unused = found[0]
            return total
        xs, ys = inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size)
        total = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            self.engine.set_gradient_accumulation_boundary(i == len(xs) - 1)
            loss = self.engine(x, y) * self.weight(y) / len(xs)
            total += loss.detach()
            # The engine skips a step with a non-finite gradient, under every precision, before it changes masters or
            # state. It does not check the loss, so a non-finite loss makes the gradient NaN.
            self.engine.backward(loss * (1.0 + 0.0 * loss.detach()), scale_wrt_gas=False)
        return total

    def update(self, loss: Tensor) -> StepResult:
        loss_value = self.mean_over_data_ranks(loss).item()
        self.engine.step()
        updated = self.engine.was_step_applied()
        norm = float(self.engine.get_global_grad_norm())
        overflow = math.isfinite(loss_value) and self.precision.update(updated)
        spiked = False
        if updated and self.limits is not None:  # the engine has updated by now, so train.spike=skip is refused
            spiked = bool((torch.tensor([loss_value, norm]) > self.limits.cpu()).any())
        return StepResult(loss_value, norm, updated=updated, overflow=overflow, spiked=spiked)

    # ---- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Held]:
        self.share_buffers()
        state: dict[str, Held] = {f"model.{name}": b for name, b in self.module.named_buffers()}
        for name, chunks in self.masters.walk():
            if self.settings["offload"] == "nvme":  # in memory only during the walk
                chunks = [dataclasses.replace(c, values=c.values.clone()) for c in chunks]
            state[name] = chunks
        return state

    def extra_state(self) -> dict[str, Any]:
        return self.extra(self.masters.counts())

    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        lora_base.check(extra.get("base"), self.base)
        for name, chunks in self.masters.walk(write=True):
            for mine, filled in zip(chunks, chunks_of(state[name]), strict=True):
                if mine.values.data_ptr() != filled.values.data_ptr():
                    mine.values.copy_(filled.values)
        self.masters.set_counts(extra["optimizer"])
        self.precision.load_state_dict(extra["precision"])

    def close(self) -> None:
        self.engine.destroy()
        if self.settings["nvme_path"]:
            shutil.rmtree(self.settings["nvme_path"], ignore_errors=True)
