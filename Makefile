# Everything a newcomer needs: Python 3.11 or later and make. Each target sets up its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.ready-to-train

.PHONY: demo docs test test-fast test-slow test-kernels coverage test-gpu sanitize lint format hub-kernel clean

# Again only when the project's requirements change.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)

# What a run needs, without the tools for tests and docs; nothing to do where the whole environment is up to date.
$(RUNS): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if ! test $(READY) -nt pyproject.toml; then \
		echo "Setting up $(VENV) (a few minutes the first time) ..."; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train]'; \
	fi
	@touch $(RUNS)

demo: $(RUNS)  ## trains a small LambdaResNet and its convolutional twin on real digits, about two minutes
	OMP_WAIT_POLICY=PASSIVE $(BIN)/lambdanets demo  # threads that wait do not spin: no crawl beside a busy browser

docs: $(READY)  ## the site, its tutorials executed: build/docs/index.html. Warnings and broken links are errors
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

test-slow: $(READY)  ## runs that are killed and resumed, several processes, two hosts: minutes
	$(BIN)/python -m pytest -m slow --durations=10

KERNEL_TESTS := $(filter-out %_compiles.py, $(wildcard tests/ops/test_fused*.py))

test-kernels: $(READY)  ## the GPU kernels under Triton's interpreter, values and every gradient
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNEL_TESTS)
	@# The interpreter has no bfloat16: a seed that draws the other types often.
	TRITON_INTERPRET=1 $(BIN)/lambdanets selftest --backend fused --seed 67 --cases 4

coverage: $(READY)  ## lines that the fast tests and the kernels' miss; watching them takes the interpreter twice as long
	$(BIN)/python -m pytest -n 2 --cov --cov-report=
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNEL_TESTS) --cov --cov-append --cov-report=term:skip-covered

test-gpu: $(READY)  ## the kernels and the operation on a CUDA device
	$(BIN)/python -m pytest $(KERNEL_TESTS) tests/models/test_pool.py tests/bench/test_compiled.py tests/bench/test_kernels.py tests/train/test_prefetch.py tests/train/test_fixed.py tests/train/test_data_path.py
	$(BIN)/lambdanets selftest --device cuda --minutes 3

# Without torch's cache an access beyond a tensor is one beyond its memory.
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --tool
sanitize: $(READY)  ## small layers that launch every kernel, under compute-sanitizer on a CUDA device
	$(SANITIZE) memcheck $(BIN)/python -m pytest tests/ops/test_fused_sanitizer.py
	$(SANITIZE) racecheck $(BIN)/python -m pytest tests/ops/test_fused_sanitizer.py

hub-kernel: $(READY)  ## the operation as a kernel package for the Hugging Face hub: build/hub-kernel
	$(BIN)/python benchmarks/hub_kernel.py build/hub-kernel

clean:
	rm -rf $(VENV) build dist docs/_generated *.egg-info .pytest_cache .ruff_cache .coverage
