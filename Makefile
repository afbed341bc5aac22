# Every target builds .venv first, when it is missing or older than pyproject.toml or constraints.txt.
#   make demo     a first look: runs `fsdptrace demo`
#   make test     the tests        make lint    ruff and mypy
#   make bench    the benchmarks   make docs    rewrites the generated pages

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The first Python >= 3.10 that can make a virtual environment; `make PYTHON=...` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; \
	done)

.PHONY: demo test lint bench docs venv clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	@$(BIN)/fsdptrace demo

test: $(STAMP)
	@$(BIN)/python -m pytest -q

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict

bench: $(STAMP)
	@$(BIN)/python benchmarks/overhead.py

docs: $(STAMP)
	@$(BIN)/python docs/generate.py --write

venv: $(STAMP)

# The stamp is written last. Without one, whatever lies in .venv is half made and is started over; with an old one
# the environment is brought up to date in place.
$(STAMP): pyproject.toml constraints.txt
	@py="$(PYTHON)"; \
	if [ -z "$$py" ]; then \
		echo "fsdptrace needs Python >= 3.10 with the venv module (on Debian: apt-get install python3-venv)" >&2; exit 1; \
	fi; \
	if [ ! -f $@ ]; then \
		echo "building $(VENV) (torch is about 200 MB: the first time takes a minute or two)"; \
		"$$py" -m venv --clear $(VENV); \
	else \
		echo "bringing $(VENV) up to date"; \
	fi && \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[cli,test]" || { \
		echo "$(VENV) could not be built. For the details, in a shell:" >&2; \
		echo '  $(BIN)/python -m pip install -c constraints.txt -e ".[cli,test]"' >&2; exit 1; \
	}
	@touch $@

clean:
	rm -rf $(VENV) build dist fsdptrace-out .mypy_cache .pytest_cache .ruff_cache .nox
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
