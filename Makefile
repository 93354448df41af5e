# Two commands need nothing but Python 3.11 or newer and make: `make demo` and `make test`.
# Both work in .venv, which belongs to this file: it is emptied and filled again when the pinned set changes.

PYTHON ?= $(shell for name in python3.11 python3 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)

# What decides the contents of .venv. The folder counts too: a copied tree would else run the code that it was copied from.
SET := $(firstword $(shell { pwd; cat pyproject.toml constraints.txt; } | cksum))
RUN_STAMP := .venv/installed-run-$(SET)
TEST_STAMP := .venv/installed-test-$(SET)

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-gpu bench-gpu nccl-wheels check reference wheel bench soak soak-tests soak-ends soak-detection soak-interrupts soak-stalls soak-referee soak-times soak-disk soak-resume soak-spot soak-lengths soak-loggers soak-hosts soak-slow-network soak-slow-link soak-slurm soak-nccl soak-sim soak-large soak-churn soak-inside soak-residuals soak-repairs soak-schedules soak-formulas soak-zoo clean

# Whatever can run the tests can run the demo.
demo: $(or $(wildcard $(TEST_STAMP)),$(RUN_STAMP))
	.venv/bin/bamboo run

# What watches clocks closely runs by itself, when the machine has nothing else to do.
TIMED := tests/e2e/test_etcd_faults.py

# The byte code of our own modules is kept, whatever the environment says: the hundreds of programs that tests start
# would else compile the same modules, each a third of a second long.
# Tests know the bits of the CPU, so they see no GPU. A failure of the first part does not keep the second from running.
test: export PYTHONDONTWRITEBYTECODE :=
test: export CUDA_VISIBLE_DEVICES :=
test: $(TEST_STAMP)
	@status=0; set -x; \
	.venv/bin/python -m pytest --numprocesses 3 --dist worksteal $(TIMED:%=--ignore=%) || status=$$?; \
	.venv/bin/python -m pytest --numprocesses 2 $(TIMED) || status=$$?; \
	exit $$status

# On a machine with a GPU, in .venv with a CUDA build of torch; it writes a page into docs/hardware. Skipped elsewhere, with the reason.
test-gpu: $(TEST_STAMP)
	.venv/bin/python -m pytest -m gpu tests/gpu --ignore tests/gpu/test_gpu_bench.py

# The same for speed: beside plain PyTorch and torch's pipeline, and the cost of shadows, audit and determinism; ten minutes at most.
bench-gpu: $(TEST_STAMP)
	.venv/bin/python -m pytest -m gpu tests/gpu/test_gpu_bench.py

# Four versions of NCCL, a gigabyte, for tests of their symbols, layout and texts (tests/runtime/test_real_nccl.py).
nccl-wheels: $(TEST_STAMP)
	for each in cu12==2.27.5 cu13==2.28.9 cu13==2.29.7 cu13==2.32.3; do \
		.venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --dest .venv/nccl-wheels nvidia-nccl-$$each || exit; done
	.venv/bin/python -m pytest -m soak tests/runtime/test_real_nccl.py

check: $(TEST_STAMP)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest tests/core tests/test_house.py

# Every text that is generated from the program: docs/reference, the schemas in scenarios, tests/cli/interface.txt.
reference: $(TEST_STAMP)
	.venv/bin/python -m tests.documents.reference

# Into dist, with the build tools of .venv; CI keeps it.
wheel: $(TEST_STAMP)
	.venv/bin/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

bench: $(TEST_STAMP)
	.venv/bin/bamboo bench pipeline --quick
	.venv/bin/bamboo bench launch --quick

# A million schedules take hours on one core; it says how far it is, and shrinks the first that fails.
soak-sim: $(TEST_STAMP)
	.venv/bin/python -m tests.simulation --soak 1000000

# Deaths and lost hosts in jobs of 64, 256 and 1,024 workers, whose messages are counted: LARGE cases of each.
LARGE ?= 10
soak-large: $(TEST_STAMP)
	.venv/bin/python -m tests.simulation --large $(LARGE)

# Four hundred kills under the schedules for little memory, without bubbles and of two directions, with slices and with
# residuals on the host: at each kind of action in the simulation, and in real processes; some five minutes on two cores.
LITTLE = schedule-z* schedule-v-* schedule-dualpipe slices-* offload-*
soak-schedules: $(TEST_STAMP)
	.venv/bin/python -m tests.simulation --classes 360 --first $(FIRST)
	.venv/bin/python -m tests.e2e.kill_soak --kills 40 --seed $(SEED) --among $(foreach each,$(LITTLE),'$(each)')

# Workers come, leave and die while blocks move: some ten minutes on one core; FIRST=25000 tries other cases.
FIRST ?= 0
soak-churn: $(TEST_STAMP)
	.venv/bin/python -m tests.simulation --churn 25000 --first $(FIRST)

# Hand-overs inside steps, each held against the check of samples: some seven minutes on one core.
soak-inside: $(TEST_STAMP)
	.venv/bin/python -m tests.simulation --inside 20000 --first $(FIRST)

# Notices inside a step of six kinds of models, in real processes, with residuals sent: some ten minutes on two cores.
soak-residuals: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.residual_soak

# Random failures planned twice, repaired and from scratch: the same work, in no more time; some fifteen minutes on one core.
CASES ?= 100000
soak-repairs: $(TEST_STAMP)
	.venv/bin/python -m tests.core.soak_repairs $(CASES) --first $(FIRST)

