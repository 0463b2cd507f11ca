# Weight syncs while everything breaks, and the cost of calling many engines at once.
CHAOS_SEED ?= 1
CHAOS_SYNCS ?= 500
FANOUT_ENGINES ?= 64

.PHONY: chaos-sync chaos-sync-proxy fanout-bench

chaos-sync: $(VENV)/.stamp ## 500 weight syncs while engines die, hang and lie (a few minutes)
	$(BIN)/python -m tests.scenarios.chaos_sync --seed $(CHAOS_SEED) --syncs $(CHAOS_SYNCS)

# Finds wrong answers still: an update that broke before the proxy died is not known to the next one.
chaos-sync-proxy: $(VENV)/.stamp ## the same with the proxy killed as well, which is known to find something
	$(BIN)/python -m tests.scenarios.chaos_sync --seed $(CHAOS_SEED) --syncs $(CHAOS_SYNCS) --proxy-every 50

fanout-bench: $(VENV)/.stamp ## overhead of a control call to 64 engines over its slowest leg
	$(BIN)/python -m tests.scenarios.chaos_sync.fanout_bench --engines $(FANOUT_ENGINES)
