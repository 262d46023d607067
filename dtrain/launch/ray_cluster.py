"""Launch on Ray: a placement group reserves the nodes, and an actor for each rank starts and watches its process.

The supervisor is the same as on any other launcher, and runs in the process that you started. The rank itself is a
process of its own below its actor, so that it starts, saves and fails as everywhere. When the launcher, an actor or a
node dies, its ranks die with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from dtrain import start
from dtrain.checks import profile as profiling
from dtrain.config import run_file
from dtrain.config.build import TRUST, typed_trust
from dtrain.errors import bad
from dtrain.launch import metrics_server
from dtrain.launch.supervisor import PEERS_S, Supervisor, hang_settings, rank_module
from dtrain.launch.wait_graph import Position
from dtrain.preflight import network_env
from dtrain.runs import causes
from dtrain.runs.folder import note_attempt, read_summary
from dtrain.runs.protocol import DONE, PREEMPTED, STACK_SIGNAL, STARTER, free_port

GONE_S = 10.0  # to wait for killed ranks
# variables of the launcher that ranks get; keys of trackers are not among them, as the launcher feeds the trackers
PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "FI_", "UCX_", "HF_", "OMP_", "MKL_", "DTRAIN_")


class Ray:
    """Runs on Ray, on this machine or on an existing cluster."""

    def __init__(
        self,
        address: str | None = None,
        nodes: int = 1,
        gpus_per_node: int = 0,
        processes: int | None = None,
        cpus_per_rank: int = 1,
        max_restarts: int = 0,
        grace_s: int = 300,
        start_s: int = 600,
        hang_timeout: float | None = None,
        on_hang: Literal["stop", "warn"] = "stop",
        autoscaling: bool = False,
        system_metrics_every: float = 5,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
    ) -> None:
        self.address, self.nodes, self.autoscaling = address or running_cluster(), nodes, autoscaling
        if self.address is None and nodes != 1:
            rule = "without cluster.address, Ray is started on this machine, which is one node"
            raise bad(
                "cluster.nodes", nodes, rule, "cluster.nodes=1, or cluster.address=auto for a running Ray cluster"
            )

    def check(self, config: dict[str, Any]) -> None:
        if config["dry_run"]:  # it can be previewed without Ray
            return
        if importlib.util.find_spec("ray") is None:
            raise bad("cluster", "ray", "ray is not installed", "pip install 'dtrain[ray]', or cluster=local")
        gpus, ranks = config["cluster"]["gpus_per_node"], config["cluster"]["processes"]
        if gpus > ranks and gpus % ranks:
            rule = f"must be a multiple of cluster.processes={ranks}: Ray gives each rank as many"
            raise bad("cluster.gpus_per_node", gpus, rule, f"cluster.processes={gpus}")
        if config.get("nsys"):
            raise bad("nsys", "true", "is not there under Ray", "cluster=local, or profile=torch")
        if config["preflight"]["level"] != "off":
            rule = "preflight needs a launcher that starts programs on nodes, and Ray starts actors"
            raise bad("preflight", config["preflight"]["level"], rule, "preflight=off")
        metrics_server.check(config["cluster"])
        profiling.check_machine(config)
        if self.address is not None:
            self._check_room(config["cluster"])

    def _check_room(self, cluster: dict[str, Any]) -> None:
        """Refuse what the nodes of this cluster could never hold; nodes that an autoscaler adds are not known."""
        wanted = bundle(cluster)
        with connected(cluster) as ray:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = [node for node in alive if all(node.get(key, 0) >= value for key, value in wanted.items())]
        if len(fitting) < self.nodes and not self.autoscaling:
            text = ", ".join(f"{value:g} {key}" for key, value in wanted.items())
            rule = f"only {len(fitting)} of the {len(alive)} nodes of {self.address} have {text} for their ranks"
            fix = "fewer nodes, ranks or GPUs; add nodes (ray start --address=…); cluster.autoscaling=true if Ray does"
            raise bad("cluster.nodes", self.nodes, rule, fix)

    def dry_run(self, run_dir: Path, config: dict[str, Any]) -> None:
        supervisor = OnRay(config)
        for name, value in supervisor.environment().items():
            print(f"export {name}={network_env.quote(value)}")
        cluster = config["cluster"]
        print(
            f"# ray.init(address={self.address!r}), a placement group of {cluster['nodes']} × {bundle(cluster)}, and in"
        )
        print(
            f"# each of {supervisor.num_ranks} actors, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT:"
        )
        print(shlex.join(supervisor.command(run_dir)))

    def launch(self, run_dir: Path) -> int:
        config = run_file.load(run_dir)
        with connected(config["cluster"]):  # before the supervisor's signal handlers: Ray installs one for SIGTERM
            supervisor = OnRay(config)
            note_attempt(run_dir, "start")
            code = supervisor.supervise(run_dir)
            ended = read_summary(run_dir).get("status", "")
            why = ended if code in (DONE, PREEMPTED) else causes.one_line(supervisor.failure)
            note_attempt(run_dir, "end", code=code, why=why)
            return code


def running_cluster() -> str | None:
    """Return the address of the Ray cluster that this process belongs to: in a Ray job, task or actor, or connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return os.environ.get("RAY_ADDRESS")


