# Weight syncs while everything breaks, and the cost of calling many engines at once.
CHAOS_SEED ?= 1
CHAOS_SYNCS ?= 500
FANOUT_ENGINES ?= 64

.PHONY: chaos-sync chaos-sync-proxy fanout-bench

chaos-sync: $(VENV)/.stamp ## 500 weight syncs while engines die, hang and lie (a few minutes)
	$(BIN)/python -m tests.scenarios.chaos_sync --seed $(CHAOS_SEED) --syncs $(CHAOS_SYNCS)

chaos-sync-proxy: $(VENV)/.stamp ## the same with the proxy killed as well, and a trainer that resumes whatever happened
	$(BIN)/python -m tests.scenarios.chaos_sync --seed $(CHAOS_SEED) --syncs $(CHAOS_SYNCS) --proxy-every 50 --careless

fanout-bench: $(VENV)/.stamp ## overhead of a control call to 64 engines over its slowest leg
	$(BIN)/python -m tests.scenarios.chaos_sync.fanout_bench --engines $(FANOUT_ENGINES)
