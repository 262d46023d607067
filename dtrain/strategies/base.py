"""The seam between the loop and a way to parallelise: one optimizer step over a data rank's whole batch.

A strategy gets the whole batch of its data rank, never a micro-batch: a pipeline schedule and DeepSpeed's engine
split it their own way. Most strategies override only `parallelize`, `wrap` and `no_sync`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain import mesh
from dtrain.kernels import cublaslt
from dtrain.manifest import CheckpointError
from dtrain.models import lora
from dtrain.models.parts import IGNORED
from dtrain.optim import AdamW
from dtrain.precision import Precision
from dtrain.shards import Held
from dtrain.strategies import frozen
from dtrain.strategies.recorded import RecordedStep
from dtrain.strategies.rules import MOST_PASSES
from dtrain.strategies.shared import (
    Compile,
    checkpoint_layers,
    clip_factor,
    compile_mode,
    compile_model,
    init_optimizer_state,
    init_weights,
    local,
    materialize,
    merged,
    scale_gradients,
    set_stream,
    total_norm,
)
from dtrain.weights import Drawn


@dataclass
class StepResult:
    loss: float  # mean over the global batch
    grad_norm: float  # over the whole model, before clipping
    updated: bool  # False: loss or gradient was not finite, and weights and optimizer were left alone
    overflow: bool = False  # not updated only because the fp16 loss scale was too large; it is smaller now
    late = False

    def read(self) -> StepResult:
        return self


class LateResult:
    """A step's figures on their way from a GPU, which is not made to wait for whoever reads them."""

    late = True

    def __init__(self, figures: Tensor) -> None:
        self.figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        self.figures.copy_(figures, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def read(self) -> StepResult:
        self.arrived.synchronize()  # with this step, and not with the one that was begun after it
        loss, norm, finite = self.figures.tolist()
        return StepResult(loss, norm, updated=bool(finite))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read(), name)


