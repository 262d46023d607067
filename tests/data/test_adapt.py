"""Data as people have them: taken as it is, in an exact order, and refused with what to write."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, SubsetRandomSampler, TensorDataset

from dtrain.checks import own_data as check_own
from dtrain.commands.verify.compare import compare
from dtrain.data.adapt import adapted, open_data, splits_of
from dtrain.data.arrays import Arrays
from dtrain.data.check import without_targets
from dtrain.data.collate import as_batch, collated
from dtrain.data.fields import Fields, has_targets
from dtrain.data.loader import Loader
from dtrain.data.prefetch import portable
from dtrain.launch.python_objects import name_of, spell
from dtrain.runs.causes import own_frames
from tests.data import own_data as mine
from tests.own_runs import own_run
from tests.world import losses, summary

ME = "tests.data.own_data"


def batches(data: Any, *place: int, size: int = 8, count: int = 8) -> list[Any]:
    loader = Loader(data, size, 0, *place)
    try:
        return [loader.batch(position * size) for position in range(count)]
    finally:
        loader.close()


# ---- what is taken -------------------------------------------------------------------------------------------


def test_draws_of_a_sample_depend_on_its_position_only() -> None:
    data = adapted("d", mine.Drawing())
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    whole, halves = batches(data), [batches(data, rank, 2) for rank in range(2)]
    assert torch.equal(before[0], torch.get_rng_state()) and np.array_equal(before[1], np.random.get_state()[1])
    for (x, y), *parts in zip(whole, *halves, strict=True):
        assert torch.equal(x, torch.cat([part[0] for part in parts]))
        assert torch.equal(y, torch.cat([part[1] for part in parts]))
    later = Loader(data, 8, 0)
    assert torch.equal(later.batch(7 * 8)[0], whole[7][0]), "a resume starts anywhere"
    later.close()
    assert not torch.equal(whole[0][0], whole[6][0]), "another epoch draws anew"


def test_dicts_tuples_and_things_that_are_not_numbers() -> None:
    notes: dict[str, None] = {}
    inputs, targets = collated([mine.Dicts()[i] for i in range(4)], None, notes)
    assert isinstance(inputs, Fields) and set(inputs.values) == {"x", "scale"} and inputs.target == "labels"
    assert targets.tolist() == [0, 1, 2, 0] and inputs.values["scale"].dtype == torch.float32  # type: ignore[index]
    assert [note.split()[0] for note in notes] == ["text", "float64"]
    parts = inputs.split(3)
    assert [len(part) for part in parts] == [3, 1] and len(inputs[:2]) == 2 and inputs.numel() == 32
    assert parts[1].to(torch.float64).values["x"].dtype == torch.float64  # type: ignore[index]
    three, last = collated([(1.0, 2.0, 3)] * 2, None, notes)
    assert isinstance(three.values, tuple) and len(three.values) == 2 and last.tolist() == [3, 3]
    alone, none = as_batch(torch.ones(5, 2), notes)
    assert alone.shape == (5, 2) and not has_targets(none) and len(none.split(2)) == 3
    rows, _ = collated([{"input_ids": [1, 2, 3], "labels": 1}] * 2, None, notes)
    assert rows.values["input_ids"].tolist() == [[1, 2, 3]] * 2  # type: ignore[index]
    with pytest.raises(ValueError, match=r"one number for the whole batch.*\n  fix: "):
        as_batch({"x": torch.ones(2), "loss_weight": torch.tensor(1.0)}, notes)


def test_samples_with_other_fields_than_the_first_are_refused() -> None:
    """torch would drop them from the whole batch, and a model trains without its targets."""
    whole = {"features": torch.ones(2), "labels": 1}
    for other in ({"features": torch.ones(2)}, {"features": None, "labels": 1}):
        for samples in ([whole, other], [other, whole]):
            with pytest.raises(ValueError, match="the samples of a batch differ: the fields "):
                collated(samples, None, {}, "mine.Dicts")


def test_splits_by_argument_and_pictures(caplog: pytest.LogCaptureFixture) -> None:
    source = open_data({"_target_": f"{ME}.Pictures"}, [ME])
    train_set, val_set = source.dataset("train"), source.dataset("val")
    assert (len(train_set), len(val_set)) == (32, 16)
    inputs, targets = batches(train_set)[0]
    assert inputs.shape == (8, 3, 4, 4) and inputs.dtype == torch.float32 and 0 <= float(inputs.max()) <= 1
    assert "PIL image" in train_set.notes[0] and targets.dtype == torch.int64
    fixed = open_data({"_target_": f"{ME}.Pictures", "train": True}, [ME])
    caplog.set_level("INFO", logger="dtrain")
    assert fixed.dataset("val") is None and "nothing is evaluated" in caplog.text
    caplog.clear()
    none = open_data({"_target_": f"{ME}.only_train"}, [ME])
    assert len(none.dataset("train")) == 8 and none.dataset("val") is None and "nothing is evaluated" in caplog.text


def test_arrays() -> None:
    data = open_data({"_target_": f"{ME}.digits"}, [ME])
    train_set, val_set = data.dataset("train"), data.dataset("val")
    assert (len(train_set), len(val_set)) == (1347, 450)
    x, y = batches(train_set)[0]
    assert x.dtype == torch.float32 and y.dtype == torch.int64 and "float32" in train_set.notes[0]
    assert train_set.fingerprint == adapted("d", tuple(mine.digits()[::2])).fingerprint != val_set.fingerprint
    pairs = TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.uint8))
    assert type(adapted("d", pairs)) is Arrays and adapted("d", pairs).targets.dtype == torch.int64
    assert splits_of("d", (np.ones((4, 2)), np.ones(4))).keys() == {"train"}
    rows = [{"x": 1.0, "label": 0}] * 3
    assert splits_of("d", (rows, rows[:1])) == {"train": rows, "val": rows[:1]}
    assert splits_of("d", ([(1.0, 0)] * 3, [(1.0, 0)])).keys() == {"train", "val"}
    with pytest.raises(ValueError, match="gave a tuple of list, list"):
        splits_of("d", ([1.0, 2.0], [0, 1]))  # inputs and targets, or two splits?
    x, y, strange = [[0.5, 1.0]] * 6, [0, 1] * 3, torch.ones(6, 2)
    for given, fix in (
        ((x, y), "return torch.tensor(inputs), torch.tensor(targets)"),
        ((strange, y), "return inputs, torch.tensor(targets)"),
        (([torch.ones(2)] * 6, y), "return torch.stack(inputs), torch.tensor(targets)"),
        (([np.ones(2)] * 6, y), "return torch.tensor(np.array(inputs)), torch.tensor(targets)"),
        ((x, x, y), '{"train": (torch.tensor(input_1), torch.tensor(input_2), torch.tensor(targets))}'),
        ((x, x[:5], y, y[:5]), "torch.tensor(train_inputs), torch.tensor(val_inputs), torch.tensor(train_targets)"),
        ((["good"] * 6, y), "numbers in place of the text"),
        ((strange, strange, strange), '{"train": (a, b, targets)}'),
        (tuple((row, 0) for row in x), "return a list, if these are the samples"),
    ):
        with pytest.raises(ValueError) as caught:
            splits_of("d", given)
        assert fix in str(caught.value).partition("\n  fix: ")[2], caught.value
    with pytest.raises(ValueError, match=r"torch.tensor\(inputs\)"):
        adapted("d", (x, y))  # of {"train": (x, y)}
    own = DataLoader([[1, 2, 3, 4]] * 3, collate_fn=lambda samples: torch.tensor(samples))  # type: ignore[arg-type, misc]
    assert len(adapted("d", own)) == 3, "a collate function takes lists"
    assert len(adapted("d", [[1, 2, 3, 4, 5, 6, 7]] * 6)) == 6  # samples, each a list of tokens
    assert adapted("d", (np.ones((2, 2), np.complex64), np.ones(2))).inputs.dtype == torch.complex64
    with pytest.raises(ValueError, match="array of <U1, not of numbers"):
        adapted("d", (np.ones((2, 2)), np.array(["a", "b"])))
    mixed = np.array([[1.0, "Berlin"], [2.0, "Rom"]], object)
    with pytest.raises(ValueError, match=r"it has the text 'Berlin'\n  fix: leave out the columns of text"):
        adapted("d", (mixed, np.ones(2)))
    with pytest.raises(ValueError, match=r"the text 'a'\n  fix: np\.unique\(y, return_inverse=True\)"):
        adapted("d", (np.ones((2, 2)), np.array(["a", "b"])))
    rows = np.empty(4, object)
    rows[:] = [np.ones(3)] * 4
    with pytest.raises(ValueError, match=r"each of its elements is an array\n  fix: one array: np\.stack"):
        adapted("d", (rows, np.ones(4)))
    with pytest.raises(ValueError, match="pairs are not clear"):
        splits_of("d", [np.ones(4)] * 4)
    with pytest.raises(ValueError, match="4 and 3 rows"):
        adapted("d", (np.ones(4), np.ones(3)))


def test_a_data_loader_keeps_its_collate_function_and_order() -> None:
    given, held_out = splits_of("d", mine.loader()).values()
    inputs, targets = batches(adapted("d", given))[0]
    assert isinstance(inputs, Fields) and list(inputs.values) == ["x"] and targets.shape == (8,) and len(held_out) == 16
    unshuffled = adapted("d", mine.in_order())
    assert batches(unshuffled)[0][1].tolist() == [i % 3 for i in range(8)] and "in order" in unshuffled.notes[1]
    drawn = adapted("d", mine.weighted())
    loader = Loader(drawn, 8, 0)
    assert len(drawn) == 40 and loader.indices(0).max() < 24
    assert loader.indices(0).tolist() == Loader(adapted("d", mine.weighted()), 8, 0).indices(0).tolist()
    assert loader.indices(0).tolist() != loader.indices(40).tolist()


def test_hugging_face_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[i, i + 1] for i in range(12)], "label": [i % 2 for i in range(12)], "text": ["a"] * 12}
    whole = datasets.Dataset.from_dict(rows).train_test_split(test_size=4, shuffle=False)
    whole.save_to_disk(str(tmp_path / "saved"))
    parts = splits_of("d", datasets.load_from_disk(str(tmp_path / "saved")))
    assert parts.keys() == {"train", "val"}
    inputs, targets = batches(adapted("d", parts["train"]), size=4)[0]
    assert inputs.values["input_ids"].shape == (4, 2) and targets.shape == (4,) and inputs.target == "label"
    assert torch.equal(inputs.values["input_ids"][:, 0] % 2, targets)


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, words",
    [
        ("nothing", "gave nothing: it has no return"),
        ("Net", "is a model"),
        ("no_length", "NoLength has no __len__"),
        ("only_iterates", "OnlyIterates has no __getitem__ and no __len__"),
    ],
)
def test_other_things_are_refused(data: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"data={ME}.{data}: .*{words}.*\n  fix: "):
        open_data({"_target_": f"{ME}.{data}"}, [ME]).dataset("train")


def test_a_class_in_place_of_its_object_is_refused() -> None:
    for data in (mine.Dicts, {"train": mine.Dicts, "val": None}):
        parts = splits_of("d", data)
        with pytest.raises(ValueError, match=r"d: gave the class Dicts, not an object.*\n  fix: return Dicts\(\)"):
            adapted("d", parts["train"])


def test_text_that_is_not_tokenized_is_named() -> None:
    rows = [{"text": "a good film", "label": 1}] * 2
    with pytest.raises(
        ValueError, match=r"no inputs: .*it is text: text\n  fix: tokenize it first: data\.map\("
    ) as caught:
        collated(rows, None, {}, "d")
    assert "return e.g." not in str(caught.value)
    with pytest.raises(ValueError, match=r"fix: return e\.g\."):
        collated([{"label": 1}] * 2, None, {}, "d")
    inputs, _ = collated([row | {"input_ids": [1, 2]} for row in rows], None, {}, "d")
    assert list(inputs.values) == ["input_ids"]


def test_the_class_without_a_length_is_shown() -> None:
    with pytest.raises(ValueError, match=r"fix: add __len__\(self\), .*; or make it an IterableDataset") as caught:
        adapted("d", mine.NoLength())
    assert own_frames(caught.value)[-1]["text"].startswith("class NoLength(Dataset")


@pytest.mark.parametrize("data, words", [("Net", "is a model"), ("Useless", "has none of dataset")])
def test_what_the_source_shows_is_refused_by_the_launcher(data: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_own.check({"data": {"_target_": f"{ME}.{data}"}})


@pytest.mark.parametrize("thing", [mine.loader()[0], np.ones(3), {"train": 1}, mine.Drawing()])
def test_an_object_is_answered_with_the_function_to_write(thing: Any) -> None:
    with pytest.raises(ValueError, match=r"is an object of this process.*\n  fix: def my_data\(\): return "):
        name_of("data", thing)


ROWS = np.ones((4, 3))


@pytest.mark.parametrize(
    ("thing", "made"),
    [
        ((ROWS, torch.zeros(4)), "inputs, targets"),
        ([ROWS, ROWS], "inputs, targets"),
        ({"data": ROWS, "target": ROWS}, "inputs, targets"),
        ((mine.Drawing(), mine.Drawing()), "train, val"),
        (((ROWS, ROWS), (ROWS, ROWS)), "train, val"),
        ({"train": mine.Drawing(), "val": mine.Drawing()}, '{"train": Drawing(…), "val": Drawing(…)}'),
        ({"train": (ROWS, ROWS), "val": ROWS}, '{"train": (inputs, targets), "val": (inputs, targets)}'),
        ((ROWS, ROWS, ROWS, ROWS), '{"train": (inputs, targets), "val": (inputs, targets)}'),
    ],
)
def test_the_function_to_write_returns_what_was_given(thing: Any, made: str) -> None:
    fix = rf"is an object of this process.*\n  fix: def my_data\(\): return {re.escape(made)} at the top level"
    with pytest.raises(ValueError, match=fix + " of the file, and data=my_data$"):
        spell({"data": thing})


def test_settings_of_data_stay_settings() -> None:
    words = ["data.train='a.csv'", "data.val=[1,2]"]
    assert spell({"data": {"train": "a.csv", "val": [np.int64(1), 2]}})[0] == words


# ---- real runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, data", [("Named", "Dicts"), ("Whole", "loader")])
def test_a_stopped_run_goes_on_exactly_and_another_strategy_follows(model: str, data: str, tmp_path: Path) -> None:
    words = (f"model={ME}.{model}", f"data={ME}.{data}")
    whole = own_run(tmp_path / "whole", 2, *words, "strategy=ddp")
    first = own_run(tmp_path / "first", 2, *words, "train.stop_after=3")
    again = own_run(first, 2, *words)
    assert losses(again) == losses(whole), "every bit"
    assert summary(again)["weights_sha256"] == summary(whole)["weights_sha256"]
    if model == "Whole":
        found = summary(whole)
        assert found["val_entropy"] + found["val_size"] == pytest.approx(found["val_loss"])
    alone = own_run(tmp_path / "fsdp", 1, *words, "train.micro_batch_size=2")
    for other in (own_run(tmp_path / "fsdp-2", 2, *words, "strategy=fsdp"), whole):
        assert compare(other, alone).loss <= 1e-5


def test_our_models_take_no_dicts(tmp_path: Path) -> None:
    run = own_run(tmp_path / "run", 1, "model=gpt2-tiny", f"data={ME}.Dicts", code=2)
    assert "model=gpt2-tiny: reads one tensor" in (run / "logs" / "rank-0.log").read_text()


def test_validation_reads_what_its_own_sampler_reads() -> None:
    parts = (SubsetRandomSampler(range(90)), SubsetRandomSampler(range(90, 100)))
    numbers = TensorDataset(torch.arange(100.0), torch.arange(100))
    train, val = (adapted("x", DataLoader(numbers, batch_size=5, sampler=sampler)) for sampler in parts)
    assert set(Loader(val, 5, seed=0, shuffle=False).indices(0)) <= set(range(90, 100))
    assert max(Loader(train, 90, seed=0).indices(0)) < 90


def test_a_distributed_sampler_is_not_applied_twice() -> None:
    numbers = TensorDataset(torch.arange(12.0), torch.arange(12))
    sampler = DistributedSampler(numbers, num_replicas=3, rank=1, shuffle=True)
    data = adapted("x", DataLoader(numbers, batch_size=2, sampler=sampler))
    assert len(data) == 12 and sorted(Loader(data, 12, seed=0).indices(0)) == list(range(12))
    assert any("DistributedSampler" in note for note in data.notes)


# ---- mistakes in the samples ----------------------------------------------------------------------------------


class Faulty(Dataset[Any]):
    """Each sample is what a function returns for its index."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


