# Every target sets up what it needs; a fresh clone and PyPI are enough.
PYTHON_GIVEN := $(PYTHON)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two stages: what serving needs (about 60 MB), and everything (Spark, Java, tests, linters: over 1 GB).
SERVE := $(VENV)/.serve
STAMP := $(VENV)/.installed
SERVE_EXTRAS := cli,match,server
EXTRAS := $(SERVE_EXTRAS),spark,delta,iceberg,tier,zstd,cdc,otel
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
NATIVE := $(wildcard native/*)
# An environment belongs to one Python version: `make test PYTHON=python3.13` after python3.11 makes it again.
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
MADE := $(or $(if $(PYTHON_GIVEN),,$(firstword $(wildcard $(VENV)/.python-*))),$(VENV)/.python-$(VERSION))

.PHONY: help setup run demo log-demo test test-fast test-spark crash-spark lint format bench bench-log bench-topics bench-tier bench-match bench-journal bench-views bench-server bench-spark bench-spark-tier bench-nexmark bench-cdc soak-server fuzz wheel clean docs reference

help:
	@echo "make run     install what serving needs and serve on port 8232"
	@echo "make test    install everything and run every test"
	@echo "make lint    ruff and mypy                  make bench  every benchmark"
	@echo "make setup   the whole environment (.venv)  make clean  remove what make made"
	@echo "make demo    everything at work, live       make fuzz   the native engines under sanitizers"
	@echo "make wheel   source archive and wheel in dist/  make docs   the docs as a site in build/site"

setup: $(STAMP)

$(MADE):
	@$(PYTHON) --version # stop here where there is no such Python
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(SERVE): $(MADE) pyproject.toml setup.py $(NATIVE)
	@echo "installing what serving needs into $(VENV)"
	$(PIP) install --editable ".[$(SERVE_EXTRAS)]"
	@touch $@

# The package is there already, so only what it still lacks is installed; nothing is built twice.
$(STAMP): $(SERVE)
	@echo "installing everything else into $(VENV): Spark, Java, tests and linters"
	$(PIP) install --upgrade "pip>=25.1"
	$(PIP) install "virta[$(EXTRAS)]" --group dev
	@touch $@

run: $(SERVE)
	@echo "make demo shows everything at work, with data"
	$(BIN)/virta serve

# Everything at work: server, console, a shop that changes by itself, jobs; with Spark after `make setup`.
demo: $(SERVE)
	$(BIN)/virta demo

log-demo: $(SERVE)
	$(BIN)/python examples/log_demo.py

# Two processes, each with whole files, in our order: most tests wait for processes and sockets of their own.
# A test that hangs beyond its time limit ends its process, and with it the run.
test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --timeout-method thread --max-worker-restart 0

test-fast: setup
	$(BIN)/python -m pytest -m "not slow"

# The tests of Spark on another version: make test-spark SPARK=4.1 (or 4.2, 4.3).
SPARK ?= 4.3
SPARK_VENV := build/spark-$(SPARK)

test-spark: $(MADE)
	test -x $(SPARK_VENV)/bin/python || $(BIN)/python -m venv $(SPARK_VENV)
	$(SPARK_VENV)/bin/python -m pip --quiet install --upgrade "pip>=25.1"
	$(SPARK_VENV)/bin/python -m pip --quiet install --editable ".[$(EXTRAS)]" --group dev "pyspark[sql]==$(SPARK).*"
	$(SPARK_VENV)/bin/python -m pytest tests/spark

# Drivers and executors killed while large micro-batches go to a channel, Delta and Iceberg; needs Maven Central.
KILLS ?= 20

crash-spark: $(MADE)
	test -x build/spark-4.1/bin/python || $(BIN)/python -m venv build/spark-4.1
	build/spark-4.1/bin/python -m pip --quiet install --upgrade "pip>=25.1"
	build/spark-4.1/bin/python -m pip --quiet install --editable ".[$(EXTRAS)]" --group dev "pyspark[sql]==4.1.*"
	build/spark-4.1/bin/python tests/spark/kill_rounds.py --kills $(KILLS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-log bench-topics bench-tier bench-match bench-journal bench-views bench-server bench-spark bench-cdc

bench-log: setup
	@$(PIP) install --group bench || echo "some peers are not installable: their rows are skipped"
	$(BIN)/python bench/log_bench.py

bench-topics: setup
	$(BIN)/python bench/log_topics.py $(BENCH_ARGS)

bench-tier: setup
	$(BIN)/python bench/tier_bench.py $(BENCH_ARGS)

bench-journal: setup
	@$(PIP) install --group bench || echo "some peers are not installable: their rows are skipped"
	$(BIN)/python bench/journal_bench.py $(BENCH_ARGS)

bench-spark: setup
	$(BIN)/python bench/spark_bench.py $(BENCH_ARGS)
	$(BIN)/python bench/spark_decode.py

# Ten million events take 8 GB of disk; BENCH_ARGS="--events 1000000" for less.
bench-nexmark: setup
	$(BIN)/python bench/nexmark_bench.py $(BENCH_ARGS)

# Spark on a log in object storage; with Parquet from the same store where 690 MB of jars can be downloaded.
bench-spark-tier: setup
	$(BIN)/python bench/spark_tier.py $(BENCH_ARGS)

bench-cdc: setup
	$(BIN)/python bench/cdc_bench.py $(BENCH_ARGS)

bench-match: setup
	$(BIN)/python bench/match_bench.py $(BENCH_ARGS)

bench-views: setup
	$(BIN)/python bench/views_bench.py $(BENCH_ARGS)

bench-server: setup
	@$(PIP) install --group bench || echo "some peers are not installable: their rows are skipped"
	$(BIN)/python bench/server_bench.py $(BENCH_ARGS)
	$(BIN)/python bench/server_access.py

# Half an hour of many idle consumers, a steady stream and connections that come and go; SOAK_ARGS="--seconds 60" for less.
soak-server: setup
	$(BIN)/python bench/server_soak.py $(SOAK_ARGS)

# The native engines, built with ASan and UBSan outside the ordinary build, against the plain ones.
FUZZ_SECONDS ?= 60
FUZZ := build/fuzz

fuzz: setup
	@rm -rf $(FUZZ) && mkdir -p $(FUZZ)/tree
	@cp -r pyproject.toml setup.py LICENSE $(wildcard README.md) src native $(FUZZ)/tree/
	@find $(FUZZ)/tree -name '*.so' -delete
	VIRTA_SANITIZE=1 $(PIP) install --no-deps --target $(FUZZ)/site $(FUZZ)/tree
	for script in tests/match/fuzz.py tests/fuzz_native.py; do \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	PYTHONMALLOC=malloc PYTHONPATH=$(FUZZ)/site:tests:tests/match:tests/filters $(BIN)/python $$script --seconds $(FUZZ_SECONDS) || exit 1; \
	done

# The pages of docs/ that are written from the code.
reference: setup
	$(BIN)/python tests/server/api/routes_page.py

# The docs as a site: build/site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict # --quiet would hide the warnings from --strict
	@echo "build/site/index.html"

# Source archive and wheel in dist/; a test installs both outside of the tree.
wheel: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf dist $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
