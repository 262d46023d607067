"""`dtrain export`: write a run's newest weights for other programs."""

from __future__ import annotations

from pathlib import Path

from dtrain.commands.run_parser import RunParser


def main(argv: list[str]) -> int:
    parser = RunParser("dtrain export", description="Export a run's newest weights for other programs.")
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("out", nargs="?", help="default: RUN/model.safetensors, or the folder RUN/hf")
    parser.add_argument(
        "--format", choices=["safetensors", "hf"], default="safetensors",
        help="one file with dtrain's parameter names, or a folder for Hugging Face's transformers",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the weights; default: unchanged"
    )
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help="your own modules that the run uses")
    options = parser.parse_args(argv)
    from dtrain.runs.find import find_run

    run_dir = find_run(options.run)
    import torch

    from dtrain.inference import export as write

    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.format == "hf":
        path = write.export_hf(run_dir, Path(options.out or run_dir / "hf"), dtype, options.trust)
    else:
        path = write.export_file(run_dir, Path(options.out or run_dir / "model.safetensors"), dtype, options.trust)
    size = sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path]))
    print(f"wrote {path} ({size / 2**20:.1f} MiB)")
    return 0
