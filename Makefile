# Needs python3 (3.10 or later), make and a package index. Everything goes into .venv.

PYTHON ?= python3
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_BENCH := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help demo demo-check test lint bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Show the locks at work, then serve the demo site until Ctrl-C.
	$(RUN) manage.py demo $(ARGS)

demo-check: $(INSTALLED) ## The demo without the site.
	$(RUN) manage.py demo --no-serve $(ARGS)

test: $(INSTALLED) ## Run the test suite.
	$(RUN) -m pytest $(ARGS)

lint: $(INSTALLED) ## Check style and types.
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

bench: $(INSTALLED_BENCH) ## Measure against other locks.
	$(RUN) -m benchmarks $(ARGS)

clean: ## Remove what these targets have made.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis db.sqlite3
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	    f"Python 3.10 or later is needed, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# With a new setup.cfg the package is installed again.
$(INSTALLED): setup.cfg pyproject.toml | $(RUN)
	@echo 'Installing into $(VENV); once, it takes a minute.'
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[demo,test,lint]'
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@
