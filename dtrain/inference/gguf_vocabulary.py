"""The tokenizer of a GGUF file: bytes, or a byte-level BPE (GPT-2's, Llama 3's) of the `tokenizers` library.

llama.cpp has its own code for each kind of tokenizer. One that it would read differently is left out: such a file takes
and gives token ids only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.config.run_file import Settings
from dtrain.data import text, tokens
from dtrain.formats.bounded import read_json
from dtrain.inference.export_hf import tokenizer_of

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens
END = "<|endoftext|>"
NO_MERGE = "ĀĀ ĀĀ"  # llama.cpp needs at least one; two of what a byte never is
# how the text is split before BPE: Llama 3's pattern, as its tokenizer.json has it
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Vocabulary:
    tokens: dict[int, str]
    kinds: dict[int, int]  # of those that are not NORMAL
    merges: list[str]
    split: str  # llama.cpp's name of how text is split
    end: int  # the token that ends a document


def of_run(cfg: Settings, trust: Iterable[str] = ()) -> tuple[Vocabulary | None, str]:
    """Return the vocabulary of a run's data; or None and the reason."""
    named = cfg.data.get("tokenizer")
    file = tokenizer_of(cfg.data)
    if file is not None:
        return of_file(file)
    if named:
        return None, f"the file {Path(str(named)).name} is not there any more"
    target = cfg.data["_target_"]
    if target == "dtrain.data.tokens.Tokens":
        try:
            named = tokens.read_meta(cfg.data["path"])["tokenizer"]
        except ValueError as error:
            return None, str(error).splitlines()[0]
        return (None, "the token folder has lost its tokenizer.json") if named else (of_bytes(), "")
    if target in ("dtrain.data.stdlib.Stdlib", "dtrain.data.text.Text"):
        return of_bytes(), ""
    return None, "the data set of the run is no text"


def characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE: itself if it can be printed."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def of_bytes() -> Vocabulary:
    """Return a BPE without merges; byte 0 ends a document (text.ByteTokenizer)."""
    end = text.ByteTokenizer.separator
    return Vocabulary(dict(enumerate(characters())) | {end: END}, {end: CONTROL}, [NO_MERGE], "gpt-2", end)


def of_file(path: Path) -> tuple[Vocabulary | None, str]:
    """Return the vocabulary of a tokenizer.json; or None and the reason."""
    try:
        end = text.FileTokenizer(str(path)).separator  # also checks the file
        values = read_json(path, text.LARGEST_TOKENIZER)
        model, split = values["model"], split_of(values)
        if end is None:
            return None, f"{path.name} has no token that ends a document, which llama.cpp needs"
        if not split:
            return None, f"{path.name} is not a byte-level BPE that splits text as GPT-2 or Llama 3"
        found = {index: token for token, index in model["vocab"].items()}
        added = {token["id"]: token for token in values.get("added_tokens", ())}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        return None, f"{path.name} cannot be read ({str(error).splitlines()[0]})"
    kinds = {index: CONTROL if token.get("special") else USER_DEFINED for index, token in added.items()}
    found |= {index: token["content"] for index, token in added.items()}
    return Vocabulary(found, kinds | {end: CONTROL}, merges or [NO_MERGE], split, end), ""


def split_of(values: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how a tokenizer.json splits text; "" if it has no equal of it."""
    model, pieces = values["model"], values.get("pre_tokenizer") or {}
    odd = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(key) for key in odd) or values.get("normalizer"):
        return ""
    if not set(characters()) <= model["vocab"].keys():
        return ""  # llama.cpp drops what it does not know
    parts: list[Any] = pieces["pretokenizers"] if pieces.get("type") == "Sequence" else [pieces]
    if [part.get("type") for part in parts] == ["ByteLevel"]:
        is_gpt2 = not parts[0].get("add_prefix_space", True) and parts[0].get("use_regex", True)
        return "gpt-2" if is_gpt2 and not model.get("ignore_merges") else ""
    if [part.get("type") for part in parts] != ["Split", "ByteLevel"]:
        return ""
    first, second = parts
    same = first.get("pattern") == {"Regex": LLAMA3} and first.get("behavior") == "Isolated" and not first.get("invert")
    plain = not second.get("add_prefix_space", True) and not second.get("use_regex", True)
    return "llama-bpe" if same and plain and model.get("ignore_merges") else ""


def add(writer: Any, vocabulary: Vocabulary | None, size: int) -> None:
    """Add it to the file. size: the model's vocabulary, which may be larger."""
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list([vocabulary.tokens.get(i, f"[UNUSED{i}]") for i in range(size)])
    unused = {i: UNUSED for i in range(size) if i not in vocabulary.tokens}
    writer.add_token_types([(vocabulary.kinds | unused).get(i, NORMAL) for i in range(size)])
    writer.add_token_merges(vocabulary.merges)
    # llama.cpp takes token 11 for what is not named
    writer.add_bos_token_id(vocabulary.end)
    writer.add_eos_token_id(vocabulary.end)
    writer.add_add_bos_token(False)  # as in training
    writer.add_add_eos_token(False)
