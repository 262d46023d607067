"""`dtrain sample`: generate text with a trained language model."""

from __future__ import annotations

import math

from dtrain.commands.run_parser import CHECKPOINT, TRUST, RunParser


def main(argv: list[str]) -> int:
    parser = RunParser("dtrain sample", description="Continue a text with a trained language model.")
    parser.add_argument("run", help=CHECKPOINT)
    parser.add_argument("prompt", nargs="?", default="\n")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the most likely token")
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k most likely tokens; 0 = all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help=TRUST)
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights (ema.decay)")
    options = parser.parse_args(argv)
    from dtrain.errors import bad

    if options.tokens < 1:
        raise bad("--tokens", options.tokens, "must be at least 1", "--tokens 200")
    if not 0 <= options.temperature < math.inf:
        raise bad("--temperature", options.temperature, "must be a number, at least 0", "--temperature 0.8")
    if options.top_k < 0:
        raise bad("--top-k", options.top_k, "must be at least 0", "--top-k 0, which samples from all tokens")
    if not 0 <= options.seed < 2**63:
        raise bad("--seed", options.seed, "must be at least 0 and less than 2^63", "--seed 0")
    from dtrain.runs.find import find_checkpoint

    at = find_checkpoint(options.run)
    from dtrain.inference.sample import sample as sample_text

    choices = (options.temperature, options.top_k, options.seed, options.trust, at.step, options.ema)
    print(sample_text(at.run_dir, options.prompt, options.tokens, *choices))
    return 0
