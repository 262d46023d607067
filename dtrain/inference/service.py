"""A run behind a server: its model, its tokenizer or classes, and its newest checkpoint as training goes on."""

from __future__ import annotations

import base64
import copy
import io
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.config.build import build
from dtrain.config.files import TARGET
from dtrain.data import check, images
from dtrain.data.small_images import PixelDataset
from dtrain.data.text_classification import Labelled, LabelledDataset, Record
from dtrain.errors import CheckpointError, bad
from dtrain.inference.decoder import Decoder
from dtrain.inference.engine import Engine, copy_weights
from dtrain.inference.export import Final, check_shapes
from dtrain.inference.openai_api import ApiError, text
from dtrain.inference.sample import check_generates, load_model
from dtrain.strategies.materialize import set_stream

log = logging.getLogger("dtrain")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_BATCH = 64  # inputs of one request to classify


def load(run_dir: Path, step: int, trust: list[str], dtype: str | None, ema: bool = False) -> tuple[nn.Module, Any]:
    """Return the model in the server's dtype: bfloat16 on a GPU, float32 on a CPU."""
    model, cfg = load_model(run_dir, trust, step, ema)
    on_gpu = next(model.parameters()).is_cuda
    chosen = DTYPES[dtype] if dtype else torch.bfloat16 if on_gpu else torch.float32
    model = model.to(chosen)
    set_stream(model, chosen)
    return model, cfg


class Watcher:
    """Follows the checkpoints of a run that trains, and hands the weights of each new one over."""

    def __init__(
        self, run_dir: Path, step: int, trust: list[str], model: nn.Module,
        swap: Callable[[int, Callable[[], None]], None], every_s: float,
    ) -> None:  # fmt: skip
        self.run_dir, self.step, self.trust, self.model, self.swap = run_dir, step, trust, model, swap
        self.every_s = every_s
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watcher", daemon=True)

    def run(self) -> None:
        while not self.stop.wait(self.every_s):
            try:
                self.look()
            except (
                OSError,
                CheckpointError,
                ValueError,
            ) as error:  # pruned while it was read, or damaged: the next one
                log.warning("the newest checkpoint could not be read: %s", str(error).splitlines()[0])

    def look(self) -> None:
        latest = self.run_dir / "checkpoints" / "latest"  # written when a checkpoint is complete
        name = latest.read_text().strip()
        if not name.startswith("step-") or not name[5:].isdigit() or int(name[5:]) <= self.step:
            return
        step = int(name[5:])
        final = Final(self.run_dir, self.trust, step)
        weights = dict(final)
        check_shapes(final.path, self.model, weights, self.model.state_dict())
        self.swap(step, lambda: copy_weights(self.model, weights))
        self.step = step


class TextService:
    """A language model."""

    def __init__(
        self, model: nn.Module, cfg: Any, step: int, trust: list[str], slots: int, context: int | None, compiled: bool,
        deterministic: bool,
    ) -> None:  # fmt: skip
        self.data = build(cfg.data, trust)
        if not hasattr(self.data, "encode"):
            raise bad("RUN", cfg.choices.model, "its data is no text, and it has no classes", "another run")
        check_generates(cfg)
        self.vocabulary = int(cfg.model.vocab_size)
        longest = int(cfg.model.seq_len)
        if context is not None and not 2 <= context <= longest:
            raise bad("--context", context, f"must be 2 to {longest}, the model's seq_len", f"--context={longest}")
        self.context = context or longest
        end = getattr(getattr(self.data, "tokenizer", None), "separator", None)
        self.ends = frozenset() if end is None else frozenset([end])
        decoder = Decoder(model, slots, self.context, compiled, fixed_batch=deterministic)
        decoder.warm_up()
        self.engine = Engine(decoder, step)
        self.swap = self.engine.swap

    @property
    def step(self) -> int | None:
        return self.engine.step

    def encode(self, words: str) -> list[int]:
        return list(self.data.encode(words))

    def decode(self, tokens: list[int]) -> str:
        return str(self.data.decode(tokens))


