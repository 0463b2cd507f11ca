# The balancing policies on simulated engines and traces; docs/balancing.md shows what came out.

# More arguments, such as SIMULATE_ARGS="--engines 8 --traces agents,slow".
SIMULATE_ARGS ?= --sweep

.PHONY: simulate
simulate: $(VENV)/.stamp ## every balancing policy over every trace, simulated (some minutes)
	@$(BIN)/python -m benchmarks.simulate $(SIMULATE_ARGS)
