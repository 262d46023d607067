"""A real SLURM cluster of several virtual nodes on one machine, so that launchers meet a scheduler and not a mock.

Every node is a real `slurmd` with its own host name and /etc/hosts (a uts and a mount namespace); with `network=True`
also with its own network and process table. All nodes share this machine's files. Root only; SLURM 22.05 or newer.

A client, whether `sbatch` or `python launch.py`, runs on the host as usual and needs only the environment, for the
network variant too (slurmctld listens on the host's end of the cluster's network):

    subprocess.run([sys.executable, "launch.py", …], env={**os.environ, **cluster.env})

A test file takes a fixture with `cluster = slurm.cluster` at its top. Authentication is off (auth/none): any user of
this machine could submit a job. Mounts that the host makes after the start are not seen by the nodes unless / is
shared: make them in the node, `[*cluster.inside("node1"), "mount", …]`.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dtrain.runs.protocol import Deadline, slowness
from tests.patience import patience

FINISHED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
FORGOTTEN = "FORGOTTEN"  # not SLURM's word: a job older than MinJobAge, of which `scontrol show job` knows nothing
CLEAN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
_count = itertools.count()

SLURM_CONF = """
ClusterName=fake
SlurmctldHost=head({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire={cred_expire}  # a requeued job waits for this long: 121 s without it
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides  # more CPUs and memory than the machine has
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
MinJobAge={min_job_age}
ReturnToService=1
SlurmdTimeout={slurmd_timeout}
GresTypes=gpu
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""

SLURMDBD_CONF = """
AuthType=auth/none
DbdHost=head
DbdAddr={address}
DbdPort={port}
SlurmUser=root
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""

# one statement a line: mariadbd executes only the first one of each
DATABASE = """
CREATE DATABASE slurm;
CREATE USER slurm@'%' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm.* TO slurm@'%';
"""

# The daemons listen on the address that their host name has (NoInAddrAny), so each needs a name and an /etc/hosts.
NAMED = """mount --bind "$1/etc/hosts" /etc/hosts && echo "$2" >/proc/sys/kernel/hostname || exit 1
"""
HEAD = NAMED + "echo ready; exec sleep infinity"
SWITCH = "echo ready; exec sleep infinity"
NODE = NAMED + 'echo ready; read _; exec slurmd -D -N "$2" </dev/null >"$1/log/$2.out"'
# the network is plugged in between `ready` and `read`: slurmd starts when its address is there
# as the first process of a process table, the shell adopts and reaps what a killed step leaves
NETWORK_NODE = (
    NAMED
    + """
[ ! -e /etc/resolv.conf ] || mount --bind "$1/etc/resolv.conf" /etc/resolv.conf || exit 1
mount -t tmpfs tmpfs /dev/shm && ip link set lo up || exit 1
echo ready; read _; exec </dev/null >"$1/log/$2.out"
slurmd -D -N "$2" &
while :; do wait; sleep 1; done
"""
)


class Cluster:
    """`nodes` virtual nodes node1, node2 … with 2 fake GPUs each, and the partitions main (the default), low, high.

    Jobs in `low` are preempted by the other two: TERM, `grace` seconds, then a requeue. All that the cluster writes is
    under `folder`, whose path must be short (unix sockets: at most about 60 characters).
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        network: bool = False,
        accounting: bool = False,
        cpus: int = 8,
        memory: int = 64_000,  # MB, as the CPUs only a claim
        min_job_age: int = 300,
        kill_wait: int = 15,
        grace: int = 5,
    ) -> None:
        self.folder = folder
        self.nodes = [f"node{i + 1}" for i in range(nodes)]
        self.network = network
        self.accounting = accounting
        self.cpus = cpus
        self.memory = memory
        self.min_job_age = min_job_age
        self.kill_wait = kill_wait
        self.grace = grace
        self.conf = folder / "etc" / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}
        self.subnet = _free_subnet() if network else ""
        self.address = f"{self.subnet}.254" if network else "127.0.0.1"  # of slurmctld and of clients
        self.port, self.database_port, self.dbd_port, *self.node_ports = _free_ports(nodes + 3)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._namespaces: dict[str, int] = {}  # every process of a node is found by its uts namespace
        self._uplink = f"dt{os.getpid()}x{next(_count)}"  # the host's end of the network; 15 characters at most

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when every node is idle; otherwise raises with the daemons' logs, and leaves nothing running."""
        try:
            self._write()
            self._start_head()
            if self.accounting:
                self._start_accounting()
            self.start_controller("-c")
            for name in self.nodes:
                self._start_slurmd(name)
            self._until(lambda: all(self.node_state(name) == "idle" for name in self.nodes), 30, "idle nodes")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill it all: no process, namespace, mount or network device stays. The folder stays, with its logs."""
        for name in self.nodes:
            self.kill_node(name)
        self.stop_controller()  # not killed: it would leave its slurmscriptd
        for name in ("slurmdbd", "mariadbd"):
            self._kill(name)
        if self.network:
            _sh("ip", "link", "del", self._uplink, check=False)
        for name in ("switch", "head"):
            self._kill(name)
        shutil.rmtree(self.folder / "db", ignore_errors=True)  # 100 MB

    def start_controller(self, *options: str) -> None:
        """With `-c` without the saved state."""
        self._spawn("slurmctld", *self.inside("head"), "slurmctld", "-D", *options)
        self._until(lambda: _listens(self.address, self.port), 30, "slurmctld")

    def stop_controller(self) -> None:
        """slurmctld ends and keeps its state; jobs run on. Clients now block or fail: give them a timeout."""
        self._kill("slurmctld", signal.SIGTERM)

    def kill_node(self, name: str) -> None:
        """Power loss: slurmd, its steps, their tasks and whatever these started are killed at once. SLURM notices after
        25 to 32 s."""
        namespace = self._namespaces.pop(name, None)
        for pid in _processes(namespace) if namespace else []:
            # one that is killed late would react to the death of the others, as srun does by ending its step
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        while namespace and (pids := _processes(namespace)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if name in self._daemons:
                self._daemons[name].poll()
            time.sleep(0.01)
        self._kill(name)

    def start_node(self, name: str, timeout: float = 60) -> None:
        """The node comes back, without its jobs; returns when SLURM would use it again."""
        self._start_slurmd(name)
        self._until(lambda: self.node_state(name) in ("idle", "mixed", "allocated"), timeout, f"{name} in service")

    # -- clients --------------------------------------------------------------------------------------------------

    def client_env(self) -> dict[str, str]:
        """This process's environment with the cluster's, and without what an outer SLURM job may have set."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return kept | self.env

    def run(self, *argv: str | Path, timeout: float = 30, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """A client command (sinfo, squeue, sbatch …) on the head; its output is captured, its failure not raised."""
        place = f"--chdir={kwargs.pop('cwd', os.getcwd())}"  # nsenter goes to /
        command = [*self.inside("head"), "env", place, *(str(arg) for arg in argv)]
        kwargs = {"env": self.client_env(), "stdin": subprocess.DEVNULL, **kwargs}
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(timeout), **kwargs)

    def sbatch(self, *argv: str | Path, script: str | None = None) -> str:
        """The id of the job; `script` is what `--wrap` takes. A refusal is raised."""
        wrap = () if script is None else (f"--wrap={script}",)
        result = self.run("sbatch", "--parsable", *wrap, *argv)
        if result.returncode:
            raise RuntimeError(f"sbatch: {result.stderr.strip()}")
        return result.stdout.strip().split(";")[0]

    def job(self, job_id: str | int) -> dict[str, str]:
        """`scontrol show job` as a dictionary; empty when SLURM does not know the job, or has forgotten it."""
        result = self.run("scontrol", "show", "job", "-o", str(job_id))
        if result.returncode:
            if "Invalid job id" in result.stderr:
                return {}
            raise RuntimeError(f"scontrol: {result.stderr.strip()}")
        pairs = re.findall(r"([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", result.stdout.splitlines()[0])
        return dict(reversed(pairs))  # of two, the first: a command's own arguments come late

    def wait(
        self, job_id: str | int, states: str | Collection[str] = FINISHED, timeout: float = 60, restarts: int = 0
    ) -> str:
        """The job's state once it is one of `states` after at least `restarts` requeues.

        A forgotten job counts as finished (FORGOTTEN). A job that has ended, and stays so, raises when `states` waits
        for something else.
        """
        states = {states} if isinstance(states, str) else states
        deadline, ended = Deadline(timeout), None
        while True:
            job = self.job(job_id)
            state = job["JobState"] if job else FORGOTTEN
            if state in states and int(job.get("Restarts", restarts)) >= restarts:
                return state
            if not job and FINISHED & set(states):
                return FORGOTTEN
            # after the loss of a node NODE_FAIL stands there for seconds before the requeue
            ended = (ended or Deadline(10)) if state in {*FINISHED, FORGOTTEN} else None
            if deadline.left() <= 0 or (ended and ended.left() <= 0):
                raise TimeoutError(
                    f"job {job_id} is {state} after {deadline}, not {sorted(states)} with {restarts} restarts: {job}\n"
                    f"{self.state()}"
                )
            time.sleep(0.2)

    def node_state(self, name: str) -> str:
        """idle, mixed, allocated, completing, down …; a trailing * (it does not answer) stays."""
        result = self.run("sinfo", "-h", "-N", "-p", "main", "-n", name, "-o", "%T", timeout=20)
        return result.stdout.strip()

    # -- nodes ----------------------------------------------------------------------------------------------------

    def inside(self, name: str) -> list[str]:
        """What to put before a command to run it, from /, in the node or on the `head`.

        nsenter, for `ip netns exec` would replace /sys, at which slurmd stumbles.
        """
        pid = self._daemons[name].pid
        prefix = ["nsenter", f"--target={pid}", "--uts", "--mount"]
        if self.network and name != "head":
            prefix += ["--net", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return [*prefix, "--"]

    def link(self, name: str, up: bool) -> None:
        """Plug the node's eth0 in or out; its processes run on."""
        self._in_net(name, "ip", "link", "set", "eth0", "up" if up else "down")
        if up:  # it went with the link
            self._in_net(name, "ip", "route", "replace", "default", "via", self.address)

    def slow_link(self, name: str, rate: str | None) -> None:
        """At most `rate` (as tc writes it: 10mbit) from and to the node, each; None undoes it."""
        for place, device in ((name, "eth0"), ("switch", name)):
            if rate is None:
                self._in_net(place, "tc", "qdisc", "del", "dev", device, "root")
            else:
                limit = ("rate", rate, "burst", "64kb", "latency", "200ms")
                self._in_net(place, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    # -- how ------------------------------------------------------------------------------------------------------

    def _node_address(self, name: str) -> str:
        return f"{self.subnet}.{self.nodes.index(name) + 1}" if self.network else "127.0.0.1"

    def _write(self) -> None:
        for sub in ("etc", "state", "run", "log", *(f"spool/{name}" for name in self.nodes)):
            (self.folder / sub).mkdir(parents=True, exist_ok=True)
        for gpu in ("gpu0", "gpu1"):  # any device will do; without one the node is drained
            os.mknod(self.folder / "etc" / gpu, stat.S_IFCHR | 0o600, os.stat("/dev/null").st_rdev)
        # three times at most: a requeue and a lost node take as long as these limits are
        common, slow = {"address": self.address, "folder": self.folder}, min(3.0, slowness())
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={self._node_address(name)} Port={port} "
            f"CPUs={self.cpus} CoresPerSocket={self.cpus} RealMemory={self.memory} Gres=gpu:2"
            for name, port in zip(self.nodes, self.node_ports, strict=True)
        )
        accounting = (
            "AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost={self.address}\nAccountingStoragePort={self.dbd_port}"
        )
        self.conf.write_text(
            SLURM_CONF.format(
                **common,
                port=self.port,
                nodes=nodes,
                accounting=accounting if self.accounting else "",
                kill_wait=self.kill_wait,
                min_job_age=self.min_job_age,
                grace=self.grace,
                cred_expire=round(5 * slow),  # on a busy machine a step may be launched after it, and is refused then
                slurmd_timeout=round(10 * slow),  # a node that only is slow to answer would be down
            )
        )
        etc = self.conf.parent
        (etc / "gres.conf").write_text(f"NodeName={','.join(self.nodes)} Name=gpu File={etc}/gpu[0-1]\n")
        # there is no way out of a node's network: a look-up says so at once, where the host's server would take 20 s
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # the only one that needs no cgroup mount
        (etc / "slurmdbd.conf").write_text(
            SLURMDBD_CONF.format(**common, port=self.dbd_port, database=self.database_port)
        )
        (etc / "slurmdbd.conf").chmod(0o600)
        names = [(self._node_address(name), name) for name in self.nodes]
        hosts = [("127.0.0.1", "localhost"), ("::1", "localhost"), (self.address, "head"), *names]
        (etc / "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))

    def _spawn(self, name: str, *argv: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        """A daemon with a clean environment, which dies with this process even if that is killed."""
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            kwargs = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, **kwargs}
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                env=CLEAN | self.env,
                cwd=self.folder,
                start_new_session=True,  # ctrl-c is for the tests
                **kwargs,
            )
        return self._daemons[name]

    def _kill(self, name: str, number: int = signal.SIGKILL) -> None:
        if process := self._daemons.pop(name, None):
            process.send_signal(number)
            process.wait(patience(30))

    def _spawn_ready(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        """Returns when the daemon has said `ready`: from then on it is in its namespaces."""
        process = self._spawn(name, *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin and process.stdout
        with process.stdout:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{name} did not start\n{self.logs()}")
        return process

    def _start_head(self) -> None:
        unshare = ("unshare", "--uts", "--mount", "--propagation", "slave")
        self._spawn_ready("head", *unshare, "sh", "-c", HEAD, "sh", str(self.folder), "head")
        if not self.network:
            return
        # the switch has a namespace of its own, where no firewall of the host sees it, with one cable to the host
        switch = self._spawn_ready("switch", "unshare", "--net", "sh", "-c", SWITCH)
        self._in_net("switch", "ip", "link", "add", "br0", "type", "bridge")
        self._in_net("switch", "ip", "link", "set", "br0", "up")
        _sh("ip", "link", "add", self._uplink, "type", "veth", "peer", "name", "host", "netns", str(switch.pid))
        self._in_net("switch", "ip", "link", "set", "host", "master", "br0", "up")
        _sh("ip", "addr", "add", f"{self.address}/24", "dev", self._uplink)
        _sh("ip", "link", "set", self._uplink, "up")

    def _start_slurmd(self, name: str) -> None:
        # slave: mounts of the host appear in the node (where / is shared), never the other way round
        unshare = ["unshare", "--uts", "--mount", "--propagation", "slave"]
        if self.network:
            unshare += ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = NETWORK_NODE if self.network else NODE
        process = self._spawn_ready(name, *unshare, "sh", "-c", script, "sh", str(self.folder), name)
        self._namespaces[name] = os.stat(f"/proc/{process.pid}/ns/uts").st_ino
        if self.network:
            self._plug(name, process.pid)
        assert process.stdin
        with process.stdin:
            process.stdin.write(b"\n")

    def _plug(self, name: str, pid: int) -> None:
        self._in_net("switch", "ip", "link", "del", name, check=False)  # of a killed node: the kernel removes it late
        self._in_net("switch", "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._in_net("switch", "ip", "link", "set", name, "master", "br0", "up")
        self._in_net(name, "ip", "addr", "add", f"{self._node_address(name)}/24", "dev", "eth0")
        self.link(name, True)

    def _in_net(self, name: str, *argv: str, check: bool = True) -> None:
        assert self.network, "for Cluster(network=True) only"
        _sh("nsenter", f"--target={self._daemons[name].pid}", "--net", "--", *argv, check=check)

    def _start_accounting(self) -> None:
        data, sql = self.folder / "db", self.folder / "etc" / "init.sql"
        sql.write_text(DATABASE)
        options = ("--no-defaults", "--user=root", f"--datadir={data}", "--innodb-log-file-size=4M")
        auth = "--auth-root-authentication-method=normal"
        _sh("mariadb-install-db", *options, auth, "--skip-test-db", "--skip-name-resolve")
        listen = (f"--socket={data}/sock", f"--port={self.database_port}", "--bind-address=127.0.0.1")
        quick = ("--innodb-flush-log-at-trx-commit=0", "--skip-name-resolve", f"--init-file={sql}")
        self._spawn("mariadbd", "mariadbd", *options, *listen, *quick, f"--pid-file={self.folder}/run/mariadbd.pid")
        self._until(lambda: _listens("127.0.0.1", self.database_port), 30, "mariadbd")
        self._spawn("slurmdbd", *self.inside("head"), "slurmdbd", "-D")
        self._until(lambda: _listens(self.address, self.dbd_port), 30, "slurmdbd")
        self._until(lambda: self.run("sacctmgr", "-i", "add", "cluster", "fake").returncode == 0, 20, "the cluster")

    def _until(self, true: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = Deadline(timeout)
        while not true():
            dead = [name for name, process in self._daemons.items() if process.poll() is not None]
            if dead or deadline.left() <= 0:
                raise RuntimeError(f"no {what} after {deadline}; ended: {dead or 'none'}\n{self.logs()}")
            time.sleep(0.05)

    def state(self) -> str:
        """The queue, the nodes and the ends of the daemons' logs, for the message of who waited for something else."""
        shown = [self.run(*command) for command in (("squeue", "--all"), ("sinfo", "-N", "-l"))]
        return "\n".join([*(result.stdout + result.stderr for result in shown), self.logs(10)])

    def logs(self, lines: int = 30) -> str:
        """The ends of the daemons' logs."""
        paths = sorted(path for path in (self.folder / "log").iterdir() if path.stat().st_size)
        texts = (path.read_text(errors="replace").splitlines()[-lines:] for path in paths)
        return "\n".join(f"--- {path.name}\n" + "\n".join(text) for path, text in zip(paths, texts, strict=True))


def _sh(*argv: str, check: bool = True) -> None:
    result = subprocess.run(argv, capture_output=True, text=True)
    if check and result.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {result.stderr or result.stdout}")


def _processes(namespace: int) -> list[int]:
    """All living processes of one uts namespace, however they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.stat(entry / "ns" / "uts").st_ino == namespace:
                    found.append(int(entry.name))
            except OSError:  # it has ended
                pass
    return found


def _listens(address: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1)
        return sock.connect_ex((address, port)) == 0


def _free_ports(number: int) -> list[int]:
    """Below 32768, from where the kernel takes the ports of outgoing connections."""
    found: list[int] = []
    chance = random.SystemRandom()  # a test may have seeded the other one
    while len(found) < number:
        port = chance.randrange(15_000, 32_000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def _free_subnet() -> str:
    """The first three bytes of a /24 that this host has no route for."""
    routes = subprocess.run(["ip", "-4", "route", "show", "table", "all"], capture_output=True, text=True).stdout
    chance = random.SystemRandom()
    while (net := f"10.{chance.randrange(100, 250)}.{chance.randrange(0, 256)}") in routes:
        pass
    return net


def _missing(packages: str, *commands: str) -> str | None:
    absent = [command for command in commands if not shutil.which(command, path=CLEAN["PATH"])]
    return f"no {', '.join(absent)} here (apt-get install {packages})" if absent else None


def available() -> str | None:
    """Why no cluster can run here; None when one can."""
    if os.geteuid():
        return "a SLURM cluster of virtual nodes needs root"
    if missing := _missing("slurm-wlm util-linux", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", "setpriv"):
        return missing
    tried = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def network_available() -> str | None:
    """Why no cluster with `network=True` can run here; None when one can."""
    if reason := available() or _missing("iproute2", "ip", "tc"):
        return reason
    script = (
        "set -e; ip link add veth0 type veth peer name veth1; ip link add br0 type bridge; "
        "tc qdisc add dev veth0 root tbf rate 1mbit burst 64kb latency 200ms"
    )
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "sh", "-c", script], capture_output=True, text=True)
    return f"no virtual networks here: {tried.stderr.strip()}" if tried.returncode else None


def accounting_available() -> str | None:
    """Why no cluster with `accounting=True` can run here; None when one can."""
    return available() or _missing("slurmdbd mariadb-server", "slurmdbd", "mariadbd", "mariadb-install-db")


@contextmanager
def temporary(reason: str | None, nodes: int = 3, **kwargs: Any) -> Iterator[Cluster]:
    """A cluster in a folder of its own, which goes with it; skips the test when there is a `reason`."""
    if reason:
        pytest.skip(reason)
    # not pytest's folder: its path is long, and nobody but root should reach this cluster's sockets
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder,
        Cluster(Path(folder), nodes, **kwargs) as it,
    ):
        yield it


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes on 127.0.0.1, no accounting."""
    with temporary(available()) as it:
        yield it


@pytest.fixture(scope="module")
def accounting_cluster() -> Iterator[Cluster]:
    """With slurmdbd and a database, for sacct."""
    with temporary(accounting_available(), accounting=True) as it:
        yield it


@pytest.fixture(scope="module")
def network_cluster() -> Iterator[Cluster]:
    """Three nodes with an eth0, and a process table, each."""
    with temporary(network_available(), network=True) as it:
        yield it