class ClassService:
    """A classifier of texts or of images."""

    def __init__(self, model: nn.Module, cfg: Any, step: int, trust: list[str], classes: Sequence[str] = ()) -> None:
        """classes: the names that the checkpoint has."""
        self.model, self.step, self.lock = model, step, threading.Lock()
        number = int(cfg.model.num_classes)
        names = list(classes) if len(classes) == number else []
        self.files = images.Decoding.of(cfg.data) if cfg.data[TARGET] == images.TARGET else None
        self.data = self.data_of(cfg, trust, names)
        self.images: PixelDataset | None = None
        self.decoding = threading.Lock()  # one image at a time: a large one takes 256 MiB
        if self.files is None and not isinstance(self.data, Labelled):
            self.images = self.data.dataset("val")
            if not isinstance(self.images, PixelDataset):
                rule = f"data={cfg.choices.data}: its inputs cannot be sent to a server"
                raise bad(
                    "RUN", cfg.choices.model, rule, "a run of images, digits, mnist, cifar10, labelled or stdlib-lines"
                )
        self.labels = names or check.class_names(self.data, number) or [str(i) for i in range(number)]

    def data_of(self, cfg: Any, trust: list[str], names: list[str]) -> Any:
        """Return the data set, but of image files only if it must give the names of the classes."""
        if self.files and names:
            return None
        if self.files and not Path(cfg.data.path).expanduser().is_dir():
            rule = "is not here, and the checkpoint has no names of classes: an older version of dtrain saved it"
            raise bad("data.path", cfg.data.path, rule, "put the folder there, with one folder for each class")
        return build(cfg.data, trust)

    def swap(self, step: int, apply: Callable[[], None]) -> None:
        with self.lock:
            apply()
            self.step = step

    @torch.inference_mode()
    def classify(self, given: Any) -> tuple[int, list[list[float]]]:
        """Return the step of the weights, and the probability of each class for each input."""
        if not isinstance(given, list) or not 0 < len(given) <= LARGEST_BATCH:
            raise ApiError(400, f"input must be a list of 1 to {LARGEST_BATCH} inputs", "input")
        inputs = self.encoded(given)
        with self.lock:
            device = next(self.model.parameters())
            inputs = inputs.to(device.device, device.dtype if inputs.is_floating_point() else None)
            # one by one, so that an answer does not depend on what else is in the request
            logits = torch.cat([self.model(one).float().reshape(1, -1) for one in inputs.split(1)])
            return self.step, logits[:, : len(self.labels)].softmax(dim=-1).cpu().tolist()

    def encoded(self, given: list[Any]) -> Tensor:
        """Return the model's inputs, prepared as for an evaluation."""
        if self.files is not None:
            return self.pictures(given, self.files)
        return self.pixels(given) if self.images is not None else self.texts(given)

    def pictures(self, given: list[Any], how: images.Decoding) -> Tensor:
        """Decode image files in base64."""
        found = []
        for i, one in enumerate(given):
            try:
                data = base64.b64decode(one, validate=True)
                with self.decoding:
                    found.append(how.decode(io.BytesIO(data)))
            except Exception as error:  # a decoder can raise anything for damaged bytes
                log.debug("an image that cannot be read", exc_info=True)
                why = str(error) if type(error) is ValueError else "it is not an image that Pillow reads"
                raise ApiError(
                    400, f"input {i} must be an image file (JPEG, PNG, …) in base64: {why}", "input"
                ) from None
        return how.normalized(found)

    def texts(self, given: list[Any]) -> Tensor:
        data = self.data
        records = []
        for one in given:
            pair = one.get("text_pair") if isinstance(one, dict) else None
            words = one.get("text") if isinstance(one, dict) else one
            if (
                not isinstance(words, str)
                or not words
                or not isinstance(pair, str | None)
                or "\0" in words + (pair or "")
            ):
                raise ApiError(400, "an input must be a text, or an object with text and text_pair", "input")
            records.append(Record(text(words), pair and text(pair), data.labels[0]))
        if any((r.pair is None) != (records[0].pair is None) for r in records):
            raise ApiError(400, "text_pair must be in all inputs, or in none", "input")
        dataset = LabelledDataset(records, data.labels, data.tokenizer, data.marks, data.seq_len)
        inputs, _ = dataset.batch(np.arange(len(records)))
        return inputs

    def pixels(self, given: list[Any]) -> Tensor:
        assert self.images is not None
        made = copy.copy(self.images)
        channels = made.pictures.shape[1]
        try:
            pictures = np.array(given)
            pictures = pictures[:, None] if pictures.ndim == 3 and channels == 1 else pictures
            good = pictures.ndim == 4 and pictures.shape[1] == channels and pictures.dtype.kind in "iu"
            good = good and pictures.min() >= 0 and pictures.max() <= made.largest and max(pictures.shape[2:]) <= 4096
        except (ValueError, OverflowError):  # rows of different lengths, numbers beyond 64 bits
            good = False
        if not good:
            form = "rows" if channels == 1 else f"{channels} lists (channels) of rows"
            rule = f"images must be {form} of whole numbers from 0 to {made.largest}, all of one size"
            raise ApiError(400, rule, "input")
        made.pictures, made.labels = pictures.astype(np.uint8), np.zeros(len(pictures), dtype=np.int64)
        inputs, _ = made.batch(np.arange(len(pictures)))
        return inputs
