# make serve   install, compile SmolLM2-135M-Instruct and serve it on http://127.0.0.1:8000
# make test    install what the tests need, run them
# make check   format, lint, types, layers

PYTHON ?= python3
MODEL  ?= smollm2-135m
PORT   ?= 8000
HOST   ?= 127.0.0.1
ARGS   ?=
TESTS  ?=

VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: serve test check format test-torch211 test-gpu clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	$(BIN)/compile-and-serve serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(TESTS) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The oldest torch that is supported, in an environment of its own.
test-torch211: .venv-torch211/.installed-dev
	.venv-torch211/bin/python -m pytest $(TESTS) $(ARGS)

# Tests that need a CUDA device, with the Python of that host (torch and the [cuda] packages already there).
test-gpu:
	$(PYTHON) -m pytest -m "gpu or multigpu" $(TESTS) $(ARGS)

clean:
	rm -rf .venv .venv-torch211 build dist *.egg-info

# torch goes first and by its exact version, so that an index that offers a CPU build of it is asked for that one alone;
# everything else must then be content with it. A stamp is newer than what it was made from: the next `make` starts at once.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { echo "Python's venv module is needed: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

.venv-torch211/.installed-dev: pyproject.toml constraints.txt
	test -x .venv-torch211/bin/python || $(PYTHON) -m venv .venv-torch211
	# Triton 3.6, which torch 2.11 brings, cannot interpret kernels with NumPy 2.4.
	{ grep -v -e '^torch==' -e '^numpy==' constraints.txt; echo 'numpy<2.4'; } > .venv-torch211/constraints.txt
	.venv-torch211/bin/python -m pip install --quiet torch==2.11.0
	.venv-torch211/bin/python -m pip install --quiet -c .venv-torch211/constraints.txt -e '.[dev]' torch==2.11.0
	@touch $@
