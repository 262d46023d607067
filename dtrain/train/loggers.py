"""Loggers: where metrics go beside metrics.jsonl. Only rank 0 has one."""

from __future__ import annotations

from typing import Any, Literal

from dtrain.config.redaction import redact


class NoLogger:
    def start(self, run_name: str, run_dir: str, config: Any) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        pass

    def finish(self, summary: dict[str, Any]) -> None:
        pass


class Wandb(NoLogger):
    """Weights & Biases. The run id is the run folder's name, so a resumed run continues on the same page."""

    def __init__(self, project: str = "dtrain", mode: Literal["online", "offline", "disabled"] = "online") -> None:
        self.project, self.mode = project, mode

    def start(self, run_name: str, run_dir: str, config: Any) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ValueError(
                "logger=wandb: wandb is not installed\n  fix: pip install 'dtrain[wandb]', or logger=none"
            ) from error
        run_id = run_dir.rstrip("/").replace("/", "-")[-64:]
        shown = redact(config)
        self.run = wandb.init(
            project=self.project, name=run_name, id=run_id, dir=run_dir, config=shown, mode=self.mode, resume="allow"
        )

    def log(self, values: dict[str, Any]) -> None:
        self.run.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def finish(self, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish()
