"""`dtrain data`: turn text into memory-mapped token files."""

from __future__ import annotations

import shlex
from pathlib import Path

from dtrain.commands.run_parser import RunParser


def main(argv: list[str]) -> int:
    parser = RunParser("dtrain data", description="Turn text into memory-mapped token files.")
    parser.add_argument("action", choices=["prepare"])
    parser.add_argument(
        "source", help="a text or .jsonl file, a folder of them, or a dataset that `datasets` saved to disk"
    )
    parser.add_argument("out", help="the folder to create")
    parser.add_argument("--tokenizer", help="a tokenizers JSON file; default: bytes")
    parser.add_argument("--val-fraction", type=float, default=0.05)
    parser.add_argument("--pattern", help="which files of a folder, e.g. '**/*.md'; default: its .txt or .jsonl files")
    parser.add_argument("--field", default="text", help="the JSON field or dataset column that holds the text")
    options = parser.parse_args(argv)
    from dtrain.data.text import check_tokenizer
    from dtrain.data.tokens import prepare

    check_tokenizer(options.tokenizer, "--tokenizer")
    choices = (options.tokenizer, options.val_fraction, options.pattern, options.field)
    meta = prepare(Path(options.source), Path(options.out), *choices)
    counts = f"{meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens"
    print(f"wrote {options.out}: {counts} ({meta['dtype']})")
    from dtrain.ui.console import LAUNCH

    print(f"next: {LAUNCH} data=tokens data.path={shlex.quote(options.out)}")
    return 0
