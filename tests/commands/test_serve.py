"""A real `dtrain serve` process, and the official OpenAI client in front of it."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from dtrain.cli import main
from dtrain.data.small_images import PixelDataset
from dtrain.inference.openai_api import ApiError
from dtrain.inference.sample import generate, load_model
from dtrain.inference.service import ClassService
from dtrain.runs.folder import checkpoints
from tests.hf import load, save
from tests.inference.test_sample import greedy
from tests.models.vision import make_run as make_pictures
from tests.patience import patience, until
from tests.world import make_run, start, train

ROOT = Path(__file__).parent.parent.parent
TEXT = ["model.vocab_size=256", "model.seq_len=96", "data=text", f"data.path={Path(__file__).parent}"]
TEXT += ["data.pattern='**/*.py'", "cluster.processes=1", "optim.lr=3e-3"]


def make(folder: Path, *overrides: str) -> Path:
    run = make_run(folder, *overrides)
    (run / "launch.json").write_text('{"launches": []}')
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make(tmp_path_factory.mktemp("serve") / "writer", *TEXT, "train.steps=20", "checkpoint.every=0")
    assert train(run) == [0]
    return run


@contextmanager
def serving(run: Path | str, *options: str, **env: str) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """A server on a free port: its host, its port, its process."""
    command = [sys.executable, "-m", "dtrain", "serve", str(run), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | env)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.match(r"http://([\d.]+):(\d+)/v1: ", line)
        assert found, line
        yield found[1], int(found[2]), server
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    with serving(run, "--no-follow") as found:
        yield found


def client_of(server: tuple[str, int, Any], key: str = "none") -> openai.OpenAI:
    url = f"http://{server[0]}:{server[1]}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=patience(60))


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return client_of(server)


def health(server: Any) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*server[:2], timeout=patience(30))
    connection.request("GET", "/health")
    return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]


def reference(run: Path, prompt: str, count: int, step: int | None = None) -> str:
    """Greedy text by the plain model, without a batch or a server."""
    model, _ = load_model(run, [], step)
    tokens = torch.tensor([list(prompt.encode())])
    made = generate(model, tokens, count, 96, greedy)[0, tokens.shape[1] :].tolist()
    assert 0 not in made
    return bytes(min(t, 255) for t in made).decode(errors="replace")


# ---- the official client -------------------------------------------------------------------------------------


def test_completions(run: Path, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["writer"] and client.models.retrieve("writer").owned_by == "dtrain"
    whole = client.completions.create(model="writer", prompt="def test", max_tokens=20, temperature=0)
    assert whole.choices[0].text == reference(run, "def test", 20) and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (8, 20)
    assert whole.system_fingerprint == "step-20"
    many = client.completions.create(
        model="writer", prompt=["def test", [100, 101, 102]], n=2, max_tokens=10, temperature=0.9, seed=7, logprobs=2
    )
    again = client.completions.create(
        model="writer", prompt=["def test", "def"], n=2, max_tokens=10, temperature=0.9, seed=7
    )
    assert [c.text for c in many.choices] == [c.text for c in again.choices], "the same seed, and the same tokens"
    assert len({c.text for c in many.choices}) == 4 and [c.index for c in many.choices] == [0, 1, 2, 3]
    logs = many.choices[0].logprobs
    assert logs is not None and logs.tokens is not None and len(logs.tokens) == 10 and logs.top_logprobs is not None
    assert "".join(logs.tokens) == many.choices[0].text and all(len(top) <= 2 for top in logs.top_logprobs)
    stopped = client.completions.create(
        model="writer", prompt="def test", max_tokens=20, temperature=0, stop=[whole.choices[0].text[7:10]]
    )
    place = whole.choices[0].text.find(whole.choices[0].text[7:10])
    assert stopped.choices[0].text == whole.choices[0].text[:place] and stopped.choices[0].finish_reason == "stop"


def test_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "hm"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ask: Any = {"model": "writer", "messages": messages, "max_completion_tokens": 15, "temperature": 0.7, "seed": 3}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    plain = client.completions.create(
        model="writer", prompt="System: hm\n\nUser: hi\n\nAssistant:", max_tokens=15, temperature=0.7, seed=3
    )
    assert whole.choices[0].message.content == plain.choices[0].text and whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    for token in whole.choices[0].logprobs.content:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and token.logprob <= 0
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 5
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None and whole.usage == chunks[-1].usage


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": []}, "messages"), ({"temperature": 3}, "temperature"), ({"max_tokens": 2000}, "max_tokens"),
        ({"n": 0}, "n"), ({"stop": [1]}, "stop"), ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"), ({"seed": "x"}, "seed"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(client: openai.OpenAI, wrong: dict[str, Any], param: str) -> None:
    ask = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]} | wrong
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask)
    assert refused.value.param == param and refused.value.type == "invalid_request_error"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="x")


def test_32_streams_at_once_are_what_each_is_alone(client: openai.OpenAI) -> None:
    prompts = [("def test_" * 6)[: 3 + i] for i in range(32)]

    def write(i: int) -> str:
        stream = client.completions.create(
            model="writer",
            prompt=prompts[i],
            max_tokens=12 + i % 9,
            temperature=1.0 if i % 2 else 0,
            seed=i,
            stream=True,
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    alone = [write(i) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(write, range(32))) == alone
    assert len(set(alone)) > 20


# ---- bad clients ---------------------------------------------------------------------------------------------


def raw(server: Any, data: bytes) -> tuple[int, dict[str, Any]]:
    with socket.create_connection(server[:2], timeout=patience(30)) as connection:
        connection.sendall(data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, json.loads(response.read())


def post(body: bytes, length: int | None = None, path: str = "/v1/completions") -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + body


def test_bad_requests_get_an_error_and_break_nothing(server: Any, client: openai.OpenAI) -> None:
    for data, status in (
        (post(b"{"), 400), (post(b"[]"), 400), (post(b"[" * 100_000), 400), (post(b'{"prompt": "\\ud800"}'), 400),
        (post(b'{"prompt": 5}'), 400), (post(b'{"prompt": [256]}'), 400), (post(b'{"prompt": ""}'), 400),
        (post(b'{"prompt": "x", "temperature": NaN}'), 400), (post(b"", 2**40), 413), (post(b"", -5), 411),
        (post(b"{}", path="/v1/nothing"), 404), (post(b'{"input": []}', path="/v1/classify"), 404),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    ):  # fmt: skip
        found, values = raw(server, data)
        assert found == status and values["error"]["message"], (data[:80], found, values)
    for data in (b"\0" * 200, b"GET\r\n\r\n", post(b"{}", 50), b"POST / HTTP/1.1\r\nA: " + b"x" * 70_000):
        with socket.create_connection(server[:2], timeout=patience(30)) as connection:
            connection.sendall(data)
    assert client.completions.create(model="writer", prompt="x", max_tokens=1).usage is not None


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: Any, stream: bool) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 95, "n": 16, "stream": stream, "ignore_eos": True}
    with socket.create_connection(server[:2]) as connection:
        connection.sendall(post(json.dumps(body).encode()))
        until(lambda: health(server)["running"], "the request runs")
    until(lambda: health(server)["running"] == 0, "and is cancelled", state=lambda: str(health(server)))


def test_a_key_is_checked(run: Path) -> None:
    with serving(run, "--name", "mine", DTRAIN_API_KEY="s3cret") as server:
        for key in ("other", "s3cre", "é"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                client_of(server, key).models.list()
        assert [m.id for m in client_of(server, "s3cret").models.list()] == ["mine"]
        assert health(server)["status"] == "ok"


def test_a_server_that_is_asked_to_end_finishes_what_it_has_begun(run: Path) -> None:
    with serving(run, "--slots", "1") as server:
        stream = client_of(server).completions.create(
            model="writer", prompt="def", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream)).choices[0].text
        server[2].send_signal(signal.SIGTERM)
        chunks = [chunk.choices[0] for chunk in stream]
        assert first + "".join(c.text for c in chunks) == reference(run, "def", 60)
        assert chunks[-1].finish_reason == "length"
        assert server[2].wait(patience(30)) == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [(["--port", "70000"], "--port"), (["--slots", "0"], "--slots"), (["--context", "5000"], "--context")],
)
def test_wrong_options_are_refused(
    run: Path, options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), *options]) == 2
    assert f"error: {error}=" in capsys.readouterr().err


def test_a_template_is_used_only_if_the_user_names_it(run: Path, tmp_path: Path) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, "eos_token": "!"}))
    with serving(run, "--chat-template", str(tmp_path)) as server:
        ask: Any = {"model": "writer", "max_tokens": 9, "temperature": 0}
        client = client_of(server)
        chat = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **ask)
        assert chat.choices[0].message.content == client.completions.create(prompt="<user>hi!", **ask).choices[0].text


# ---- new weights while it trains -----------------------------------------------------------------------------


def test_hot_swap_under_load_loses_no_request(tmp_path: Path) -> None:
    run = make(tmp_path / "run", *TEXT, "train.steps=400", "checkpoint.every=2", "checkpoint.keep=200")
    ranks = start(run)
    answers: list[tuple[str, str]] = []
    failures: list[Exception] = []
    done = threading.Event()
    try:
        until(lambda: (run / "checkpoints" / "latest").exists(), "a first checkpoint", 120)
        with serving(run, "--poll", "0.05") as server:

            def ask(client: openai.OpenAI) -> None:
                try:
                    while not done.is_set():
                        found = client.completions.create(
                            model="run",
                            prompt="def test",
                            max_tokens=24,
                            temperature=0,
                            extra_body={"ignore_eos": True},
                        )
                        answers.append((str(found.system_fingerprint), found.choices[0].text))
                except Exception as error:
                    failures.append(error)

            threads = [threading.Thread(target=ask, args=(client_of(server),)) for _ in range(4)]
            for thread in threads:
                thread.start()
            until(lambda: len({step for step, _ in answers}) >= 4 or failures, "answers of four checkpoints", 120)
            done.set()
            for thread in threads:
                thread.join()
    finally:
        ranks.kill()
    assert not failures
    steps = {int(step.removeprefix("step-")) for step, _ in answers}
    assert steps <= {int(path.name[5:]) for path in checkpoints(run / "checkpoints")}
    for step in sorted(steps)[:4]:
        texts = {text for name, text in answers if name == f"step-{step}"}
        model, _ = load_model(run, [], step)
        tokens = torch.tensor([list(b"def test")])
        made = generate(model, tokens, 24, 96, greedy)[0, 8:].tolist()
        assert texts == {bytes(min(t, 255) for t in made).decode(errors="replace")}, f"all of it is of step {step}"


# ---- classifiers ---------------------------------------------------------------------------------------------


def asking(server: Any) -> Callable[..., Any]:
    return lambda given: raw(server, post(json.dumps({"input": given}).encode(), path="/v1/classify"))


def test_images_are_classified(tmp_path: Path) -> None:
    run = make_pictures(
        tmp_path / "run", "model=vit-tiny", "model.patch_size=4", "cluster.processes=1", "train.steps=2"
    )
    (run / "launch.json").write_text('{"launches": []}')
    assert train(run) == [0]
    from dtrain.data.digits import Digits

    model, cfg = load_model(run, [])
    dataset = Digits(cfg.model.image_size).dataset("val")
    assert isinstance(dataset, PixelDataset)
    with torch.no_grad():
        expected = model(dataset.batch(torch.arange(3).numpy())[0]).softmax(-1)
    with serving(run) as server:
        ask = asking(server)
        status, found = ask(dataset.pictures[:3, 0].tolist())
        assert status == 200 and found["system_fingerprint"] == "step-2"
        rows = torch.tensor([list(one["probabilities"].values()) for one in found["data"]])
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)
        assert [int(one["label"]) for one in found["data"]] == expected.argmax(-1).tolist()
        for wrong in ([], "x", [[1]], [[[17]]], [[[-1]]], [[[1, 2], [3]]], [[[1.5]]], [[["x"]]]):
            status, found = ask(wrong)
            assert status == 400 and found["error"]["param"] == "input", wrong
        assert raw(server, post(b'{"prompt": "x"}'))[0] == 404


@pytest.mark.filterwarnings("ignore:Image size")
def test_image_files_are_classified(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(("cat", "dog", "owl")):
        for j in range(4):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            image.new("RGB", (40, 30 + j), (80 * i, 40, 200)).save(tmp_path / "data" / name / f"{j}.png")
    run = make_pictures(
        tmp_path / "run", "model=vit-tiny", "model.patch_size=4", "data=images", f"data.path={tmp_path / 'data'}",
        "model.num_classes=3", "cluster.processes=1",
    )  # fmt: skip
    save(run, load(run))
    service = ClassService(*load_model(run, []), 1, [])
    assert service.labels == ["cat", "dog", "owl"]
    moved = ClassService(*load_model(run, []), 1, [], ["a", "b", "c"])
    assert moved.labels == ["a", "b", "c"] and moved.data is None
    dataset = service.data.dataset("val")
    files = [base64.b64encode((dataset.root / name).read_bytes()).decode() for name in dataset.names]
    with torch.no_grad():
        expected = service.model(dataset.batch(torch.arange(len(files)).numpy())[0]).softmax(-1)
    torch.testing.assert_close(torch.tensor(service.classify(files)[1]), expected, rtol=0, atol=1e-6)
    huge = io.BytesIO()
    image.new("L", (20_000, 5_000)).save(huge, "PNG")
    for wrong, why in (("x", ""), (5, ""), ([[1]], ""), ("aGVsbG8=", "not an image"), (huge.getvalue(), "pixels, and")):
        given = base64.b64encode(wrong).decode() if isinstance(wrong, bytes) else wrong
        with pytest.raises(ApiError, match=f"input 1 must be an image file.*{why}") as refused:
            service.classify([files[0], given])
        assert refused.value.status == 400


def test_a_moved_run_of_image_files_needs_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(("cat", "dog")):
        for j in range(8):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            image.new("RGB", (40, 30 + j), (80 * i, 40, 200)).save(tmp_path / "data" / name / f"{j}.png")
    settings = ["model=vit-tiny", "model.patch_size=4", "data=images", f"data.path={tmp_path / 'data'}"]
    settings += ["model.num_classes=2", "cluster.processes=1", "train.steps=2", "train.eval_batches=0"]
    run = make_pictures(tmp_path / "run", *settings, "data.val_crop=0.5", "train.global_batch_size=4")
    (run / "launch.json").write_text('{"launches": []}')
    assert train(run) == [0]
    png = base64.b64encode((tmp_path / "data" / "cat" / "0.png").read_bytes()).decode()
    service = ClassService(*load_model(run, []), 1, [])
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with serving(run) as server:
        status, found = asking(server)([png])
        assert status == 200 and list(found["data"][0]["probabilities"]) == ["cat", "dog"]
        assert list(found["data"][0]["probabilities"].values()) == pytest.approx(service.classify([png])[1][0])
    save(run, load(run))  # a checkpoint of an older version, without names
    assert main(["serve", f"{run}@1", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "the checkpoint has no names of classes" in error and "fix: put the folder there" in error


def test_texts_are_classified(tmp_path: Path) -> None:
    run = make(
        tmp_path / "run", "model=bert-tiny-classify", "data=stdlib-lines", "model.vocab_size=259", "model.seq_len=32",
        "cluster.processes=1", "train.steps=2",
    )  # fmt: skip
    assert train(run) == [0]
    with serving(run) as server:
        status, both = asking(server)(["import os", {"text": "# a comment"}])
        assert status == 200 and len(both["data"]) == 2
        assert all(abs(sum(one["probabilities"].values()) - 1) < 1e-5 for one in both["data"])
        assert asking(server)(["# a comment"])[1]["data"][0]["probabilities"] == both["data"][1]["probabilities"]
        assert asking(server)([5])[0] == 400 and asking(server)([{"text": "a", "text_pair": "b"}, "c"])[0] == 400
