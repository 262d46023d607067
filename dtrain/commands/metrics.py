"""`dtrain metrics serve`: the metrics of all live runs of a folder, for Prometheus."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dtrain.commands.run_parser import RunParser
from dtrain.errors import bad
from dtrain.report import prometheus
from dtrain.util import ports
from dtrain.util.format import counted, short_path

PORT = 9833


def main(argv: list[str]) -> int:
    """`dtrain metrics`: serve metrics until Ctrl-C."""
    text = "Serve the metrics of all live runs of a folder for Prometheus, for example on a login node."
    parser = RunParser("dtrain metrics", description=text)
    parser.add_argument("action", choices=["serve"], help="serve http://HOST:PORT/metrics until Ctrl-C")
    parser.add_argument("folder", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1, this machine only)")
    minutes = prometheus.KEEP_S / 60
    parser.add_argument(
        "--keep",
        type=float,
        default=minutes,
        metavar="MINUTES",
        help=f"how long an ended run is still served (default: {minutes:.0f})",
    )
    options = parser.parse_args(argv)
    folder = Path(options.folder).expanduser()
    if not folder.is_dir():
        raise bad("folder", folder, "there is no such folder", "give the folder that holds the runs")
    if not 0 < options.port < 65536:
        raise bad("--port", options.port, "must be 1 to 65535", f"--port={PORT}")
    if find_spec("prometheus_client") is None:
        rule = "prometheus-client is not installed"
        raise bad("metrics", "serve", rule, "pip install 'dtrain[prometheus]'")
    collector = prometheus.Collector(folder, keep_s=60 * options.keep)

    def ready() -> None:
        place = f"http://{options.host}:{options.port}/metrics"
        print(f"{place}: {counted(len(collector.runs), 'run')} of {short_path(folder)} now; Ctrl-C ends it", flush=True)

    try:
        prometheus.serve(collector, options.host, options.port, ready)
    except OSError as error:
        raise ports.refusal("--port", options.port, options.host, error, sign=" ") from None
    except KeyboardInterrupt:
        pass
    return 0
