"""What to do about errors that torch or Python raises for a mistake in a model, a loss or data; the error stays."""

from __future__ import annotations

import bdb
import builtins
import difflib
import os
import re
import traceback
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import chain
from dtrain.util.format import size_text
from dtrain.util.host_memory import described, total_bytes

ALLOCATION = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")

# (words of torch's message, what to do about it: \1 is the first group of those words)
HINTS: tuple[tuple[str, str], ...] = (
    (
        r"element 0 of tensors does not require grad",
        "the loss depends on no weight: look for .detach(), .item(), torch.no_grad() or torch.tensor(loss) in forward "
        "and in the loss",
    ),
    (
        r"Can't call numpy\(\) on Tensor that requires grad",
        "compute with torch in place of numpy, which has no gradients; for a value to look at: x.detach().numpy()",
    ),
    (
        r"Target -?\d+ is out of bounds",
        "class numbers are 0 to the number of outputs - 1; -100, torch's ignore_index, is left out: check the targets "
        "and the size of the last layer",
    ),
    (
        r"index out of range in self",
        "a token is at least the number of embeddings, or negative: check the inputs and the size of the embedding",
    ),
    (
        r"modified by an inplace operation",
        "an operation in forward changes a tensor that the backward pass needs (+=, relu_, x[i] = …): write it "
        "without, as x = x + y",
    ),
    (
        r"a leaf Variable that requires grad is being used in an in-place operation",
        "change weights without gradients: @torch.no_grad() above step() of an optimizer, or `with torch.no_grad():`",
    ),
    (
        r"__(getitem|len|iter)__\(\) takes [01] positional arguments? but \d+ w",
        r"self is the first argument of a method: def __\1__(self, …)",
    ),
    (
        r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|CUDA error: invalid device",
        "no .cuda() and no device names: dtrain moves the model and the batch; a new tensor takes device=x.device",
    ),
    (
        r"[Oo]n the same device|device meta is not on the expected device|not on the expected device",
        "create tensors on the device of the inputs, torch.zeros(…, device=x.device), and keep constants with "
        "register_buffer",
    ),
    (
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        r"the layer on that line expects \2 features and gets \1",
    ),
    (
        r"expected input\[1, (\d+), \d+, \d+\] to have 1 channels, but got \1 channels",
        "the images have no dimension of channels: image.unsqueeze(0) in the data set makes each [1, height, width]",
    ),
    (
        r"expected input\[\d+, \d+, \d+, (\d+)\] to have \1 channels",
        "the channels of the images come last: image.permute(2, 0, 1) in the data set puts them first",
    ),
    (
        r"expected input\[\d+, \d+, (\d+)\] to have \1 channels",
        "the channels come last: x.transpose(1, 2) before that layer",
    ),
    (
        r"expected input.* to have (\d+) channels, but got (\d+)",
        r"the layer on that line expects \1 channels and gets \2",
    ),
    (
        r"mat1 and mat2 shapes cannot be multiplied|size mismatch",
        "the layer on that line expects another number of features than it gets",
    ),
    (
        r"stack expects each tensor to be equal size",
        "samples of one batch have different shapes: pad or crop them to one shape",
    ),
    (
        r"\.(train|eval)\(\) takes 1 positional argument",
        r"torch calls that method as \1(mode): give your own one another name",
    ),
    (
        r"(cat|stack)\(\): argument 'tensors' \(position 1\) must be tuple of Tensors, not Tensor",
        r"one tuple of tensors: torch.\1((a, b), dim=-1)",
    ),
    (
        r"must be tuple of ints, but found element of type float",
        "a size of a layer is a whole number: // in place of /",
    ),
    (
        r"Expected tensor for argument #1 'indices' to have one of the following scalar types",
        "an embedding takes whole numbers: x.long()",
    ),
    (
        r"all elements of (input|target) should be between 0 and 1",
        "that loss takes probabilities, and targets of 0 and 1: for the scores of a last layer without sigmoid it is "
        "torch.nn.functional.binary_cross_entropy_with_logits",
    ),
    (
        r"Input type \((unsigned char|long|int|double|bool)\) and bias type",
        "the inputs are no float32: x.float() in the data set, x.float() / 255 for images of bytes",
    ),
    (
        r"argument 'input' \(position 1\) must be Tensor, not tuple",
        "a recurrent layer, and attention, returns a tuple, of which the first part is the output: x, _ = layer(x)",
    ),
    (
        r"Classification metrics can't handle a mix of \w+ and continuous",
        "the outputs are scores, one for each class: outputs.argmax(-1) are the predicted classes",
    ),
    (
        r"connect to '?https://huggingface\.co|outgoing traffic has been disabled|HF_HUB_OFFLINE",
        "where there is a network: hf download OWNER/NAME --local-dir ./NAME; then from_pretrained('./NAME')",
    ),
    (r"^list is not a Module subclass", "one argument for each layer: nn.Sequential(*layers)"),
    (
        r'Unexpected key\(s\) in state_dict: "module\.',
        "the weights were saved from DataParallel: {k.removeprefix('module.'): v for k, v in state.items()}",
    ),
    (r"expected unspecified shuffle option", "leave out shuffle=: a stream has an order of its own"),
    (
        r"Boolean value of Tensor with more than one value is ambiguous",
        "torch.where(condition, a, b) in place of `if`, or (condition).any()",
    ),
    (
        r"initialize the default process group twice",
        "leave out init_process_group: dtrain starts the ranks and connects them",
    ),
    (
        r"must be Tensor, not (ReLU|GELU|SiLU|Tanh|Sigmoid|Softmax|Dropout|LeakyReLU|ELU|Linear|LayerNorm)\b",
        r"nn.\1(…) makes a layer, and does not call it: self.layer = nn.\1(…) in __init__, then self.layer(x); or the "
        "function of torch.nn.functional",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "batch norm needs two samples in a pass of a rank: a larger train.global_batch_size, or nn.LayerNorm",
    ),
    (
        r"attempted relative import with no known parent package",
        "leave out the dot, `from layers import …`: the file is in no package",
    ),
    (
        r"mat1 and mat2 must have the same dtype|expected scalar type|expected m1 and m2 to have the same dtype",
        "inputs and weights have different dtypes: give inputs as float32, x.float()",
    ),
    (r"not implemented for '(Long|Int|Byte|Bool|Half)'", "this operation needs floating point numbers: x.float()"),
    (
        r"before Module\.__init__\(\) call",
        "call super().__init__() on the first line of __init__",
    ),
    (
        r"backward through the graph a second time",
        "a tensor of an earlier step is kept, for example in self: detach() it when it is kept; or your code calls "
        ".backward(), which dtrain does",
    ),
    (r"^'val'$", 'dataset() is called with "train" and with "val"; it may return None for "val"'),
    (
        r"takes \d+ positional arguments? but \d+ were given|missing \d+ required positional argument",
        "compare the arguments of that function with the call (docs/your-own.md)",
    ),
)  # fmt: skip


