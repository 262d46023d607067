"""`dtrain export`: write a run's weights for other programs."""

from __future__ import annotations

from pathlib import Path

from dtrain.commands.run_parser import CHECKPOINT, TRUST, RunParser


def main(argv: list[str]) -> int:
    parser = RunParser("dtrain export", description="Export a run's weights for other programs.")
    parser.add_argument("run", help=CHECKPOINT)
    parser.add_argument(
        "out",
        nargs="?",
        help="default: RUN/model.safetensors, or the folder RUN/hf; of RUN@100 RUN/model-100.safetensors, RUN/hf-100",
    )
    parser.add_argument(
        "--format", choices=["safetensors", "hf"], default="safetensors",
        help="one file with dtrain's parameter names, or a folder for Hugging Face's transformers",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the weights; default: unchanged"
    )
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help=TRUST)
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (ema.decay)")
    options = parser.parse_args(argv)
    from dtrain.runs.find import find_checkpoint

    run_dir, step = find_checkpoint(options.run)
    import torch

    from dtrain.inference import export as write

    suffix = ("-ema" if options.ema else "") + ("" if step is None else f"-{step}")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.format == "hf":
        folder = Path(options.out or run_dir / f"hf{suffix}")
        path = write.export_hf(run_dir, folder, dtype, options.trust, step=step, ema=options.ema)
    else:
        out = Path(options.out or run_dir / f"model{suffix}.safetensors")
        path = write.export_file(run_dir, out, dtype, options.trust, step, options.ema)
    size = sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path]))
    print(f"wrote {path} ({size / 2**20:.1f} MiB)")
    return 0
