# Benchmarks (docs/performance.md). Peers are optional: what cannot be installed is left out and named.
BENCH_PYTHON ?= .venv/bin/python
# Further flags of benchmarks/run.py, such as BENCH_FLAGS="--only fleetgate nginx --groups traffic".
BENCH_FLAGS ?=

.PHONY: bench bench-quick bench-build bench-peers bench-soak

bench-build: ## Build the mock engine and the load generator
	@$(MAKE) --no-print-directory -C benchmarks/src

bench-peers: ## Install the proxies to measure against
	@$(BENCH_PYTHON) benchmarks/peers.py

bench: bench-build bench-peers ## Measure everything (about half an hour)
	$(BENCH_PYTHON) benchmarks/run.py $(BENCH_FLAGS)

bench-quick: bench-build bench-peers ## Measure a part in under three minutes
	$(BENCH_PYTHON) benchmarks/run.py --quick $(BENCH_FLAGS)

bench-soak: bench-build ## Watch the memory for ten minutes
	$(BENCH_PYTHON) benchmarks/run.py --soak 600 --name soak
