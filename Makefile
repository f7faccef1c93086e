# serve: set up and run the server. test: set up and run the tests. check: all that CI runs.
# native: compile the kernels again.
# TORCH=cpu takes the CPU build of torch; without it pip chooses, on Linux the one with CUDA (4.4 GB).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
TORCH ?=
CPU_INDEX := https://download.pytorch.org/whl/cpu

ifeq ($(TORCH),cpu)
TORCH_READY := $(VENV)/.torch-cpu
else ifneq ($(TORCH),)
$(error TORCH can only be cpu)
endif

NATIVE_SOURCES := $(foreach kind,cpp hpp h py,$(wildcard kernels/cpu/*.$(kind)))

.PHONY: serve test check lint types bench soak native clean

serve: $(VENV)/.serve
	$(BIN)/kvtrio serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/kvtrio fetch smollm2
	$(BIN)/kvtrio fetch gemma3-270m
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

check: lint types test

# Tables, no verdicts: scheduling, the prefix index, returning conversations, lateness at the client,
# what lies between two steps, saving and restoring state.
bench: $(VENV)/.test
	$(BIN)/python tests/bench/policies.py
	$(BIN)/python tests/bench/core_cost.py
	$(BIN)/python tests/bench/index_cost.py
	$(BIN)/python tests/bench/returning.py
	$(BIN)/python tests/bench/streams.py
	$(BIN)/python tests/bench/between_steps.py
	$(BIN)/python tests/bench/analyze.py --gigabytes 1
	$(BIN)/python tests/bench/store.py
	$(BIN)/python tests/bench/restart.py

# Kills writers of state, then whole servers, at so many random moments each, and looks at what they
# left.
MOMENTS ?= 200
soak: $(VENV)/.test
	$(BIN)/python tests/soak/stores.py $(MOMENTS)
	$(BIN)/python tests/soak/server.py $(MOMENTS)

# Compiles the kernels again, beside their sources; unlike at install, a failure is an error. Takes
# setuptools from an environment that `make test` has set up.
native: | $(BIN)/python
	KVTRIO_NATIVE=required $(BIN)/python -c 'from setuptools import setup; setup()' -q \
	  build_ext --inplace

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot see packages that setuptools maps from other folders; a tree of links shows it the
# packages under the names they are imported by.
types: $(VENV)/.test
	rm -rf build/typing && mkdir -p build/typing/kvtrio
	ln -s "$(CURDIR)"/kvtrio/* "$(CURDIR)"/schedulers "$(CURDIR)"/backends "$(CURDIR)"/kernels \
	  build/typing/kvtrio/
	cd build/typing && MYPYPATH=. "$(abspath $(BIN))/mypy" --config-file ../../pyproject.toml -p kvtrio

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Before all else, so that pip finds torch installed and keeps it. Without dependencies: those come
# from the usual index, in the versions of constraints.txt.
$(VENV)/.torch-cpu: constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt --no-deps --force-reinstall --index-url $(CPU_INDEX) torch
	touch $@

$(VENV)/.serve: pyproject.toml constraints.txt $(NATIVE_SOURCES) $(TORCH_READY) | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(NATIVE_SOURCES) $(TORCH_READY) | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) build dist kvtrio.egg-info kernels/cpu/*.so
