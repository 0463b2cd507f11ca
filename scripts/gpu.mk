.PHONY: gpu-pack gpu-try gpu-run gpu-tables

GPUS ?= 2
GPU_OUT ?= .gpu/out

gpu-pack: engine ## pack what a GPU machine without a network lacks (.gpu/load-*)
	$(BIN)/python benchmarks/gpu/pack.py --engine-python $(ENGINE_PYTHON)

gpu-try: $(VENV)/.stamp ## the whole GPU run on simulated engines, in some three minutes
	$(BIN)/python benchmarks/gpu/run.py --sim --scale 0.15 --clients 2 --sync-load 48 --out $(GPU_OUT) --work $(GPU_OUT)/work

gpu-run: ## the GPU run, where vLLM, torch and this project's needs are importable (GPUS=2)
	$(PYTHON) benchmarks/gpu/run.py --gpus $(GPUS) --out $(GPU_OUT)

gpu-tables: ## the tables of the last run
	$(PYTHON) benchmarks/gpu/tables.py $(GPU_OUT)/results.json
