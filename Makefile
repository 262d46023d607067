# Each target does all of its own set-up in .venv; Python 3.11 or newer is all that must be there.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# without bytecode every process would compile all of dtrain anew: a third of the time of a launch
unexport PYTHONDONTWRITEBYTECODE
# processes that run the tests: 3 on two cores, because a test often waits; 0 = all in this one, as --pdb needs it
WORKERS ?= 3
# without compiling: that takes a minute, for modules of which most are never imported
INSTALL = $(BIN)/python -m pip install -q --no-compile -c constraints.txt
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)

.NOTPARALLEL: # one pip at a time in .venv
.PHONY: train test test-all nvme horovod lint docs clean

# The main job on an embedded default: gpt2-tiny, 2 processes, the Python standard library's source; then a sample.
train: .venv/installed
	$(BIN)/python launch.py recipe=cpu-tiny $(ARGS)
	@echo; echo 'dtrain sample latest "def "'
	@$(BIN)/dtrain sample latest "def "

test: .venv/installed-dev
	$(PYTEST) $(ARGS)

# Also every pair of strategies as saver and resumer; --matrix FILE writes what came out to FILE.json and FILE.md
test-all: .venv/installed-engines
	$(MAKE) horovod || echo 'Horovod could not be built: its tests are skipped'
	$(PYTEST) --all $(ARGS)

# DeepSpeed's operation for offload to NVMe: 2 to 5 minutes of compiling, for which libaio-dev and g++ must be there
nvme: .venv/installed-dev
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions $(BIN)/python -c \
		'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)'

# Horovod for torch on CPUs, with gloo: 5 to 10 minutes of compiling, for which g++ must be there
horovod: .venv/installed-horovod

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

# torchvision lies beside the packages, for its examples alone: its compiled part needs CUDA's libraries, and a torchvision
# that cannot be imported keeps transformers from being imported
.venv/installed-dev: .venv/torch
	$(INSTALL) -e '.[dev]'
	rm -rf .venv/torchvision
	$(BIN)/python -m pip install -q --no-deps --target .venv/torchvision torchvision==0.28.0 timm==1.0.31 \
		|| echo 'torchvision could not be installed: its examples are skipped'
	touch .venv/installed $@

# other engines (Ray, TensorFlow): as large as all the rest together, so only for make test-all
.venv/installed-engines: .venv/torch
	$(INSTALL) -e '.[dev,ray,tensorflow]'
	touch .venv/installed .venv/installed-dev $@

.venv/installed-docs: .venv/torch
	$(INSTALL) -e '.[docs]'
	touch .venv/installed $@

# Horovod's last release, of 2023, asks for C++14, but torch's headers need C++20; and CMake 4 refuses the version that its
# copy of gloo asks for
.venv/installed-horovod: .venv/torch
	$(INSTALL) cffi cloudpickle cmake packaging psutil pyyaml setuptools wheel
	rm -rf .venv/horovod
	$(BIN)/python -m pip download -q --no-deps --no-binary=:all: --no-build-isolation -d .venv/horovod horovod==0.28.1
	tar -xzf .venv/horovod/horovod-0.28.1.tar.gz -C .venv/horovod --strip-components=1
	sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' .venv/horovod/CMakeLists.txt .venv/horovod/horovod/torch/CMakeLists.txt
	HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
		HOROVOD_CMAKE=$(CURDIR)/$(BIN)/cmake CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j$$(nproc) \
		$(BIN)/python -m pip install -q --no-compile --no-deps --no-build-isolation .venv/horovod
	rm -rf .venv/horovod
	touch $@

clean:
	rm -rf .venv site outputs multirun dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
