"""Products of compiled graphs by the fastest kernel: the same values, and which products are taken."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

from dtrain.kernels import cublaslt
from dtrain.kernels.gemm_pass import FastestProducts, fastest_products
from dtrain.strategies.compile import backend


class Seen(FastestProducts):
    """Remembers each graph's operations; not for torch's cache, which would not call it again."""

    graphs: ClassVar[list[list[fx.Node]]] = []  # torch calls a copy

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.graphs.clear()

    def uuid(self) -> Any:
        return None

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        graph.lint()
        self.graphs.append([node for node in graph.nodes if node.op == "call_function"])

    def ours(self) -> list[list[fx.Node]]:
        return [[n for n in graph if n.target is torch.ops.dtrain.product.default] for graph in self.graphs]

    def left(self) -> int:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return sum(node.target in products for graph in self.graphs for node in graph)


def trained(model: nn.Module, x: Tensor, seen: Seen | None, device: str = "cpu") -> list[Tensor]:
    """Output and gradients of a compiled copy, under autocast as precision=bf16 has it."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(model, **({"options": {"post_grad_custom_post_pass": seen}} if seen else {}))
    with torch.autocast(device, torch.bfloat16):
        out = run(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (out.float() * weights).sum().backward()
    return [out, *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


def layers(width: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False))
    return model, torch.randn(4, 24, width)


def test_all_products_of_both_graphs_are_taken_and_values_stay() -> None:
    model, x = layers(32)
    seen = Seen(large=0, device="cpu")
    ours, usual = trained(model, x, seen), trained(model, x, None)
    forward, backward = seen.ours()
    assert (len(forward), len(backward), seen.left()) == (2, 4, 0)
    for mine, theirs in zip(ours, usual, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2 * float(theirs.detach().abs().max()))


def test_the_gradient_of_a_weight_is_written_in_float32() -> None:
    """And that of an activation is not, which what follows would have to read."""
    model, x = layers(32)
    seen = Seen(large=0, device="cpu")
    trained(model, x, seen)
    backward = seen.ours()[1]
    wide = [node for node in backward if node.args[3] is torch.float32]
    assert sorted(tuple(node.meta["val"].shape) for node in wide) == [(32, 64), (64, 32)]
    assert all(node.meta["val"].dtype == torch.float32 for node in wide)
    assert {node.args[3] for node in backward if node not in wide} == {torch.bfloat16}


def test_small_products_and_wide_types_are_left_to_torch() -> None:
    model, x = layers(32)
    small = Seen(device="cpu")
    assert cublaslt.LARGE > 2 * 96 * 32 * 64
    trained(model, x, small)
    assert small.ours() == [[], []] and small.left() == 6
    wide = Seen(large=0, device="cpu")
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, options={"post_grad_custom_post_pass": wide})(x)
    assert wide.ours() == [[]] and wide.left() == 2


def test_not_without_such_a_gpu_nor_where_bits_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert backend().options == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    assert isinstance(backend().options["post_grad_custom_post_pass"], FastestProducts) and backend() == backend()
    monkeypatch.setattr(cublaslt, "copies_stay_alike", True)
    assert backend().options == {"deterministic": True}, "nor may the compiler choose by timing"
    monkeypatch.setattr(cublaslt, "copies_stay_alike", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert backend().options == {}


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(8, 1), torch.ones(8, 64)])
def test_a_bias_that_is_no_row_is_left_to_torch(bias: Tensor) -> None:
    """The library would read a value for each column from it, one after the other."""
    seen = Seen(large=0, device="cpu")
    x, weight = torch.ones(8, 32).bfloat16(), torch.ones(32, 64).bfloat16()
    torch._dynamo.reset()
    run = torch.compile(torch.addmm, options={"post_grad_custom_post_pass": seen})
    assert (run(bias.bfloat16(), x, weight) == 33).all()
    assert seen.graphs and not seen.ours()[0]


