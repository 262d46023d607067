"""How fast is a token? Decoding with random weights, beside the GPU's memory bandwidth and other programs.

    python benchmarks/serve.py [--json benchmarks/results/serve-h200.json]

Every step reads all weights once, so their bytes divided by the bandwidth are a limit for a step, at any batch size.
`weights` is the share of that limit that is reached; `with cache` also counts the keys and values that attention reads.
Greedy, in bfloat16, on one GPU. transformers runs as `generate` does by default, vLLM where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from dtrain.config.build import build
from dtrain.config.files import section
from dtrain.inference.decoder import Decoder, Settings
from dtrain.models.layers import Cache
from dtrain.strategies.materialize import set_stream

PROMPT = 128  # tokens before the measured ones
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes per second, as published


def make(name: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    settings = section("model", name)
    with torch.device("meta"):
        model = build(settings)
    model = model.to(dtype).to_empty(device=device).eval()
    set_stream(model, dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
    return model


def prompts(batch: int, vocabulary: int) -> list[list[int]]:
    return torch.randint(0, vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()


def start(decoder: Decoder, texts: list[list[int]]) -> list[int]:
    for slot, tokens in enumerate(texts):
        filling = decoder.fill(slot, tokens, Settings())
        while not filling.advance():
            pass
    return list(range(len(texts)))


def ours(decoder: Decoder, batch: int, num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds per step, and each sequence's tokens. As in the server, a step is read while the next one runs."""
    slots = start(decoder, prompts(batch, decoder.model.vocab_size))
    steps = [decoder.step(slots)]
    read = []
    sync(decoder.device)
    began = time.perf_counter()
    for _ in range(num_tokens):
        steps.append(decoder.step(slots))
        read.append(steps.pop(0).read())
    sync(decoder.device)
    return (time.perf_counter() - began) / num_tokens, [list(row) for row in zip(*read, strict=True)]


@torch.inference_mode()
def check(decoder: Decoder, num_tokens: int = 64) -> str:
    """Compare the captured step with the plain model: the largest difference of the logits along one text."""
    tokens = ours(decoder, 1, num_tokens)[1][0]
    prompt = prompts(1, decoder.model.vocab_size)[0]
    whole = torch.tensor([prompt + tokens], device=decoder.device)
    logits = decoder.model(whole, cache=Cache(whole.shape[1]))[0, len(prompt) - 1 : -1].float()
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(tokens, device=decoder.device)[:, None])[:, 0]
    same = int((best == chosen).sum())
    return (
        f"{same} of {num_tokens} tokens are the plain model's likeliest; otherwise {(best - chosen).max():.3f} below it"
    )


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def theirs(model: Any, batch: int, num_tokens: int, device: str) -> float:
    """transformers: seconds per step, from two lengths, so that the prompt does not count."""
    tokens = torch.tensor(prompts(batch, model.config.vocab_size), device=device)
    took = []
    for count in (8, 8, 8 + num_tokens):
        sync(torch.device(device))
        began = time.perf_counter()
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        sync(torch.device(device))
        took.append(time.perf_counter() - began)
    return (took[2] - took[1]) / num_tokens


def transformers_model(name: str, device: str, dtype: torch.dtype) -> Any:
    import transformers

    from dtrain.formats import huggingface

    settings = section("model", name)
    family = huggingface.of_target(settings["_target_"])
    values = {k: v for k, v in family.config(settings).items() if k != "architectures"}
    config = transformers.AutoConfig.for_model(family.model_type, **values)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model


