# Each target sets up what it needs: Python 3.10 or newer is enough.
PYTHON ?= python3
VENV := .venv

.PHONY: parity parity-ranks test test-full package versions te-matrix nvidia-tests mutants torture lint site clean

parity: $(VENV)/ready  ## compare every case at every precision and write reports/parity.md
	$(VENV)/bin/parity run -n auto

parity-ranks: $(VENV)/ready  ## compare TE's modules over ranks and write reports/parity_ranks.md; a quarter of an hour on two cores
	$(VENV)/bin/parity run examples/over_ranks.py -n auto -p fp32,bf16,fp8_delayed,fp8_current,fp8_block --name parity_ranks

test: $(VENV)/ready  ## the harness's own tests, and every case; of tests with several parameters, rows that cover their values and pairs of these
	$(VENV)/bin/python -m pytest -n auto

test-full: $(VENV)/ready  ## the same with every row
	$(VENV)/bin/python -m pytest -n auto --full

package: $(VENV)/ready  ## builds sdist and wheel, and tries the wheel; with FRESH=1 in an empty environment, which takes minutes
	$(VENV)/bin/python scripts/check_package.py $(if $(FRESH),--fresh --constraints constraints.txt)

versions: $(VENV)/ready  ## tries each Python with its newest and its oldest dependencies; WITHOUT_TORCH="3.12 3.13"; writes reports/versions.md
	$(VENV)/bin/python scripts/versions.py $(if $(WITHOUT_TORCH),--without-torch $(WITHOUT_TORCH))

te-matrix: $(VENV)/ready  ## the CPU kernels' tests on several versions of TransformerEngine; writes reports/te-matrix.md; a quarter of an hour on two cores
	$(VENV)/bin/python scripts/te_matrix.py

nvidia-tests: $(VENV)/ready  ## NVIDIA's own tests of the checkout TE_TESTS on the CPU kernels: SAMPLE=500 of them, or FULL=1; writes reports/nvidia_tests.md
	$(VENV)/bin/python -m lab nvidia-tests --sample $(if $(FULL),0,$(or $(SAMPLE),500))

mutants: $(VENV)/ready  ## removes each title of findings in turn, and fails if no test notices
	$(VENV)/bin/python scripts/mutants.py

torture: $(VENV)/ready  ## kills runs, damages files and compares cases that misbehave; takes minutes, or hours with FULL=1; writes reports/torture.md
	$(VENV)/bin/python scripts/torture.py $(if $(FULL),--kills 180 --real-kills 20 --inputs 100000 --results 10000)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

site: $(VENV)/ready  ## the documentation as a site, in build/site; a warning is an error, and no network is needed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

$(VENV)/ready: scripts/setup.sh pyproject.toml constraints.txt
	PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
