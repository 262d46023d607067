"""`dtrain export`: write a run's weights for other programs."""

from __future__ import annotations

import shlex
from pathlib import Path

from dtrain.commands.run_parser import CHECKPOINT, TRUST, RunParser
from dtrain.errors import bad

# what is written, and its default name in the run folder
NAMES = {"safetensors": "model{}.safetensors", "hf": "hf{}", "gguf": "model{}.gguf", "onnx": "onnx{}"}
ENDINGS = {".gguf": "gguf", ".onnx": "onnx", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".pkl"), "")}  # "": none


def main(argv: list[str]) -> int:
    parser = RunParser(
        "dtrain export",
        description="Export a run's weights for other programs, with a model card that says where they come from.",
    )
    parser.add_argument("run", help=CHECKPOINT)
    parser.add_argument(
        "out", nargs="?",
        help="a file for safetensors and gguf, a folder for hf and onnx; default: in the run folder "
        "model.safetensors, model.gguf, hf or onnx, of RUN@100 model-100.safetensors, …",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=list(NAMES), default="safetensors",
        help="safetensors: one file with the names of the model's state_dict(); hf: a folder for Hugging Face's "
        "transformers (gpt2, llama, bert, and models of your own that are of transformers); gguf: one file for "
        "llama.cpp (gpt2, llama); onnx: a folder with model.onnx (gpt2, llama, bert, resnet, vit)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of the weights; default: unchanged"
    )
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help=TRUST)
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (ema.decay)")
    options = parser.parse_args(argv)
    ending = Path(options.out or "").suffix.lower()
    if options.format == "safetensors" and ending in ENDINGS:
        rule = "has the ending of another format, and --format is safetensors"
        kind = ENDINGS[ending]
        stem, suffix = str(Path(options.out).with_suffix("")), {"gguf": ending, "onnx": ""}.get(kind, ".safetensors")
        asked = [options.run, *(["--format", kind] if kind else []), stem + suffix]
        asked += ["--ema"] if options.ema else []
        raise bad("OUT", options.out, rule, f"dtrain export {shlex.join(asked)}")
    if options.format == "onnx" and options.dtype not in (None, "float32"):
        rule = "an onnx export has fp32 weights"
        raise bad("--dtype", options.dtype, rule, "leave it out, and convert model.onnx with onnxruntime's tools")
    from dtrain.runs.find import find_checkpoint

    run_dir, step = find_checkpoint(options.run)
    suffix = ("-ema" if options.ema else "") + ("" if step is None else f"-{step}")
    out = Path(options.out or run_dir / NAMES[options.format].format(suffix))
    import torch

    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.format == "hf":
        from dtrain.inference.export_hf import export_hf

        path = export_hf(run_dir, out, dtype, options.trust, step=step, ema=options.ema)
    elif options.format == "gguf":
        from dtrain.inference.export_gguf import export_gguf

        path, missing = export_gguf(run_dir, out, dtype, options.trust, step, options.ema)
        if missing:
            print(f"the file has no tokenizer: {missing}; programs must give it token ids")
    elif options.format == "onnx":
        from dtrain.inference.export_onnx import export_onnx

        path = export_onnx(run_dir, out, options.trust, step, options.ema)
    else:
        from dtrain.inference.export import export_file

        path = export_file(run_dir, out, dtype, options.trust, step, options.ema)
    size = sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path]))
    print(f"wrote {path} ({size / 2**20:.1f} MiB)")
    return 0
