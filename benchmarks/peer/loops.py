"""One training loop a peer, each as its users write it: bf16, AdamW in one fused kernel, clipping, compiled.

All take a composed configuration of dtrain (for the sizes) and the feed, and go on for ever: the feed ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.peer.feed import Feed
from benchmarks.peer.yardsticks import kind_of, yardstick

CLIP, LR, BETAS, DECAY = 1.0, 1e-4, (0.9, 0.95), 0.1


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)


# ---- ours ----------------------------------------------------------------------------------------------------


def ours(cfg: Any, feed: Feed, device: torch.device) -> None:
    """The step of dtrain/train/loop.py, with the defaults and the few words of peers.py."""
    strategy = set_up(cfg, len(feed.batches[0][0]), device)
    for inputs, targets in feed:
        before, feed.loss = feed.loss, strategy.train_step(inputs, targets)
        if before is not None:  # as in the loop: a step's figures are read while the next one computes
            before.read()


def set_up(cfg: Any, size: int, device: torch.device) -> Any:
    """What dtrain/train/loop.py sets up for one rank and a batch of `size`, with weights that are made at once."""
    from measure import Quick

    from dtrain.config.build import build
    from dtrain.data.masked_lm import num_masked
    from dtrain.train import build as models

    strategy = build(cfg.strategy).for_world(1)
    strategy.resolve_mesh(1, 1)
    model = models.make(cfg)
    if cfg.model.get("task") == "mlm":  # as train/setup.py does
        model.num_targets = num_masked(cfg.model.seq_len, cfg.data.share)
    strategy.setup(
        model, build(cfg.optim, global_batch_size=size), precision=build(cfg.precision), device=device,
        first=Quick(), micro_batch_size=cfg.train.micro_batch_size or size, max_grad_norm=cfg.train.max_grad_norm,
        activation_checkpointing=cfg.activation_checkpointing,
        activation_checkpointing_every=cfg.activation_checkpointing_every, compile=cfg.compile,
        cuda_graphs=cfg.cuda_graphs,
    )  # fmt: skip
    strategy.set_lr(LR / cfg.optim.lr)
    return strategy


# ---- plain torch ---------------------------------------------------------------------------------------------


def plain(cfg: Any, feed: Feed, device: torch.device, source: str = "timm") -> None:
    """float32 parameters under autocast."""
    loop(yardstick(cfg.model, source).to(device), feed, torch.autocast(device.type, torch.bfloat16))


def plain_torchvision(cfg: Any, feed: Feed, device: torch.device) -> None:
    plain(cfg, feed, device, "torchvision")


def plain_bf16(cfg: Any, feed: Feed, device: torch.device) -> None:
    """Parameters, gradients and optimizer state all in bfloat16: less memory and time, and less exact."""
    loop(yardstick(cfg.model).to(device, torch.bfloat16), feed, contextlib.nullcontext(), torch.bfloat16)


def loop(model: nn.Module, feed: Feed, autocast: Any, dtype: torch.dtype = torch.float32) -> None:
    compiled: Callable[..., Any] = torch.compile(model)
    optimizer = adamw(model.parameters())
    for inputs, targets in feed:
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        with autocast:
            loss = compiled(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        feed.loss = loss.detach()


# ---- the tools, with the yardstick ---------------------------------------------------------------------------


def lightning(cfg: Any, feed: Feed, device: torch.device) -> None:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(yardstick(cfg.model))

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(*batch)
            feed.loss = loss.detach()
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self.parameters())

        # Trainer(gradient_clip_val=...) refuses a fused optimizer under bf16-mixed; this is its hook for one's own
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)

    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision="bf16-mixed", max_epochs=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), feed)


def accelerate(cfg: Any, feed: Feed, device: torch.device) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor", cpu=device.type == "cpu")
    model = yardstick(cfg.model).to(device)
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), DataLoader(feed, batch_size=None))
    for inputs, targets in loader:
        loss = model(inputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        feed.loss = loss.detach()


def deepspeed(cfg: Any, feed: Feed, device: torch.device) -> None:
    """zero2 in bfloat16 with float32 masters, not compiled: its tutorials' form, with torch's fused AdamW."""
    from dtrain.strategies.deepspeed_state import import_deepspeed

    tool = import_deepspeed(device)  # its import as it must be where there is no compiler or no GPU; no more of ours
    # It sends no weights with channels last, and leaves the statistics of batch norms in float32, which torch refuses.
    model = yardstick(cfg.model).to(device, torch.bfloat16, memory_format=torch.contiguous_format)
    config = {
        "train_micro_batch_size_per_gpu": len(feed.batches[0][0]), "gradient_clipping": CLIP,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    engine, *_ = tool.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    for inputs, targets in feed:
        loss = engine(inputs.bfloat16() if inputs.is_floating_point() else inputs, targets)
        engine.backward(loss)
        engine.step()
        feed.loss = loss.detach()


# ---- Hugging Face's Trainer, with its own models -------------------------------------------------------------


def hf_trainer(cfg: Any, feed: Feed, device: torch.device) -> None:
    import transformers

    kind = kind_of(cfg.model)
    model = hf_model(cfg.model, kind)
    key = "pixel_values" if kind in ("vit", "resnet") else "input_ids"
    causal = kind in ("gpt2", "llama")  # there the model itself moves the targets by one
    feed.batches = [{key: inputs, "labels": inputs if causal else targets} for inputs, targets in feed.batches]

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return feed

        def training_step(self, *args: Any, **options: Any) -> Any:
            feed.loss = super().training_step(*args, **options)
            return feed.loss

    arguments = transformers.TrainingArguments(
        output_dir="/nowhere", max_steps=10**9, per_device_train_batch_size=len(feed.batches[0][key]), bf16=True,
        torch_compile=True, optim="adamw_torch_fused", learning_rate=LR, lr_scheduler_type="constant",
        weight_decay=DECAY, max_grad_norm=CLIP, save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False, use_cpu=device.type == "cpu",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=feed).train()


def hf_model(sizes: Any, kind: str) -> Any:
    """Hugging Face's model with our sizes; its vocabulary is padded as the others' are."""
    import transformers

    from dtrain.formats import huggingface

    if kind in huggingface.FAMILIES:
        padded = {**sizes, "vocab_size": -(-sizes.vocab_size // 128) * 128}
        values = huggingface.FAMILIES[kind].config(padded)
        name = values["architectures"][0]
        config = transformers.AutoConfig.for_model(kind, **values, use_cache=False)
    elif kind == "vit":
        name = "ViTForImageClassification"
        config = transformers.ViTConfig(
            hidden_size=sizes.dim, num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_heads,
            intermediate_size=4 * sizes.dim, image_size=sizes.image_size, patch_size=sizes.patch_size,
            num_channels=sizes.channels, num_labels=sizes.num_classes,
        )  # fmt: skip
    else:
        name = "ResNetForImageClassification"
        config = transformers.ResNetConfig(
            depths=list(sizes.blocks), layer_type="bottleneck" if sizes.bottleneck else "basic",
            num_channels=sizes.channels, num_labels=sizes.num_classes,
        )  # fmt: skip
        if not sizes.bottleneck:
            config.hidden_sizes = [64, 128, 256, 512]
    return getattr(transformers, name)(config)


LOOPS: dict[str, Callable[..., None]] = {
    "ours": ours, "plain": plain, "plain_torchvision": plain_torchvision, "plain_bf16": plain_bf16,
    "lightning": lightning, "accelerate": accelerate, "deepspeed": deepspeed, "hf_trainer": hf_trainer,
}  # fmt: skip
