# From a bare clone: `make demo` shows the main job in some seconds of work, `make test` checks everything.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test docs install lint types tests nightly wheel

demo: install
	$(BIN)/lrbpfl compare

test: lint types tests

# site/index.html, which needs no network; a broken link fails.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Three workers on two cores: those that start a server and sites mostly wait.
tests: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# What takes too long for every change.
nightly: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly
	LRBPFL_FUZZ=10 $(BIN)/python -m pytest -n 2 tests/fuzz

# What a release holds, in dist/, tried in an empty environment.
wheel: install
	rm -rf dist build
	$(BIN)/python -m build --quiet --outdir dist .
	PYTHON=$(BIN)/python .ci/wheel
