"""Hands off the shell: nothing that is typed is executed on its way through sbatch, bash and srun, and no secret stays.

Every payload would leave a canary if a shell took it for more than a word. What SLURM takes is really submitted and
really runs; what it refuses ends with 2 and leaves nothing.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import stat
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dtrain.checks.validate import check_text
from dtrain.cli import main
from dtrain.launch.quoting import quote
from dtrain.launch.slurm import Slurm
from tests import slurm, slurm_runs
from tests.slurm import Cluster
from tests.slurm_runs import NODES_1, attempts, job_id, said, submit
from tests.world import summary

cluster, here = slurm.cluster, slurm_runs.here
pytestmark = pytest.mark.timeout(600)

# {} is a command that leaves a canary
PAYLOADS = {
    "plain": "a$({})`{}`; {} && {} || {} | {} & {} #*?~$HOME",
    "quotes": "a'; {}; '\"; {}; \"'\"'\"'; {} #",
    "options": "a --wrap='{}' --output=x",
    "backslash": "a\\' --wrap='{}' \\'",
    "unicode": "é日本\u202e；$({})",
}
MORE = {
    "substitution": "$({})",
    "backticks": "`{}`",
    "semicolon": "; {}",
    "quote": "'; {}; '",
    "double-quote": '"; {}; "',
    "mixed-quotes": "'\"'\"'; {} #'\"",
    "pipe": "| {} &",
    "dashes": "--wrap={}",
    "dash": "-D;{}",
    "hash": "#{}",
    "escape": "a\\n{}\\",
    "arithmetic": "$(({}))",
    "brace": "{{}}",
}
CONTROL = {"newline": "a\n{}\n", "return": "a\r{}", "separator": "a\u2028{}", "nel": "a\x85{}", "escape": "\x1b[2J{}"}


def text_settings() -> list[str]:
    """Every setting of the launcher that takes text, by its annotation: a new one is covered without a new test."""
    annotations = {name: str(p.annotation) for name, p in inspect.signature(Slurm).parameters.items()}
    return [f"cluster.{name}" for name, kind in annotations.items() if re.search(r"\bstr\b", kind) and "[" not in kind]


PLACES = [
    *text_settings(),
    "name",
    "run_dir",
    "cluster.sbatch.comment",
    "cluster.srun",
    "cluster.fabric.interface",
    "cluster.fabric.hca",
    "cluster.fabric.env.NCCL_X.value",
]
TAKE_ANY_TEXT = ("name", "run_dir", "cluster.account", "cluster.mail_user", "cluster.sbatch.comment", "cluster.srun")


def test_a_new_kind_of_setting_needs_a_place_here() -> None:
    kinds = {str(p.annotation) for p in inspect.signature(Slurm).parameters.values()}
    assert {k for k in kinds if "[" in k and re.search(r"\bstr\b", k)} == {"dict[str, Any] | None", "list[str] | None"}
    assert len(text_settings()) >= 16, text_settings()


def words(place: str, payload: str) -> list[str]:
    """The overrides that put the payload there."""
    value = quote(payload)  # type: ignore[arg-type]
    if place == "cluster.srun":  # as a word of its own, and as the value of an option
        return [f"cluster.srun=[{value}]", f"cluster.srun=[{quote('--comment=' + payload)}]"]  # type: ignore[arg-type]
    if place.endswith(".value"):
        return [f"cluster.fabric.env={{NCCL_X: {{value: {value}, why: x}}}}"]
    return [f"{place}={value}"]


@pytest.fixture
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where payloads leave their traces: outside of the folder in which they are typed."""
    return tmp_path_factory.mktemp("canaries")


