# Three commands for people: `make demo`, `make test`, `make lint`. Each makes .venv if it is missing and installs what it needs.
#
#   make demo PYTHON=python3.12                   another interpreter (3.11 or newer)
#   make demo TORCH="torch==2.11.0"               another PyTorch; any pip arguments may stand here, a CPU wheel too
#   make test ARGS="tests/unit -k cli"            part of the tests
#   make demo ARGS="--model path/to/model.gguf"   another model

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint format dev clean help

help:
	@sed -n 's/^#\( \|$$\)//p' Makefile

demo: $(VENV)/.stamp-run
	@$(BIN)/foretell demo --max-tokens 128 $(ARGS)

test: $(VENV)/.stamp-dev
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dev: $(VENV)/.stamp-dev

# The stamps make the second run fast: pip is asked again only when pyproject.toml has changed.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("foretell needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.11" % v[:2])'
	@echo "making $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# PyTorch first and by itself, so that the choice of build is made here and pip keeps it afterwards.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	@echo "installing $(TORCH) (once)"
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-torch pyproject.toml
	@echo "installing foretell and what it needs (once)"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	@echo "installing the test tools (once)"
	@$(PIP) install --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