# The dry run of every schedule in every shape, against the formulas of the literature: minutes on one core.
soak-formulas: $(TEST_STAMP)
	.venv/bin/python -m tests.core.soak_formulas

# Fifteen models of transformers in three stages with a death, beside plain loops, and thirty drawn ones: some six minutes.
soak-zoo: $(TEST_STAMP)
	.venv/bin/python -m pip install --quiet --constraint constraints.txt peft
	.venv/bin/python -m tests.e2e.hf_soak
	.venv/bin/python -m tests.e2e.hf_draw --seed $(SEED)
	.venv/bin/python -m tests.e2e.hf_peers

# Real processes, some five minutes on two cores; SEED=1000 tries other kills.
SEED ?= 0
soak: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.kill_soak --kills 1000 --seed $(SEED)
	.venv/bin/python -m tests.e2e.kill_soak --kills 100 --seed $(SEED) --buffers 4096

# The tests that take longest, and all of that of which `make test` has a sample: every kill, cut and schedule with every
# model, and the benchmarks in their quick form, from the command to the figures.
soak-tests: $(TEST_STAMP)
	.venv/bin/python -m pytest -m soak

# Runs whose processes are stopped, killed and paused, half of them at their end: some forty minutes on two cores.
soak-ends: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.end_soak --runs 500 --seed $(SEED)

# Hangs of five kinds, 60 s of slow data, 300 pauses of half the deadline: the verdicts, some twelve minutes on two cores.
soak-detection: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.detection_soak --pauses 300 --load 60 --seed $(SEED)

# Ctrl-C at every moment of each command, answered in 0.3 s and ended in 2: some six minutes, on an idle machine only.
soak-interrupts: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.interrupt_soak --rounds 3

# The table of time beside clocks outside of it: some five minutes on two cores.
soak-times: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.time_soak

# How long training stood, by the reports of 40 runs and by an observer outside of them: some eight minutes on two cores.
soak-stalls: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.stall_soak --cases 210 --seed $(SEED)

# The stalls of torchrun, accelerate and bamboo as `bamboo inject` tells them, beside an observer's, and whether a foreign
# process is ever struck: some ten minutes on two cores, as root.
soak-referee: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.referee_soak --strikes 40 --seed $(SEED)

# Disks that fill up and files that may not grow, at some forty places: some four minutes on two cores, as root.
soak-disk: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.disk_soak

# Every step of three jobs resumed with four cuts, and 60 kills of workers and launchers: some ten minutes on two cores.
soak-resume: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.resume_grid
	.venv/bin/python -m tests.e2e.resume_soak --kills 60 --launchers 10 --seed $(SEED)

# A day on spot machines: twenty SIGTERMs and SIGKILLs, each end followed by the same line; some five minutes on two cores.
soak-spot: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.spot_soak --kills 20 --seed $(SEED)

# Streams of sequences of different lengths: 100 kills, resumed on other numbers of workers; some four minutes.
soak-lengths: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.length_soak --kills 100 --seed $(SEED)

# The steps of runs with loggers that raise, block, sleep and compute, beside runs without: some ten minutes, on an idle machine.
soak-loggers: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.logger_soak

# Each fault of hosts TIMES times, on hosts of namespaces with clocks an hour apart: some forty minutes on two cores.
TIMES ?= 20
BEDS ?= 1
soak-hosts: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.host_soak --times $(TIMES) --jobs $(BEDS) --seed $(SEED) $(ONLY:%=--only %)

# Three hosts on a network with round trips of 200 ms, which must cost no host, until one is cut off; on a fast one a
# dead host has to be known within a second; as root.
soak-slow-network: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.slow_network_soak
	.venv/bin/python -m tests.e2e.slow_network_soak --round-trip-ms 0 --minutes 1 --known-within 1

# Messages of training beside state on a link of 40 Mbit/s, as root: half a minute.
soak-slow-link: $(TEST_STAMP)
	.venv/bin/python -m tests.e2e.slow_link_soak

# A real Slurm of three nodes, of Debian's packages, in namespaces, as root: some three minutes on two cores.
soak-slurm: $(TEST_STAMP)
	.venv/bin/python -m pytest -m soak tests/e2e/test_slurm.py

# Real kills, joins, hand-overs, restarts and the cells of hangs over the calls of NCCL, on a strict double of its library
# between CPUs, which the C compiler builds: some fifteen minutes on two cores.
soak-nccl: $(TEST_STAMP)
	.venv/bin/python -m pytest -m "soak or not soak" tests/e2e/test_nccl_kills.py tests/e2e/test_nccl_moves.py

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): EXTRA := vision
$(TEST_STAMP): EXTRA := dev

# The stamp is written last and taken away first, so an installation that was interrupted is begun afresh.
$(RUN_STAMP) $(TEST_STAMP):
	@if [ -e $(RUN_STAMP) ]; then rm $(RUN_STAMP); else \
		test -n "$(PYTHON)" || { echo 'found no Python 3.11 or newer: install one, or make PYTHON=/path/to/python' >&2; exit 1; }; \
		echo 'creating .venv ($(PYTHON)); the first time takes a minute or more'; \
		"$(PYTHON)" -m venv --clear .venv; fi
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA)]'
	@touch $@