def vllm_steps(name: str, batches: list[int], num_tokens: int) -> dict[int, float]:
    """vLLM with dummy weights of the same shape."""
    import tempfile

    import vllm

    from dtrain.formats import huggingface

    settings = section("model", name)
    family = huggingface.of_target(settings["_target_"])
    with tempfile.TemporaryDirectory() as folder:
        values = {"model_type": family.model_type, **family.config(settings), "torch_dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        engine = vllm.LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, gpu_memory_utilization=0.5
        )
        found = {}
        for batch in batches:
            texts = [{"prompt_token_ids": p} for p in prompts(batch, settings["vocab_size"])]
            took = []
            for count in (8, 8, 8 + num_tokens):
                began = time.perf_counter()
                options = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                engine.generate(texts, options, use_tqdm=False)
                took.append(time.perf_counter() - began)
            found[batch] = (took[2] - took[1]) / num_tokens
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-1b", help="an option of conf/model")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=256, help="measured tokens of each sequence")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens that a slot can hold")
    parser.add_argument("--eager", action="store_true", help="CUDA graphs without torch.compile")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    bandwidth = next((b for key, b in BANDWIDTH.items() if key in name), None)
    began = time.perf_counter()
    print(f"{options.model} on {name}, torch {torch.__version__}, {dtype}; {PROMPT} tokens of prompt", flush=True)

    model = make(options.model, device, dtype)
    num_bytes = sum(p.nbytes for p in model.parameters())
    decoder = Decoder(model, max(options.batches), options.capacity, compiled=not options.eager)
    decoder.batches = sorted(options.batches)
    per_token = sum(x.keys[0, :, 0].nbytes + x.values[0, :, 0].nbytes for x in decoder.slots.layers.values())
    rows = []
    for batch in sorted(options.batches):
        compiling = time.perf_counter()
        ours(decoder, batch, 4)
        compiling = time.perf_counter() - compiling
        best = min(ours(decoder, batch, options.tokens)[0] for _ in range(3))
        cached = per_token * batch * (PROMPT + options.tokens / 2)
        row = {"program": "dtrain", "batch": batch, "step_ms": 1e3 * best, "tokens_per_s": batch / best}
        if bandwidth:
            row |= {"weights": num_bytes / bandwidth / best, "with_cache": (num_bytes + cached) / bandwidth / best}
        rows.append(row | {"first_s": compiling})
        print(f"  dtrain batch {batch}: {1e3 * best:.3f} ms a step (compiled in {compiling:.0f} s)", flush=True)
    checked = check(decoder)
    print(f"  {checked}", flush=True)
    del model, decoder
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    count = min(options.tokens, 64)
    if not options.no_peers and find_spec("transformers"):
        peer = transformers_model(options.model, device, dtype)
        for batch in sorted(options.batches):
            took = theirs(peer, batch, count, device)
            rows.append(
                {"program": "transformers", "batch": batch, "step_ms": 1e3 * took, "tokens_per_s": batch / took}
            )
            print(f"  transformers batch {batch}: {1e3 * took:.3f} ms a step", flush=True)
        del peer
        gc.collect()
    if not options.no_peers and device == "cuda" and find_spec("vllm"):
        torch.cuda.empty_cache()
        for batch, took in vllm_steps(options.model, sorted(options.batches), count).items():
            rows.append({"program": "vllm", "batch": batch, "step_ms": 1e3 * took, "tokens_per_s": batch / took})

    print(f"\n{'program':<14}{'batch':>6}{'ms/step':>10}{'tokens/s':>12}{'weights':>10}{'with cache':>12}")
    for row in rows:
        if bandwidth and "weights" not in row:
            row["weights"] = num_bytes / bandwidth / (row["step_ms"] / 1e3)
        shares = [f"{100 * row[k]:.0f}%" if k in row else "" for k in ("weights", "with_cache")]
        print(
            f"{row['program']:<14}{row['batch']:>6}{row['step_ms']:>10.3f}{row['tokens_per_s']:>12,.0f}"
            f"{shares[0]:>10}{shares[1]:>12}"
        )
    print(f"{num_bytes / 1e9:.2f} GB of weights; all of it took {time.perf_counter() - began:.0f} s")
    if options.json:
        kept = {"model": options.model, "device": name, "torch": torch.__version__, "dtype": str(dtype)}
        kept |= {"prompt": PROMPT, "tokens": options.tokens, "weights_bytes": num_bytes, "check": checked, "rows": rows}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
