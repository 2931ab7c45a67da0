# Everything runs in .venv; a bare checkout needs Python 3.11+ with pip.
#   make setup    create .venv (again only when pyproject.toml changed)
#   make test     format check, lint, types, tests: what CI runs
#   make test-slow  all comparisons with transformers, and the whole product of MoE backends: 45 minutes
#   make test-clients  real packages of others against the server (TOOLS="openai litellm" chooses);
#                 installs them in .venv-clients, 16 GB for all
#   make serve    serve the house model on port 30000, its experts on 4 ranks (MODEL=DIR serves
#                 another, ARGS=… with other flags)

PYTHON ?= python3
# Installed first, and alone, so that the choice of build is yours and not the resolver's:
#   make setup TORCH="torch==2.13.0 --index-url YOUR_INDEX_OF_CPU_BUILDS"
TORCH ?= torch==2.13.0
MODEL ?= models/house-moe
BENCH ?=
ARGS ?=
PYTEST_ARGS ?=
TOOLS ?=

BIN := .venv/bin
# Tests start some hundred processes: each would compile the package again where this is set.
export PYTHONDONTWRITEBYTECODE :=
# They judge ranks by how long these take: beside tests that compute they may misjudge them. They mostly wait, so
# that three of them at a time do not disturb each other.
WATCHFUL := $(patsubst %,tests/distributed/test_%.py,supervisor nodes missing_peer comm tcp_links)
# Tests on a GPU have it to themselves. Nothing to run, of what PYTEST_ARGS choose, is no error. All files are
# collected at once, as that takes long; those that start services come first, as many short ones end together.
BESIDE := -n 2 -m "not slow and not gpu" --dist loadfile --no-loadscope-reorder
NONE := || [ $$? -eq 5 ]
STAMP := .venv/.stamp

.PHONY: setup test test-slow test-clients serve format docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[dev,server,structured,bench]'
	touch $@

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(BESIDE) tests $(WATCHFUL:%=--ignore=%) $(PYTEST_ARGS) $(NONE)
	$(BIN)/pytest $(BESIDE) -n 3 $(WATCHFUL) $(PYTEST_ARGS) $(NONE)
	[ ! -e /dev/nvidiactl ] || $(BIN)/pytest -m "gpu and not slow" tests $(PYTEST_ARGS) $(NONE)

test-slow: setup
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

test-clients: setup
	$(BIN)/python -m tests.clients.run $(TOOLS)

serve: setup
	$(BIN)/moesaic serve --model-path $(MODEL) $(or $(ARGS),--tp 4 --ep 4 --moe-a2a-backend deepep)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python -m moesaic.config.docs docs/flags.md
	$(BIN)/python -m moesaic.moe.matrix_docs docs/backends.md
	$(BIN)/python -m moesaic.observe.metrics_docs docs/metrics.md deploy/grafana/moesaic.json

bench: setup
	@test -n "$(BENCH)" || { echo "usage: make bench BENCH=NAME ARGS=...; NAME is a file of bench/:"; \
		ls bench/*.py; exit 2; }
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
