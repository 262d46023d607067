"""One step for many sequences: each gets the tokens that it gets alone, to the last bit on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.inference.choose import choose, greedy_in_parts
from dtrain.inference.decoder import CHUNK, Decoder, Settings
from dtrain.inference.sample import generate
from dtrain.models.llama import Llama
from dtrain.strategies.materialize import set_stream
from tests.inference.test_sample import greedy, language_model

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [49] * 20, [3, 1]]


def start(decoder: Decoder, slot: int, prompt: list[int], settings: Settings = Settings()) -> None:  # noqa: B008
    filling = decoder.fill(slot, prompt, settings)
    while not filling.advance():
        pass


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sequences_that_join_and_leave_have_the_tokens_of_one_alone(name: str) -> None:
    model = language_model(name, 45)
    alone = [generate(model, torch.tensor([p]), 20, 45, greedy)[0, len(p) :].tolist() for p in PROMPTS]
    decoder = Decoder(model, 3, 45)
    waiting, running = list(enumerate(PROMPTS)), {}
    texts: list[list[int]] = [[] for _ in PROMPTS]
    while waiting or running:
        for slot in {0, 1, 2} - running.keys():
            if waiting:
                number, prompt = waiting.pop()
                start(decoder, slot, prompt)
                running[slot] = number
        slots = list(running)
        for slot, token in zip(slots, decoder.step(slots).read(), strict=True):
            texts[running[slot]].append(token)
            if len(texts[running[slot]]) == 20:
                del running[slot]
    assert texts == alone
    assert len({t for text in texts for t in text}) > 5, "or it would be no test"


def test_rows_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = language_model("llama", 45)
    assert not Decoder(model, 3, 45).one_by_one
    head = model.head.forward
    noise = torch.zeros(32, 1, 1)
    noise[17] = 1e-6
    monkeypatch.setattr(model.head, "forward", lambda x, w, t=None: head(x, w, t) + noise[: len(x)])
    decoder = Decoder(model, 3, 45)
    assert decoder.one_by_one and "one by one" in caplog.text
    for slot in range(3):
        start(decoder, slot, PROMPTS[slot])
    texts = [decoder.step([2, 0]).read() for _ in range(20)]
    for column, prompt in enumerate((PROMPTS[2], PROMPTS[0])):
        alone = generate(model, torch.tensor([prompt]), 20, 45, greedy)[0, len(prompt) :].tolist()
        assert [row[column] for row in texts] == alone


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_logits_do_not_depend_on_the_others_nor_on_the_slot(name: str) -> None:
    model = language_model(name, 45)
    found = []
    for others, mine in (([], 0), ([0, 1, 2, 3], 4), ([4, 0, 2], 3)):
        decoder = Decoder(model, 5, 45)
        for slot in others:
            start(decoder, slot, PROMPTS[slot], Settings(1.0))
        start(decoder, mine, PROMPTS[2])
        for _ in range(6):
            slots = [*others, mine]
            step = decoder.step(slots, dict.fromkeys(slots, 0.4), logprobs=True)
        assert step.logprobs is not None
        found.append(step.logprobs[1][-1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_long_prompt_is_computed_in_chunks() -> None:
    model = language_model("llama", CHUNK + 40)
    prompt = torch.randint(0, 50, (CHUNK + 20,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder = Decoder(model, 1, CHUNK + 40)
    filling = decoder.fill(0, prompt, Settings())
    assert not filling.advance() and filling.advance()
    tokens = [decoder.step([0]).read()[0] for _ in range(5)]
    assert tokens == generate(model, torch.tensor([prompt]), 5, CHUNK + 40, greedy)[0, len(prompt) :].tolist()


def test_a_shape_without_a_kernel_on_a_gpu_attends_over_the_whole_capacity() -> None:
    model = language_model("llama", 20)
    exact, masked = Decoder(model, 3, 20), Decoder(model, 3, 20)
    for layer in masked.slots.layers.values():
        layer.keys.zero_(), layer.values.zero_()
        layer.one_by_one = layer.masked  # type: ignore[method-assign]
    masked.one_by_one = True  # whose rows are the slots that are in use
    for decoder in (exact, masked):
        for slot in range(3):
            start(decoder, slot, PROMPTS[slot])
    for _ in range(8):
        a, b = (d.step([0, 1, 2], logprobs=True).logprobs for d in (exact, masked))
        assert a is not None and b is not None
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-5)


# ---- choosing ------------------------------------------------------------------------------------------------


def chosen(logits: list[float], draws: int = 400, **settings: float) -> dict[int, float]:
    """The share of each token among evenly spread draws."""
    rows = torch.tensor([logits]).expand(draws, -1)
    full = {"temperature": 1.0, "top_k": 99, "top_p": 1.0} | settings
    columns = [torch.full((draws,), full[key]) for key in ("temperature", "top_k", "top_p")]
    tokens = choose(rows, *columns, (torch.arange(draws) + 0.5) / draws)
    return {int(t): float((tokens == t).sum()) / draws for t in tokens.unique()}


def test_tokens_come_as_often_as_their_probability() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().tolist()
    assert chosen(logits) == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}, abs=0.01)
    assert chosen(logits, top_k=2) == pytest.approx({2: 3 / 7, 3: 4 / 7}, abs=0.01)
    assert chosen(logits, top_p=0.5) == pytest.approx({2: 3 / 7, 3: 4 / 7}, abs=0.01)
    assert chosen(logits, top_p=0.3) == {3: 1.0} == chosen(logits, top_p=0.0) == chosen(logits, temperature=0.0)
    assert chosen(logits, temperature=0.5) == pytest.approx({0: 1 / 30, 1: 4 / 30, 2: 9 / 30, 3: 16 / 30}, abs=0.01)


def test_a_draw_of_one_by_rounding_takes_a_token_that_may_be_taken() -> None:
    one = torch.ones(1)
    assert choose(torch.tensor([[3.0, 2.0, 1.0]]), one, one.long() * 2, one, one).item() == 1


@pytest.mark.parametrize("vocabulary", [1, 45, 128, 1000])
def test_the_likeliest_token_is_the_same_in_parts(vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[1] = 2.0  # all are equal: the first one
    assert torch.equal(greedy_in_parts(logits), logits.argmax(dim=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_attends_as_torch_does(dtype: torch.dtype) -> None:
    from dtrain.inference.slots import SlotLayer, has_kernel

    assert has_kernel(torch.device("cuda"), 32, dtype)
    torch.manual_seed(0)
    for heads, kv_heads, dim in ((8, 2, 32), (32, 8, 64), (12, 12, 64), (16, 4, 128)):
        keys, values = (torch.randn(6, kv_heads, 700, dim, device="cuda", dtype=dtype) for _ in range(2))
        q = torch.randn(4, heads, 1, dim, device="cuda", dtype=dtype)
        k, v = (torch.randn(4, kv_heads, 1, dim, device="cuda", dtype=dtype) for _ in range(2))
        found = []
        for kernel in (True, False):
            layer = SlotLayer(keys.clone(), values.clone(), kernel)
            layer.rows = torch.tensor([5, 0, 3, 1], device="cuda")
            layer.positions = torch.tensor([0, 63, 64, 699], device="cuda")
            found.append((layer(q, k, v), layer.keys, layer.values))
        (ours, *kept), (theirs, *expected) = found
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
        assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


@pytest.mark.gpu
def test_a_captured_and_compiled_step_has_the_tokens_of_the_plain_model() -> None:
    model: nn.Module = language_model("llama", 45).to("cuda")
    alone = [
        generate(model, torch.tensor([p], device="cuda"), 20, 45, greedy)[0, len(p) :].tolist() for p in PROMPTS[:3]
    ]
    decoder = Decoder(model, 4, 45)
    for slot in range(3):
        start(decoder, slot, PROMPTS[slot])
    steps = [decoder.step([0, 1, 2]) for _ in range(20)]
    assert [list(row) for row in zip(*(step.read() for step in steps), strict=True)] == alone


@pytest.mark.gpu
def test_a_llama_in_16_bits_computes_one_row_with_kernels_of_its_own() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(2, 256, 8, 2, 512, 300, 64).bfloat16().eval()
    set_stream(model, torch.bfloat16)
    tokens = torch.randint(0, 300, (1, 9), device="cuda").tolist()[0]
    with torch.inference_mode():
        decoder = Decoder(model, 1, 64)
        assert decoder.one_row is not None
        start(decoder, 0, tokens)
        chosen = [decoder.step([0]).read()[0] for _ in range(20)]
        logits = model(torch.tensor([tokens + chosen], device="cuda"))[0, len(tokens) - 1 : -1].float()
    below = logits.max(dim=-1).values - logits.gather(1, torch.tensor(chosen, device="cuda")[:, None])[:, 0]
    assert below.max() < 0.05 * logits.std()  # sums in another order, rounded to 16 bits
