# make serve   install, compile SmolLM2-135M-Instruct and serve it on http://127.0.0.1:8000
# make test    install what the tests need, run all but the slow ones (`make test-slow` runs those, `make test-exhaustive` further cases)
# make check   format, lint, types, layers
# Where there is an NVIDIA GPU, the packages for CUDA are installed too. DEVICE=cpu or DEVICE=cuda overrides the detection.

PYTHON ?= python3
MODEL  ?= smollm2-135m
PORT   ?= 8000
HOST   ?= 127.0.0.1
ARGS   ?=
TESTS  ?=

VENV   := .venv
BIN    := $(VENV)/bin

# A GPU is a device node or, where there are none (WSL), a line of the driver's tool.
GPUS   := $(or $(wildcard /dev/nvidia[0-9]*),$(shell nvidia-smi -L 2>/dev/null | grep '^GPU '))
DEVICE ?= $(if $(GPUS),cuda,cpu)

# A worker for each core, which take tests from each other; one process where there is a GPU, whose memory engines want whole.
WORKERS ?= $(if $(GPUS),0,auto)
PYTEST  := -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

.PHONY: serve test test-slow test-exhaustive test-sdk check format test-torch211 test-torch215 test-transformers517 test-transformers524 test-gpu clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	$(BIN)/compile-and-serve serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# Bytecode is kept, whatever the environment says: assertions of all tests take half a minute to rewrite, in each worker and each run.
test test-slow test-exhaustive: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST) -m "not slow" $(TESTS) $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST) -m "slow and not exhaustive" $(TESTS) $(ARGS)

# Its engines and ranks start as users start them, not as forks (`tests/support/forked_starts.py`).
test-exhaustive: export START_AS_USERS := 1

test-exhaustive: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST) -m exhaustive $(TESTS) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tests of everything that depends on the internals of torch and transformers, with the ends of the ranges that are supported.
# All else is as in constraints.txt. torch 2.15 has no build for CPUs on the index: its packages for CUDA take gigabytes.
RANGE_TESTS := tests/compiler tests/models tests/runtime/runner
RANGE_TRANSFORMERS_TESTS := $(RANGE_TESTS) tests/runtime/weights tests/runtime/text tests/end_to_end

test-torch211 test-torch215: test-%: .venv-%/.installed-dev
	.venv-$*/bin/python $(PYTEST) -m "not slow" $(or $(TESTS),$(RANGE_TESTS)) $(ARGS)

test-transformers517 test-transformers524: test-%: .venv-%/.installed-dev
	.venv-$*/bin/python $(PYTEST) -m "not slow" $(or $(TESTS),$(RANGE_TRANSFORMERS_TESTS)) $(ARGS)

# Other people's clients against a live server. Some need older versions of packages that the other tests use: they get a venv of
# their own, which finds everything else in the main one.
test-sdk: .venv-sdk/.installed
	.venv-sdk/bin/python -m pytest tests/sdk $(ARGS)

.venv-sdk/.installed: pyproject.toml $(VENV)/.installed-dev
	test -x .venv-sdk/bin/python || $(BIN)/python -m venv .venv-sdk
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["sdk"], sep="\n")' \
		| .venv-sdk/bin/python -m pip install --quiet -r /dev/stdin
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(.venv-sdk/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main-venv.pth"
	@touch $@

# Tests that need a CUDA device, with the Python of that host (torch and the [cuda] packages already there).
test-gpu:
	$(PYTHON) -m pytest -m "gpu or multigpu" $(TESTS) $(ARGS)

clean:
	rm -rf .venv .venv-sdk .venv-torch211 .venv-torch215 .venv-transformers517 .venv-transformers524 build dist *.egg-info

# torch goes first and alone, so that the index's build for this device is taken. For a CPU the exact version matches a CPU
# build where the index has one; for a GPU that build is excluded. Later steps name the same build again: otherwise pip may
# replace it by the other one to satisfy a package.
# A stamp is newer than what it was made from, so the next `make` starts at once. The stamp .for-DEVICE installs again when
# the device changes.
TORCH      := $(shell grep '^torch==' constraints.txt)
TORCH_cpu  := $(TORCH)
TORCH_cuda := $(TORCH),!=$(subst torch==,,$(TORCH))+cpu
EXTRA_cuda := [cuda]

$(VENV)/.for-$(DEVICE):
	@test "$(TORCH_$(DEVICE))" || { echo "DEVICE is cpu or cuda, not $(DEVICE)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "Python's venv module is needed: apt install python3-venv"; exit 1; }
	@rm -f $(VENV)/.for-*
	@touch $@

$(VENV)/.torch: constraints.txt $(VENV)/.for-$(DEVICE)
	@echo "Installing for $(if $(EXTRA_$(DEVICE)),CUDA,the CPU): $(if $(GPUS),an NVIDIA GPU was found,no NVIDIA GPU was found) (DEVICE=$(DEVICE))."
	$(BIN)/python -m pip install --quiet '$(TORCH_$(DEVICE))'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.$(EXTRA_$(DEVICE))' '$(TORCH_$(DEVICE))'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' '$(TORCH_$(DEVICE))'
	@touch $@

# torch 2.11 comes with Triton 3.6, which cannot interpret kernels with NumPy 2.4.
RANGE_torch211 := torch==2.11.0 numpy<2.4
RANGE_torch215 := torch==2.15.0
RANGE_transformers517 := $(TORCH) transformers==5.17.0
RANGE_transformers524 := $(TORCH) transformers==5.24.0 huggingface_hub==2.4.0

.venv-%/.installed-dev: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	printf '%s\n' $(foreach package,$(RANGE_$*),'$(package)') | cat - constraints.txt | awk -F '[=<>]+' '!seen[$$1]++' > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet '$(firstword $(RANGE_$*))'
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt -e '.[dev]' '$(firstword $(RANGE_$*))'
	@touch $@