@pytest.mark.parametrize("place", PLACES)
def test_no_setting_is_executed(
    place: str,
    here: Path,
    canaries: Path,
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    runs = []
    payloads = PAYLOADS | (MORE if pytestconfig.getoption("--all") else {})
    for name, payload in payloads.items():
        # a name has no slash, and a run_dir with one is several folders
        touch = f"touch canary-{name}" if place in ("name", "run_dir") else f"touch {canaries}/{name}"
        for number, override in enumerate(words(place, payload.replace("{}", touch))):
            # a rank that ends at once: what matters is the way to it
            rank = [] if place == "cluster.python" else ["cluster.python=/bin/true"]
            folder = [] if place == "run_dir" else [f"run_dir=run-{name}-{number}"]
            before = set(here.iterdir())
            code = main(["launch", *NODES_1, *rank, *folder, override])
            error = capsys.readouterr().err
            new = [path for path in here.iterdir() if path not in before]
            if code:
                assert code == 2 and "fix: " in error, (override, error)
                assert not new, f"{override} was refused and left {new}"
            else:
                runs += new
    for run in runs:
        cluster.wait(job_id(run), timeout=120)
        assert len(attempts(run, "end")) == 1, f"{run}: the job did not come to its end"
    executed = [*canaries.iterdir(), *here.glob("**/canary-*")]
    assert not [path for path in executed if path not in runs], executed
    assert len(runs) >= 3 or place not in TAKE_ANY_TEXT, "nothing was tried: SLURM takes nearly any text here"


def test_the_canary_would_sing(here: Path, canaries: Path, cluster: Cluster) -> None:
    """The same payload where shell code is meant: so the test above can fail."""
    run = submit(*NODES_1, "cluster.python=/bin/true", f'cluster.setup=["echo $(touch {canaries}/plain)"]')
    cluster.wait(job_id(run))
    assert (canaries / "plain").exists()


@pytest.mark.parametrize("place", [*PLACES, "cluster.setup"])
def test_control_characters_are_refused_everywhere(
    place: str, here: Path, canaries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = CONTROL["newline"].replace("{}", "touch x" if place == "name" else f"touch {canaries}/x")
    overrides = [f"cluster.setup=[{quote(payload)}]"] if place == "cluster.setup" else words(place, payload)  # type: ignore[arg-type]
    for override in overrides:
        folder = [] if place == "run_dir" else ["run_dir=run"]
        assert main(["launch", *NODES_1, *folder, override]) == 2
        assert re.search(r"control character|must be|leave it out|whole number", capsys.readouterr().err)
        assert not list(here.iterdir()) and not list(canaries.iterdir())


@given(st.text(), st.sampled_from([*CONTROL.values(), "", "x"]), st.text())
@example("", "\x00", "")
@example("a\tb", "", "")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_is_refused_exactly_when_it_has_one(before: str, middle: str, after: str) -> None:
    """By Unicode's own word for them: control characters, and what ends a line or a paragraph."""
    text = before + middle + after
    has_one = any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in text)
    for flat in (
        {"cluster.partition": text},
        {"name": text},
        {"run_dir": text},
        {"cluster.srun": ["--x", text]},
        {"cluster.setup": [text]},
        {"cluster.sbatch.comment": text},
        {f"cluster.sbatch.{text}": "x"},
    ):
        try:
            check_text(flat)
        except ValueError as error:
            assert has_one and "control character" in str(error)
            assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in str(error).replace("\n  fix", ""))
        else:
            assert not has_one, repr(text)


