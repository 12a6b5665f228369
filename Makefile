# Needs Python 3.11 or newer, make and a package registry; each target sets up .venv when it has to.
PYTHON ?= python3
ARGS ?=
RUN := .venv/bin/python
READY := .venv/.ready
# Jupyter does not start as root unless told to, which containers are; without a screen it prints its address.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
SCREEN := $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(BROWSER),$(filter Darwin,$(shell uname)))

.DEFAULT_GOAL := help
.PHONY: help lab test demo fuzz faults kills screenshots lessons lint clean

help:  # no "##" here: the list is what it prints
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-12s%s\n", $$1, $$2}'

lab: $(READY)  ## open the lessons in JupyterLab (without a screen: print its address)
	$(RUN) -m jupyterlab $(ROOT) $(if $(SCREEN),,--no-browser) $(ARGS) lessons

test: $(READY)  ## run the tests, e.g. make test ARGS="-k datasets -x"
	$(RUN) -m pytest $(ARGS)

demo: $(READY)  ## train digits under every strategy on real processes: one table, one figure
	$(RUN) -m distlab demo $(ARGS)

fuzz: $(READY)  ## random simulated runs of every strategy, e.g. make fuzz ARGS=1000 (100 unless said)
	DISTLAB_FUZZ=$(or $(ARGS),100) $(RUN) -m pytest tests/test_fuzz.py --timeout=0

faults: $(READY)  ## kill each kind of process under each strategy, 50 times each: what happens (fewer: ARGS="--rounds 5")
	$(RUN) benchmarks/faults.py $(ARGS)

kills: $(READY)  ## kill a script that makes checkpoints 8 times under each of four strategies, and let it go on (more: ARGS=30)
	DISTLAB_KILLS=$(or $(ARGS),8) $(RUN) -m pytest tests/test_checkpoints.py -k killed --timeout=0

screenshots: $(READY)  ## the dashboard of each strategy in a browser, for you to look at (some: ARGS="AsyncPS SyncPS")
	$(RUN) benchmarks/screenshots.py $(ARGS)

lessons: $(READY)  ## execute the lessons whose source changed (all: ARGS=--force)
	$(RUN) lessons/build.py $(ARGS)

lint: $(READY)  ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m mypy

clean:  ## remove .venv, caches and what was built
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find distlab tests lessons datasets -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lessons,test]'
	@touch $@
