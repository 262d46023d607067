"""`dtrain evaluate RUN`: metrics of a run's newest weights over a whole split, on one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dtrain.commands.run_parser import RunParser
from dtrain.config.build import build
from dtrain.errors import bad
from dtrain.runs.find import find_run
from dtrain.util.format import loss_text, percent, perplexity


def main(argv: list[str]) -> int:
    parser = RunParser(
        "dtrain evaluate", description="Loss, and perplexity or accuracy, of a run's newest weights over a whole split."
    )
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("--split", choices=["val", "train"], default="val")
    parser.add_argument(
        "--batch-size", type=int, default=None, metavar="N", help="samples per forward pass (default: as in training)"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help="your own modules that the run uses")
    options = parser.parse_args(argv)
    if options.batch_size is not None and options.batch_size < 1:
        raise bad("--batch-size", options.batch_size, "must be at least 1", "--batch-size 32")
    found = evaluate(find_run(options.run), options.split, options.batch_size, options.trust)
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0


def evaluate(
    run_dir: Path, split: str = "val", batch_size: int | None = None, trust: list[str] | None = None
) -> dict[str, Any]:
    """Return each metric as a mean over all counted targets of the split, in the run's own precision."""
    import torch

    from dtrain.data.loader import Loader
    from dtrain.inference.sample import load_model
    from dtrain.models.layers import IGNORED
    from dtrain.strategies.materialize import set_stream
    from dtrain.train import metrics

    model, cfg = load_model(run_dir, trust or [])
    device = next(model.parameters()).device
    precision = build(cfg.precision)
    set_stream(model, precision.stream)
    dataset = build(cfg.data, trust or []).dataset(split)
    size = min(batch_size or cfg.train.micro_batch_size or cfg.train.global_batch_size, len(dataset))
    whole, rest = Loader(dataset, size, cfg.train.seed, shuffle=False), len(dataset) % size
    batches = [(whole, position) for position in range(0, len(dataset) - rest, size)]
    if rest:
        batches.append((Loader(dataset, rest, cfg.train.seed, shuffle=False), len(dataset) - rest))
    sums, count = torch.zeros(1, dtype=torch.float64), 0
    with torch.inference_mode(), precision.autocast(device.type):
        for loader, position in batches:
            inputs, targets = (t.to(device) for t in loader.batch(position))
            num_targets = int((targets != IGNORED).sum()) if not targets.is_floating_point() else targets.numel()
            sums = sums + model(inputs, targets).double().cpu().reshape(-1) * num_targets
            count += num_targets
    values = metrics.evaluated(model, (sums / count).tolist())
    found = {name.removeprefix("val_"): value for name, value in values.items()}
    return {"run": str(run_dir), "split": split, "samples": len(dataset), "targets": count, **found}


def as_text(found: dict[str, Any]) -> str:
    forms = {"loss": loss_text, "perplexity": perplexity, "accuracy": percent, "top5": percent}
    names = {"top5": "top-5 accuracy"}
    lines = [f"{found['split']}: {found['samples']:,} samples, {found['targets']:,} targets"]
    lines += [
        f"{names.get(k, k):<20} {forms.get(k, loss_text)(found[k])}" for k in found if isinstance(found[k], float)
    ]
    return "\n".join(lines)