# what people forget to import, by the names that they give it
IMPORTS = {
    "torch": "import torch", "nn": "from torch import nn", "F": "import torch.nn.functional as F",
    "np": "import numpy as np", "pd": "import pandas as pd", "math": "import math", "os": "import os",
    "random": "import random", "Path": "from pathlib import Path", "Tensor": "from torch import Tensor",
    "optim": "from torch import optim", "json": "import json", "Dataset": "from torch.utils.data import Dataset",
    "DataLoader": "from torch.utils.data import DataLoader", "partial": "from functools import partial",
}  # fmt: skip


def near_name(error: BaseException) -> str:
    """Return the name that was probably meant by one that does not exist; "" if there is none."""
    if type(error) is NameError and error.name and error.__traceback__:
        frame = [*traceback.walk_tb(error.__traceback__)][-1][0]
        if error.name in names_of(frame.f_locals.get("self")):
            return f"self.{error.name}"
        if error.name in IMPORTS:
            return f"{IMPORTS[error.name]}, at the top of the file"
        there, prefix = [*frame.f_locals, *frame.f_globals, *dir(builtins)], ""
    elif isinstance(error, AttributeError) and error.name == "device" and isinstance(error.obj, nn.Module):
        return "leave out .to(self.device), as the inputs are there; a new tensor takes device=x.device"
    elif isinstance(error, AttributeError) and error.name and error.obj is not None:
        there, prefix = names_of(error.obj), "self." if isinstance(error.obj, nn.Module) else ""
        prefix = f"{error.obj.__name__}." if isinstance(error.obj, ModuleType) else prefix
    else:
        return ""
    near = difflib.get_close_matches(error.name, [name for name in there if name[:1] != "_"], 1, 0.75)
    return f"did you mean {prefix}{near[0]}?" if near else ""


