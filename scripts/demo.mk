# `make demo` needs nothing but Python; `make demo ENGINE=vllm` builds the engine environment and the model first.

ENGINE ?= sim
# More arguments for the demo, such as DEMO_ARGS="--syncs 3 --json .run/demo.json".
DEMO_ARGS ?=

ifeq ($(ENGINE),vllm)
DEMO_NEEDS := engine model
else
DEMO_NEEDS :=
endif

.PHONY: demo
demo: $(VENV)/.stamp $(DEMO_NEEDS) ## replace weights under load and check every token; ENGINE=sim (default) or vllm
	@$(BIN)/python -m examples.demo --engine $(ENGINE) $(DEMO_ARGS)
