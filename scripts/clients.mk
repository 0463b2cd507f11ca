# Real clients in an environment of their own: the SDKs, TRL, and through a path file what `make engine` built.
CLIENTS_PYTHON := .clients/bin/python

.PHONY: clients

.clients/.stamp: requirements/clients.lock scripts/clients.mk
	test -x $(CLIENTS_PYTHON) || $(PYTHON) -m venv .clients
	$(CLIENTS_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/clients.lock
	@# Python leaves out a path that does not exist, so the file does no harm before .engine is there.
	$(CLIENTS_PYTHON) -c 'import pathlib, sysconfig; site = pathlib.Path(sysconfig.get_path("purelib")); \
	  site.joinpath("engine.pth").write_text(f"../../../../.engine/lib/{site.parent.name}/site-packages\n")'
	@touch $@

clients: $(VENV)/.stamp .clients/.stamp $(TEST_NEEDS) ## real clients (OpenAI, Anthropic, TRL, vLLM) against the proxy
	FLEETGATE_REQUIRE_VLLM=$(VLLM) $(BIN)/python -m pytest tests/contract/clients $(PYTEST_VLLM)