def names_of(thing: Any) -> list[str]:
    """The attributes of an object, without calling a property or a __dir__ of the user."""
    parts = [part for one in type(thing).__mro__ for part in vars(one)]
    own = getattr(thing, "__dict__", {})
    modules = [name for kept in ("_modules", "_parameters", "_buffers") for name in own.get(kept) or ()]
    return [*own, *modules, *parts]


def of_embedding(error: BaseException) -> str:
    """Name the embedding that has too few rows for a number that it got; "" for another error."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner: dict[str, Any] = next((own for own in reversed(frames) if isinstance(own.get("self"), nn.Embedding)), {})
    if type(error) is not IndexError or not isinstance(numbers := inner.get("input"), Tensor) or not numbers.numel():
        return ""
    embedding, low, high = inner["self"], int(numbers.min()), int(numbers.max())
    models = (own["self"] for own in frames if isinstance(own.get("self"), nn.Module))
    names = (name for model in models for name, module in model.named_modules() if module is embedding and name)
    has = f"{next(names, 'an embedding')} has {embedding.num_embeddings} rows, and gets {low if low < 0 else high}"
    if low == 0 and torch.equal(numbers.flatten().unique(), torch.arange(high + 1, device=numbers.device)):
        return f"{has}, perhaps a position: shorter sequences, or more rows"
    return f"{has}: more rows, or other numbers in the data"


def hint(error: BaseException) -> str:
    """Return what to do about an error, or "" if nothing is known."""
    if named := of_embedding(error):
        return named
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, KeyError) and any("/pandas/core/" in file for file in files):
        return "pandas looks up labels, not places: .iloc[i], or .to_numpy() once in __init__"
    if files[-1:] and files[-1].endswith("torch/utils/data/dataset.py"):
        made = [*traceback.walk_tb(error.__traceback__)][-1][0].f_code.co_names
        if "size" in made and re.search(r"object is not callable|has no attribute 'size'", str(error)):
            return "TensorDataset takes tensors: torch.from_numpy(…) for each array, torch.tensor(…) for each list"
    texts = [str(one) for one in chain(error)]
    asked = max((int(size[1]) for text in texts if (size := ALLOCATION.search(text))), default=0)
    if asked > (total := total_bytes()):  # no number of ranks helps
        return (
            f"a smaller model or batch: this allocation alone is {size_text(asked)}, and {described(total)} "
            f"{size_text(total)}"
        )
    if any(isinstance(one, bdb.BdbQuit) for one in chain(error)):
        return "leave out breakpoint() and pdb: a rank has no terminal; what it prints is in its log"
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return "leave out input(): a rank has no terminal"
    is_program = any(file.endswith("/subprocess.py") for file in files)
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, (str, bytes)) and not is_program:
        name = os.fsdecode(error.filename)
        if not os.path.isabs(name):
            return f"the ranks run in {os.getcwd()}: a path from there, or Path(__file__).parent / {name!r}"
    found = ((re.search(words, text), fix) for words, fix in HINTS for text in texts)
    return next((match.expand(fix) for match, fix in found if match), "")
