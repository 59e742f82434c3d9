# Needs Python 3.11 or later and make. Each target sets up the environment that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.ready-to-train

.PHONY: demo docs test test-fast test-slow test-kernels coverage test-gpu sanitize lint format wheel hub-kernel clean

# Runs again only when the requirements change.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)

# What a run needs, without the tools for tests and docs. Skipped where the whole environment is up to date.
$(RUNS): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if ! test $(READY) -nt pyproject.toml; then \
		echo "Setting up $(VENV) (a few minutes the first time) ..."; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train]'; \
	fi
	@touch $(RUNS)

demo: $(RUNS)  ## train a small LambdaResNet and a convolutional baseline on real digits, about two minutes
	OMP_WAIT_POLICY=PASSIVE $(BIN)/lambdanets demo  # waiting threads do not spin: other programs stay responsive

docs: $(READY)  ## build the site in build/docs and run its tutorials; warnings and broken links are errors
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m sphinx -W --keep-going -d build/doctrees docs build/docs
	$(BIN)/python docs/check_links.py build/docs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint test-fast test-kernels  ## lint, types and the fast tests

test-fast: $(READY)
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)  ## tests that take minutes: runs that are killed and resumed, several processes, two hosts
	$(BIN)/python -m pytest -m slow --durations=10

KERNEL_TESTS := $(filter-out %_compiles.py, $(wildcard tests/ops/test_fused*.py))

test-kernels: $(READY)  ## values and gradients of the GPU kernels under Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNEL_TESTS)
	@# The interpreter has no bfloat16: this seed mostly draws other dtypes.
	TRITON_INTERPRET=1 $(BIN)/lambdanets selftest --backend fused --seed 67 --cases 4

coverage: $(READY)  ## lines that the fast tests and the kernel tests do not run; takes twice as long as the tests
	$(BIN)/python -m pytest -n 2 --cov --cov-report=
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNEL_TESTS) --cov --cov-append --cov-report=term:skip-covered

test-gpu: $(READY)  ## test the kernels and the operation on a CUDA device
	$(BIN)/python -m pytest $(KERNEL_TESTS) tests/models/test_pool.py tests/bench/test_compiled.py tests/bench/test_kernels.py tests/train/test_prefetch.py tests/train/test_fixed.py tests/train/test_data_path.py
	$(BIN)/lambdanets selftest --device cuda --minutes 3

# Without torch's caching allocator, an access beyond a tensor is an access beyond an allocation.
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --tool
sanitize: $(READY)  ## run every kernel on small layers under compute-sanitizer on a CUDA device
	$(SANITIZE) memcheck $(BIN)/python -m pytest tests/ops/test_fused_sanitizer.py
	$(SANITIZE) racecheck $(BIN)/python -m pytest tests/ops/test_fused_sanitizer.py

PYTHONS ?= $(PYTHON)
TORCH ?= torch
wheel:  ## sdist and wheel in dist/, installed and used in a fresh environment of each of PYTHONS; downloads torch
	$(PYTHON) tests/package/check_wheel.py --pythons $(PYTHONS) --torch "$(TORCH)"

hub-kernel: $(READY)  ## write a kernel package for the Hugging Face hub to build/hub-kernel
	$(BIN)/python benchmarks/hub_kernel.py build/hub-kernel

clean:
	rm -rf $(VENV) build dist docs/_generated *.egg-info .pytest_cache .ruff_cache .coverage
