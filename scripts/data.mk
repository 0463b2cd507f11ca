# The data plane under fire. Each target prints what it measured and ends with an error if a promise was broken.

# More arguments, such as CHAOS_ARGS="--seed 7 --rollouts 500".
CHAOS_ARGS ?=
PAUSE_ARGS ?=
RACE_ARGS ?=
MEMORY_ARGS ?=

.PHONY: chaos pause-cycles pause-cycles-vllm keepalive-race memory

chaos: $(VENV)/.stamp ## 2,000 rollouts while simulated engines are killed, frozen, paused and cut
	$(BIN)/python -m tests.scenarios.chaos $(CHAOS_ARGS)

pause-cycles: $(VENV)/.stamp ## 300 pauses and resumes under load in each mode
	$(BIN)/python -m tests.scenarios.pause_cycles $(PAUSE_ARGS)

pause-cycles-vllm: $(VENV)/.stamp model ## 30 of them in each mode on real vLLM servers
	$(BIN)/python -m tests.scenarios.pause_cycles --vllm .models/tiny --cycles 30 $(PAUSE_ARGS)

keepalive-race: $(VENV)/.stamp ## 10,000 POSTs that meet connections which the engine is just closing
	$(BIN)/python -m tests.scenarios.keepalive_race $(RACE_ARGS)

memory: $(VENV)/.stamp ## memory of each open and each held request
	$(BIN)/python -m tests.scenarios.memory $(MEMORY_ARGS)
