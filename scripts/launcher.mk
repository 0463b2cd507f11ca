# The launcher under fire, Ray on a local cluster of several nodes, and the Kubernetes manifests.

# RESTART_ENGINE=vllm shows it on real engines (some ten minutes on two cores); more as RESTART_ARGS="--story restore".
RESTART_ENGINE ?= sim
RESTART_ARGS ?=
# What is run of it, such as RAY_PYTEST="-s" to see the time line; with real engines: RAY_PYTEST="-s -m vllm".
RAY_PYTEST ?= -m "not vllm"
RAY_BIN := .ray/bin
RAY_VERSION := 2.60.0

ifeq ($(RESTART_ENGINE),vllm)
RESTART_NEEDS := engine model
endif

.PHONY: show-restart rolling-restart ray ray-test

show-restart: $(VENV)/.stamp $(RESTART_NEEDS) ## kill -9 of an engine and a rolling restart under load, with the time line
	$(BIN)/python -m tests.scenarios.launcher.restart --kind $(RESTART_ENGINE) $(RESTART_ARGS)

rolling-restart: $(VENV)/.stamp $(RESTART_NEEDS) ## every engine restarted in turn under load, no client sees it; with the time line
	$(BIN)/python -m tests.scenarios.launcher.restart --kind $(RESTART_ENGINE) --story rolling --story rolling-sync

.ray/.stamp: pyproject.toml requirements/dev.lock scripts/launcher.mk
	test -x $(RAY_BIN)/python || $(PYTHON) -m venv .ray
	$(RAY_BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.lock
	$(RAY_BIN)/python -m pip install --quiet --disable-pip-version-check "ray==$(RAY_VERSION)"
	$(RAY_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

ray: .ray/.stamp ## an environment with Ray (.ray)

ray-test: ray ## engines on a local Ray cluster of several nodes, one of which is killed
	$(RAY_BIN)/python -m pytest -W ignore $(RAY_PYTEST) tests/scenarios/launcher/test_ray.py
