# `make test` and `make demo` need nothing but Python 3.10 or newer: each makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
OLDEST_TRITON := $(VENV)/triton-3.6.0
TRITONS_BETWEEN := $(VENV)/triton-3.7.1 $(VENV)/triton-3.8.0

.PHONY: test lint types docs drawings tests interpreted compiled gpu-tests sanitize demo bench wheel clean

test: lint types docs tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev  # the site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

drawings: $(VENV)/.dev
	$(BIN)/python docs/drawings.py

tests: $(VENV)/.dev $(OLDEST_TRITON) $(TRITONS_BETWEEN)  # two at a time, a thread each: a second one would only wait
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --jobs=2 --output-sync=target interpreted first-half second-half compiled

%-half: $(VENV)/.dev
	$(PYTEST) --shard $(if $(filter first,$*),0,1)/2

interpreted: $(VENV)/.dev  # GPU kernels, on the CPU
	TRITON_INTERPRET=1 $(PYTEST) tests/test_hopper.py
	TRITON_INTERPRET=1 $(PYTEST) tests/test_parity.py tests/test_budget.py tests/test_ring.py tests/test_replay.py -k "triton or packed or hopper"

compiled: $(VENV)/.dev $(OLDEST_TRITON) $(TRITONS_BETWEEN)  # by the releases before the newest
	PYTHONPATH=$(OLDEST_TRITON) $(PYTEST) tests/test_triton_compilation.py tests/test_hopper_compilation.py -m "not every_format"
	for triton in $(TRITONS_BETWEEN); do PYTHONPATH=$$triton $(PYTEST) tests/test_hopper_compilation.py -k "compiles or descriptors" || exit 1; done

gpu-tests: $(VENV)/.dev  # on a machine with an NVIDIA GPU; with many cores, share the compilation: --shard 0/20, 1/20, ...
	$(PYTEST) tests/test_gpu.py tests/test_hopper.py tests/test_budget.py tests/test_parity.py tests/test_ring.py -k "gpu or hopper or triton or packed"

sanitize: $(VENV)/.dev
	$(BIN)/python tests/sanitize.py  # compiles without the sanitizer, which would slow it down
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/sanitize.py
	# Not Hopper's kernels: racecheck takes what they hand over by mbarriers for races.
	compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python tests/sanitize.py portable

demo: $(VENV)/.demo
	$(BIN)/sparge demo

bench: $(VENV)/.demo
	$(BIN)/sparge bench

$(VENV)/triton-%: $(VENV)/bin/python  # beside the newest, which the environment holds
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.demo

wheel: $(VENV)/.dev  # in dist/, tried out in an environment that holds nothing but it and what it needs
	rm -rf dist build/clean
	$(BIN)/python -m build --wheel --no-isolation --outdir dist
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	build/clean/bin/python -c "import sparge, torch; x = torch.randn(1, 2, 300, 32); print(sparge.attention(x, x, x).shape)"
	build/clean/bin/sparge; test $$? -eq 1  # one sentence: the command is an extra

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
