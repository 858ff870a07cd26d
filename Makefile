# Two commands for a bare machine with Python 3.11+ and make; all set-up goes into .venv, once:
#   make train    make test

PYTHON ?= python3
VENV := .venv
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint $(CONSTRAINTS)
CONSTRAINTS := constraints.txt

# Another torch than the pinned one, in an environment of its own: make test TORCH=2.15.0
# There pip's own constraints of this machine do not apply.
# Each torch needs its own setuptools, so the pin does not hold there either.
ifdef TORCH
VENV := .venv-torch-$(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
export PIP_CONSTRAINT := /dev/null
endif

# The wheel index that torch comes from, beside pip's own. On Linux, PyPI's torch brings gigabytes
# of CUDA. So by default: nothing extra where pip has indexes of its own configured, or where there
# is an NVIDIA GPU to use (PyPI's build is then the right one); else PyTorch's CPU builds.
# Your choice: make test TORCH_INDEX=https://download.pytorch.org/whl/cu130, or TORCH_INDEX= for none.
TORCH_INDEX ?= $(shell $(PYTHON) -m pip config list 2>/dev/null | grep -E 'index|find-links' >/dev/null \
	|| command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)

# Python's cache of compiled files, also where an image switches it off: without it each process compiles all files anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test check lint types tests test-all laws sweep bench mutants faults cuda gpu docs format clean
.DELETE_ON_ERROR:

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

train: $(VENV)/examples.stamp ## train the example GPT; ARGS="--stage 3 --ranks 4", or "--experts 8 --ep 2"
	$(BIN)/python examples/$(if $(findstring --experts,$(ARGS)),moe,train_gpt).py --out "$$(mktemp -d)" $(ARGS)

test: lint types tests ## lint, types and tests; TORCH=2.15.0 for another torch than the pinned one

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev.stamp
	$(BIN)/pyright

check: $(VENV)/dev.stamp ## what has changed: its lint, types and tests, within a minute
	@$(BIN)/python -m tests.check $(ARGS)

tests: $(VENV)/dev.stamp ## only the tests; ARGS="-n0 -k gather" to choose
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/dev.stamp ## lint, types and all tests, also those that "make test" leaves out
	HYPOTHESIS_PROFILE=all $(MAKE) lint types tests ARGS="-m 'slow or not slow' $(ARGS)"
	$(MAKE) laws ARGS=
	$(MAKE) sweep ARGS=

laws: $(VENV)/dev.stamp ## the laws on random examples, whose seed is printed; ARGS="--seed 7" to repeat a run
	$(BIN)/python -m tests.laws $(ARGS)

sweep: $(VENV)/dev.stamp ## train every model in the default backend; goes on where it stopped, hours; ARGS="--models llama"
	$(BIN)/python -m tests.sweep $(ARGS)

bench: $(VENV)/bench.stamp ## compare with DDP, FSDP2 and DeepSpeed, two hours; ARGS="--models A" to choose
	$(BIN)/python -m benchmarks.peers $(ARGS)

mutants: $(VENV)/dev.stamp ## plant faults one at a time; the tests must catch each
	$(BIN)/python -m tests.mutants $(ARGS)

faults: $(VENV)/dev.stamp ## kill, starve and damage training on processes; ARGS="--cycles 100" to choose
	$(BIN)/python -m tests.faults $(ARGS)

# The laws of the GPU need PyPI's build of torch, which brings CUDA, and g++; they need no GPU, and run on one where it is.
CUDA_TORCH ?= 2.14.1
CUDA_PIP = PIP_CONSTRAINT=/dev/null .venv-cuda/bin/python -m pip install --disable-pip-version-check --constraint .venv-cuda/constraints.txt

cuda: .venv-cuda/stamp ## the laws of the GPU, without one or on one; makes .venv-cuda, 3 GB to download; ARGS="-k wait"
	.venv-cuda/bin/python -m tests.cuda $(ARGS)

# Ten minutes on one to eight GPUs. Another Python with a torch of its own for the cards: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= .venv-cuda/bin/python

gpu: $(if $(filter .venv-cuda/%,$(GPU_PYTHON)),.venv-cuda/stamp) ## ten minutes on 1 to 8 GPUs: benchmarks/gpu.md; ARGS=--rehearse without one, GPU_PYTHON=python3
	@$(GPU_PYTHON) -c 'import sys, importlib.util as u; sys.exit(u.find_spec("deepspeed") is None)' || [ '$(GPU_PYTHON)' != .venv-cuda/bin/python ] || \
		$(CUDA_PIP) --quiet deepspeed || echo 'DeepSpeed cannot be installed here, so it is left out.'
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

.venv-cuda/stamp: pyproject.toml constraints.txt
	@echo 'This downloads 3 GB of torch $(CUDA_TORCH) with CUDA from PyPI, which take 5.5 GB in .venv-cuda.'
	$(PYTHON) -m venv .venv-cuda
	@sed -e '/^setuptools==/d' -e 's/^torch==.*/torch==$(CUDA_TORCH)/' constraints.txt > .venv-cuda/constraints.txt
	$(CUDA_PIP) torch numpy hatchling editables
	$(CUDA_PIP) --quiet --no-build-isolation --editable '.[testing,examples,finetune]' pytest pytest-xdist
	@touch $@

# The variable silences an advertisement; --strict makes every warning an error.
docs: $(VENV)/docs.stamp ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

format: $(VENV)/dev.stamp ## format the code and the pages, write their lists, and fix what lint can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python -m tests.docs.lists
	$(BIN)/python -m tests.docs.sentences
	$(BIN)/python benchmarks/bytes_per_rank.py --write

clean: ## remove .venv, caches and outputs
	rm -rf $(VENV) .hypothesis .pytest_cache .ruff_cache build dist site *.png examples/*.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/dev.stamp: fzero, editable, with its extra `dev`; likewise for the other extras.
$(VENV)/%.stamp: $(VENV)/base.stamp
	$(INSTALL) --quiet --no-build-isolation --editable '.[$*]'
	@touch $@

# torch comes first, by itself, so that TORCH_INDEX serves nothing else.
$(VENV)/base.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'fzero needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if [ -n '$(TORCH)' ]; then sed -e 's/^torch==.*/torch==$(TORCH)/' -e /^setuptools==/d constraints.txt > $(CONSTRAINTS); fi
	$(INSTALL) $(addprefix --extra-index-url=,$(TORCH_INDEX)) torch
	$(INSTALL) --quiet hatchling editables
	@touch $@
