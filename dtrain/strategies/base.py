"""The interface between the loop and a parallelism strategy: one optimizer step over a data rank's whole batch.

A strategy receives the whole batch of its data rank, not a micro-batch, because pipeline schedules and DeepSpeed's
engine split it their own way. Most strategies override only `parallelize`, `wrap` and `no_sync`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dtrain.checkpoint.initial_weights import Drawn
from dtrain.comm.compressor import Compressor
from dtrain.comm.context import Kind, Sequences
from dtrain.config import mesh
from dtrain.errors import CheckpointError
from dtrain.kernels import cublaslt
from dtrain.models import lora
from dtrain.models.layers import IGNORED
from dtrain.optim.adafactor import Adafactor
from dtrain.optim.adamw import AdamW
from dtrain.optim.average import KEY, WeightAverage
from dtrain.optim.muon import Muon, pieces_of
from dtrain.optim.precision import Precision
from dtrain.strategies import first_pass, lora_base
from dtrain.strategies.compile import Compile, compile_mode, compile_model
from dtrain.strategies.cuda_graph import RecordedStep
from dtrain.strategies.grad_norm import clip_factor, scale_gradients, total_norm
from dtrain.strategies.materialize import init_weights, materialize, set_stream
from dtrain.strategies.optimizer_state import init_optimizer_state, is_tensor, merged
from dtrain.strategies.recompute import checkpoint_layers
from dtrain.strategies.results import LateResult as LateResult
from dtrain.strategies.results import StepResult as StepResult
from dtrain.strategies.stage_layout import MOST_PASSES
from dtrain.util.dtensor import Held, is_dtensor, local, whole


class Strategy:
    """One process per data rank, nothing sharded: the reference result that every strategy must match."""

    # How far the losses of `dtrain verify` may be from one process. None: what the precision allows, because the math
    # is the same. A strategy with different math states its own tolerance and why.
    tolerance: float | None = None
    compiles = "whole"  # "blocks" if the strategy communicates between layers
    recorded: RecordedStep | None = None  # the step captured as a CUDA graph, if it can be
    is_profiled = False  # True while a profiler needs to tell the parts of a step apart
    limits: Tensor | None = None  # loss and gradient norm above which a step is a spike, and makes no update
    compressor: Compressor | None = None  # averages gradients under strategy.compress
    passes: Callable[[Tensor, Tensor], Tensor] | None = None  # replaces forward_backward in a step that is checked
    updates_together = False  # all ranks make the same updates of the same weights, so one may compute for the others
    gradients_checked = False  # after the first backward pass
    unused = ""  # a warning: names of weights that got no gradient in it
    waits_for_gradients = False  # of every weight in every step
    first_target = 0  # targets of a sample before this one never count: a Hugging Face model shifts its labels
    reduced: Collection[nn.Parameter] | None = None  # the weights whose gradients this rank gets; None: all
    updates_all = True  # whether a rank's optimizer has all trained weights of its module
    ranks_meet = True  # in every step, in a collective
    steps_ahead = 0  # by how many steps a rank may be ahead of the slowest, if the ranks do not meet in every step
    evaluates_average = False  # of the weights, instead of the weights
    sequences: Sequences | None = None  # under cp: which part of each sequence this rank computes
    context: Mapping[str, Any] = {}  # what the model gets, to attend to the other parts
    folder: Path | None = None  # of the run, for what a strategy writes besides checkpoints

    def __init__(self, pp: int = 1, dp: int = -1, tp: int = 1, cp: int = 1, cp_kind: Kind = "ring") -> None:
        self.axes = {"pp": pp, "dp": dp, "tp": tp, "cp": cp}
        self.cp_kind = cp_kind
        if cp > 1:  # attention communicates
            self.compiles = "blocks"

    def resolve_mesh(self, world_size: int, node_size: int | None = None) -> mesh.MeshSizes:
        return mesh.resolve(world_size, node_size, **self.axes)

    def for_world(self, world_size: int) -> Strategy:
        """Return the strategy to use on this many ranks: the base one if a single rank would shard nothing."""
        return self

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
        """Parallelize a model on the meta device, fill in its initial weights, and create its optimizer.

        `masked`: some targets are IGNORED, and their number differs between samples.
        """
        self.precision, self.device = precision, device
        # before 2.13, torch does not split a graph with recomputation at DDP's buckets (pytorch issue 104674)
        split = activation_checkpointing != "none" and dist.get_world_size() > 1
        self.compile = compile_mode(compile, "blocks" if split else self.compiles, device, model)
        if self.compile == "whole" and self.compiles == "blocks":  # its collectives or hooks sit between layers
            self.compile = "blocks"
        if device.type == "cuda":  # TF32 for what autocast leaves in fp32; true fp32 under precision=fp32
            torch.set_float32_matmul_precision("highest" if precision.dtype == torch.float32 else "high")
        self.first, self.masked = lora_base.First(first, model), masked
        self.micro_batch_size, self.max_grad_norm = micro_batch_size, max_grad_norm
        self.node_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.sizes = self.resolve_mesh(dist.get_world_size(), self.node_size)
        # cp is a part of the axis dp: gradients and losses are averaged over all ranks with different tokens
        axes = {"pp": self.sizes.pp, "dp": self.sizes.token_ranks, "tp": self.sizes.tp}
        self.mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.random_rank = self.mesh.get_local_rank("dp")  # of random draws
        self.data_rank = self.random_rank // self.sizes.cp  # picks samples
        self.data_ranks = self.sizes.dp  # over how many the batch is divided
        self.data_group = self.mesh.get_group("dp")
        if self.sizes.cp > 1:
            inner = self.mesh._unflatten(1, (self.sizes.dp, self.sizes.cp), ("samples", "cp"))["cp"]
            self.sequences = Sequences(inner.get_group(), self.cp_kind)
            self.context = {"cache": self.sequences}
        set_stream(model, precision.stream)
        lora.hold(model, precision.dtype)
        cublaslt.copies_stay_alike = self.sizes.tp > 1
        if self.sizes.tp > 1:
            torch.backends.cudnn.benchmark = False  # it would choose kernels by timing, too
        precision.apply(model, device, compiled=self.compile != "none")
        checkpoint_layers(model, activation_checkpointing, activation_checkpointing_every)
        self.module = self.parallelize(model)  # the unwrapped module: its parameter names are the canonical ones
        self.materialize(self.module)
        self.base = self.first.fingerprint()  # identifies the frozen base weights of adapters
        self.model = self.wrap(self.module)
        self.optimizer = make_optimizer(self.module.named_parameters())
        if hasattr(self.optimizer, "seed"):  # seeds stochastic rounding, differently for each run
            self.optimizer.seed = getattr(first, "seed", 0)
        for group in self.optimizer.param_groups:
            if group.get("ns_dtype") == "auto":
                half = device.type == "cuda" and precision.dtype != torch.float32
                group["ns_dtype"] = "bfloat16" if half else "float32"
        if isinstance(self.optimizer, Muon):
            self.optimizer.compiled = self.compile != "none"
        if isinstance(self.optimizer, Muon | Adafactor):
            self.share_matrices(self.optimizer)
        if cuda_graphs == "auto" and self.can_be_recorded():
            self.recorded = RecordedStep(self.step_on_device, self.optimizer, device)

    # ---- what most strategies override -----------------------------------------------------------------------

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard the model while it is still on the meta device."""
        return model

    def materialize(self, model: nn.Module) -> None:
        """Allocate the model's memory and fill in its initial weights."""
        materialize(model, self.device)
        init_weights(model, self.first, self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model once its weights exist. The loop calls the returned module."""
        compile_model(model, self.compile)
        return model

    def no_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context for one micro-batch: defer gradient communication unless it is the last one."""
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self.precision.autocast(self.device.type)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Context for a warm-up pass: gradients, random draws and buffer changes are discarded."""
        with self.kept_buffers():
            yield
        self.optimizer.zero_grad(set_to_none=True)
        if self.compressor is not None:
            self.compressor.discard()

    @contextlib.contextmanager
    def kept_buffers(self) -> Iterator[None]:
        """Context for passes that are no part of a step: random draws and buffer changes are discarded."""
        buffers = [b.clone() for b in self.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):  # not after an error: the GPU may fail
            buffer.copy_(before)

    def splits_weights(self) -> bool:
        """Return whether the optimizer may get parts of matrices."""
        return any(is_dtensor(p) for p in self.module.parameters())

    def share_matrices(self, optimizer: Muon | Adafactor) -> None:
        """Let the ranks compute the updates of whole matrices together, if they hold parts or copies of them.

        Muon's take long, so ranks with copies divide the work. Adafactor's do not.
        """
        shares = self.updates_together and isinstance(optimizer, Muon)
        if dist.get_world_size() > 1 and (shares or self.splits_weights()):
            optimizer.share(pieces_of(self.module.named_parameters()), self.device)

    def average_weights(self, decay: float, evaluate: bool) -> None:
        """Keep a moving average of the weights from now on, and evaluate with it if `evaluate`."""
        init_optimizer_state(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        WeightAverage(self.optimizer, decay, trained)
        self.evaluates_average = evaluate

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Context of an evaluation: exchange the weights for their average, if that is evaluated."""
        if not self.evaluates_average:
            yield
            return
        self.exchange_averages()
        try:
            yield
        finally:  # what is saved after an error must be the weights
            self.exchange_averages()

    @torch.no_grad()
    def exchange_averages(self) -> None:
        for p in self.module.parameters():
            average = self.optimizer.state.get(p, {}).get(KEY)
            if average is not None:
                weight = local(p).clone()
                local(p).copy_(local(average))
                local(average).copy_(weight)
        if isinstance(self.optimizer, AdamW):
            self.optimizer.forget_sums()

    def updated(self, p: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates for a weight of the module: the weight, or a copy of it."""
        return p

    def in_step(self) -> bool:
        """Return whether replicas hold the same bits after this step. User strategies are only compared at saves."""
        return type(self).__module__.startswith("dtrain.strategies.")

    # ---- a step ----------------------------------------------------------------------------------------------

    def set_lr(self, share: float) -> float:
        """Set each group's rate to `share` of its peak; return the first group's rate for the log."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult | LateResult:
        if not self.model.training:  # train() walks all modules: 0.1 ms
            self.model.train()
        targets = self.own_targets(targets)
        self.count_targets(targets)
        num_passes = len(inputs) / self.micro_batch_size
        is_usual = not self.is_profiled and self.passes is None
        if self.recorded is not None and is_usual and num_passes <= MOST_PASSES:
            metrics = self.recorded(inputs, targets)
            if metrics is not None:
                return LateResult(metrics)
        passes = self.passes or self.forward_backward
        result = self.update(passes(inputs, targets))
        if self.recorded is not None and isinstance(result, LateResult):
            self.recorded.watch(result.arrived)
        return result

    def own_targets(self, targets: Tensor) -> Tensor:
        """Return the targets of this rank's part of each sequence. The model itself takes its part of the inputs."""
        return targets if self.sequences is None else self.sequences.tokens(targets)

    def count_targets(self, targets: Tensor) -> None:
        """Before a step with ignored targets: compute the mean count of targets per micro-batch over all data ranks."""
        if self.masked:
            count = self.num_targets(targets).float()
            if self.sizes.token_ranks > 1:
                dist.all_reduce(count, group=self.data_group)
            self.mean_count = count * self.micro_batch_size / (len(targets) * self.sizes.token_ranks)

    def weight(self, targets: Tensor) -> Tensor | float:
        """Return a micro-batch's weight in the global mean loss: its number of targets relative to the average.

        So the loss is one mean over all targets of the global batch, however the batch is split.
        """
        return self.num_targets(targets) / self.mean_count if self.masked else 1.0

    def weighted(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's share of the global mean loss, before the division by the number of micro-batches."""
        if self.masked and self.sequences is not None:  # a part of a sequence may have no target; then the mean is NaN
            loss = torch.where(self.num_targets(targets) > 0, loss, 0.0)
        return loss * self.weight(targets)

    def num_targets(self, targets: Tensor) -> Tensor:
        counted = targets[:, self.first_target :] if self.first_target else targets
        return (counted != IGNORED).sum()

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients over the micro-batches; return this data rank's mean loss."""
        if self.compressor is not None:
            self.compressor.scale = self.precision.scale
        micro_batches = list(
            zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True)
        )
        total = torch.zeros((), device=self.device)
        for i, (x, y) in enumerate(micro_batches):
            with self.no_sync(last=i == len(micro_batches) - 1):
                with self.autocast():
                    loss = self.weighted(self.model(x, y, **self.context), y) / len(micro_batches)
                (loss * self.precision.scale).backward()
            total += loss.detach()
        self.check_gradients()
        return total

    def check_gradients(self) -> None:
        """After the first backward pass: reject weights that no step would train."""
        if not self.gradients_checked:
            self.gradients_checked = True
            needs_all = self.waits_for_gradients
            self.unused = first_pass.check(self.module, self.optimizer, needs_all, self.updates_all, self.reduced)

    def update(self, loss: Tensor) -> StepResult | LateResult:
        """Unscale, clip, and step if everything is finite and no spike. All ranks decide on the same numbers."""
        if self.decides_on_device():
            return LateResult(self.update_on_device(loss))
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.precision.scaled and parameters:
            torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], 1.0 / self.precision.scale)
        norm = self.clip(parameters)
        loss, norm, spiked = self.agreed(loss, norm.to(loss.device))  # offloaded gradients have their norm on the CPU
        # the only host sync of a step
        loss_value, norm_value, is_spike = torch.stack([loss.float(), norm.float(), spiked.float()]).tolist()
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite and not is_spike:
            self.optimizer.step()
        self.end_step(finite and not is_spike)
        self.optimizer.zero_grad(set_to_none=True)
        # a non-finite loss does not come from the loss scale, which only affects gradients
        overflow = math.isfinite(loss_value) and self.precision.update(finite)
        updated = finite and not is_spike
        return StepResult(loss_value, norm_value, updated, overflow, spiked=finite and bool(is_spike))

    def end_step(self, updated: bool | Tensor) -> None:
        """After an update that was made or skipped. A Tensor: only the GPU knows which."""
        if self.compressor is not None:
            self.compressor.end_step(updated)

    def agreed(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss over the data ranks, the norm, and whether one of them exceeds its limit on any rank.

        If loss or norm is non-finite on one rank, it is on all. Under ddp each rank computes the norm of its own copy
        of the gradients, and a fault in one copy must not make only that rank skip the update. The flag is the second
        element of the loss all-reduce, so the loss keeps its position in the reduction, and therefore its bits. It is
        inf for a non-finite norm and 1 for a spike: their sum over the ranks tells both.
        """
        world_size, num_data_ranks = dist.get_world_size(), self.sizes.token_ranks
        over = torch.zeros_like(loss) if self.limits is None else (norm > self.limits[1]).to(loss.dtype)
        flag = torch.where(torch.isfinite(norm), over, torch.inf) if world_size > 1 else over
        if num_data_ranks > 1:
            values = torch.stack([loss, flag])
            dist.all_reduce(values, group=self.data_group)  # gloo has no AVG
            loss, flag = values[0] / num_data_ranks, values[1]
        if self.limits is not None:
            flag = torch.maximum(flag, (loss > self.limits[0]).to(flag.dtype))
        if num_data_ranks < world_size:  # tensor and pipeline ranks: no collective has compared their losses
            flags = torch.stack([(~torch.isfinite(loss)).to(flag.dtype), flag])
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            loss = torch.where((flags[0] > 0) & torch.isfinite(loss), torch.nan, loss)
            flag = flags[1]
        norm = torch.where(torch.isinf(flag) & torch.isfinite(norm), torch.nan, norm) if world_size > 1 else norm
        return loss, norm, flag > 0

    def can_be_recorded(self) -> bool:
        """Return whether a step depends on neither the host nor another rank.

        User code may use Python's random numbers or count its calls: a graph would repeat the captured step's values.
        """
        usual = (type(self).update, type(self).forward_backward) == (Strategy.update, Strategy.forward_backward)
        ours = type(self).__module__.startswith("dtrain.strategies.") and type(self.optimizer) is AdamW
        model = type(self.module).__module__.startswith("dtrain.models.") and "forward" not in vars(self.module)
        on_device = self.decides_on_device() and self.compile != "none" and not self.masked
        return usual and ours and model and self.model is self.module and on_device and dist.get_world_size() == 1

    @property
    def is_captured(self) -> bool:
        return self.recorded is not None and self.recorded.graph is not None

    def step_on_device(self, inputs: Tensor, targets: Tensor) -> Tensor:
        try:
            return self.update_on_device(self.forward_backward(inputs, targets))
        except Exception:  # a failed capture leaves gradients that were never computed
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def update_on_device(self, loss: Tensor) -> Tensor:
        """Return loss, norm, whether the step updates, and whether it is a spike. The GPU itself skips the update."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        loss, norm, spiked = self.agreed(loss, self.norm(parameters))
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        ended_well = finite & ~spiked
        self.optimizer.step_if(ended_well, clip_factor(norm, self.max_grad_norm))  # type: ignore[attr-defined]
        self.end_step(ended_well)
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.float(), norm.float(), ended_well.float(), (finite & spiked).float()])

    def decides_on_device(self) -> bool:
        """Return whether the GPU itself can skip an update. It cannot under fp16: the host keeps the loss scale."""
        on_device = self.device.type == "cuda" and getattr(self, "offload", "none") == "none"
        # a strategy with its own clip() must have it called
        clips = type(self).clip is Strategy.clip and hasattr(self.optimizer, "step_if")
        return on_device and clips and not self.precision.scaled

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return one norm over the gradients of the whole model."""
        return total_norm(parameters)

    def clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Clip by one norm over the whole model, and return that norm."""
        norm = self.norm(parameters)
        scale_gradients(parameters, clip_factor(norm, self.max_grad_norm))
        return norm

    @torch.no_grad()
    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the global batch, without gradients, followed by the model's own metrics if any."""
        self.begin_evaluation()
        targets = self.own_targets(targets)
        self.count_targets(targets)
        results = []
        for x, y in zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True):
            with self.autocast():
                results.append(self.weighted(self.model(x, y, **self.context).float(), y))
        return self.mean_over_data_ranks(torch.stack(results).mean(dim=0))

    @torch.no_grad()
    def eval_outputs(self, inputs: Tensor, targets: Tensor, see: Callable[[Tensor, Tensor], None]) -> None:
        """Call see(outputs, targets) for each micro-batch of this data rank, on the ranks that have the outputs."""
        self.begin_evaluation()
        for x, y in zip(inputs.split(self.micro_batch_size), targets.split(self.micro_batch_size), strict=True):
            with self.autocast():
                outputs = self.model(x, **self.context)
            see(self.all_tokens(whole(outputs)), y)

    def all_tokens(self, outputs: Tensor) -> Tensor:
        """Return the outputs of whole sequences, of which this rank has computed a part."""
        return outputs if self.sequences is None else self.sequences.whole(outputs)

    def free_gathered(self) -> None:
        """After a user's code has called the model outside of a step: free the weights that this gathered."""

    def begin_evaluation(self) -> None:
        self.share_buffers()
        self.model.eval()

    def share_buffers(self) -> None:
        """Before an evaluation or a save: copy data rank 0's buffers to all data ranks.

        Our models' buffers are equal anyway. A user's batch norm differs on each rank, but a checkpoint holds one copy.
        """
        if self.sizes.token_ranks > 1 and self.module.training:
            for buffer in self.module.buffers():
                dist.broadcast(local(buffer), group=self.data_group, group_src=0)

    def mean_over_data_ranks(self, value: Tensor) -> Tensor:
        if self.sizes.token_ranks > 1:
            dist.all_reduce(value, group=self.data_group)  # gloo has no AVG
            value = value / self.sizes.token_ranks
        return value

    # ---- state: canonical names, whatever the layout ---------------------------------------------------------

    def state_dict(self) -> dict[str, Held]:
        """Return this rank's part of every tensor to save, by canonical name: `model.NAME`, `optim.NAME.KEY`.

        The tensors are the live ones: loading fills them in place. All ranks must call it. Frozen base weights of
        adapters are not included, because the initial weights restore them.
        """
        init_optimizer_state(self.optimizer)
        self.share_buffers()
        held = {id(self.updated(p)) for p in self.module.parameters()}
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        assert trained <= held, "the module has different tensors than the optimizer"
        state: dict[str, Held] = {
            f"model.{name}": p.detach() for name, p in self.module.named_parameters() if name not in self.first.base
        }
        state |= {f"model.{name}": b for name, b in self.module.named_buffers()}
        for name, p in self.module.named_parameters():
            for key, value in self.optimizer.state.get(self.updated(p), {}).items():
                if is_tensor(key, value, p):
                    state[f"optim.{name}.{key}"] = value
        return state if self.compressor is None else state | self.compressor.state_dict()

    def extra_state(self) -> dict[str, Any]:
        """Return the state that is not a weight-shaped tensor: update counts, the loss scale, the base's fingerprint.

        All ranks must call it, because a rank need not know every weight.
        """
        counts: dict[str, dict[str, float]] = {}
        for name, p in self.module.named_parameters():
            if name in self.first.base:
                continue
            slots = self.optimizer.state.get(self.updated(p), {}).items()
            counts[name] = {k: float(v) for k, v in slots if not is_tensor(k, v, p)}
        return self.extra(counts)

    def extra(self, counts: dict[str, dict[str, float]]) -> dict[str, Any]:
        extra = {"optimizer": merged(counts), "precision": self.precision.state_dict()}
        if self.compressor is not None:
            extra["compress"] = self.compressor.extra_state()
        return extra | ({"base": self.base} if self.base else {})

    def needed_to_resume(self) -> tuple[str, ...]:
        """Return the keys that a checkpoint's manifest must have. A user's strategy may save less."""
        ours = type(self).__module__.startswith("dtrain.strategies.")
        return ("samples", "data", "extra", *(("extra.optimizer", "extra.precision") if ours else ()))

    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        """Load the remaining state, after a load has filled the tensors of `state_dict()`."""
        lora_base.check(extra.get("base"), self.base)
        if self.recorded is not None:  # the captured step holds the old addresses of state that was recreated
            self.recorded.forget()
        if isinstance(self.optimizer, AdamW):
            self.optimizer.forget_sums()
        for name, p in self.module.named_parameters():
            slots, counts = self.optimizer.state.get(self.updated(p), {}), extra["optimizer"].get(name, {})
            counted = {k for k, v in slots.items() if not is_tensor(k, v, p)}
            if not counted <= counts.keys() and name not in self.first.base:
                raise CheckpointError(f"the checkpoint has no update count of {name}. Fix: use an older checkpoint")
            for key, value in counts.items():
                if isinstance(slots.get(key), Tensor):
                    slots[key].fill_(value)
                else:
                    slots[key] = value
        self.precision.load_state_dict(extra["precision"])
        if self.compressor is not None:
            self.compressor.load_state_dict(extra.get("compress", {}))

    def totals(self) -> dict[str, Any]:
        """Return what summary.json says about this strategy at the end of a run. All ranks must call it."""
        return {}

    def close(self) -> None:
        """At the end of a run: release what would outlive the process, such as files on disk."""
