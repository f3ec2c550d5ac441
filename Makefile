# make compare   the main job on the embedded model; ARGS="--budget 16 --json reports/run.json" is passed on
# make test      ruff, then the tests; ARGS="-k tree" is passed to pytest
# make test-kernels   SGLang's own kernels from its wheel (in .kernels/), without a GPU; ARGS="-k gdn" is passed to pytest
# make test-browser   the HTML report in a headless Chromium (Debian: apt-get install chromium)
# Both set up .venv first, once. PYTHON=python3.12 picks the interpreter; constraints-torch.txt says how to get a CPU torch.
# make itself exits 2 on any failure; "Error N" in its last line is the command's own exit code.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ddtree-check
KERNELS := .kernels
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup compare test test-browser test-kernels lint bench clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile
	@echo "make lint | bench | clean (removes .venv too)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt constraints-torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"ddtree-check needs Python >= 3.11, $(PYTHON) is {sys.version.split()[0]}; try make PYTHON=python3.12")'
	@echo "setting up $(VENV): minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-torch.txt -e '.[test]'
	@touch $@

compare: $(STAMP)
	@$(BIN)/ddtree-check compare $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# One thread a worker: two workers with two threads each on two cores are slower than one. No test may reach the network.
# Bytecode is kept: without it each of the processes that tests start compiles all that it imports.
test: lint
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 $(ARGS)

# In a folder of their own, so that a wheel that is missing or does not fit never breaks `make test`.
$(KERNELS)/.installed: constraints-kernels.txt | $(STAMP)
	@echo "setting up $(KERNELS)"
	@rm -rf $(KERNELS)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(KERNELS) -r constraints-kernels.txt
	@touch $@

test-kernels: $(STAMP) $(KERNELS)/.installed
	@PYTHONPATH=$(KERNELS) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m sglang --durations 5 tests/sglang/test_kernels.py $(ARGS)

test-browser: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser/suite.py $(ARGS)

bench: $(STAMP)
	@set -e; for file in benchmarks/*.py; do \
		test -e "$$file" || { echo "make bench: no script in benchmarks/"; exit 1; }; \
		echo "== $$file"; $(BIN)/python "$$file" $(ARGS); \
	done

clean:
	rm -rf $(VENV) $(KERNELS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find ddtree_check tests benchmarks fixtures -name __pycache__ -type d -prune -exec rm -rf {} +
