"""`dtrain evaluate RUN`: metrics of a checkpoint's weights over a whole split, or a stream's start."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dtrain.commands.run_parser import CHECKPOINT, TRUST, RunParser
from dtrain.config.build import allowed, build
from dtrain.config.files import HOOKS, TARGET
from dtrain.config.schema import check_run
from dtrain.errors import bad
from dtrain.runs.find import find_checkpoint
from dtrain.ui.counter import Counter
from dtrain.util.format import as_dict, clean, loss_text, percent, perplexity

QUIET_S = 2.0  # most evaluations of small runs are over by then


def main(argv: list[str]) -> int:
    parser = RunParser(
        "dtrain evaluate",
        description="Loss, and perplexity or accuracy, of a run's weights over a whole split; of a stream, over its "
        "first train.eval_batches global batches.",
    )
    parser.add_argument("run", help=CHECKPOINT)
    parser.add_argument("--split", choices=["val", "train"], default="val")
    parser.add_argument(
        "--batch-size", type=int, default=None, metavar="N", help="samples per forward pass (default: as in training)"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help=TRUST)
    parser.add_argument(
        "overrides", nargs="*", metavar="data=…", help="other data than that of the run: data=text data.path=FOLDER"
    )
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (ema.decay)")
    options = parser.parse_args(argv)
    if options.batch_size is not None and options.batch_size < 1:
        raise bad("--batch-size", options.batch_size, "must be at least 1", "--batch-size 32")
    at = find_checkpoint(options.run)
    choices = (options.trust, at.step, options.overrides, options.ema)
    found = evaluate(at.run_dir, options.split, options.batch_size, *choices)
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0


def evaluate(
    run_dir: Path,
    split: str = "val",
    batch_size: int | None = None,
    trust: list[str] | None = None,
    step: int | None = None,
    overrides: Sequence[str] = (),
    ema: bool = False,
) -> dict[str, Any]:
    """Return each metric as a mean over all counted targets of the split, in the run's own precision.

    Of a stream, which may have no end, its start counts.
    """
    import torch

    from dtrain.data.adapt import open_data
    from dtrain.data.fields import Fields, has_targets
    from dtrain.data.loader import Loader
    from dtrain.data.samples import in_memory
    from dtrain.inference.sample import load_model
    from dtrain.models.calling import shifts_labels
    from dtrain.models.layers import IGNORED
    from dtrain.strategies.materialize import set_stream
    from dtrain.train import metrics

    model, cfg = load_model(run_dir, trust or [], step, ema)
    device = next(model.parameters()).device
    data = other_data(run_dir, overrides, trust or []) if overrides else cfg.data
    precision = build(cfg.precision)
    set_stream(model, precision.stream)
    dataset = open_data(data, trust or []).dataset(split)
    if dataset is None:
        raise bad("--split", split, "the run's data have no such split", "--split train")
    is_whole = True
    if getattr(dataset, "is_stream", False):
        count = max(1, cfg.train.eval_batches) * cfg.train.global_batch_size
        dataset = in_memory(dataset, count)
        is_whole = len(dataset) < count
    size = min(batch_size or cfg.train.micro_batch_size or cfg.train.global_batch_size, len(dataset))
    whole, rest = Loader(dataset, size, cfg.train.seed, shuffle=False), len(dataset) % size
    batches = [(whole, position) for position in range(0, len(dataset) - rest, size)]
    if rest:
        batches.append((Loader(dataset, rest, cfg.train.seed, shuffle=False), len(dataset) - rest))
    sums, num = torch.zeros(1, dtype=torch.float64), 0
    progress = Counter(0, len(batches), "batches", QUIET_S)
    with torch.inference_mode(), precision.autocast(device.type):
        for loader, position in batches:
            inputs, targets = (t.to(device) for t in loader.batch(position))
            if isinstance(targets, torch.Tensor) and has_targets(targets):
                counted = targets[:, 1:] if shifts_labels(model) and isinstance(inputs, Fields) else targets
                is_class = not targets.is_floating_point()
                num_targets = int((counted != IGNORED).sum()) if is_class else targets.numel()
            else:
                num_targets = len(targets)
            sums = sums + model(inputs, targets).double().cpu().reshape(-1) * num_targets
            num += num_targets
            progress.add()
    values = metrics.evaluated(model, (sums / num).tolist())
    found = {name.removeprefix("val_"): value for name, value in values.items()}
    own = of_hooks(run_dir, cfg, trust or [], model, precision, lambda: (x.batch(i) for x, i in batches))
    found |= {name.removeprefix("val_"): value for name, value in own.items()}
    at = {} if step is None else {"step": step}
    return {
        "run": str(run_dir),
        **at,
        "split": split,
        "is_whole": is_whole,
        "samples": len(dataset),
        "targets": num,
        **found,
    }


def other_data(run_dir: Path, overrides: Sequence[str], trust: Sequence[str]) -> dict[str, Any]:
    """Return the section of the data that these overrides name, completed from the run's settings, and checked."""
    from dtrain.checks.validate import check_data  # Hydra takes a while
    from dtrain.launch.compose import compose
    from dtrain.launch.quoting import quote

    for word in overrides:
        if not word.startswith(("data=", "data.")):
            raise bad("override", word, "only the data may differ from the run's", "data=text data.path=FOLDER")
    try:
        config = compose([f"resume={quote(run_dir)}", *overrides, f"trust=[{','.join(trust)}]"])
        check_data(config)
    except ValueError as error:  # the model is the run's
        raise ValueError(re.sub(r", or another model$", ", or a run of another model", str(error))) from error
    return dict(config["data"])


def of_hooks(
    run_dir: Path, cfg: Any, trust: list[str], model: Any, precision: Any, batches: Callable[[], Iterable[Any]]
) -> dict[str, float]:
    """Return the metrics of the run's hooks. The user's own are left out, visibly, if their module is not trusted."""
    import torch

    from dtrain.train.hook_run import HookRun
    from dtrain.train.hooks import Hooks

    device = next(model.parameters()).device

    def forward(inputs: Any, targets: Any, see: Callable[[Any, Any], None]) -> None:
        with torch.no_grad(), precision.autocast(device.type):
            outputs = model(inputs)
        see(outputs, targets)

    def on_device() -> Iterator[Any]:
        return ((inputs.to(device), targets.to(device)) for inputs, targets in batches())

    sections = as_dict(cfg.get(HOOKS))
    trusted = {name: s for name, s in sections.items() if allowed(str(as_dict(s).get(TARGET)), trust)}
    check_run({HOOKS: trusted}, trust, (HOOKS,))
    for name in sections.keys() - trusted.keys():
        print(clean(f"left out: the metrics of hooks={name}; --trust with its module adds them"), file=sys.stderr)
    view = HookRun(run_dir, cfg, model, device, cfg.train.steps or 0, forward, on_device, model.eval)
    return Hooks(trusted, trust, view).evaluate({}, lambda: None)


def as_text(found: dict[str, Any]) -> str:
    forms = {"loss": loss_text, "perplexity": perplexity, "accuracy": percent, "top5": percent}
    names = {"top5": "top-5 accuracy"}
    samples = f"{found['samples']:,} samples"
    samples = samples if found["is_whole"] else f"the first {samples} of a stream"
    lines = [f"{found['split']}: {samples}, {found['targets']:,} targets"]
    lines += [
        f"{names.get(k, k):<20} {forms.get(k, loss_text)(found[k])}" for k in found if isinstance(found[k], float)
    ]
    return "\n".join(lines)