@contextlib.contextmanager
def connected(cluster: dict[str, Any]) -> Iterator[Any]:
    """Connect to a cluster, or start one of this machine that is large enough for the ranks; yield the module ray.

    A connection that this process has already, as dtrain.fit finds in a Ray task, is used, and stays.
    """
    import ray

    address = cluster["address"] or running_cluster()
    if ray.is_initialized():
        if address not in ("auto", running_cluster()):
            rule = f"this process is connected to {running_cluster()}, and to one cluster only"
            raise bad("cluster.address", address, rule, "leave it out, or ray.shutdown() before")
        yield ray
        return
    own: dict[str, Any] = {}
    if address is None:
        wanted = bundle(cluster)
        own = {"num_cpus": wanted["CPU"], "num_gpus": wanted.get("GPU", 0), "include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **own)
    except ConnectionError as error:
        why = str(error).strip().splitlines()[0]
        raise bad("cluster.address", address, f"no Ray cluster answers ({why})", "ray status") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def bundle(cluster: dict[str, Any]) -> dict[str, float]:
    """What the ranks of one node reserve together."""
    gpus = int(cluster["gpus_per_node"])
    return {"CPU": cluster["processes"] * cluster["cpus_per_rank"]} | ({"GPU": gpus} if gpus else {})


# ---- the ranks -----------------------------------------------------------------------------------------------


class Rank:
    """An actor: the process of one rank, on the node where Ray has put it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str, int, str]:
        """(host name, address, a free port, the GPUs that Ray has given to this rank)."""
        import socket

        import ray

        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return socket.gethostname(), str(ray.util.get_node_ip_address()), free_port(), gpus

    def run(self, argv: list[str], env: dict[str, str], cwd: str, log: str) -> int:
        """Run the rank to its end; return its exit code, negative for a signal."""
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                argv, env=os.environ | env | {STARTER: str(os.getpid())}, cwd=cwd if os.path.isdir(cwd) else None,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=ignore_early_stops,
            )  # fmt: skip
        return self.process.wait()

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def ignore_early_stops() -> None:
    """A stop signal must not end a rank whose Python is still starting: it finds the stop file later."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class RayRanks:
    """The ranks of one attempt, with those methods of a process that a supervisor calls; none of them waits for Ray."""

    def __init__(
        self,
        cluster: dict[str, Any],
        argv: list[str],
        env: dict[str, str],
        log: Path,
        on_placed: Callable[[list[str]], None],
    ) -> None:
        import ray
        from ray.util.placement_group import placement_group

        self.ray, self.cluster, self.argv, self.env, self.log = ray, cluster, argv, env, log
        self.on_placed = on_placed  # called with the nodes' names
        strategy = "STRICT_SPREAD" if cluster["nodes"] > 1 else "STRICT_PACK"
        self.group = placement_group([bundle(cluster)] * cluster["nodes"], strategy=strategy)
        self.ready, self.places = self.group.ready(), list[Any]()
        self.actors: list[Any] = []
        self.running: dict[Any, int] = {}  # the rank of each call of `run`
        self.exits: list[tuple[int, int]] = []  # (rank, exit code), in the order in which they were seen
        self.returncode: int | None = None
        self.ends_at = float("inf")  # when the other ranks are ended after a failure
        self.problem = ""  # what Ray itself reported

    @property
    def num_ranks(self) -> int:
        return int(self.cluster["nodes"] * self.cluster["processes"])

    def poll(self) -> int | None:
        try:
            if self.returncode is None:
                self._look()
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            self._give_up(f"the connection to Ray was lost: {error}")
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End all ranks; also before Ray has found room for them, and wait until they are gone."""
        with contextlib.suppress(self.ray.exceptions.RayError, ConnectionError):
            for actor in self.actors:
                self.ray.kill(actor)
            if self.running:
                self.ray.wait(list(self.running), num_returns=len(self.running), timeout=GONE_S)
            self.ray.util.remove_placement_group(self.group)
        self.returncode = self.returncode or -signal.SIGKILL

    def _give_up(self, problem: str) -> None:
        """End the attempt with a problem of Ray itself, which the supervisor finds in the log."""
        self.problem = problem
        with open(self.log, "a") as file:
            file.write(f"{problem}\n")
        self.kill()
        self.returncode = 1

    @property
    def waits(self) -> bool:
        """Has no rank been started yet? Then there is nothing to save."""
        return not self.running and not self.exits

    def give_up_waiting(self) -> None:
        self.kill()
        self.returncode = PREEMPTED

    def send(self, ranks: list[int], number: int) -> None:
        for rank in ranks if self.running else []:
            self.actors[rank].send.remote(number)

    def _look(self) -> None:
        if not self.actors:
            if self._done(self.ready):
                self._make_actors()
        elif self.waits:
            if all(map(self._done, self.places)):
                self._begin()
        else:
            self._collect()

    def _done(self, reference: Any) -> bool:
        return bool(self.ray.wait([reference], timeout=0)[0])

    def _make_actors(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each, gpus = self.cluster["processes"], self.cluster["gpus_per_node"] / self.cluster["processes"]
        actor = self.ray.remote(num_cpus=self.cluster["cpus_per_rank"], num_gpus=gpus, max_concurrency=2)(Rank)
        for rank in range(self.num_ranks):
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank // each)
            self.actors.append(actor.options(scheduling_strategy=place).remote())
        self.places = [actor.where.remote() for actor in self.actors]

    def _begin(self) -> None:
        try:
            places = self.ray.get(self.places)
        except self.ray.exceptions.RayError as error:  # a node was lost while they started
            return self._give_up(f"an actor could not start: {error}")
        each = self.cluster["processes"]
        self.on_placed([places[node * each][0] for node in range(self.cluster["nodes"])])
        _, address, port, _ = places[0]
        shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(self.num_ranks)}
        shared |= {"LOCAL_WORLD_SIZE": str(each)} | self.env
        for rank, actor in enumerate(self.actors):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % each)}
            of_node = [place[3] for place in places[rank - rank % each :][:each]]  # in the order of the local ranks
            if all(of_node):  # a rank sees all GPUs of its node and takes its own, as everywhere
                own["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(",".join(of_node).split(",")))
            self.running[actor.run.remote(self.argv, shared | own, os.getcwd(), str(self.log))] = rank

    def _collect(self) -> None:
        for reference in filter(self._done, list(self.running)):
            rank = self.running.pop(reference)
            try:
                code = int(self.ray.get(reference))
            except self.ray.exceptions.RayTaskError as error:  # no such folder or Python on that node
                return self._give_up(f"rank {rank} could not be started: {error.cause}")
            except self.ray.exceptions.RayError:  # the actor or its node is gone, and the rank with it
                code = -signal.SIGKILL
            self.exits.append((rank, code))
        failed = any(code not in (DONE, PREEMPTED) for _, code in self.exits)
        if failed and self.ends_at == float("inf"):
            self.ends_at = time.monotonic() + PEERS_S  # the others may report what they lost
        if not self.running or time.monotonic() > self.ends_at:
            self._end()

    def _end(self) -> None:
        bad_codes = [code for _, code in self.exits if code]
        self.kill()
        self.returncode = bad_codes[0] if bad_codes else 0


class OnRay(Supervisor):
    """Supervises the ranks of Ray's actors."""

    log_name = "ray.log"
    ranks: RayRanks | None = None

    def __init__(self, config: dict[str, Any]) -> None:
        cluster = config["cluster"]
        self.config, self.cluster = config, cluster
        num_ranks = cluster["nodes"] * cluster["processes"]
        super().__init__(num_ranks, cluster["max_restarts"], cluster["grace_s"], *hang_settings(cluster))
        self.start_s, self.is_one_host = cluster["start_s"], cluster["nodes"] == 1

    def command(self, run_dir: Path) -> list[str]:
        return [*start.command(rank_module(self.config)), str(run_dir)]

    def environment(self) -> dict[str, str]:
        """All that ranks elsewhere inherit from the launcher: they inherit the environment of Ray's node here."""
        given = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        wanted = network_env.environment(self.config, os.environ) | start.environment() | given
        wanted.setdefault("OMP_NUM_THREADS", str(self.cluster["cpus_per_rank"]))
        return wanted | ({TRUST: ",".join(typed_trust())} if typed_trust() else {})

    def start(self, run_dir: Path, log: IO[bytes]) -> RayRanks:
        argv, env = self.command(run_dir), self.environment()
        self.ranks = RayRanks(
            self.cluster, argv, env, run_dir / "logs" / self.log_name,
            on_placed=lambda nodes: note_attempt(run_dir, "placed", nodes=nodes),
        )  # fmt: skip
        return self.ranks

    def kill(self, process: Any) -> None:
        process.kill()

    def on_stop(self) -> None:
        """Signal the ranks: a network file system may hide a new stop file for a minute."""
        if self.ranks is not None and self.ranks.waits:
            self.ranks.give_up_waiting()
        elif self.ranks is not None:
            self.ranks.send(list(range(self.num_ranks)), signal.SIGUSR1)

    def ask_for_stacks(self, positions: dict[int, Position]) -> None:
        if self.ranks is not None:
            self.ranks.send(list(positions), STACK_SIGNAL)

    def killed_ranks(self, log: str) -> list[tuple[int, str]]:
        exits = self.ranks.exits if self.ranks else []
        return [(rank, signal.Signals(-code).name) for rank, code in exits if code < 0][:1]

    def ended_well(self, log: str) -> list[int]:
        return [rank for rank, code in self.ranks.exits if code == 0] if self.ranks else []

    def place(self) -> dict[str, Any]:
        return {}  # not known yet