def test_the_working_folder_is_a_setting_too(
    here: Path, canaries: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the path of the log, and in PYTHONPATH: in the script."""
    for name, words in ((f"a\ntouch {canaries.name}\n", "control character"), ("100%j", "%"), ("a\\", "\\")):
        folder = here / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert main(["launch", *NODES_1, "run_dir=run"]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: run_dir=") and words in message and "fix: " in message
        assert not list(folder.iterdir())


@given(st.text(st.sampled_from("ab'\"\\# -=$`;*é")).filter(lambda text: text.strip() and len(text) < 40))
@example("x' --comment=INJECTED '")
@example("x\\' --comment=INJECTED \\'")
@example('x" --comment=INJECTED "')
@example("--comment=INJECTED")
@example("a # b")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slurm_reads_a_name_as_it_was_typed(cluster: Cluster, name: str) -> None:
    """SLURM has its own reading of quotes; a name that it would take for options is refused."""
    launcher = Slurm(gpus_per_node=0, processes=1, sbatch={"hold": True})
    try:
        script = launcher.script(Path("/tmp/run"), name)
    except ValueError as error:
        assert "\\" in name and "backslash" in str(error)
        return
    job = cluster.run("sbatch", "--parsable", input=script, stdin=None).stdout.strip()
    assert job, f"refused: {script}"
    shown = cluster.run("scontrol", "show", "job", "-o", job).stdout
    cluster.run("scancel", job)
    assert f"JobName={name} UserId=" in shown and "INJECTED" not in shown.replace(name, ""), shown


@pytest.mark.parametrize(
    "payload", [*PAYLOADS.values(), *MORE.values(), *CONTROL.values(), "", "nice\n", "Nice", "n_e"]
)
def test_a_name_of_a_parameter_is_a_name(payload: str) -> None:
    with pytest.raises(ValueError, match="long name of an sbatch option"):
        Slurm(sbatch={payload: "x"})


@pytest.mark.parametrize("value", [None, False, [1], {"a": 1}])
def test_a_value_of_a_parameter_is_one_word(value: object) -> None:
    with pytest.raises(ValueError, match="must be text, a number, or true"):
        Slurm(sbatch={"comment": value})


# ---- code that is meant as code ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, value",
    [
        ("setup", ["touch {}"]),
        ("python", "sh -c 'touch {}'"),
        ("srun", ["--task-prolog={}"]),
        ("sbatch", {"export": "ALL,BASH_ENV={}"}),
    ],
)
def test_code_does_not_come_from_a_recipe_or_a_run_folder(
    setting: str, value: object, here: Path, canaries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = json.loads(json.dumps(value).replace("{}", str(canaries / "x")))
    OmegaConf.save(OmegaConf.create({"cluster": {setting: code}}), here / "theirs.yaml")
    assert main(["launch", *NODES_1, "recipe=theirs.yaml", "run_dir=run"]) == 2
    message = capsys.readouterr().err
    assert f"cluster.{setting}" in message and "command line" in message
    assert not (here / "run").exists()

    run = submit(*NODES_1, "cluster.python=/bin/true", "cluster.sbatch={hold: true}", run="theirs")
    main(["cancel", "theirs"])
    theirs = OmegaConf.load(run / "config.yaml")
    theirs.cluster[setting] = code
    theirs.cluster.sbatch = code if setting == "sbatch" else {}
    theirs.cluster.python = code if setting == "python" else None
    OmegaConf.save(theirs, run / "config.yaml")
    jobs = [*run.glob("submitit/*")]
    capsys.readouterr()
    assert main(["launch", "resume=theirs"]) == 2
    message = capsys.readouterr().err
    assert f"cluster.{setting}" in message and "give it again" in message, message
    assert [*run.glob("submitit/*")] == jobs and not list(canaries.iterdir())


# ---- secrets -------------------------------------------------------------------------------------------------

SECRET = "canary-7d1f5b9e"
SEEN = """
import os
from dtrain.models.gpt2 import GPT2

class Seen(GPT2):
    def forward(self, *arguments):
        with open("seen", "w") as file:
            file.write(os.environ["WANDB_API_KEY"][::-1])  # backwards, or the search would find it
        return super().forward(*arguments)
"""


def test_a_secret_of_the_environment_stays_there(
    here: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that trains, with a preflight before it, and a sweep: everything they leave is searched."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    Path("seen_model.py").write_text(SEEN)
    small = [*NODES_1, "train.stop_after=2", "model._target_=seen_model.Seen", "trust=[seen_model]"]
    run = submit(*small, "preflight=quick", "preflight.min_shm_gib=0")
    assert main(["launch", "-m", *NODES_1, "cluster.python=/bin/true", "train.seed=1,2"]) == 0
    sweep = [path.parent for path in here.glob("multirun/*/*/*/launch.json")]
    assert len(sweep) == 2
    assert cluster.wait(job_id(run), timeout=120) == "COMPLETED", said(run)
    assert summary(run)["status"] == "done" and (here / "seen").read_text() == SECRET[::-1], "the rank had no key"
    for point in sweep:
        cluster.wait(job_id(point), timeout=60)

    texts = {str(path): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert any(name.endswith(".pkl") for name in texts) and any(name.endswith("submit.sbatch") for name in texts)
    for job in (job_id(run), *map(job_id, sweep)):
        texts[f"job {job}"] = cluster.run("scontrol", "show", "job", "-dd", job).stdout.encode()
        texts[f"script {job}"] = cluster.run("scontrol", "write", "batch_script", job, "-").stdout.encode()
        assert b"JobState" in texts[f"job {job}"] and b"#SBATCH" in texts[f"script {job}"]
    out = capsys.readouterr()
    texts["terminal"] = (out.out + out.err).encode()
    assert not [name for name, text in texts.items() if SECRET.encode() in text]

    for folder in (run, *sweep, *here.glob("**/submitit/*/")):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700, folder
    for script in here.glob("**/submit.sbatch"):
        assert stat.S_IMODE(os.stat(script).st_mode) == 0o600, script


@pytest.mark.parametrize(
    "override",
    [
        f"+wandb.key={SECRET}",
        f"+wandb.api_key={SECRET}",
        f"+logger.token={SECRET}",
        f"cluster.setup=[export WANDB_API_KEY={SECRET}]",
        f"cluster.sbatch={{export: 'ALL,WANDB_API_KEY={SECRET}'}}",
        f"cluster.srun=['--export=ALL,HF_TOKEN={SECRET}']",
        f"cluster.python='env DB_PASSWORD={SECRET} python'",
        f"cluster.fabric.env={{HF_TOKEN: {{value: {SECRET}, why: x}}}}",
    ],
)
def test_a_secret_that_is_typed_is_refused(override: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = re.sub(r"\[export (\S+)\]", r"['export \1']", override)
    assert main(["launch", *NODES_1, override, "run_dir=run"]) == 2
    message = capsys.readouterr().err
    assert "fix: " in message and SECRET not in message, message
    assert not list(here.iterdir())
