# Two commands set up everything: `make demo` and `make test`.  Both use .venv, which they make from
# PYTHON and the pinned versions in constraints.txt.  `make test` has every oracle and a case of every
# feature; `make test-all` runs the long tests too.  `make lint` checks style, types and layers;
# `make cuda` runs, on a machine with an NVIDIA GPU, what needs one, with the torch of PYTHON;
# `make compat TORCH=2.15.0` runs the tests with another torch, in an environment beside .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := -m pip install --quiet --disable-pip-version-check
# A test that hangs fails after 15 minutes, with the stack of each thread.
HANGS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
PYTEST := -m pytest -n 2 --dist worksteal --durations=25 --durations-min=5 $(HANGS)
TORCH ?= 2.15.0
OTHER ?= .venv-torch-$(TORCH)
MARKED ?= slow or not slow

.PHONY: demo test test-slow test-all lint compat cuda docs clean

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow"

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m slow

test-all: test test-slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

compat: $(OTHER)
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)" "$(OTHER)/bin/python" $(PYTEST) -m "$(MARKED)"

# Installs nothing, for what has CUDA is there; each of the two ends within 9 minutes.
cuda:
	PYTHONPATH="$(CURDIR)" timeout 540 $(PYTHON) -m pytest -q -p no:benchmark -m cuda tests/cuda
	PYTHONPATH="$(CURDIR)" timeout 540 $(PYTHON) -m benchmarks.cuda

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	# Annotations that one module takes over from another stay text; all else that pdoc warns of ends it.
	$(BIN)/python -W error::UserWarning -W 'ignore:Error parsing type annotation' \
		-m pdoc planner '!planner\.' --docformat google -o build/docs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch comes first and by its exact version: a range would fetch a build with CUDA.
	$(BIN)/python $(PIP) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python $(PIP) -c constraints.txt -e ".[test,lint]"
	touch $(STAMP)

# Complete or not there at all: it is made beside its place.  The package itself is not in it.
$(OTHER):
	rm -rf "$@.partial"
	$(PYTHON) -m venv "$@.partial"
	grep -v '^torch==' constraints.txt > "$@.partial/constraints.txt"
	"$@.partial/bin/python" $(PIP) -c "$@.partial/constraints.txt" "torch==$(TORCH)" ".[test]"
	"$@.partial/bin/python" -m pip uninstall --quiet --yes checkpoint-planner
	mv "$@.partial" "$@"

clean:
	rm -rf $(VENV) .venv-torch-* build *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
