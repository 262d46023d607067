"""A person's mistakes: exit code 2, one message with the typed word and a way out, and nothing left behind.

Most go through `dtrain.cli.main` in this process, for speed; some through a real `python launch.py`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dtrain.cli import main
from dtrain.config.hardware import CPU_FP16
from dtrain.data.tokens import prepare
from dtrain.launch.local import Local
from tests.patience import patience

# Hydra composes a first time only to ask for hydra.mode, which we never set; the real processes below do it, too.
COMPOSE_ONCE = ("hydra._internal.hydra.Hydra.get_mode", lambda self, **_: None)
LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
RECIPE_FILES = {
    "typo": "train: {stpes: 3}\n",
    "list": "- train\n- model\n",
    "broken": "train: [1\nmodel: }\n",
    "prose": "this is not a recipe but a letter, dear reader\n",
    "option": "defaults:\n  - override /model: gpt3\n",
    "again": "defaults:\n  - /model: gpt2-124m\n",
    "word": "model: gpt2-124m\n",
    "secret": "logger: {api_key: hunter2}\n",
    "resumes": "resume: latest\n",
    "trusts": "trust: [subprocess]\nlogger: {_target_: subprocess.Popen, args: [touch, pwned]}\n",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("world"))


def fill(world: Path) -> Path:
    """Make the files that the mistakes are about: data of several kinds, recipes, and a run."""
    (world / "empty").mkdir()
    (world / "text.txt").write_text("words and words\n" * 40)
    prepare(world / "text.txt", world / "cut")
    (world / "cut" / "train.bin").write_bytes(b"\0" * 100)
    for name, text in RECIPE_FILES.items():
        (world / f"{name}.yaml").write_text(text)
    (world / "binary.yaml").write_bytes(b"\x00\x01\xff")
    (world / "folder.yaml").mkdir()
    (world / "full").mkdir()
    (world / "full" / "thesis.doc").write_text("the only copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*COMPOSE_ONCE)
        patch.setattr(Local, "launch", lambda self, run_dir: 0)
        patch.setattr(sys, "path", [*sys.path])
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.chdir(world)
        assert main(["launch", f"run_dir={world / 'run'}"]) == 0
        assert main(["launch", "-m", "train.seed=1,2", f"hydra.sweep.dir={world / 'sweep'}"]) == 0
        (world / "my_pkg").mkdir()
        (world / "my_pkg" / "__init__.py").write_text("")
        (world / "my_pkg" / "net.py").write_text(OWN)
        assert main([*MINE.split(), f"run_dir={world / 'mine'}"]) == 0
    return world


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*COMPOSE_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a launch appends its folder
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks, whatever this machine has
    monkeypatch.setenv(CPU_FP16, "0")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(Local, "launch", lambda self, run_dir: pytest.fail(f"{run_dir} was started"))


def snapshot(*folders: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for folder in folders for p in folder.rglob("*")}


def case(command: str, *words: str) -> object:
    """A command line, split at spaces, and what its message must contain."""
    return pytest.param(command.split(" "), words, id=command)


CASES = [
    # words that are not there
    case("launch strategy=fdsp", "strategy=fdsp", "did you mean strategy=fsdp?"),
    case("launch +train.steps=5", "+train.steps", "fix: train.steps=5   (without the +)"),
    case("launch strategy=../model/gpt2-tiny", "strategy=../model/gpt2-tiny: is a path", "strategy can be "),
    case("launch strategy=ddp.yaml", "strategy=ddp.yaml", "without .yaml"),
    case("launch strategy=", "strategy=: has no value", "strategy can be 3d, auto, "),
    case("launch strategy=null", "strategy=null: cannot be null", "strategy can be "),
    case("launch strategy=[ddp,fsdp]", "strategy=[ddp,fsdp]", "more than one value", "-m strategy=ddp,fsdp"),
    case("launch strategy=ddp,fsdp", "strategy=ddp,fsdp", "fix: strategy=ddp, or -m strategy=ddp,fsdp"),
    case("launch precision=16", "precision=16: there is no such option", "fix: precision=fp16 or bf16; precision can"),
    case("launch train.steps=1,000", "is more than one value", "fix: train.steps=1000\n"),
    case("launch optim.betas=0.9,0.95", "is more than one value", "fix: 'optim.betas=[0.9,0.95]'"),
    case("launch optim.betas=(0.9,0.95)", "is not understood", "fix: 'optim.betas=[0.9,0.95]'"),
    case("launch tags=a,b", "is more than one value", "fix: 'tags=[a,b]'"),
    case("launch logger=csv,wandb", "is more than one value", "fix: 'logger=[csv,wandb]'"),
    case("launch train.steps=100k", "must be a whole number", "fix: train.steps=100000"),
    case("launch train.steps=100.5", "must be a whole number", "fix: train.steps=100"),
    case(
        "launch activation_checkpointing=true", "must be one of none, ops, selective, full", "=ops or selective or full"
    ),
    case("launch optim=adam", "there is no such option", "fix: optim=torch.optim.Adam, or optim=adamw"),
    case("launch optim.lr=0,001", "is more than one value", "fix: optim.lr=0.001\n"),
    case("launch train.max_grad_norm=0", "must be more than 0", "or train.max_grad_norm=null   (no clipping)"),
    case("launch ema.decay=1.5", "must be less than 1", "fix: ema.decay=0.999"),
    case("explain strategy=fdsp", "strategy=fdsp: there is no such option", "fix: did you mean strategy=fsdp?"),
    case("recipes show cpu-tyni", "recipe=cpu-tyni", "fix: dtrain recipes show cpu-tiny\n"),
    case("launch strategy=3", "strategy=3: there is no such option", "fix: strategy=zero3; strategy can be 3d, auto, "),
    case("launch model=124", "model=124: there is no such option", "fix: model=gpt2-124m; "),
    case("launch -m precision=fp32,16", "precision=16: there is no such option", "fix: precision=fp16 or bf16; "),
    case("launch precision=@x", "precision=@x", "fix: "),
    case("launch precision=true", "precision=true: there is no such option", "precision can be "),
    case("launch strategy fsdp", "strategy: is not understood", "fix: strategy=fsdp"),
    case("launch -m optim.lr=1e-3, 3e-3", "optim.lr=1e-3,: is not", "fix: -m optim.lr=1e-3,3e-3   (no space"),
    case("launch -m optim.lr=[1e-3,3e-3]", "must be a number", "fix: optim.lr=0.001, or -m optim.lr=0.001,0.003\n"),
    case("search optim.lr=loguniform(1e-4,1e-2)", "is not", "fix: 'optim.lr=tag(log,interval(1e-4,1e-2))'   (for"),
    case("launch train.steps=50 warmup_ratio=0.1", "no such setting", "fix: schedule.warmup_steps=5   (a number"),
    case("launch strategy.tp=2", "strategy.tp=2: strategy=ddp has no such setting", "or strategy=tensor\n"),
    case("launch optim.betas=0.9", "optim.betas=0.9: must be a list", "fix: 'optim.betas=[0.9,0.95]'"),
    case(
        "launch strategy=tensor strategy.tp=3 cluster.processes=4",
        "strategy.tp=3: must divide model.num_heads=4",
        "fix: strategy.tp=2 strategy.dp=-1",
    ),
    case("launch stratgy=ddp", "stratgy", "did you mean strategy"),
    case("launch train.stpes=3", "train.stpes", "did you mean train.steps?"),
    case("launch +logger.colour=red", "logger.colour", "no such setting", "logger.csv.every"),
    case("launch +choices.model=x", "choices.model=x", "written by dtrain", "leave out choices.model"),
    case("launch schedule=constant schedule.min_ratio=0", "leave out schedule.min_ratio, or schedule=cosine or "),
    case("launch ~train.steps", "train.steps", "leave out ~train.steps"),
    case("launch recipe=cpu_tiny", "recipe=cpu_tiny", "did you mean recipe=cpu-tiny?"),
    case("luanch", "luanch", "did you mean dtrain launch?"),
    case("fly", "fly", "dtrain --help"),
    case("strategy=fsdp", "strategy=fsdp", "dtrain launch strategy=fsdp"),
    case("recipes show cpu", "recipe=cpu:", "fix: dtrain recipes show cpu-tiny\n"),
    # commands of other programs
    case("resume RUN", "resume: there is no such command", "fix: dtrain launch resume=RUN\n"),
    case("fork RUN@200 optim.lr=1e-4", "fork: there", "fix: dtrain launch fork=RUN@200 optim.lr=1e-4\n"),
    case("train strategy=fsdp", "train: there", "fix: dtrain launch strategy=fsdp\n"),
    case("run train.py --lr 1", "run: there", "fix: dtrain launch script=train.py 'script_args=[--lr,1]'\n"),
    case("torchrun --nproc_per_node=4 train.py", "fix: dtrain launch script=train.py cluster.processes=4\n"),
    case("accelerate launch train.py", "accelerate: there", "fix: dtrain launch script=train.py\n"),
    case("launch.py strategy=fsdp", "fix: dtrain launch strategy=fsdp\n"),
    case("--strategy=fsdp", "fix: dtrain launch strategy=fsdp\n"),
    case("-m strategy=ddp,fsdp", "fix: dtrain launch -m strategy=ddp,fsdp\n"),
    case("config strategy=fsdp", "fix: dtrain launch --cfg job strategy=fsdp\n"),
    case("test", "test: there", "fix: dtrain evaluate latest\n"),
    case("eval RUN", "eval: there", "fix: dtrain evaluate RUN\n"),
    case("ls", "ls: there", "fix: dtrain runs\n"),
    case("strategies", "strategies: there", "fix: dtrain explain strategy\n"),
    case("tensorboard", "fix: dtrain log latest logger=tensorboard\n"),
    case("rm RUN", "rm: there", "rm -r FOLDER"),
    # options of other programs
    case(
        "launch strategy=deepspeed", "strategy=deepspeed: there is no such option", "fix: strategy=zero3; strategy can"
    ),
    case("launch strategy=fully_sharded", "fix: strategy=fsdp; "),
    case("launch strategy=single_device", "fix: strategy=ddp cluster.processes=1; "),
    case("launch schedule=cosine_with_warmup", "fix: schedule=cosine; "),
    case("launch precision=mixed", "fix: precision=bf16; "),
    case("launch precision=64", "fix: precision=fp32; "),
    case("launch model=gpt2", "fix: model=gpt2-124m; "),
    case("launch model=meta-llama/Llama-2-7b-hf", "fix: model=hf:FOLDER (", "or model=llama-7b with random weights; "),
    case("launch model=./gpt2.yaml", "is a path", "fix: model=gpt2-124m; "),
    case("launch data={world}/empty", "fix: data=text data.path="),
    case("launch callbacks=[EarlyStopping]", "callbacks: there is no such setting", "fix: hooks=early_stop "),
    case("launch loss=L1Loss", "loss=L1Loss", "fix: loss=torch.nn.L1Loss; "),
    case("launch loss=nn.CrossEntropyLoss", "no module nn", "did you mean loss=cross_entropy?"),
    case("launch loss=F.cross_entropy", "did you mean loss=cross_entropy?"),
    case("launch loss=torch.nn.mse", "torch.nn has no mse", "did you mean loss=torch.nn.MSELoss?"),
    case("launch optim=torch.optim.Adamw", "torch.optim has no Adamw", "did you mean optim=torch.optim.AdamW?"),
    case("launch optim=torch.AdamW", "torch has no AdamW", "did you mean optim=torch.optim.AdamW?"),
    case("launch optim=torch.optim.adamw", "is a module", "fix: optim=torch.optim.adamw.AdamW\n"),
    case("launch schedule=torch.optim.lr_scheduler.StepLR", "is a class", "fix: schedule=step, or "),
    # flags of other programs
    case("launch --lr 1e-3", "--lr: there", "fix: optim.lr=1e-3 "),
    case("launch --nproc-per-node 2", "fix: cluster.processes=2 "),
    case("launch -np 4", "-np: there", "fix: cluster.processes=4\n"),
    case("launch patience=3", "patience: there", "fix: hooks=early_stop hooks.early_stop.patience=3 "),
    case("launch hooks=early_stop hooks.patience=3", "hooks.patience", "fix: hooks.early_stop.patience=3 "),
    case("launch hooks=[early_stop] early_stop.patience=3", "early_stop.patience", "fix: hooks.early_stop.patience=3 "),
    case("plan tokens=100B", "tokens=100B: is an option", "fix: --tokens 100B\n"),
    case("plan tokens=100Bn", "--tokens=100Bn: must be a number", "fix: --tokens 100B\n"),
    case("plan gpus_for=30d", "gpus_for=30d: is an option", "fix: --gpus-for 30d\n"),
    case("plan largest_model=true", "is an option", "fix: --largest-model\n"),
    case("launch {world}/typo.yaml", "is not understood", "fix: recipe=/", "/typo.yaml\n"),
    case("launch cpu-tiny", "cpu-tiny: is not understood", "fix: recipe=cpu-tiny\n"),
    case("launch cpu-tiny.yaml", "cpu-tiny.yaml: is not understood", "fix: recipe=cpu-tiny\n"),
    case("launch nothing.yaml", "nothing.yaml: there is no such file", "fix: recipe=FILE.yaml; "),
    case("launch --config my.yaml", "--config: there", "fix: recipe=my.yaml\n"),
    case("launch --fp16", "--fp16: there", "fix: precision=fp16 "),
    case("launch --master_port 29500", "leave out --master_port"),
    case("launch --halp", "--halp: there", "fix: dtrain launch --help"),
    # gradient accumulation, with the numbers of this run
    case(
        "launch gradient_accumulation_steps=4", "fix: train.micro_batch_size=4   (train.global_batch_size=32 / 2 data"
    ),
    case("launch accumulate_grad_batches=4 cluster.processes=4", "fix: train.micro_batch_size=2   ("),
    case("launch --gradient_accumulation_steps 7", "fix: train.micro_batch_size=2 train.global_batch_size=28   ("),
    case(
        "launch grad_accum=4 train.micro_batch_size=8", "fix: train.global_batch_size=64   (train.micro_batch_size=8 ×"
    ),
    case(
        "launch grad_accum=4 per_device_train_batch_size=8",
        "fix: train.micro_batch_size=8 train.global_batch_size=64   (",
    ),
    # an option typed as a setting, or switched on in a section
    case("launch optim.name=adam", "optim.name: there", "fix: optim=torch.optim.Adam, or optim=adamw; "),
    case("launch optim.type=sgd", "fix: optim=sgd "),
    case("launch model.name=gpt2-tiny", "fix: model=gpt2-tiny "),
    case("launch logger.name=wandb", "fix: logger=wandb "),
    case("launch optim.name=torch.optim.RAdam", "fix: optim=torch.optim.RAdam\n"),
    case("launch optim=0.001", "optim=0.001: there is no such option", "fix: optim.lr=0.001; "),
    case("launch train.fp16=true", "train.fp16: there", "fix: precision=fp16 "),
    case("launch train.fsdp=true", "fix: strategy=fsdp "),
    case("launch logger.wandb=true", "logger.wandb=true: is a section", "fix: logger=wandb, or "),
    case("launch metrics=accuracy", "metrics: there", "fix: hooks=MODULE.CLASS "),
    case("launch model.pretrained=true", "model.pretrained: there", "fix: model=hf:FOLDER "),
    case("launch pretrained=false", "fix: leave out pretrained\n"),
    case("launch pretrained={world}/text.txt", "fix: init_from=FOLDER, a run or one that"),
    case("launch checkpoint=latest", "checkpoint=latest: is a section", "fix: resume=latest\n"),
    case("launch checkpoint=100", "fix: checkpoint.every=100\n"),
    case("launch checkpoint.path=some", "fix: run_dir=some "),
    case("launch checkpoint.dir=some", "fix: run_dir=some "),
    case("launch fsdp_sharding_strategy=FULL_SHARD", "fix: strategy=fsdp "),
    case("launch train.optimizer=adam", "fix: optim=torch.optim.Adam, or optim=adamw\n"),
    case("launch hooks=accuracy", "hooks=accuracy: there is no such option", "fix: hooks=MODULE.CLASS, "),
    # a program with its arguments
    case("launch train.py --lr 1e-3", "train.py --lr 1e-3: is a program", "script=train.py 'script_args=[--lr,1e-3]'"),
    case("launch script=t.py --lr 1e-3 cluster.processes=2", "fix: script=t.py 'script_args=[--lr,1e-3]'\n"),
    case("launch script=t.py script_args=--lr 1e-3", "the shell divides it", "fix: 'script_args=[--lr,1e-3]'\n"),
    case("launch script=t.py clustre.processes=2", "clustre.processes: there", "did you mean cluster.processes?"),
    # Hydra's own flags
    case("launch --config-name=foo", "--config-name=foo: dtrain has its own", "fix: recipe=FILE.yaml, "),
    case("launch -cn cpu-tiny", "fix: recipe=cpu-tiny\n"),
    case("launch --config-path conf", "--config-path=conf: dtrain has its own", "fix: recipe=FILE.yaml, "),
    case("launch -h foo", "foo: --help takes", "fix: dtrain launch --help\n"),
    case("launch --help strategy", "fix: dtrain explain strategy\n"),
    case("launch ~optim.foo", "~optim.foo: there is nothing to take away", "fix: leave out ~optim.foo\n"),
    # fixes that need another one
    case("launch recipe=cpu-tiny model=vit-tiny", "data.seq_len: refers", "fix: data=digits, or another model\n"),
    case("launch model=convnet data=cifar10", "data.path=: is required", "to try it without files: data=digits\n"),
    case("launch strategy=pipeline strategy.pp=8", "only model.num_layers=4", "fix: strategy.pp=2 strategy.dp=-1\n"),
    case(
        "launch model=llama-tiny model.num_heads=3", "fix: model.dim=132 model.num_kv_heads=1, or model.num_heads=4\n"
    ),
    case("search optim.lr=1e-3,1e-4 model=gpt2-tiny dry_run=true", "dtrain launch model=gpt2-tiny dry_run=true "),
    case("search optim.lr=1e-3,1e-4 --dry-run", "dry_run=true: a search chooses", "fix: leave it out; "),
    case("generate {world}/run", "PROMPTS -o OUT: are missing", "/run PROMPTS -o OUT\n"),
    case("runs --where val_loss<<2", "has two operators, < <", "fix: --where 'val_loss<2'\n"),
    case("runs --where val_loss=<2", "fix: --where 'val_loss<=2'\n"),
    case("runs --where val_loss<>2", "fix: --where 'val_loss!=2'\n"),
    # lists without commas, without a bracket, and where there is no list
    case("launch hooks=[early_stop", "is not a list", "fix: 'hooks=[early_stop]'\n"),
    case("launch logger=csv,tensorboard]", "is not a list", "fix: 'logger=[csv,tensorboard]'\n"),
    case("launch loss=[cross_entropy]", "takes no list", "fix: loss=cross_entropy; "),
    case("launch hooks=[early_stop, my_pkg.Hook]", "the shell divides it", "fix: 'hooks=[early_stop,my_pkg.Hook]'"),
    case("launch optim.betas=[0.9 0.95]", "the shell divides it", "fix: 'optim.betas=[0.9,0.95]'"),
    # what Hydra's grammar does not take
    case("launch run_dir=a=b", "run_dir=a=b", "fix: 'run_dir=\"a=b\"'"),
    case("launch name=日本", "name=日本", "fix: 'name=\"日本\"'"),
    case("launch train.steps=[1", "train.steps=[1", "not understood"),
    case("launch train.steps==", "train.steps==", "fix: train.steps=300"),
    case("launch fsdp", "fsdp", "fix: strategy=fsdp"),
    case("launch strategy:fsdp", "strategy:fsdp", "fix: strategy=fsdp"),
    case("launch --strategy=fsdp", "--strategy=fsdp", "fix: strategy=fsdp"),
    case("launch --strategy fsdp", "--strategy", "fix: strategy=fsdp"),
    # wrong types
    case("launch optim.lr=abc", "optim.lr=abc", "a number", "fix: optim.lr=0.001"),
    case("launch train.steps=1.5", "train.steps=1.5", "a whole number"),
    case("launch compile=maybe", "compile=maybe", "one of auto, blocks, whole, none, true, false"),
    case("launch trust=x", "trust=x", "fix: 'trust=[x]'"),
    case("launch trust=null", "trust=null", "must be a list"),
    case("launch model={a:1}", "model={a:1}: is a section", "fix: model=gpt2-tiny, or model.SETTING"),
    case("launch run_dir=5", "run_dir=5", "must be text"),
    case("launch deterministic=yes", "deterministic=yes: must be true or false", "fix: deterministic=true\n"),
    case("launch deterministic=0", "deterministic=0: must be true or false", "fix: deterministic=false\n"),
    case("launch fused_loss=on", "fused_loss=on", "fix: fused_loss=true\n"),
    # values out of range
    case("launch train.steps=0", "train.steps=0", "at least 1"),
    case("launch train.global_batch_size=-4", "train.global_batch_size=-4", "at least 1"),
    case("launch model.dropout=1.5", "model.dropout=1.5", "less than 1"),
    case("launch train.nonfinite=maybe", "train.nonfinite=maybe", "one of stop, skip"),
    # arithmetic
    case("launch train.global_batch_size=31", "train.global_batch_size=31", "2 data-parallel ranks", "=30 or 32"),
    case("launch train=steps=3", "fix: train.steps=3\n"),
    case("launch train.steps=5 minutes", "minutes: is not", "fix: leave out minutes; "),
    case("launch cluster=slurm cluster.mem=64 GB", "fix: cluster.mem=64GB\n"),
    case("launch cluster=slurm cluster.gpus=4", "fix: cluster.gpus_per_node=4 "),
    case("launch gpus=4", "fix: cluster.processes=4 "),
    case("launch cluster.processes=64", "64 data-parallel ranks", "fix: cluster.processes=32, or "),
    case(
        "launch strategy=tensor strategy.tp=3 cluster.processes=3",
        "strategy.tp=3",
        "strategy=fsdp, without strategy.tp",
    ),
    case("launch train.micro_batch_size=5", "train.micro_batch_size=5", "fix: train.micro_batch_size=4"),
    case("launch train.global_batch_size=100 train.micro_batch_size=8", "=5, or train.global_batch_size=96 or 112\n"),
    case("launch train.global_batch_size=34 train.micro_batch_size=16", "fix: train.global_batch_size=32 or 64, or "),
    case("launch strategy.dp=3 train.micro_batch_size=4", "cluster.processes=3 train.global_batch_size=36\n"),
    case("launch model.dim=130", "model.dim=130: must", "fix: model.dim=132, or model.num_heads=2 or 5\n"),
    case("launch model.num_heads=3", "model.dim=128", "fix: model.dim=129, or model.num_heads=2 or 4\n"),
    case(
        "launch strategy.dp=3", "strategy.dp=3", "number of ranks, 2", "cluster.processes=3 train.global_batch_size=33"
    ),
    case("launch strategy=zero1 precision=fp16", "precision=fp16", "AVX512-FP16", "precision=bf16, or strategy=fsdp"),
    case("launch cluster.nodes=2", "cluster.nodes=2", "fix: cluster.nodes=1"),
    case("launch data=text data.path={world}/text.txt model.vocab_size=9", "model.vocab_size=9", "256"),
    # data
    case("launch data=text", "data.path=", "is required"),
    case("launch data=text data.path=", "data.path=", "is required"),
    case("launch data=text data.path={world}/nothing", "data.path=", "/nothing", "does not exist"),
    case(
        "launch data=text data.path={world}/empty",
        "data.path=",
        "/empty",
        "no file that matches",
        "the folder is empty",
    ),
    case("launch data=tokens data.path={world}/cut", "data.path=", "/cut", "train.bin has 100 bytes"),
    case(
        "launch data=tokens data.path={world}/text.txt",
        "data.path=",
        "/text.txt",
        "is not a folder",
        "data=text data.path=",
    ),
    case("data prepare {world}/nothing out", "/nothing", "does not exist"),
    # where the run goes
    case("launch run_dir={world}/run", "run_dir=", "/run:", "this folder already has a run", "resume="),
    case("launch run_dir={world}/full", "run_dir=", "/full:", "not empty", "/full-2"),
    case("launch run_dir={world}/text.txt/run", "run_dir=", "/text.txt cannot be written to"),
    case("launch run_dir=/proc/run", "run_dir=/proc/run", "/proc cannot be written to", "leave out run_dir="),
    case("launch hydra.run.dir=elsewhere", "hydra.run.dir=elsewhere", "fix: run_dir=elsewhere"),
    case("launch -m run_dir=x train.seed=1,2", "run_dir=x", "fix: hydra.sweep.dir=x"),
    # resume
    case("launch resume=nothing", "resume=nothing: there is no such run", "leave out resume="),
    case("launch resume={world}/full", "/full: the folder is no run", "leave out resume="),
    case("launch +resume=nothing", "resume=nothing: there is no such run"),
    case("launch resume={world}/run train.seed=7", "leave out train.seed, or allow", "resume_allow=[train.seed]"),
    case("launch resume={world}/run resume_allow=[train.stpes]", "train.stpes", "'resume_allow=[train.steps]'"),
    case("launch resume={world}/run -m", "resume=", "/run", "leave out -m"),
    case("launch resume={world}/run recipe=cpu-tiny", "resume=", "/run", "leave out recipe="),
    # recipes
    case("launch recipe={world}/nothing.yaml", "recipe=", "/nothing.yaml", "no such file"),
    case("launch recipe={world}/folder.yaml", "recipe=", "/folder.yaml", "is a folder"),
    case("launch recipe={world}/broken.yaml", "recipe=", "/broken.yaml", "not valid yaml", "broken.yaml:2"),
    case("launch recipe={world}/binary.yaml", "recipe=", "/binary.yaml", "is not a text file"),
    case("launch recipe={world}/list.yaml", "recipe=", "/list.yaml", "must be a yaml mapping"),
    case("launch recipe={world}/prose.yaml", "recipe=", "/prose.yaml", "must be a yaml mapping"),
    case("launch recipe={world}/typo.yaml", "/typo.yaml:1: train.stpes", "did you mean train.steps"),
    case("launch recipe={world}/option.yaml", "/option.yaml:2: model=gpt3", "model can be "),
    case(
        "launch recipe={world}/again.yaml", "/again.yaml:2: model=gpt2-124m", "defaults: [override /model: gpt2-124m]"
    ),
    case("launch recipe={world}/word.yaml", "/word.yaml:1: model=gpt2-124m", "defaults: [override /model: gpt2-124m]"),
    case("launch recipe={world}/resumes.yaml", "/resumes.yaml", "give resume="),
    # what may be called
    case("launch model._target_=os.system", "model._target_=os.system", "only dtrain's own code", "model=MODULE.NAME"),
    case(
        "launch model._target_=dtrain.launch.local.subprocess.Popen",
        "dtrain.launch.local.subprocess.Popen",
        "gpt2-tiny",
    ),
    case(
        "launch model._target_=dtrain.models.gpt2.nn",
        "model._target_=dtrain.models.gpt2.nn",
        "leave out model._target_",
    ),
    case(
        "launch logger=csv logger.csv._target_=dtrain.config.files.build",
        "logger.csv._target_=dtrain.config.files.build",
        "leave out logger.csv._target_",
    ),
    case("launch recipe={world}/trusts.yaml", "/trusts.yaml", "trust may be given on the command line only"),
    # sweeps: the first job is good, and must not be started either
    case("launch -m train.steps=1,0", "train.steps=0", "at least 1"),
    case("launch -m train.seed=1,2 hydra.sweep.subdir=same", "hydra.sweep.subdir=same", "the same folder"),
    case("launch -m strategy=ddp,fdsp", "strategy=fdsp", "did you mean strategy=fsdp?"),
    case("launch train={a:1}", "train={a:1}: is a section", "fix: train.SETTING"),
]


@pytest.mark.parametrize(("argv", "words"), CASES)
def test_a_mistake_is_explained_and_leaves_nothing(
    argv: list[str], words: tuple[str, ...], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(world, tmp_path)
    code = main([arg.replace("{world}", str(world)) for arg in argv])
    out, err = capsys.readouterr()
    check_message(code, out, err, words)
    assert snapshot(world, tmp_path) == before


def check_message(code: int, out: str, err: str, words: tuple[str, ...]) -> None:
    assert code == 2
    assert out == ""
    assert err.startswith("error: ") and err.count("error:") == 1, "one message"
    assert sum(line.startswith("  fix: ") for line in err.splitlines()) == 1, err
    assert not any(noise in err for noise in ("Traceback", "Warning", "HYDRA_FULL_ERROR", "full_key", "hydra.cc")), err
    for word in words:
        assert word in err, err


def test_there_are_enough_cases_and_none_twice() -> None:
    ids = [param.id for param in CASES]  # type: ignore[attr-defined]
    assert len(ids) == len(set(ids)) >= 25


@pytest.mark.parametrize("key", ["+wandb.api_key", "hydra.job.env_set.HF_TOKEN"])
def test_a_secret_is_refused_and_not_repeated(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["launch", f"{key}=hunter2"])
    out, err = capsys.readouterr()
    check_message(code, out, err, (f"{key}=…", "environment variable"))
    assert "hunter2" not in err
    assert not list(tmp_path.iterdir())


def test_a_secret_in_a_recipe_is_not_repeated(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["launch", f"recipe={world}/secret.yaml"])
    out, err = capsys.readouterr()
    check_message(code, out, err, ("logger.api_key",))
    assert "hunter2" not in err


OWN = """
from torch import nn, optim

