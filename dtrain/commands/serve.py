"""`dtrain serve`: a model of a run as an HTTP server with OpenAI's API."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from dtrain.commands.run_parser import CHECKPOINT, RunParser
from dtrain.errors import bad
from dtrain.runs.find import find_checkpoint
from dtrain.util import ports

KEY = "DTRAIN_API_KEY"


def main(argv: list[str]) -> int:
    parser = RunParser(
        "dtrain serve",
        description="Serve a run's model over HTTP: /v1/completions and /v1/chat/completions as OpenAI has them, or "
        "/v1/classify. New checkpoints of a run that is training are taken over between requests.",
    )
    parser.add_argument("run", help=CHECKPOINT)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 = a free one")
    parser.add_argument("--name", help="the model's name in requests (default: the name of the run's folder)")
    parser.add_argument("--slots", type=int, default=32, help="sequences that are computed at once; others wait")
    parser.add_argument("--context", type=int, help="tokens of prompt and answer (default: the model's seq_len)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU")
    parser.add_argument(
        "--deterministic", action="store_true",
        help="one batch size also on a GPU: the same tokens whoever else is there; slower at few requests",
    )  # fmt: skip
    parser.add_argument("--no-compile", action="store_true", help="start sooner, decode slower (GPU only)")
    parser.add_argument("--no-follow", action="store_true", help="keep to the checkpoint that is there at the start")
    parser.add_argument("--poll", type=float, default=2.0, metavar="S", help="seconds between two looks for a new one")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template, or a tokenizer_config.json with one")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds to finish requests at SIGTERM")
    parser.add_argument("--trust", nargs="*", default=[], metavar="MODULE", help="your own modules that the run uses")
    options = parser.parse_args(argv)
    if not 0 <= options.port < 65536:
        raise bad("--port", options.port, "must be 0 to 65535", "--port=8000")
    if not 1 <= options.slots <= 512:
        raise bad("--slots", options.slots, "must be 1 to 512", "--slots=32")
    if not 0.05 <= options.poll <= 3600:
        raise bad("--poll", options.poll, "must be 0.05 to 3600 seconds", "--poll=2")
    # now, not after the model is loaded
    ports.check("--port", options.port, options.host, "--port 0 for any free one", " ")
    at = find_checkpoint(options.run)
    template = chat_template(options.chat_template)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    return serve(at.run_dir, at.step, options, template)


def serve(run_dir: Path, fixed: int | None, options: Any, template: Any) -> int:
    from dtrain.checkpoint.store import read_manifest
    from dtrain.inference import service as services
    from dtrain.inference.export import checkpoint_of
    from dtrain.inference.http_server import Server

    step = fixed if fixed is not None else int(checkpoint_of(run_dir, None).name[5:])
    model, cfg = services.load(run_dir, step, options.trust, options.dtype)
    service: services.TextService | services.ClassService
    if cfg.model.get("num_classes"):
        classes = read_manifest(run_dir / "checkpoints" / f"step-{step:08d}").meta.get("classes", ())
        service = services.ClassService(model, cfg, step, options.trust, classes)
    else:
        if cfg.model.get("task"):
            raise bad("RUN", run_dir, "its model is bidirectional and generates no text", "a run of gpt2 or llama")
        service = services.TextService(
            model, cfg, step, options.trust, options.slots, options.context, not options.no_compile,
            options.deterministic,
        )  # fmt: skip
    name = options.name or run_dir.name
    try:
        server = Server((options.host, options.port), service, name, os.environ.get(KEY) or None, template=template)
    except OSError as error:
        raise ports.refusal("--port", options.port, options.host, error, "--port 0 for any free one", " ") from None
    watcher = None
    if fixed is None and not options.no_follow:
        watcher = services.Watcher(run_dir, step, options.trust, model, service.swap, options.poll)
        watcher.thread.start()
    if isinstance(service, services.TextService):
        service.engine.thread.start()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    port, host = server.server_address[1], f"[{options.host}]" if ":" in options.host else options.host
    locked = "an API key is needed" if server.key else f"anyone who reaches it may use it ({KEY} sets a key)"
    print(f"http://{host}:{port}/v1: {name} at step {step}; {locked}; Ctrl-C ends it", flush=True)
    code = 0
    while not stop.wait(0.2):
        if isinstance(service, services.TextService) and not service.engine.thread.is_alive():
            print(f"error: the model has failed: {service.engine.failure}", flush=True)
            code = 3
            break
    server.draining = True
    end = time.monotonic() + options.grace
    while server.busy and not code and time.monotonic() < end:
        time.sleep(0.05)
    if isinstance(service, services.TextService):
        service.engine.close()
    end = time.monotonic() + 2
    while server.busy and time.monotonic() < end:  # those that were cut off get an answer that says so
        time.sleep(0.05)
    server.shutdown()
    server.server_close()
    if watcher:
        watcher.stop.set()
    return code


def chat_template(path: str | None) -> Any:
    """Return the function of a template that the user names: a run folder cannot choose one, because it is a program.

    Jinja's sandbox keeps it from everything but the messages, as in transformers.
    """
    if path is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from dtrain.formats.bounded import read_bytes, read_json

    file = Path(path).expanduser()
    values: dict[str, Any] = {}
    file = file / "tokenizer_config.json" if file.is_dir() else file
    try:
        if file.suffix == ".json":
            found = read_json(file, 2**24)
            values = found if isinstance(found, dict) else {}
            source = values.get("chat_template")
        else:
            source = read_bytes(file, 2**20).decode()
    except ValueError as error:
        raise bad("--chat-template", path, f"cannot be read ({error})", "leave it out, for the plain one") from None
    if not isinstance(source, str):
        raise bad("--chat-template", path, "has no chat_template", "leave it out, for the plain one")
    try:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(source)
    except TemplateError as error:
        raise bad("--chat-template", path, f"is no Jinja template ({error})", "leave it out") from None
    marks = {
        key: value.get("content", "") if isinstance(value, dict) else value
        for key, value in values.items() if key in ("bos_token", "eos_token")
    }  # fmt: skip

    def render(messages: list[dict[str, str]]) -> str:
        from dtrain.inference.openai_api import ApiError

        def refuse(message: str) -> None:
            raise ApiError(400, f"the chat template refuses this: {message}", "messages")

        try:
            return template.render(messages=messages, add_generation_prompt=True, raise_exception=refuse, **marks)
        except TemplateError as error:
            raise ApiError(400, f"the chat template fails with this: {error}", "messages") from None

    return render
