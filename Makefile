# Every target does its own set-up; a second call reuses .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A worker for each of two cores, one thread each. A file's tests stay together, since they share runs and engines.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
VERL   := $(VENV)/verl
OMNI   := $(VENV)/verl-omni
ROUND  := $(VENV)/quantization
VLLM   := .venv-vllm

.PHONY: demo test test-all lint unit verl quantization verl-omni docs kernels vllm browser gpu install clean

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/flowgrpo_trainer/run_tiny_qwen_image_ocr_lora_rollout_corr.sh

# Quick: everything that neither trains nor starts a process; lists the tests that take more than two seconds.
test: lint unit

# The rest: training runs, processes, slow tests, the drop-in against verl, and a base in 8 or 4 bits. `make test` checks
# annotated shapes: in training runs that would take much of the time.
test-all: export JAXTYPING_DISABLE = 1
test-all: $(STAMP)
	$(PYTEST) -m "run or process or slow" $(PYTEST_ARGS)
	$(MAKE) verl
	$(MAKE) quantization

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

unit: $(STAMP)
	$(PYTEST) -m "not run and not process and not slow and not gpu" --durations 10 --durations-min 2 $(PYTEST_ARGS)

# The drop-in against verl itself, which lives in a folder of its own.
verl: $(VERL)/.installed
	PYTHONPATH=$(VERL) $(PYTEST) tests/integrations $(PYTEST_ARGS)

$(VERL)/.installed: tests/integrations/requirements-verl.txt $(STAMP)
	rm -rf $(VERL)
	$(BIN)/python -m pip install --quiet --no-deps --target $(VERL) -r tests/integrations/requirements-verl.txt
	touch $@

# A base in 8 or 4 bits. Its packages lie in a folder of their own: torchao, once installed, slows every start.
quantization: $(ROUND)/.installed
	PYTHONPATH=$(ROUND) $(PYTEST) tests/models/test_quantization.py tests/rollout/test_int8_engine.py \
		$(PYTEST_ARGS)

$(ROUND)/.installed: constraints.txt $(STAMP)
	rm -rf $(ROUND)
	$(BIN)/python -m pip install --quiet --no-deps --target $(ROUND) -c constraints.txt torchao bitsandbytes
	touch $@

# The drop-in inside verl-omni's own trainer, which is on GitHub alone; no part of `make test`.
verl-omni: $(OMNI)/.installed
	PYTHONPATH=$(OMNI) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_verl_omni_itself.py $(PYTEST_ARGS)

$(OMNI)/.installed: tests/integrations/requirements-verl-omni.txt $(STAMP)
	rm -rf $(OMNI)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OMNI) -r tests/integrations/requirements-verl-omni.txt
	touch $@

# The documentation site in site/; a broken link, anchor or reference is an error. Open it with `mkdocs serve`.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# A selection again with the kernels of a processor without AVX: torch's own, oneDNN's and MKL's.
kernels: $(STAMP)
	JAXTYPING_DISABLE=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
		$(PYTEST) -m portable $(PYTEST_ARGS)

# A Chromium for the tests that open the report; does nothing where there is one.
browser:
	scripts/install_chromium.sh

# The engine vllm_omni against the real vllm-omni on a CPU, in an environment of its own (three minutes to set up). One
# file has most of the tests, so a worker without work takes over half of the other's.
vllm: $(VLLM)/.installed
	JAXTYPING_DISABLE=1 OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/vllm_omni \
		$(PYTEST_ARGS)

$(VLLM)/.installed: scripts/install_vllm_omni_cpu.sh scripts/torchvision_on_cpu.py constraints-vllm.txt pyproject.toml
	PYTHON=$(PYTHON) scripts/install_vllm_omni_cpu.sh $(VLLM)
	touch $@

# On a machine with a CUDA device: the tests that need one, the demo and benchmarks; figures in outputs/gpu_run.
gpu: $(VERL)/.installed $(ROUND)/.installed
	status=0; export PY=$(BIN)/python; \
	PYTHONPATH=$(CURDIR)/$(VERL):$(CURDIR)/$(ROUND) bash scripts/gpu_run.sh tests || status=1; \
	PYTHONPATH=$(CURDIR)/$(ROUND) bash scripts/gpu_run.sh scale || status=1; \
	exit $$status

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Python 3.10 to 3.13 is needed; choose one with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[ocr,serve,trackers,ray,dev,docs]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(VLLM) outputs