class Net(nn.Module):
    def __init__(self, hidden: int = 64, depth=2, rate=0.1, bias=True):
        super().__init__()

    def forward(self, x):
        return x

class Inherits(Net):
    pass

class NoForward(nn.Module):
    def __init__(self):
        super().__init__()

class NoInputs(nn.Module):
    def forward(self):
        return 0

class Points:
    def dataset(self, split):
        return []

def loss(outputs, targets):
    return outputs.mean()

def weighted(outputs, targets, weight):
    return outputs.mean()

class OneArgument(nn.Module):
    def forward(self, outputs):
        return outputs

def ramp(step):
    return 1.0

def capped(step, steps, most):
    return 1.0

class Module(Net):
    pass

class HasForward(Module):
    def __init__(self, dropout=False, norm=False, accumulation_steps=1):
        super().__init__()

class PassesOn:
    def __init__(self, params, lr=0.1):
        self.base = optim.SGD(params, lr=lr)

    def __getattr__(self, name):
        return getattr(self.base, name)

class NoStep(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

class NoParameters(optim.Optimizer):
    def __init__(self, lr=0.1):
        pass

    def step(self):
        pass

class Hook:
    def after_step(self):
        pass

class Acc:
    def eval_metrics(self, outputs, targets):
        return {}

class Plain:
    def forward(self, x):
        return x

def with_model(outputs, targets, model):
    return outputs.mean()
"""
MINE = "launch model=my_pkg.net.Net data=my_pkg.net.Points loss=my_pkg.net.loss"
OWN_CASES = [
    case(
        "launch model=my_pkg.net.NoForward data=my_pkg.net.Points",
        "my_pkg/net.py:14: the class NoForward has no forward",
    ),
    case(
        "launch model=my_pkg.net.NoInputs data=my_pkg.net.Points", "my_pkg/net.py:19: NoInputs.forward takes no inputs"
    ),
    case("launch model=my_pkg.net", "my_pkg.net: is a module, not a class", "fix: model=my_pkg.net.Net"),
    case("launch model=my_pkg", "fix: model=my_pkg.net.Net"),
    case("launch model=my_pkg/net.py", "fix: model=my_pkg.net.Net"),
    case("launch model=my_pkg.net:Net", "fix: model=my_pkg.net.Net"),
    case("launch model=Points", "fix: model=my_pkg.net.Points"),
    case("launch data=my_pkg.net", "data=my_pkg.net: is a module", "fix: data=my_pkg.net.Points"),
    case("launch data=my_pkg.net.Points.dataset", "Points is a class or function", "fix: data=my_pkg.net.Points"),
    case("launch data=my_pkg.Points", "my_pkg/__init__.py has no Points", "did you mean data=my_pkg.net.Points?"),
    case("launch model=code.Net", "code is also the name of a module of Python's own", "mv code.py my_code.py, then"),
    case("launch model=hydra.Net", "hydra is also the name of an installed package", "mv hydra.py my_hydra.py, then"),
    case(f"{MINE} model.hidden=abc", "model.hidden=abc: must be a whole number"),
    case(f"{MINE} model.depth=abc", "must be a number, like its default in my_pkg.net.Net, depth=2", "=2   (or an"),
    case(f"{MINE} model.rate=abc", "must be a number", "fix: model.rate=0.1"),
    case(f"{MINE} model.bias=yes", "must be true or false", "fix: model.bias=true"),
    case(f"{MINE} model.hidden=1,2", "error: model.hidden=1,2", "fix: model.hidden=1, or -m model.hidden=1,2"),
    case(f"{MINE} model.hidden=[1", "error: model.hidden=[1"),
    case(f"{MINE}ed", "my_pkg/net.py has no lossed", "did you mean loss=my_pkg.net.loss?"),
    case(
        "launch model=my_pkg.net.Net", "data= is not given", "fix: data=my_pkg.net.Points, your", "data.seq_len=128\n"
    ),
    case("launch model=my_pkg.net.Net data=text data.path=.", "data.seq_len: refers", "fix: data.seq_len=128, or"),
    case("launch loss=my_pkg.net.with_model", "and no model", "fix: leave out model: optim.weight_decay=1e-4"),
    case("launch -- model=my_pkg.net.Net(hidden=32)", "not understood", "fix: model=my_pkg.net.Net model.hidden=32\n"),
    case("launch -- model=Net(32,rate=1e-1)", "fix: model=my_pkg.net.Net model.hidden=32 model.rate=0.1\n"),
    case("launch -- optim=torch.optim.SGD(0.1)", "fix: optim=torch.optim.SGD optim.lr=0.1\n"),
    case("launch -- loss=my_pkg.net.weighted([1,2])", "fix: loss=my_pkg.net.weighted 'loss.weight=[1,2]'\n"),
    case("launch -- optim=adamw(betas=(0.9,0.95))", "fix: optim=adamw 'optim.betas=[0.9,0.95]'\n"),
    case("launch strategy=torch.nn.parallel.DistributedDataParallel", "no strategy of dtrain", "fix: strategy=ddp\n"),
    case("launch loss=my_pkg.net.weighted", "my_pkg/net.py:29: weighted(", "fix: loss.weight=…, or a default"),
    case("launch loss=my_pkg.net.OneArgument", "OneArgument.forward(outputs)", "def forward(self, outputs, targets)"),
    case("launch schedule=my_pkg.net.ramp", "my_pkg/net.py:36: ramp(step) is called", "def ramp(step, steps)"),
    case("launch schedule=my_pkg.net.capped", "most has no value", "fix: schedule.most=…"),
    case("launch optim=torch.optim.LBFGS", "optim=torch.optim.LBFGS: needs a closure"),
    case("launch optim=my_pkg.net.NoStep", "my_pkg/net.py:56: the class NoStep has no step()"),
    case("launch optim=my_pkg.net.NoParameters", "NoParameters.__init__(self, lr) is called with the model's"),
    case(
        "launch model=my_pkg.net.Plain data=my_pkg.net.Points",
        "my_pkg/net.py:75: the class Plain is not a",
        "fix: class Plain(nn.Module)",
    ),
    case("launch model=wave.Net", "wave has no Net", "fix: model=my_pkg.net.Net"),
    case("launch model=math.Net", "a module of Python's own", "fix: model=my_pkg.net.Net"),
    case("launch model=my-net.Net", "Python cannot import my-net.py", "mv my-net.py my_net.py, then model=my_net.Net"),
    case("launch model=my-net.py", "Python cannot import my-net.py", "mv my-net.py my_net.py, then model=my_net.Net"),
    case("launch hooks=my_pkg.net.Accuracy", "net.py has no Accuracy", "did you mean hooks=my_pkg.net.Acc?"),
    case("launch hooks=my_pkg.net.Norms", "net.py has no Norms", "fix: my_pkg.net has Hook, Acc"),
    case("launch hooks=my_pkg.net.Hook", "my_pkg/net.py:68: Hook.after_step cannot", "def after_step(self, run)"),
    pytest.param(
        ["launch", "hooks=[early_stop my_pkg.net.Hook]"],
        ("without a comma", "fix: 'hooks=[early_stop,my_pkg.net.Hook]'"),
        id="a list without commas",
    ),
]


@pytest.mark.parametrize(("argv", "words"), OWN_CASES)
def test_a_mistake_about_your_own_code(
    argv: list[str], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").write_text("")
    for name, text in {"my_pkg/net": OWN, "code": OWN, "hydra": "class Net: ...", "my-net": OWN}.items():
        (tmp_path / f"{name}.py").write_text(text)
    before = snapshot(tmp_path)
    code = main(argv)
    check_message(code, *capsys.readouterr(), words)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "argv",
    [
        "model=my_pkg.net.HasForward model.dropout=0.1 model.norm=batch model.accumulation_steps=4",
        "optim=my_pkg.net.PassesOn",
        "-- hooks=[dtrain.train.early_stop.EarlyStop]",  # by its class: without the option's defaults
    ],
)
def test_what_is_no_mistake(argv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "net.py").write_text(OWN)
    code = main([*MINE.split(), *argv.split(), "dry_run=true"])
    assert code == 0, capsys.readouterr().err


def test_a_package_of_this_folder_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "site-packages"):
        (folder / "my_pkg").mkdir(parents=True)
        (folder / "my_pkg" / "__init__.py").write_text("")
        (folder / "my_pkg" / "net.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert main([*MINE.split(), "dry_run=true"]) == 0, "the same code"
    capsys.readouterr()
    (tmp_path / "my_pkg" / "net.py").write_text(f"{OWN}\n")
    check_message(main([*MINE.split(), "dry_run=true"]), *capsys.readouterr(), ("differs from my_pkg/net.py", "-e ."))


AGAIN = "model=my_pkg.net.Net data=my_pkg.net.Points loss=my_pkg.net.loss"
RESUMES = [  # of a run of these classes
    case("train.steps=600", "and code is never taken from a run folder", "or 'trust=[my_pkg]'   (if"),
    case(f"{AGAIN} model.hidden=32", "model.hidden: 64 → 32\n", "fix: leave out model.hidden: the saved weights prob"),
    case(
        f"{AGAIN} model.hidden=32 train.steps=600",
        "fix: leave out model.hidden: ",
        "allow the rest: 'resume_allow=[train.steps]'",
    ),
    case("trust=[my_pkg] model.rate=0.5", "model.rate: 0.1 → 0.5\n", "allow what changed: 'resume_allow=[model.rate]'"),
    case("trust=[my_pkg] model.rate=0", "model.rate: 0.1 → 0\n", "allow what changed: 'resume_allow=[model.rate]'"),
    case("trust=[my_pkg] model.hiden=32", "error: model.hiden: there", "did you mean model.hidden?"),
    case("trust=[my_pkg] model=my_pkg.net.Inherits", "fix: leave out model: the saved weights"),
    case("trust=[my_pkg] model.hidden=abc", "model.hidden=abc: must be a whole number"),
]


def test_a_run_folder_whose_run_is_done(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(world / "run", tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text('{"status": "done"}')
    for number in (2, 3):
        code = main(["launch", f"run_dir={tmp_path}/run"])
        check_message(code, *capsys.readouterr(), ("already has a run", f"fix: run_dir={tmp_path}/run-{number}; to"))
        (tmp_path / "run-2").mkdir(exist_ok=True)


@pytest.mark.parametrize(("argv", "words"), RESUMES)
def test_a_resume_of_your_own_classes(
    argv: list[str],
    words: tuple[str, ...],
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(world)
    before = snapshot(world)
    code = main(["launch", "resume=mine", *argv])
    check_message(code, *capsys.readouterr(), words)
    assert snapshot(world) == before


def test_the_old_value_of_a_default_is_no_change(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    for words in (["trust=[my_pkg]", "model.hidden=64"], [*AGAIN.split(), "model.depth=2"]):
        assert main(["launch", "resume=mine", *words, "dry_run=true"]) == 0


@pytest.mark.parametrize("extra", ["model.depth=1.5", "model.rate=1", "model.bias=false"])
def test_a_value_that_the_default_allows(extra: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "net.py").write_text(OWN)
    for model in ("Net", "Inherits"):
        command = MINE.replace("net.Net", f"net.{model}")
        assert main([*command.split(), *([extra] if model == "Net" else []), "dry_run=true"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("command", ["", "train.steps = 5"])
def test_words_with_spaces(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["launch", command])
    out, err = capsys.readouterr()
    check_message(code, out, err, (command.strip() or repr(command), "is not understood"))


def test_a_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests may run as root, for whom permissions do not hold; so the kernel's answer is played here."""

    def refuse(*args: object, dir: Path, **rest: object) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    code = main(["launch", f"run_dir={tmp_path}/theirs/run"])
    out, err = capsys.readouterr()
    check_message(code, out, err, (f"{tmp_path}/theirs/run: {tmp_path} cannot be written to (Permission denied)",))
    assert not list(tmp_path.iterdir())


def test_data_that_may_not_be_read(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code = main(["launch", "data=text", f"data.path={world}/text.txt"])
    out, err = capsys.readouterr()
    check_message(code, out, err, ("data.path=", "/text.txt", "cannot be read"))


def test_a_fault_of_our_own_is_a_traceback_and_still_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be dressed up as the user's mistake; nor may Hydra turn it into a warning and go on."""

    def broken(config: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("dtrain.launch.resolve.validate", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["launch"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--cfg", "--help=3"])
def test_a_flag_that_hydra_refuses(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", flag]) == 2
    err = capsys.readouterr().err
    assert "usage: launch.py" in err and flag.partition("=")[0] in err
    assert not list(tmp_path.iterdir())


# ---- real processes ------------------------------------------------------------------------------------------


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, str(LAUNCH), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["strategy=fdsp"], ("strategy=fdsp", "did you mean strategy=fsdp?")),
        (["-m", "strategy=ddp,fsdp", "train.global_batch_size=32,31"], ("train.global_batch_size=31",)),
    ],
)
def test_a_real_launch(arguments: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    done = launch(*arguments)
    check_message(done.returncode, done.stdout, done.stderr, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["train.stpes=3"], ["train.steps=0"]])  # Hydra's refusal, and ours
def test_hydra_full_error_gives_the_traceback(arguments: list[str], tmp_path: Path) -> None:
    done = launch(*arguments, HYDRA_FULL_ERROR="1")
    assert done.returncode != 0
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert arguments[0].partition("=")[0] in done.stderr.splitlines()[-2] + done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_help_cfg_and_dry_run_never_import_torch(
    world: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    trap = tmp_path_factory.mktemp("trap")
    (trap / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    command, environment = [sys.executable, "-c", "import torch"], {**os.environ, "PYTHONPATH": str(trap)}
    caught = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "torch was imported" in caught.stderr, "the trap works"

    shown = launch("--help", PYTHONPATH=str(trap))
    assert shown.returncode == 0 and "\nstrategy: " in shown.stdout
    composed = launch("--cfg", "job", "strategy=fsdp", PYTHONPATH=str(trap))
    assert composed.returncode == 0 and "_target_: dtrain.strategies.fsdp.FSDP" in composed.stdout
    dry = launch(
        "dry_run=true", "cluster.processes=4", "run_dir=a b/run", "data=text", f"data.path={world}/text.txt",
        "recipe=cpu-tiny", "logger=wandb", "precision=bf16", PYTHONPATH=str(trap),
    )  # fmt: skip
    assert (dry.returncode, dry.stderr) == (0, "")
    torchrun = "-P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4"
    rank = f"{LAUNCH.parent}/dtrain/start.py -m dtrain.train.rank"
    assert dry.stdout.splitlines()[-1] == f"{sys.executable} {torchrun} {rank} '{tmp_path}/a b/run'"
    assert any(line.startswith("export OMP_NUM_THREADS=") for line in dry.stdout.splitlines())
    assert not list(tmp_path.iterdir())
