"""Mistakes as newcomers make them in their own code: an edit of a small good file, or a word of the command line.

tests/test_mistakes.py runs them; `python -m tests.mistakes_run > mistakes.md` prints what a person sees of each, for a
reader who judges the messages.
"""

from __future__ import annotations

from dataclasses import dataclass

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, dim: int = 8, depth: int = 2):
        super().__init__()
        self.first = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.last = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x)


class Samples:
    def __init__(self, seed, count):
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def batch(self, indices):
        return self.x[indices], self.y[indices]


class Points:
    def __init__(self, count: int = 64):
        self.count = count

    def dataset(self, split):
        return Samples(0 if split == "train" else 1, self.count)


def my_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
"""
COMMAND = (
    "launch model=net.Net data=net.Points loss=cross_entropy train.steps=4 train.global_batch_size=8 "
    "schedule.warmup_steps=1 cluster.processes=1"
)


@dataclass(frozen=True)
class Mistake:
    """One mistake, the exit code, and words that its message must contain."""

    name: str
    code: int
    words: tuple[str, ...]
    argv: tuple[str, ...] = ()  # words of the command line that replace those of COMMAND, or are added
    edits: tuple[tuple[str, str], ...] = ()  # old and new text in net.py
    fix: str = ""  # what the message tells to type: a dry run with it must be accepted

    @property
    def source(self) -> str:
        text = NET
        for old, new in self.edits:
            assert old in text, (self.name, old)
            text = text.replace(old, new)
        return text

    @property
    def command(self) -> list[str]:
        return replaced(COMMAND.split(), self.argv)


def replaced(argv: list[str], words: tuple[str, ...]) -> list[str]:
    keys = {word.partition("=")[0] for word in words}
    return [word for word in argv if word.partition("=")[0] not in keys] + list(words)


def typo(name: str, argv: str, *words: str, fix: str = "") -> Mistake:
    """A mistake on the command line, found before anything starts."""
    return Mistake(name, 2, words, tuple(argv.split()), fix=fix)


def edit(name: str, code: int, old: str, new: str, *words: str, argv: str = "", fix: str = "") -> Mistake:
    """A mistake in net.py."""
    return Mistake(name, code, words, tuple(argv.split()), ((old, new),), fix)


NAMES = [
    typo("a misspelt class", "model=net.Nett", "model=net.Nett", "net.py has no Nett", fix="model=net.Net"),
    typo("the same with data that needs model.seq_len", "model=net.Nett data=text", "net.py has no Nett",
         "fix: model=net.Net data.path=… data.seq_len=128"),
    typo("a misspelt module", "model=nett.Net", "there is no module nett", fix="model=net.Net"),
    typo("the file instead of the class", "model=net.py", "model=net.py", "MODULE.NAME", fix="model=net.Net"),
    typo("the module instead of the class", "model=net", "model=net:", "MODULE.NAME", fix="model=net.Net"),
    typo("only the class", "model=Net", "model=Net:", "MODULE.NAME", fix="model=net.Net"),
    typo("a path with a colon", "model=./net.py:Net", "MODULE.NAME", fix="model=net.Net"),
    typo("a device", "device=cuda", "device: there is no such setting", "fix: leave out device; a GPU is used"),
    typo("a misspelt loss", "loss=net.myloss", "net.py has no myloss", fix="loss=net.my_loss"),
    typo("a misspelt optimizer of torch", "optim=torch.optim.RAdamm", "torch.optim has no RAdamm",
         fix="optim=torch.optim.RAdam"),
    edit("a class that only the started file has", 2, "def my_loss",
         'if __name__ == "__main__":\n\n    class Late(Net):\n        pass\n\n\ndef my_loss', "net.py:41 sets it under",
         "which the ranks do not run", "move Late above", argv="model=net.Late"),
    edit("a value instead of a class", 2, "class Samples", "thing = 3\n\n\nclass Samples", "net.py:19", "not a class",
         argv="model=net.thing", fix="model=net.Net"),
    edit("a syntax error", 2, "forward(self, x):", "forward(self, x)", "net.py:12 is not valid Python", "expected ':'"),
    edit("an indentation error", 2, "        x = self.first(x)\n", "       x = self.first(x)\n", "net.py:14",
         "line 13 has 7",
         "indent"),
]  # fmt: skip
RAISES = [
    edit("a missing package", 2, "import torch\n", "import torch\nimport einops2\n",
         "data=net.Points: net.py:2 imports einops2",
         "pip install einops2"),
    edit("a wrong shape", 3, "nn.Linear(4, dim)", "nn.Linear(5, dim)", "shapes cannot be multiplied",
         "expects 5 features and gets 4", "net.py:13 in forward", "x = self.first(x)"),
    edit("an error in a loader process", 3, "self.y[indices]", "self.z[indices]", "no attribute 'z'",
         "net.py:28 in batch", argv="train.loader_workers=1"),
]  # fmt: skip
TARGETS = "self.x[indices], self.y[indices]"
DATA = [
    typo("no samples", "data.count=0", "data=net.Points:", "has no samples, with data.count=0",
         "leave out data.count"),
    edit("batch gives fewer", 2, TARGETS, "self.x[indices][:3], self.y[indices][:3]", "asked for 8 samples",
         "returned 3 inputs", "data=net.Points:", "net.py:28 in batch", "code. It is in your code."),
    edit("batch gives fewer targets", 2, TARGETS, "self.x[indices], self.y[indices][:-1]", "targets",
         "one row for each index", "net.py:28 in batch"),
    edit("batch gives more", 2, TARGETS, "self.x[:16], self.y[:16]", "returned 16 inputs"),
    edit("batch ignores the indices", 2, TARGETS, "self.x, self.y", "returned 64 inputs", "the indices are not used"),
    edit("batch gives one tensor", 2, TARGETS, "self.x[indices]", "not a pair (inputs, targets)", "net.py:28"),
    edit("batch gives three", 2, TARGETS, "self.x[indices], self.y[indices], indices", "a tuple of 3"),
    edit("batch gives nothing", 2, "return " + TARGETS, "self.x[indices]", "returned None", "`return` missing",
         "net.py:28"),
    edit("an empty tensor", 2, "def my_loss", "def no():\n    return torch.ones(0, 4), torch.ones(0)\n\n\ndef my_loss",
         "has no samples", "fix: check what it reads", "net.py:40 in no", argv="data=net.no"),
    edit("one-hot targets", 2, TARGETS, "self.x[indices], nn.functional.one_hot(self.y[indices], 3)",
         "fix: give the targets as class numbers, .argmax(-1); or .float() of them", "net.py:28 in batch"),
    Mistake("a dict with other names", 2, ("Net.forward takes x, m, but the batch has image, mask", "net.py:40 in rows",
            "fix: return a dict with the keys 'x' and 'm', or def forward(self, image, mask)"),
            ("data=net.rows", "train.eval_batches=0"), (("self, x):", "self, x, m):"), ("def my_loss", "def rows():\n"
            "    return [{'image': torch.ones(4), 'mask': torch.ones(4), 'label': 0}] * 64\n\n\ndef my_loss"))),
    edit("no targets", 2, "def my_loss", "def alone():\n    return torch.randn(64, 4)\n\n\ndef my_loss",
         "data=net.alone: returns no targets, which loss=cross_entropy needs", "return (inputs, targets)",
         "net.py:40 in alone", argv="data=net.alone train.eval_batches=0"),
    edit("a collate function that does not transpose", 2, "def my_loss",
         "def pairs(batch):\n    x, y = batch\n    return x, y\n\n\ndef loader():\n    data = [*zip(*Samples(0, 64)"
         ".batch(slice(64)))]\n    return torch.utils.data.DataLoader(data, collate_fn=pairs)\n\n\ndef my_loss",
         "collate_fn gets a list of samples", "fix: inputs, targets = default_collate(batch)", "net.py:40 in pairs",
         argv="data=net.loader train.eval_batches=0"),
    edit("a stream of batches", 2, "def my_loss",
         "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        while True:\n"
         "            yield torch.ones(8, 4, 9), torch.zeros(8).long()\n\n\nclass Conv(nn.Conv1d):\n"
         "    def __init__(self):\n        super().__init__(4, 3, 9)\n\n    def forward(self, x):\n"
         "        return super().forward(x)[:, :, 0]\n\n\ndef my_loss",
         "each sample is [8, 4, 9] with 8 targets, as if it was a batch", "yield from zip(inputs, targets)",
         "in __iter__", argv="model=net.Conv data=net.Stream train.eval_batches=0"),
    edit("four inputs as a tuple", 2, "def my_loss",
         "def rows():\n    return [((0.1, 0.2, 0.3, 0.4), 0)] * 64\n\n\ndef my_loss",
         "its samples have 4 inputs, and Net.forward(x) takes 1", "one tensor in each sample, torch.tensor(inputs)",
         "net.py:40 in rows", argv="data=net.rows train.eval_batches=0"),
    edit("lists of all inputs and targets", 2, "def my_loss",
         "def rows():\n    return [[0.1, 0.2, 0.3, 0.4]] * 64, [0, 1] * 32\n\n\ndef my_loss",
         "return torch.tensor(inputs), torch.tensor(targets)", "net.py:40 in rows", argv="data=net.rows"),
    edit("lists", 2, TARGETS, "self.x[indices].tolist(), self.y[indices].tolist()", "inputs as a list", "torch.tensor"),
    edit("numpy arrays", 2, TARGETS, "self.x[indices].numpy(), self.y[indices].numpy()",
         "inputs as a ndarray and targets",
         "from_numpy", "net.py:28"),
    edit("a number as target", 2, TARGETS, "self.x[indices], self.y[indices][0]",
         "returned targets of shape [], not [1]",
         "net.py:28"),
    edit("shapes that vary", 3, TARGETS, "torch.stack([self.x[i][: 3 + i % 2] for i in indices]), self.y[indices]",
         "net.py:28 in batch", "pad or crop"),
    edit("float targets", 2, TARGETS, "self.x[indices], self.y[indices].float()", "torch.float32", "class number",
         ".long()",
         "net.py:28"),
    edit("float64 inputs", 3, TARGETS, "self.x[indices].double(), self.y[indices]", "net.py:13 in forward", "float32"),
    edit("integer inputs", 3, TARGETS, "self.x[indices].long(), self.y[indices]", "net.py:13 in forward"),
    edit("class numbers from 1", 2, "self.y[indices]", "self.y[indices] + 1", "targets are 1 to 3", "0 to 2",
         "net.py:28 in batch", "It is in your code."),
    edit("NaN in one sample", 3, "    def __len__", "        self.x[5] = float('nan')\n\n    def __len__",
         "Sample 5 of the train split has NaN", "in batch", "after the change dtrain launch resume=",
         argv="train.steps=20"),
    edit("no __len__", 2, "    def __len__(self):\n        return len(self.x)\n", "", "has no __len__", "net.py:19",
         "def __len__(self)"),
    edit("the split is not an argument", 2, "dataset(self, split)", "dataset(self)", "net.py:35: dataset(self)",
         "def dataset(self, split)"),
    edit("dataset returns nothing", 2, "return Samples", "Samples", "returned None", "`return` missing",
         "net.py:36 in dataset"),
    Mistake("fewer samples than a batch", 0, ("warning: data=net.Points has 4 samples, fewer than a batch of",
            "fix: train.global_batch_size=4"), ("data.count=4", "train.eval_batches=0")),
    edit("a __len__ without a number", 2, "        return len(self.x)", "        return None",
         "Samples.__len__ returned no number of samples", "net.py:25 in __len__"),
    edit("a data set that is made at import", 2, "def my_loss", "points = Points(64)\n\n\ndef my_loss",
         "data=net.points: is an object (Points) that net makes", "def my_points(): return Points(64)", "net.py:39",
         argv="data=net.points"),
    edit("no model for own data", 2, "import torch\n", "import torch\n", "model=gpt2-tiny: reads tokens",
         "data=net.Points gives inputs [1, 4] of torch.float32", "the default, if no model is named",
         "fix: model=net.Net loss=cross_entropy;", argv="model=gpt2-tiny loss=own"),
    edit("__iter__ without an iterator", 2, "def my_loss",
         "class Stream:\n    def __iter__(self):\n        return [(torch.ones(4), 1)]\n\n\ndef my_loss",
         "Stream.__iter__ returned a list, not an iterator", "`return iter(samples)`", "net.py:41 in __iter__",
         argv="data=net.Stream train.eval_batches=0"),
    edit("a file that is missing", 3, "        self.count = count",
         "        self.count = len(open('points.csv').read())",
         "No such file or directory: 'points.csv'", "net.py:33 in __init__"),
    edit("an error for validation only", 3, 'return Samples(0 if split == "train" else 1',
         'return Samples({"train": 0}[split]', "KeyError", "net.py:36 in dataset",
         'with "train" and with "val"'),
]  # fmt: skip
MODEL = [
    edit("a misspelt attribute", 3, "self.last(x)", "self.lst(x)", "no attribute 'lst'", "net.py:16 in forward"),
    edit("a batch without its dimension", 3, "        x = self.first(x)\n", "        x = self.first(x.flatten())\n",
         "forward got 8 samples, and gives that layer 1 row of 32", "fix: keep the dimension of the batch: x.flat",
         "net.py:13 in forward"),
    edit("the number of samples in forward", 3, "        x = self.first(x)\n",
         "        x = self.first(x.view(16, -1))\n", "forward got 8 samples, and gives that layer 16 rows of 2"),
    edit("a layer that is made in place of called", 3, "torch.relu(block(x))", "nn.ReLU(block(x))",
         "not ReLU", "fix: nn.ReLU(…) makes a layer, and does not call it", "net.py:1"),
    edit("a batch norm of one sample", 2, "        x = self.first(x)\n",
         "        x = nn.functional.batch_norm(self.first(x), None, None, training=True)\n",
         "train.global_batch_size=1: gives a rank 1 sample at a time", "net.py:13 in forward",
         "fix: train.global_batch_size=2, or",
         argv="train.global_batch_size=1"),
    edit("a softmax before cross_entropy", 0, "return self.last(x)", "x = self.last(x)\n        return x.softmax(-1)",
         "warning: net.py:17: the model ends in a softmax", "return the scores without the softmax"),
    edit("no super().__init__()", 3, "        super().__init__()\n", "", "net.py:7 in __init__", "super().__init__()"),
    edit("layers in a plain list", 2, "nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))",
         "[nn.Linear(dim, dim) for _ in range(depth)]", "blocks is a plain list of modules", "nn.ModuleList",
         "model=net.Net:", "net.py:9"),
    edit("layers in a plain dict", 2, "nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))",
         "{i: nn.Linear(dim, dim) for i in range(depth)}", "blocks is a plain dict of modules",
         "self.blocks = nn.ModuleList",
         "net.py:9"),
    edit("a comma after a layer", 2, "nn.Linear(dim, 3)\n", "nn.Linear(dim, 3),\n", "last is a tuple of one Linear",
         "fix: self.last = nn.Linear(…), without the comma after it", "net.py:10 in __init__"),
    edit("a misspelt __init__", 2, "    def __init__(self, dim: int = 8, depth: int = 2):\n        super().__init__()",
         "    def _init_(self, dim: int = 8, depth: int = 2):\n        super()._init_()", "has no parameters",
         "fix: def __init__ in place of def _init_, with two _", "net.py:6 in _init_"),
    edit("a misspelt forward", 2, "def forward", "def foward", "net.py:5: the class Net has no forward, but foward in",
         "net.py:12", "fix: def forward in place of def foward"),
    edit("a model that is made at import", 2, "def my_loss", "net = Net(dim=8)\n\n\ndef my_loss",
         "model=net.net: is an object (Net) that net makes", "def my_net(): return Net(dim=8)", "net.py:39",
         argv="model=net.net"),
    edit("a weight that is no Parameter", 2, "self.last = ",
         "self.w = torch.ones(3, requires_grad=True)\n        self.last = ", "w is a tensor with requires_grad",
         "self.w = nn.Parameter(…)", "net.py:10 in __init__"),
    edit("all weights frozen", 2, "nn.Linear(dim, 3)\n", "nn.Linear(dim, 3)\n        self.requires_grad_(False)\n",
         "has no parameter to train: all 8 have requires_grad=False", "net.py:5 in Net"),
    edit("no return", 2, "return self.last(x)", "self.last(x)", "forward returned nothing", "net.py:16 in forward"),
    edit("a detached output", 2, "return self.last(x)", "return self.last(x).detach()",
         "the output of Net.forward has no gradient",
         ".detach()", "net.py:16 in forward"),
    edit("a GPU by name", 3, "self.first(x)", "self.first(x.cuda())", "net.py:13 in forward", "no .cuda()"),
    edit("an unused layer on two ranks", 2, "self.last = ", "self.extra = nn.Linear(3, 3)\n        self.last = ",
         "extra.weight, extra.bias got no gradient", "net.py:10 in __init__", argv="cluster.processes=2"),
    edit("a lazy layer", 2, "nn.Linear(4, dim)", "nn.LazyLinear(dim)", "first.weight is lazy", "net.py:8 in __init__"),
    edit("a weight without a dimension under fsdp", 2, "self.last = ",
         "self.t = nn.Parameter(torch.tensor(1.0))\n        self.last = ", "t is a single number", "strategy=ddp",
         "net.py:10 in __init__", argv="strategy=fsdp cluster.processes=2"),
    edit("a weight that forward makes", 2, "        x = self.first(x)\n",
         "        if not hasattr(self, 'w'):\n            self.w = nn.Parameter(torch.ones(1))\n"
         "        x = self.first(x) * self.w\n", "w did not exist before forward()", "Net.__init__",
         "net.py:14 in forward"),
    edit("an operation in place", 3, "x = torch.relu(block(x))", "x = torch.relu_(x); x += block(x)",
         "modified by an inplace operation", "x = x + y", "net.py:15 in forward"),
    edit("a wrong shape on two ranks", 3, "nn.Linear(4, dim)", "nn.Linear(5, dim)", "rank ", "net.py:13 in forward",
         argv="cluster.processes=2"),
    edit("a failed assert", 3, "super().__init__()\n",
         "super().__init__()\n        assert dim % 16 == 0, 'dim must be a multiple of 16'\n",
         "dim must be a multiple of 16", "net.py:8 in __init__"),
    edit("a division by zero at import", 3, "class Net(", "x = 1 / 0\n\n\nclass Net(", "net.py:5 in <module>"),
    edit("a program that ends itself", 3, "class Net(", "raise SystemExit(1)\n\n\nclass Net(", "net.py:5 in <module>"),
    edit("an error in a helper", 3, "        x = self.first(x)\n", "        x = scaled(self.first(x))\n",
         "name 'scaled' is not defined", "net.py:13 in forward"),
    typo("a class that is no module", "model=net.Points", "is not a torch.nn.Module", fix="model=net.Net"),
    edit("a function that gives the class", 2, "def my_loss", "def make():\n    return Net\n\n\ndef my_loss",
         "model=net.make: it returned the class Net", "`return Net()`, or model=net.Net", "net.py:40 in make",
         argv="model=net.make"),
    edit("a config as the argument", 2, "dim: int = 8, depth: int = 2", "config: Config",
         "is required by net.Net", "import or define Config in net.py", "def my_model(): return Net(config=Config(…))",
         "model=net.my_model"),
    edit("a dict as the argument", 2, "dim: int = 8, depth: int = 2):\n        super().__init__()",
         "cfg):\n        super().__init__()\n        dim = depth = cfg['dim']", "is required by net.Net",
         "fix: model.cfg.dim=…"),
    typo("a misspelt library", "model=torchvison.models.resnet18", "did you mean model=torchvision.models.resnet18?"),
    typo("a library that is not installed", "model=efficientnet_pytorch.EfficientNet",
         "fix: pip install efficientnet-pytorch"),
    edit("a required argument", 2, "dim: int = 8", "dim: int", "model.dim", "is required by net.Net", "a whole number"),
    typo("a misspelt argument", "model.dimm=16", "model.dimm", "did you mean model.dim"),
    typo("an argument of the wrong type", "model.dim=big", "model.dim=big", "a whole number", fix="model.dim=8"),
    edit("a shape that fails in step 3", 3, "        x = self.first(x)\n",
         "        self.n = getattr(self, 'n', 0) + 1\n        x = self.first(x)\n        if self.n == 3:\n"
         "            x = x @ torch.ones(3, 3)\n", "net.py:16 in forward", argv="checkpoint.every=0"),
]  # fmt: skip
LOSS = [
    edit("a loss with class weights, made at import", 0, "def my_loss",
         "weighted = nn.CrossEntropyLoss(weight=torch.ones(3))\n\n\ndef my_loss", "4 of 4", argv="loss=net.weighted"),
    typo("no loss", "loss=own", "Net.forward(x) takes no targets", fix="loss=cross_entropy"),
    edit("a loss for each sample", 2, "cross_entropy(outputs, targets)",
         "cross_entropy(outputs, targets, reduction='none')", "loss=net.my_loss", "of shape [8], not a scalar",
         "net.py:40 in my_loss", argv="loss=net.my_loss"),
    edit("a loss without gradients", 2, "    return nn", "    with torch.no_grad():\n        return nn",
         "what it returns has no gradient", "leave out torch.no_grad() in line 40",
         "net.py:41 in my_loss", argv="loss=net.my_loss"),
    edit("a loss as a number", 2, "cross_entropy(outputs, targets)", "cross_entropy(outputs, targets).item()",
         "loss=net.my_loss: returned a float, which has no gradient", "leave out .item() in line 40",
         "net.py:40 in my_loss", argv="loss=net.my_loss"),
    edit("a loss of numpy", 2, "return nn.functional.cross_entropy(outputs, targets)", "return outputs.numpy().mean()",
         "leave out .numpy() in line 40, and compute with torch", argv="loss=net.my_loss"),
    edit("an accuracy as the loss", 2, "return nn.functional.cross_entropy(outputs, targets)",
         "return (outputs.argmax(-1) == targets).float().mean()", "only count: loss=cross_entropy",
         argv="loss=net.my_loss"),
    edit("a loss with its arguments swapped", 2, "my_loss(outputs, targets)", "my_loss(targets, outputs)",
         "warning: loss=net.my_loss", "my_loss(targets, outputs) gets the outputs first", "works with the two swapped",
         "def my_loss(outputs, targets)", "net.py:39 in my_loss", argv="loss=net.my_loss"),
    edit("a forward that unpacks the batch", 2, "forward(self, x):\n", "forward(self, batch):\n        x, y = batch\n",
         "Net.forward(batch) works with the inputs and the targets", "def forward(self, x)", "net.py:12 in forward"),
    Mistake("a model with a loss of its own", 2, ("forward(batch) computes the loss itself", "net.py:12"), (),
            (("forward(self, x):\n", "forward(self, batch):\n        x, y = batch\n"),
             ("return self.last(x)", "return nn.functional.cross_entropy(self.last(x), y)")), "loss=own"),
    edit("more classes than outputs", 2, "self.y[indices]", "self.y[indices] * 2", "targets are 0 to 4",
         "the data have classes", "5 or more: this batch has class 4"),
    typo("the mean absolute error", "loss=mae", "loss=torch.nn.L1Loss"),
    typo("the binary cross-entropy", "loss=bce", fix="loss=torch.nn.BCEWithLogitsLoss"),
    edit("a loss of one argument", 2, "my_loss(outputs, targets)", "my_loss(outputs)", "my_loss(outputs)",
         "two arguments", "net.py:39", argv="loss=net.my_loss"),
    typo("mse for classes", "loss=mse", "loss=mse", "outputs are [8, 3] of torch.float32 and targets [8]",
         "loss=cross_entropy",
         "why              settings"),
    edit("a forward of two inputs", 2, "forward(self, x)", "forward(self, x, mask)",
         "Net.forward(x, mask) needs mask", "net.py:12 in forward", "a default for mask"),
    edit("a forward that needs targets", 2, "forward(self, x)", "forward(self, x, targets)",
         "net.py:12: Net.forward(x, targets) needs targets",
         fix="loss=own"),
    typo("a misspelt loss option", "loss=crossentropy", "fix: loss=cross_entropy", fix="loss=cross_entropy"),
    typo("the class of torch, misspelt", "loss=torch.nn.CrossEntropy", "has no CrossEntropy",
         fix="loss=torch.nn.CrossEntropyLoss"),
]  # fmt: skip
OPT = "def my_opt(params):\n    return torch.optim.SGD(params, lr=0.1)\n\n\ndef my_loss"
RAMP = "schedule=net.ramp ~schedule.warmup_steps"
OPTIM = [
    edit("an optimizer without a return", 2, "def my_loss", OPT.replace("return ", ""), "optim=net.my_opt:",
         "returned None", "`return` missing", "net.py:40 in my_opt", argv="optim=net.my_opt"),
    edit("an optimizer without pairs", 2, "def my_loss",
         OPT.replace("(params, lr", "([p for p in params if p.grad], lr"),
         "called with pairs of a name and a weight", "for name, weight in", "net.py:40 in my_opt",
         argv="optim=net.my_opt"),
    edit("an optimizer that leaves weights out", 2, "def my_loss",
         OPT.replace("(params, lr", "([p for n, p in params if 'last' in n], lr"), "leaves out first.weight, first.bi",
         '"lr": 0.0', "net.py:40 in my_opt", argv="optim=net.my_opt"),
    typo("a schedule as optimizer", "optim=torch.optim.lr_scheduler.StepLR", "is a schedule of the learning rate"),
    edit("an argument of an optimizer without a value", 2, "def my_loss", OPT.replace("params)", "params, lr)"),
         "net.py:39: my_opt(params, lr)", "lr has no value", "optim.lr=…", argv="optim=net.my_opt"),
    typo("a loss as optimizer", "optim=torch.nn.CrossEntropyLoss", "is a loss, not an optimizer"),
    edit("a schedule without a return", 2, "def my_loss", "def ramp(step, steps):\n    step / steps\n\n\ndef my_loss",
         "ramp(0, 4) returned None", "`return` missing", "net.py:40 in ramp", argv=RAMP),
    edit("a schedule that gives 5", 2, "def my_loss", "def ramp(step, steps):\n    return 5.0\n\n\ndef my_loss",
         "ramp(0, 4) returned 5", "from 0 to 1", "optim.lr=…", "net.py:40 in ramp", argv=RAMP),
    edit("a schedule that gives the rate", 0, "def my_loss", "def ramp(step, steps):\n    return 1e-3\n\n\ndef my_loss",
         "warning: schedule=net.ramp returns at most 0.001", "optim.lr=0.001", argv=RAMP),
    typo("an optimizer as schedule", "schedule=torch.optim.Adam ~schedule.warmup_steps", "is an optimizer, not a"),
]  # fmt: skip
OTHERS = [
    typo("an optimizer with a closure", "optim=torch.optim.LBFGS", "needs a closure", fix="optim=adamw"),
    typo("a schedule that is missing", "schedule=net.warm", "net.py has no warm", "def warm(step, steps)"),
    edit(
        "a schedule that fails",
        3,
        "def my_loss",
        "def ramp(step, steps):\n    return step / zero\n\n\ndef my_loss",
        "name 'zero' is not defined",
        "in ramp",
        argv="schedule=net.ramp ~schedule.warmup_steps",
    ),
    typo(
        "a batch larger than the data",
        "data.count=4",
        "train.global_batch_size=8: data=net.Points has only 4 validation samples",
        "or train.eval_batches=0",
        fix="train.global_batch_size=4",
    ),
]
MISTAKES = [*NAMES, *RAISES, *DATA, *MODEL, *LOSS, *OPTIM, *OTHERS]
