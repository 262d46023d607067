"""Make the pictures of docs/monitoring.md in docs/pictures/: launch runs, write reports, and photograph them.

    python docs/pictures.py [--runs FOLDER]

Needs playwright and Chromium. FOLDER: keep the runs there, and use those that are there already. Each picture is
reduced to 64 colours, so that it stays below 100 kB.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LARGEST = 100_000  # bytes
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LAUNCH = [sys.executable, str(ROOT / "launch.py")]
SETTINGS = ["recipe=cpu-tiny", "train.steps=120", "train.eval_every=20", "train.global_batch_size=8"]
SWEEP = ["-m", "optim.lr=0.0005,0.002,0.008", "schedule.warmup_steps=10,40"]
SHORT = ["model.num_layers=2", "model.dim=64", "data.seq_len=64", "model.seq_len=64", "checkpoint.every=40"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "sweep").is_dir():
            place = f"hydra.sweep.dir={folder / 'sweep'}"
            subprocess.run([*LAUNCH, *SWEEP, *SETTINGS, *SHORT, place], cwd=folder, check=True)
        if not (folder / "run").is_dir():
            subprocess.run([*LAUNCH, *SETTINGS, *SHORT, f"run_dir={folder / 'run'}"], cwd=folder, check=True)
        report(folder / "sweep", folder / "sweep.html")
        report(folder / "run", folder / "run.html")
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            photograph(browser, folder / "sweep.html", "report-sweep-light", 1280, 1000, "light")
            photograph(browser, folder / "run.html", "report-run-dark-phone", 390, 780, "dark")
            browser.close()


def report(run: Path, file: Path) -> None:
    subprocess.run([sys.executable, "-m", "dtrain", "report", str(run), "-o", str(file)], cwd=ROOT, check=True)


def photograph(browser: Any, file: Path, name: str, width: int, height: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(500)
    save(page.screenshot(), name)
    context.close()


def save(png: bytes, name: str) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    path = DOCS / "pictures" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    picture.save(path, optimize=True)
    size = path.stat().st_size
    assert size < LARGEST, f"{path} has {size} bytes"
    print(f"{path.relative_to(ROOT)}  {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
