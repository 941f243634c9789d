# Every target works alone, from a fresh clone, with Python 3.11+ and make. See CONTRIBUTING.md.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export TGA_HOME ?= $(CURDIR)/.tga
# Processes are started by the hundred. Where this is set each of them compiles all that it imports, for a second or two.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test soak lowest check generate bench bench-peers pictures lock wheel clean

run: $(READY)
	@$(BIN)/tga demo

# Most of the suite waits for processes that it kills: more workers than cores. A file stays with one worker, and what
# takes long comes first (tests/conftest.py), not the files with the most tests. Of what is costly it takes a sample.
WORKERS ?= 4
test: $(READY)
	TGA_SAMPLE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The same, where the suite only samples: every case, many rounds. For hours, with printed seeds (TGA_SEED repeats one).
soak: $(READY)
	TGA_SOAK=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The suite with the lowest versions that pyproject.toml admits, in a venv of its own.
lowest: wheel
	rm -rf $(VENV)-lowest
	$(PYTHON) -m venv $(VENV)-lowest
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --python-version 3.11 --no-header --no-annotate \
		--find-links dist --no-emit-package tga-sdk pyproject.toml sdk/pyproject.toml --output-file $(VENV)-lowest/requirements.txt
	$(LOWEST) --require-hashes --requirement requirements-uv.lock
	$(LOWEST) --require-hashes --requirement requirements.lock
	$(LOWEST) --requirement $(VENV)-lowest/requirements.txt
	$(LOWEST) --offline --no-deps --no-build-isolation --editable . --editable sdk
	$(VENV)-lowest/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
LOWEST = $(BIN)/uv pip install --quiet --python $(VENV)-lowest/bin/python

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/generate.py --check
	$(BIN)/python tools/check_vectors.py

generate: $(READY)
	$(BIN)/python tools/generate.py

# Peers are optional: `make bench-peers` looks for them. Those that are not there are left out, and the report says so.
PEERS ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/tga-bench-peers
bench-peers: $(READY)
	$(BIN)/python -m bench.comparison --install --peers $(PEERS)
# README's pictures of the console, from a real gateway; needs Chromium.
pictures: $(READY)
	$(BIN)/python -m tests.console.pictures

bench: $(READY)
	$(BIN)/python -m bench.comparison --peers $(PEERS)
	$(BIN)/python -m bench.append
	$(BIN)/python -m bench.lean
	$(BIN)/python -m bench.tool_call
	$(BIN)/python -m bench.telemetry
	$(BIN)/python -m bench.recovery
	$(BIN)/python -m bench.runs
	$(BIN)/python -m bench.sdk
	$(BIN)/python -m bench.lua
	$(BIN)/python -m bench.http
	$(BIN)/python -m bench.shares
	$(BIN)/python -m bench.mcp
	$(BIN)/python -m bench.sequencer
	$(BIN)/python -m bench.verify
	$(BIN)/python -m bench.processes
	$(BIN)/python -m bench.flat
	$(BIN)/python -m bench.pages
	$(BIN)/python -m bench.load --minutes 10
	$(BIN)/python -m bench.soak --minutes 60

# Both distributions, as sdist and as wheel.
wheel: $(READY)
	$(BIN)/python -m hatchling build --directory dist
	cd sdk && ../$(BIN)/python -m hatchling build --directory ../dist

# uv installs in seconds what takes pip minutes; it is pinned like everything else. Where it does not trust the
# registry's certificate the system's own are tried, then pip, which follows the machine's pip configuration.
INSTALL := uv pip install --quiet --compile-bytecode --python $(BIN)/python
$(READY): requirements.lock requirements-uv.lock pyproject.toml hatch_build.py sdk/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements-uv.lock
	$(BIN)/$(INSTALL) --require-hashes --requirement requirements.lock \
		|| $(BIN)/$(INSTALL) --system-certs --require-hashes --requirement requirements.lock \
		|| $(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/$(INSTALL) --offline --no-deps --no-build-isolation --editable . --editable sdk
	@touch $@

# Only when dependencies change: rewrites the lock files. They name no download host, nor the SDK, which is built here.
lock: wheel
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--find-links dist --no-emit-package tga-sdk --group dev pyproject.toml --output-file requirements.lock
	echo uv | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		- --output-file requirements-uv.lock

clean:
	rm -rf $(VENV) $(VENV)-lowest dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
