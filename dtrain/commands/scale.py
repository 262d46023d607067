"""`dtrain scale`: change the number of ranks or nodes of a running elastic run."""

from __future__ import annotations

import shlex

from dtrain.commands.run_parser import RunParser
from dtrain.config import elastic, run_file
from dtrain.errors import bad
from dtrain.launch.members import Members, request
from dtrain.runs.find import find_run
from dtrain.runs.record import load
from dtrain.ui.console import resume_command
from dtrain.util.format import shell_path, short_path


def main(argv: list[str]) -> int:
    """`dtrain scale`: ask a run to continue with another number of ranks or nodes."""
    text = "Let a running run with cluster.processes=MIN:MAX or cluster.nodes=MIN:MAX continue with another number."
    parser = RunParser("dtrain scale", description=text)
    parser.add_argument("run", help="a run folder, a part of its name, or latest")
    parser.add_argument("number", type=int, help="how many ranks, or nodes on a cluster, shall take part")
    options = parser.parse_args(argv)
    run_dir = find_run(options.run)
    config = run_file.load(run_dir)
    found = elastic.range_of(config)
    (record,), _ = load([run_dir], ask_all=True)
    if not record.is_live:
        done = f" train.steps=… {shlex.quote('resume_allow=[train.steps]')}" if record.status == "done" else ""
        unit = "cluster.nodes" if found and found.unit == "node" else "cluster.processes"
        fix = f"{resume_command(run_dir)} {unit}={options.number}{done}"
        raise bad("scale", short_path(run_dir), f"the run has ended ({record.status})", fix)
    if found is None:
        rule = "the run has a fixed number of ranks"
        fix = f"stop it, then {resume_command(run_dir)} cluster.processes=1:{options.number}"
        raise bad("scale", short_path(run_dir), rule, fix)
    members = Members(config, record.launch.get("usable_sizes"))
    members.check(options.number)
    has = len(record.attempts[-1]["nodes"] or []) if record.attempts else 0
    if found.unit == "node" and options.number > has and not config["cluster"]["requeue"]:
        rule = f"the job has {has} nodes, and only a new place in the queue gets more (cluster.requeue=false)"
        raise bad("scale", options.number, rule, f"dtrain cancel --save RUN, then {resume_command(run_dir)}")
    request(run_dir, options.number)
    print(
        f"{short_path(run_dir)} was asked to save and to continue with {members.count(options.number)}: "
        f"dtrain status {shell_path(run_dir)}"
    )
    return 0
