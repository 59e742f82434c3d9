# Everything a newcomer needs: Python 3.11 or later and make. Each target sets up its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-gpu lint format clean

# Again only when the project's requirements change.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)

demo: $(READY)  ## a short tour of the lambda layer
	$(BIN)/lambdanets tour

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint  ## lint, types and the fast tests
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered

test-gpu: $(READY)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .coverage
