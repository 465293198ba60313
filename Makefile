# The two commands of the README are `make demo` and `make test`. Both create .venv when there is none.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Deepspeed's CPU accelerator, one thread a rank: what the demo and the tests run on everywhere.
RANKS := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH"
SOURCES := $(shell find compiler runtime schemas -type f -not -path '*/__pycache__/*')
# make demo SPEC=examples/byte_llama_stages.json, or byte_mixtral.json (experts over ranks), trains another spec.
SPEC := examples/byte_llama.json
DEMO := out/$(subst _,-,$(basename $(notdir $(SPEC))))

.PHONY: demo test gpu browser lint docs bench clean install help

help:
	@echo "make demo   compile an example spec and train it on 4 CPU processes (SPEC=…: another one)"
	@echo "make test   install, lint, type checks, the whole test suite"
	@echo "make gpu    everything that only a GPU can show, in twelve minutes; out/gpu/figures.json"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation as a site, in out/docs; a link that leads nowhere fails"
	@echo "make bench  the benchmarks (minutes; see benchmarks/README.md)"
	@echo "make clean  remove .venv and everything that was built"

# The dependencies; made anew when their list changes.
$(VENV)/.dependencies: pyproject.toml constraints.txt
	@echo "creating $(VENV) and installing the dependencies (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch ".[runtime,hf,dev,docs]"
	@touch $@

# The project itself, as users get it: not editable, and from a clean build folder, so that no removed file stays.
$(VENV)/.project: $(VENV)/.dependencies $(SOURCES)
	@rm -rf build
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@touch $@

install: $(VENV)/.project

demo: install
	$(BIN)/parcompile $(SPEC) -o $(DEMO)
	@rm -rf $(DEMO)/checkpoints  # those of an earlier demo: it begins anew
	$(RANKS) $(BIN)/deepspeed --num_gpus 4 --master_port $$($(BIN)/python examples/free_port.py) -q \
		examples/train.py --plan $(DEMO)
	@echo
	@echo "Next: look at $(DEMO)/loss.svg, go on training with"
	@echo "  DS_ACCELERATOR=cpu $(BIN)/deepspeed --num_gpus 4 examples/train.py --plan $(DEMO) --resume --steps 200"
	@echo "or change parallelism in $(SPEC) (tp 1, cp 4, say) and run make demo again."

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p parcompile
	$(BIN)/mypy .ci/pages

# The tests of the report page need a browser. It is installed where that is possible; outside CI they are skipped without.
browser:
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null; then \
		root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
		if { [ -n "$$CI" ] || [ "$$(id -u)" = 0 ]; } && command -v apt-get > /dev/null; then \
			echo "installing chromium for the tests of the report page ..."; \
			$$root apt-get update -qq && $$root apt-get install -y -qq --no-install-recommends chromium > /dev/null; \
		fi; \
		command -v chromium > /dev/null || echo "no chromium: the report page is tested in CI only"; \
	fi

# Two workers, which take tests in turn (tests/conftest.py). The slowest tests are listed.
test: lint browser
	$(RANKS) $(BIN)/python -m pytest -n 2 --dist loadgroup --durations 20

# Says what is missing, and fails, where there is no GPU.
gpu: install
	$(BIN)/python benchmarks/gpu.py

# The tests build the same site. The variable silences the theme's advertisement of its successor.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open out/docs/index.html"

bench: install
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
