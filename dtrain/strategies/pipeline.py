"""Pipeline parallel: each rank holds some layers, and micro-batches flow through. With tensor and data parallel: 3d."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor.parallel import loss_parallel

from dtrain.models.layers import Head, eval_metrics
from dtrain.optim.precision import autocast_inside
from dtrain.strategies.base import Strategy
from dtrain.strategies.compile import compile_layers
from dtrain.strategies.fsdp import data_mesh, free_layers, shard_layers
from dtrain.strategies.grad_norm import total_norm
from dtrain.strategies.pipeline_stages import Stages, TiedWeights, split_points, stage_of
from dtrain.strategies.stage_layout import stages_of_rank
from dtrain.strategies.tensor import finish_sums, parallelize_layers
from dtrain.util.dtensor import Held, whole

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
BACKWARD = ("I", "W", "B", "SEND_B", "RECV_B", "WAIT_SEND_B")  # torch's names of actions; the last one since 2.15


class TorchStage(pipelining.PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Before the first step: skip torch 2.11's send/recv to stages on this same rank, which gloo cannot do."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class Pipeline(Strategy):
    compiles = "blocks"

    def __init__(
        self,
        pp: int = -1,
        dp: int = -1,
        tp: int = 1,
        schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv"] = "1f1b",
        stages_per_rank: int = 2,
        split: list[int] | None = None,
        data: Literal["fsdp", "ddp"] = "fsdp",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        cp: int = 1,
        cp_kind: Literal["ring", "allgather", "ulysses"] = "ring",
    ) -> None:
        super().__init__(pp=pp, dp=dp, tp=tp, cp=cp, cp_kind=cp_kind)
        self.schedule, self.stages_per_rank, self.split, self.data = schedule, stages_per_rank, split, data
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        # Separate schedules for training and evaluation: a shared one would prepare itself again at every switch, with
        # a forward pass that draws random numbers.
        self.schedules: dict[bool, Any] = {}
        self.output_schedules: dict[tuple[int, ...], Any] = {}  # of eval_outputs, by the shape of a batch

    def parallelize(self, model: nn.Module) -> nn.Module:
        if not hasattr(model, "pipeline_split"):
            raise ValueError(
                f"strategy.pp={self.sizes.pp}: {type(model).__name__} does not define how to split it into stages\n"
                "  fix: add pipeline_split() to the model, or strategy=fsdp, zero3 or ddp"
            )
        self.num_eval_metrics = len(eval_metrics(model))
        if self.schedule == "zbv":  # zbv splits the backward pass, which a compiled graph cannot do
            self.compile = "none"
            if torch.__version__ < "2.13":  # nor can an autograd function, such as the fused head and loss
                for head in (part for part in model.modules() if isinstance(part, Head)):
                    head.fused = False
        # the mask depends on the inputs, which are passed as such only to the first stage
        self.wants_source = "source" in inspect.signature(model.forward).parameters
        self.pp_rank, self.pp_group = self.mesh.get_local_rank("pp"), self.mesh.get_group("pp")
        self.random_rank += self.sizes.token_ranks * self.pp_rank  # else two stages would use the same dropout masks
        self.data_mesh = data_mesh(self.mesh, self.sizes.token_ranks if self.data == "fsdp" else 1)
        self.stage_ids, self.num_stages = stages_of_rank(
            self.pp_rank, self.sizes.pp, self.schedule, self.stages_per_rank
        )
        bounds = split_points(model, self.num_stages, self.split)
        layers: list[nn.Module] = model.fsdp_units()  # type: ignore[operator]
        for low, high in bounds if self.first.base else ():
            if not any(p.requires_grad for layer in layers[low:high] for p in layer.parameters()):
                raise ValueError(
                    f"lora.targets: the stage of layers {low} to {high - 1} would have nothing to train\n"
                    "  fix: lora.targets=[] or names that every layer has, another strategy.split, or strategy=fsdp"
                )
        return Stages([self.parallelize_stage(stage_of(model, *bounds[i])) for i in self.stage_ids])

    def parallelize_stage(self, stage: nn.Module) -> nn.Module:
        """Apply tensor and data parallel inside a stage, as without a pipeline."""
        parallelize_layers(stage, self.mesh["tp"], self.sequence_parallel, self.loss_parallel)
        if self.compile != "none":
            compile_layers(stage)
        forward = functools.partial(stage.forward, **self.context)
        stage.forward = autocast_inside(forward, self.autocast)  # not around the backward pass
        if self.sizes.token_ranks > 1:  # layers stay gathered: otherwise every micro-batch would gather them again
            shard_layers(stage, self.data_mesh, self.precision.dtype, reshard_after_forward=False)
        return stage

    def wrap(self, model: nn.Module) -> nn.Module:
        self.tied = TiedWeights(model, self.pp_rank, self.sizes.pp, self.pp_group)
        return model

    # ---- a step ----------------------------------------------------------------------------------------------

    def run(self, inputs: Tensor, targets: Tensor, train: bool) -> Tensor:
        """Run the micro-batches through all stages; return the mean loss on every stage."""
        if train not in self.schedules:
            self.schedules[train] = self.make_schedule(len(inputs) // self.micro_batch_size, train)
            if train:  # its first pass infers each stage's shapes with an extra forward pass
                with self.rehearsal():
                    self.run(inputs, targets, train)
        is_first, is_last = 0 in self.stage_ids, self.num_stages - 1 in self.stage_ids
        losses: list[Tensor] = []
        run = self.schedules[train].step if train else self.schedules[train].eval
        with loss_parallel() if self.loss_parallel else contextlib.nullcontext():
            run(
                *([inputs] if is_first else []),
                target=targets if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
                **({"targets": targets} if is_last else {}),
                **({"source": inputs} if self.wants_source else {}),
            )
        if is_last:
            loss = torch.stack(losses).detach().float().sum(dim=0)
        else:
            loss = torch.zeros(
                () if train or not self.num_eval_metrics else 1 + self.num_eval_metrics, device=self.device
            )
        dist.all_reduce(loss, group=self.pp_group)
        return loss / self.precision.scale

    def make_schedule(
        self, num_micro_batches: int, train: bool, at_end: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Any:
        """at_end: what the last stage computes from its output and the targets; None: its share of the loss."""
        stages = [
            TorchStage(stage, i, self.num_stages, self.device, group=self.pp_group)
            for i, stage in zip(self.stage_ids, self.module.children(), strict=True)
        ]
        one_stage = self.schedule in ("gpipe", "1f1b")

        def share_of_loss(output: Tensor, targets: Tensor) -> Tensor:
            """The last stage returns the mean loss. Scale it here, as without a pipeline, not in the schedule."""
            return self.weighted(output, targets) / num_micro_batches * self.precision.scale

        schedule = SCHEDULES[self.schedule](
            stages[0] if one_stage else stages, num_micro_batches, at_end or share_of_loss, scale_grads=False
        )
        if not train and not one_stage:  # torch's own eval() runs into a backward pass that does not exist
            for rank, actions in schedule.pipeline_order_with_comms.items():
                forward = [a for a in actions if a.computation_type.value not in BACKWARD]
                schedule.pipeline_order_with_comms[rank] = forward
        return schedule

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.run(inputs, targets, train=True)
        finish_sums(self.module)
        self.tied.sum_gradients()
        return loss

    @torch.no_grad()
    def free_gathered(self) -> None:
        free_layers(self.module)

    def eval_outputs(self, inputs: Tensor, targets: Tensor, see: Callable[[Tensor, Tensor], None]) -> None:
        """Only the last stage has the outputs: its schedule passes them on in place of computing a loss."""
        if len(inputs) % self.micro_batch_size:
            rule = f"under a pipeline, a batch must be a multiple of the micro-batch, {self.micro_batch_size} samples"
            raise ValueError(f"a batch of {len(inputs)} samples: {rule}")
        self.begin_evaluation()
        self.see, shape = see, tuple(inputs.shape)
        if shape not in self.output_schedules:
            self.output_schedules[shape] = self.make_schedule(len(inputs) // self.micro_batch_size, False, self.seen)
        is_first, is_last = 0 in self.stage_ids, self.num_stages - 1 in self.stage_ids
        self.output_schedules[shape].eval(
            *([inputs] if is_first else []),
            target=targets if is_last else None,
            losses=[] if is_last else None,
            return_outputs=False,
            **({"source": inputs} if self.wants_source else {}),
        )
        free_layers(self.module)

    def seen(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.see(self.all_tokens(whole(outputs)), targets)
        return torch.zeros((), device=self.device)

    @torch.no_grad()
    def eval_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.begin_evaluation()
        targets = self.own_targets(targets)
        self.count_targets(targets)
        loss = self.mean_over_data_ranks(self.run(inputs, targets, train=False))
        free_layers(self.module)
        return loss

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        again = self.tied.counted_elsewhere()
        counted = [p for p in parameters if id(p) not in again]
        return total_norm(parameters, counted, num_stages=self.sizes.pp)

    def load_state_dict(self, state: dict[str, Held], extra: dict[str, Any]) -> None:
        super().load_state_dict(state, extra)
        self.tied.copy_state(self.optimizer)