@pytest.mark.parametrize(
    ("sample", "rule"),
    [
        (lambda i: (torch.ones(8 + i // 3), 1), "samples of a batch differ in part 0: shape [8] and shape [9]"),
        (lambda i: {"x": {"a": np.ones(8 + i // 3)}, "labels": 1}, "differ in x.a: shape [8] and shape [9]"),
        (lambda i: {"x": 1.0, "extra": 2} if i == 0 else {"x": 1.0}, "differ: the fields extra, x and the fields x"),
        (lambda i: (torch.ones(8), None if i else 1), "differ in part 1: a number and None"),
        (lambda i: (1.0, 2) if i < 3 else None, "Faulty.__getitem__(3) returned None"),
        (lambda i: None, "Faulty.__getitem__(0) returned None"),
    ],
)
def test_samples_that_cannot_be_stacked(sample: Any, rule: str) -> None:
    """The error is the user's, with the line that returns the samples."""
    with pytest.raises(ValueError, match=re.escape(rule)) as caught:
        adapted("d", Faulty(sample)).batch(np.arange(6), np.zeros(6, np.uint64))
    assert str(caught.value).startswith("data=d: ") and "\n  fix: " in str(caught.value)
    assert own_frames(caught.value)[-1]["text"] == "return self.sample(index)"


def test_the_line_of_what_gives_the_samples() -> None:
    """Of a part of a data set, of its collate function, and of the function that returned arrays."""
    data = Faulty(lambda i: (torch.ones(8), i))
    assert adapted("d", Subset(data, range(4))).reader is Faulty.__getitem__
    assert adapted("d", DataLoader(data, 4, collate_fn=by_hand)).reader is by_hand
    assert adapted("d", (np.ones((4, 2)), np.ones(4)), None, by_hand).reader is by_hand
    error = ValueError("x")
    error.add_note('File "/home/me/a.py", line 3, in f')
    error = portable(error)  # whose traceback has the note again
    assert [frame["line"] for frame in own_frames(error)].count(3) == 1


def by_hand(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


class Table:
    """As much of a pandas frame as is read."""

    columns, shape, iloc, dtypes = ("age", "label"), (4, 2), None, {"age": np.dtype(float), "label": np.dtype(object)}

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return 4

    def to_numpy(self) -> Any:
        return self.values


def test_inputs_without_targets_are_refused_before_the_first_step() -> None:
    def refused(data: Any, inputs: Any = None) -> str:
        return str(without_targets(data, inputs, "loss=cross_entropy"))

    assert "returns no targets, which loss=cross_entropy needs\n  fix: return (inputs, targets)" in refused(
        adapted("d", torch.ones(4, 2))
    )
    table = refused(adapted("d", Table(np.ones((4, 2)))))
    assert "columns age, label" in table and 'fix: return df.drop(columns="label"), df["label"]' in table
    with pytest.raises(ValueError, match="column label of its table: no numbers"):
        adapted("d", Table(np.array([[1.0, "x"]] * 4, dtype=object)))
    fields = refused(adapted("d", [{"image": torch.ones(2), "cls": 1}] * 4), Fields({"image": None, "cls": None}))
    assert (
        "no targets among its fields image, cls" in fields and 'fix: name the field with the targets "labels"' in fields
    )


class TooLong:
    """Its __len__ is one too large, and its label a word."""

    def __init__(self, label: object) -> None:
        self.rows = [(torch.ones(2), label)] * 3

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> object:
        return self.rows[index]


def test_a_length_that_is_too_large_and_a_label_of_text_are_named() -> None:
    with pytest.raises(IndexError, match=r"out of range: TooLong.__getitem__\(3\), and its __len__ is 4"):
        adapted("d", TooLong(1)).batch(np.array([3]), np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match=r"part 1 of its samples is .*\('sine'\), not numbers"):
        adapted("d", TooLong("sine"))
    for place in range(3):  # for example the name of a file
        parts: list[Any] = [torch.ones(2, 2), torch.zeros(2)]
        parts.insert(place, ["a.png", "b.png"])
        with pytest.raises(ValueError, match=rf"part {place} of its samples is .*\n  fix: leave it out"):
            as_batch(parts, {})