def test_layers_share_a_graph() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.linear(x))

    assert fastest_products() is fastest_products()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        layer = Layer()
        layer.compile(options={"post_grad_custom_post_pass": fastest_products()})
        layer(torch.ones(2, 8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be given to the library: nothing is, without a GPU."""
    kinds: list[Any] = []

    class Known:
        def run(self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, adds: bool) -> None:
            out.copy_(a @ b + out if adds else a @ b)

    monkeypatch.setattr(cublaslt, "library", lambda: object())
    monkeypatch.setattr(cublaslt, "prepared", lambda *given: kinds.append(given) or Known())
    monkeypatch.setattr(cublaslt, "alignment", lambda tensor: 256)  # as a GPU's memory has it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "LARGE", 0)
    monkeypatch.setattr(cublaslt, "_products", {})
    monkeypatch.setattr(cublaslt, "_met", Counter())
    return kinds


def multiplied(rows: int) -> bool:
    a, b = torch.ones(rows, 8), torch.ones(8, 8)
    out = torch.zeros(rows, 8)
    done = cublaslt.multiply(out, a, b)
    assert out.eq(8 if done else 0).all()
    return done


def test_a_kind_is_timed_once_when_it_has_been_met_often_enough(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [multiplied(4) for _ in range(5)] == [False, False, True, True, True]
    assert len(made) == 1
    assert not any(multiplied(rows) for rows in range(5, 50)), "rows that vary are never timed"
    assert len(made) == 1
    monkeypatch.setattr(cublaslt, "MOST_KINDS", len(cublaslt._met))
    assert not any(multiplied(60) for _ in range(5)) and len(cublaslt._met) == cublaslt.MOST_KINDS
    assert multiplied(4), "those that are known go on"


def test_kernels_are_never_tried_out_in_the_place_of_a_sum(made: list[Any]) -> None:
    a, b, total = torch.ones(4, 8), torch.ones(8, 8), torch.ones(4, 8)
    assert not any(cublaslt.multiply(total, a, b, adds=True) for _ in range(5))
    assert not made and total.eq(1).all()
    assert cublaslt.multiply(total, a, b) and len(made) == 1, "the same kind, often met by now"
    assert cublaslt.multiply(total, a, b, adds=True) and total.eq(16).all() and len(made) == 1


def test_where_bits_must_repeat_every_product_is_left_to_torch(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [multiplied(4) for _ in range(3)][-1]
    monkeypatch.setattr(cublaslt, "copies_stay_alike", True)
    assert not multiplied(4)
    monkeypatch.setattr(cublaslt, "copies_stay_alike", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not multiplied(4)
    monkeypatch.undo()
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    assert not multiplied(4), "small ones"


def test_a_graph_made_by_other_settings_is_another_one_for_the_cache() -> None:
    assert FastestProducts().uuid() == FastestProducts().uuid() != FastestProducts(large=1).uuid()


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "LARGE", 0)
    monkeypatch.setattr(cublaslt, "MEETINGS", 1)


def matrix(rows: int, columns: int, transposed: bool, dtype: torch.dtype, padding: int) -> Tensor:
    shape = (columns, rows + padding) if transposed else (rows, columns + padding)
    found = torch.randn(shape, device="cuda", dtype=dtype)
    return (found.t() if transposed else found)[:rows, :columns]


@pytest.mark.gpu
@pytest.mark.parametrize("rows, inner, columns", [(1024, 768, 3072), (1000, 512, 50304), (130, 72, 264)])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("dtype, padding", [(torch.bfloat16, 0), (torch.bfloat16, 8), (torch.float16, 0)])
@pytest.mark.usefixtures("at_once")
def test_products_against_float64(
    rows: int, inner: int, columns: int, a_transposed: bool, b_transposed: bool, dtype: torch.dtype, padding: int
) -> None:
    torch.manual_seed(0)
    a = matrix(rows, inner, a_transposed, dtype, padding)
    b = matrix(inner, columns, b_transposed, dtype, padding)
    bias = torch.randn(columns, device="cuda", dtype=dtype)
    exact = a.double() @ b.double()
    narrow, wide = (matrix(rows, columns, False, kind, padding) for kind in (dtype, torch.float32))
    assert cublaslt.multiply(narrow, a, b)
    torch.testing.assert_close(narrow.double(), exact, rtol=1 / 256, atol=1e-2)
    assert cublaslt.multiply(narrow, a, b, bias)
    torch.testing.assert_close(narrow.double(), exact + bias, rtol=1 / 256, atol=1e-2)
    assert cublaslt.multiply(wide, a, b)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=1e-3)
    before = wide.clone()
    assert cublaslt.multiply(wide, a, b, adds=True)
    torch.testing.assert_close(wide.double(), before.double() + exact, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("at_once")
def test_what_is_no_product_for_the_library_is_left_to_torch() -> None:
    a = torch.randn(64, 64, device="cuda")
    assert not cublaslt.multiply(torch.empty_like(a), a, a), "float32: torch has TF32"
    narrow = a.bfloat16()
    out = torch.empty_like(narrow)
    shifted = torch.zeros(64 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 64)
    assert not cublaslt.multiply(out, narrow, shifted), "an address that no kernel takes"
    assert not cublaslt.multiply(out, narrow, narrow, narrow[0, :1]), "one value for all columns"
    assert not cublaslt.multiply(out, narrow, narrow, narrow[:, 0]), "values that lie apart"
    product = torch.ops.dtrain.product.default(narrow, shifted, None, torch.float32)
    assert product.dtype == torch.float32 and not product.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("at_once")
def test_layers_on_a_gpu() -> None:
    model, x = layers(1024)
    model, x = model.cuda(), x.repeat(16, 1, 1).cuda()
    seen = Seen(large=0)
    ours, usual = trained(model, x, seen, "cuda"), trained(model, x, None, "cuda")
    assert [len(graph) for graph in seen.ours()] == [2, 4]
    for mine, theirs in zip(ours, usual, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2 * float(theirs.detach().abs().max()))