class Strategy:
    """One process per data rank and nothing spread: the base that every strategy's maths must equal."""

    # How far the losses of `dtrain verify` may be from one process. None: what its precision allows, as the maths is
    # the same. A strategy with other maths states its own figure, and why.
    tolerance: float | None = None
    compiles = "whole"  # or by blocks, where messages lie between them
    recorded: RecordedStep | None = None  # the step as one launch, where it can be
    is_profiled = False  # by someone who wants to tell its parts from each other

    def __init__(self, pp: int = 1, dp: int = -1, tp: int = 1) -> None:
        self.axes = {"pp": pp, "dp": dp, "tp": tp}

    def resolve_mesh(self, world_size: int, node_size: int | None = None) -> mesh.MeshSizes:
        return mesh.resolve(world_size, node_size, **self.axes)

    def setup(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        *,
        precision: Precision,
        device: torch.device,
        first: Drawn,
        micro_batch_size: int,
        max_grad_norm: float | None = None,
        activation_checkpointing: str = "none",
        activation_checkpointing_every: int = 2,
        compile: Compile = "none",
        cuda_graphs: Literal["auto", "none"] = "none",
        masked: bool = False,
    ) -> None:
        """Spread a model that was built on the meta device, give it its first weights, make its optimizer.

        `masked`: some targets are IGNORED, and not as many in every sample.
        """
        self.precision, self.device = precision, device
        # older torch cuts no graph at DDP's buckets that has recomputation in it (pytorch issue 104674; 2.13 does)
        split = activation_checkpointing != "none" and dist.get_world_size() > 1
        self.compile = compile_mode(compile, "blocks" if split else self.compiles, device, model)
        if self.compile == "whole" and self.compiles == "blocks":  # whose messages, or hooks, lie between layers
            self.compile = "blocks"
        if device.type == "cuda":  # what autocast leaves in float32 may be TF32; under fp32 products are what they say
            torch.set_float32_matmul_precision("highest" if precision.dtype == torch.float32 else "high")
        self.first, self.masked = frozen.First(first, model), masked
        self.micro_batch_size, self.max_grad_norm = micro_batch_size, max_grad_norm
        self.node_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.sizes = self.resolve_mesh(dist.get_world_size(), self.node_size)
        self.mesh = mesh.device_mesh(self.sizes, device.type)
        self.data_rank = self.random_rank = self.mesh.get_local_rank("dp")  # of which samples, of which random draws
        self.data_group = self.mesh.get_group("dp")
        set_stream(model, precision.stream)
        lora.hold(model, precision.dtype)
        cublaslt.copies_stay_alike = self.sizes.tp > 1
        precision.apply(model, device, compiled=self.compile != "none")
        checkpoint_layers(model, activation_checkpointing, activation_checkpointing_every)
        self.module = self.parallelize(model)  # the bare module: its parameter names are the canonical ones
        self.materialize(self.module)
        self.base = self.first.fingerprint()  # of what adapters leave as it was
        self.model = self.wrap(self.module)
        self.optimizer = make_optimizer(self.module.named_parameters())
        if hasattr(self.optimizer, "seed"):  # of what it rounds by chance: another for each run
            self.optimizer.seed = getattr(first, "seed", 0)
        if cuda_graphs == "auto" and self.can_be_recorded():
            self.recorded = RecordedStep(self.step_on_device, self.optimizer, device)

    # ---- what most strategies override -----------------------------------------------------------------------

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Cut the model while its weights have no memory yet."""
        return model

    def materialize(self, model: nn.Module) -> None:
        """Give the model memory and its first weights."""
        materialize(model, self.device)
        init_weights(model, self.first, self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model once its weights are there. What comes back is what is called."""
        compile_model(model, self.compile)
        return model

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around one micro-batch: hold gradient communication back unless it is the last one."""
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self.precision.autocast(self.device.type)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Around a pass that only prepares something: gradients, random draws and changed buffers are thrown away."""
        buffers = [b.clone() for b in self.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def in_step(self) -> bool:
        """Whether ranks that hold the same weights hold the same bits now. Of a strategy that is not ours: at saves."""
        return type(self).__module__.startswith("dtrain.strategies.")

    # ---- a step ----------------------------------------------------------------------------------------------

    def set_lr(self, share: float) -> float:
        """Set every group's rate to its share of the peak; give the first one for the log."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult | LateResult:
        if not self.model.training:  # walking all modules takes 0.1 ms
            self.model.train()
        self.count_targets(targets)
        num_passes = len(inputs) / self.micro_batch_size
        if self.recorded is not None and not self.is_profiled and num_passes <= MOST_PASSES:
            figures = self.recorded(inputs, targets)
            if figures is not None:
                return LateResult(figures)
        result = self.update(self.forward_backward(inputs, targets))
        if self.recorded is not None and isinstance(result, LateResult):
            self.recorded.watch(result.arrived)
        return result

    def count_targets(self, targets: Tensor) -> None:
        """Before a step: how many targets a micro-batch has on average over all data ranks, where some are ignored."""
        if self.masked:
            count = (targets != IGNORED).sum().float()
            if self.sizes.dp > 1:
                dist.all_reduce(count, group=self.data_group)
            self.mean_count = count * self.micro_batch_size / (len(targets) * self.sizes.dp)

    def weight(self, targets: Tensor) -> Tensor | float:
        """What a micro-batch's mean loss counts in the mean over the global batch: as much as it has targets.

        So the loss is one mean over all targets of the global batch, however that is cut.
        """
        return (targets != IGNORED).sum() / self.mean_count if self.masked else 1.0

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients over the micro-batches; give the mean loss of this data rank."""
        micro_batches = list(
            zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True)
        )
        total = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(micro_batches):
            with self.no_sync(last=i == len(micro_batches) - 1):
                with self.autocast():
                    loss = self.model(x, y) * self.weight(y) / len(micro_batches)
                (loss * self.precision.scale).backward()
            total += loss.detach()
        return total

    def update(self, loss: Tensor) -> StepResult | LateResult:
        """Unscale, clip, and step, unless something is not finite. All ranks decide on the same numbers."""
        if self.decides_on_device():
            return LateResult(self.update_on_device(loss))
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.precision.scaled:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], 1.0 / self.precision.scale)
        norm = self.clip(parameters)
        loss, norm = self.agreed(loss, norm.to(loss.device))  # offloaded gradients have their norm on the CPU
        loss_value, norm_value = torch.stack([loss.float(), norm.float()]).tolist()  # the one host sync of a step
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # a loss that is not finite is no matter of the scale, which only gradients see
        overflow = math.isfinite(loss_value) and self.precision.update(finite)
        return StepResult(loss_value, norm_value, updated=finite, overflow=overflow)

    def agreed(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss over the data ranks, and the norm. If either is not finite on one rank, it is so on all.

        Under ddp each rank computes the norm of its own copy of the gradients. A NaN in one copy (a faulty GPU) must
        not make that rank skip an update which the others make. The flag rides on the all-reduce of the loss, as its
        second element, so that the loss keeps its place in the reduction, and its bits.
        """
        world_size, num_data_ranks = dist.get_world_size(), self.sizes.dp
        if world_size == 1:
            return loss, norm
        values = torch.stack([loss, (~torch.isfinite(norm)).to(loss.dtype)])
        if num_data_ranks > 1:
            dist.all_reduce(values, group=self.data_group)  # gloo has no AVG
        loss, broken = values[0] / num_data_ranks, values[1] > 0
        if num_data_ranks < world_size:  # tensor and pipeline ranks have a loss each, which no collective compares
            flags = torch.stack([~torch.isfinite(loss), broken]).float()
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            loss = torch.where((flags[0] > 0) & torch.isfinite(loss), torch.nan, loss)
            broken = flags[1] > 0
        return loss, torch.where(broken & torch.isfinite(norm), torch.nan, norm)

    def can_be_recorded(self) -> bool:
        """Whether nothing of a step is up to the host, or to another rank.

        What is not ours may draw from Python's random numbers, or count its calls: only the eighth would be heard.
        """
        usual = (type(self).update, type(self).forward_backward) == (Strategy.update, Strategy.forward_backward)
        ours = type(self).__module__.startswith("dtrain.strategies.") and type(self.optimizer) is AdamW
        model = type(self.module).__module__.startswith("dtrain.models.") and "forward" not in vars(self.module)
        on_device = self.decides_on_device() and self.compile != "none" and not self.masked
        return usual and ours and model and self.model is self.module and on_device and dist.get_world_size() == 1

    @property
    def is_one_launch(self) -> bool:
        return self.recorded is not None and self.recorded.graph is not None

    def step_on_device(self, inputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return self.update_on_device(self.forward_backward(inputs, targets))
        except Exception:  # what cannot be recorded has left gradients that were never computed
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def update_on_device(self, loss: Tensor) -> Tensor:
        """Loss, norm, and whether both are finite; if not, the GPU itself has left the update out."""
        loss, norm = self.agreed(loss, self.norm([p for p in self.module.parameters() if p.grad is not None]))
        ended_well = torch.isfinite(loss) & torch.isfinite(norm)
        self.optimizer.step_if(ended_well, clip_factor(norm, self.max_grad_norm))  # type: ignore[attr-defined]
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.float(), norm.float(), ended_well.float()])

    def decides_on_device(self) -> bool:
        """Whether the GPU itself can leave an update out. The loss scale of fp16 is the host's, who must know."""
        on_device = self.device.type == "cuda" and getattr(self, "offload", "none") == "none"
        # a strategy that clips in its own way is asked to
        clips = type(self).clip is Strategy.clip and hasattr(self.optimizer, "step_if")
        return on_device and clips and not self.precision.scaled

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """One norm over the gradients of the whole model."""
        return total_norm(parameters)

    def clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Clip by one norm over the whole model, and give that norm."""
        norm = self.norm(parameters)
        scale_gradients(parameters, clip_factor(norm, self.max_grad_norm))
        return norm

    @torch.no_grad()
    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the global batch, without gradients; after it the model's own figures if it has any."""
        self.share_buffers()
        self.model.eval()
        self.count_targets(targets)
        figures = []
        for x, y in zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True):
            with self.autocast():
                figures.append(self.model(x, y).float() * self.weight(y))
        return self.mean_over_data_ranks(torch.stack(figures).mean(dim=0))

    def share_buffers(self) -> None:
        """Before an evaluation or a save: all data ranks have the first one's buffers.

        Ours are equal anyway. A user's batch norm has other statistics on each rank, and a checkpoint has one of each.
        """
        if self.sizes.dp > 1 and self.module.training:
            for buffer in self.module.buffers():
                dist.broadcast(local(buffer), group=self.data_group, group_src=0)

    def mean_over_data_ranks(self, value: Tensor) -> Tensor:
        if self.sizes.dp > 1:
            dist.all_reduce(value, group=self.data_group)  # gloo has no AVG
            value = value / self.sizes.dp
        return value

    # ---- state: canonical names, whatever the layout ---------------------------------------------------------

    def state_dict(self) -> dict[str, Held]:
        """What this rank holds of every tensor to save, by canonical name: `model.NAME`, `optim.NAME.KEY`.

        The values are the live ones: a load fills them in place. All ranks call it. What adapters leave as it was is
        not among them: the first weights bring it back.
        """
        init_optimizer_state(self.optimizer)
        self.share_buffers()
        held = {id(p) for p in self.module.parameters()}
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        assert trained <= held, "the module shows other tensors than the optimizer has"
        state: dict[str, Held] = {
            f"model.{name}": p.detach() for name, p in self.module.named_parameters() if name not in self.first.base
        }
        state |= {f"model.{name}": b for name, b in self.module.named_buffers()}
        for name, p in self.module.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    state[f"optim.{name}.{key}"] = value
        return state

    def extra_state(self) -> dict[str, Any]:
        """The state that is no tensor of a weight's shape: update counts of each weight, the loss scale, which base.

        All ranks call it: no rank need know every weight.
        """
        counts: dict[str, dict[str, float]] = {}
        for name, p in self.module.named_parameters():
            if name in self.first.base:
                continue
            slots = self.optimizer.state.get(p, {}).items()
            counts[name] = {k: float(v) for k, v in slots if not (isinstance(v, Tensor) and v.shape == p.shape)}
        return self.extra(counts)

    def extra(self, counts: dict[str, dict[str, float]]) -> dict[str, Any]:
        extra = {"optimizer": merged(counts), "precision": self.precision.state_dict()}
        return extra | ({"base": self.base} if self.base else {})

    def needed_to_resume(self) -> tuple[str, ...]:
        """What the manifest of a checkpoint must have beside the tensors. A strategy of a user's may save less."""
        ours = type(self).__module__.startswith("dtrain.strategies.")
        return ("samples", "data", "extra", *(("extra.optimizer", "extra.precision") if ours else ()))

    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        """After a load has filled the values of `state_dict()`: take over the rest."""
        frozen.check(extra.get("base"), self.base)
        if self.recorded is not None:  # state that is made anew lies elsewhere
            self.recorded.forget()
        for name, p in self.module.named_parameters():
            slots, counts = self.optimizer.state.get(p, {}), extra["optimizer"].get(name, {})
            counted = {k for k, v in slots.items() if not (isinstance(v, Tensor) and v.shape == p.shape)}
            if not counted <= counts.keys() and name not in self.first.base:
                raise CheckpointError(f"the checkpoint has no update count of {name}. Fix: use an older checkpoint")
            for key, value in counts.items():
                if isinstance(slots.get(key), Tensor):
                    slots[key].fill_(value)
                else:
                    slots[key] = value
        self.precision.load_state_dict(extra["precision"])

    def close(self) -> None:
        """At the end of a run: let go of what would outlive the process, as files on a disk."""
