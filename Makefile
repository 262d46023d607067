# Each target does all of its own set-up in .venv; Python 3.11 or newer is all that must be there.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# without bytecode every process would compile all of dtrain anew: a third of the time of a launch
unexport PYTHONDONTWRITEBYTECODE
# processes that run the tests: 2 take two thirds of the time of one on two cores; 0 = all in this one, as --pdb needs it
WORKERS ?= 2
# without compiling: that takes a minute, for modules of which most are never imported
INSTALL = $(BIN)/python -m pip install -q --no-compile -c constraints.txt
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)

.NOTPARALLEL: # one pip at a time in .venv
.PHONY: train test test-all nvme lint docs clean

# The main job on an embedded default: gpt2-tiny, 2 processes, the Python standard library's source; then a sample.
train: .venv/installed
	$(BIN)/python launch.py recipe=cpu-tiny $(ARGS)
	@echo; echo 'dtrain sample latest "def "'
	@$(BIN)/dtrain sample latest "def "

test: .venv/installed-dev
	$(PYTEST) $(ARGS)

# Also every pair of strategies as saver and resumer; --matrix FILE writes what came out to FILE.json and FILE.md
test-all: .venv/installed-engines
	$(PYTEST) --all $(ARGS)

# DeepSpeed's operation for offload to NVMe: 2 to 5 minutes of compiling, for which libaio-dev and g++ must be there
nvme: .venv/installed-dev
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions $(BIN)/python -c \
		'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)'

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q dtrain tests
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pages of docs/ as a website in site/; a stale generated page, a broken link or any other warning is an error
docs: .venv/installed-docs
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict

# torch goes in first and by its pinned version, so that nothing else pulls another build of it
.venv/torch: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'dtrain needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11'; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@

.venv/installed: .venv/torch
	$(INSTALL) -e .
	touch $@

.venv/installed-dev: .venv/torch
	$(INSTALL) -e '.[dev]'
	touch .venv/installed $@

# other engines (Ray, TensorFlow): as large as all the rest together, so only for make test-all
.venv/installed-engines: .venv/torch
	$(INSTALL) -e '.[dev,ray,tensorflow]'
	touch .venv/installed .venv/installed-dev $@

.venv/installed-docs: .venv/torch
	$(INSTALL) -e '.[docs]'
	touch .venv/installed $@

clean:
	rm -rf .venv site outputs multirun dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
