# `make help` lists the targets. The variables come first.

CARGO ?= cargo
BIN   := $(or $(CARGO_TARGET_DIR),target)/debug
DIST  := dist
# --strict: skipped tests are failures.
STRICT ?=
# Most tests wait for other processes or for a timer: run many at once. The few that need a CPU take turns.
export RUST_TEST_THREADS ?= $(shell n=$$(nproc); echo $$((n < 16 ? 16 : n)))
# The folder of `make install`; packages prefix it with DESTDIR.
PREFIX ?= /usr/local
DESTDIR ?=
# Groups of test-engines: tokens, first, large, failures, live, switch, turns, turns-eight; on several GPUs also parallel, parallel-suspend.
ENGINES ?=
# Kills of each kind in test-nodes.
KILLS ?= 200
# Seconds of test-simulation.
SECONDS ?= 60
# Options of vmmfd bench.
BENCH  ?=
# The bundle's target; another machine than this gets a separate folder.
TARGET ?=
BUNDLE := $(DIST)$(if $(TARGET),-$(TARGET))

# Cargo would wait for the job slots of `make --jobs`.
unexport MAKEFLAGS MFLAGS

# These targets need no Rust. For the others, one sentence names what is missing, in place of cargo's or the shell's error.
ifneq ($(filter-out help check-ptx engines-pack test-engines clean,$(MAKECMDGOALS)),)
RUST := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
ifeq ($(shell command -v $(firstword $(CARGO)) 2>/dev/null),)
$(error cargo was not found: install Rust $(RUST) or newer from https://rustup.rs, then run make again)
endif
ifneq ($(shell { echo $(RUST); $(CARGO) --version | cut -d ' ' -f 2; } | sort -CV || echo old),)
$(error $(CARGO) is older than Rust $(RUST): run rustup update, or install Rust from https://rustup.rs, then run make again)
endif
# Rust links with it.
ifneq ($(shell $(CC) -include stdio.h -fsyntax-only -x c /dev/null 2>/dev/null || echo none),)
$(error $(CC) is no C compiler with a C library: install one, as with apt install gcc libc6-dev, then run make again)
endif
endif

.PHONY: help build demo smoke bench test test-all test-python test-capi test-gpu check install capi wheel deb bundle \
    test-simulation test-kills test-streams test-nodes test-pairs test-engines engines-pack test-deb test-systemd check-ptx clean \
    build-all test-suite test-c test-rights test-protocol test-demos

help:
	@awk -F ':.*## ' '/^##@ / { printf "%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-15s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Try

build: ## build the commands into target/debug
	$(CARGO) build --locked

demo: build ## a handoff in both directions, then a broker; without a GPU too
	scripts/demo $(BIN)
	scripts/demo-broker $(BIN)

smoke: build ## can GPU memory be shared here? vmmfd doctor, then a handoff
	scripts/smoke $(BIN)

bench: ## measure a handoff: vmmfd bench, BENCH="repeat --backend host"
	$(CARGO) build --locked --release -p vmmfd-cli -p vmmfd-bench
	$(or $(CARGO_TARGET_DIR),target)/release/vmmfd bench $(BENCH)

##@ Test

test: test-suite test-c test-demos ## every test that needs only Rust, a C compiler and make

test-all: test test-python test-rights test-protocol test-capi ## make test, and the tests with Python, Ray, clang, valgrind, root

test-python: build-all ## the Python package, in a virtual environment; uses PyPI
	scripts/test-python $(CARGO) $(BIN) $(STRICT)

test-capi: test-c ## the C library with each installed compiler and checker
	scripts/test-capi $(BIN) --all

# It uses the virtual environment of test-python, which deletes and creates it.
ifneq ($(filter test-all test-python,$(MAKECMDGOALS)),)
test-capi: | test-python
endif

test-gpu: ## every test that needs an NVIDIA GPU; fails without one
	$(CARGO) build --locked --workspace --features launch --bins --examples
	scripts/test-gpu $(STRICT) $(CARGO) test --locked --workspace --features launch --test suite --

check: build-all ## format, lints, documentation, dependencies, aarch64
	$(CARGO) fmt --all --check
	$(CARGO) fmt --all --check --manifest-path python/Cargo.toml
	$(CARGO) clippy --locked --workspace --all-targets --features launch -- -D warnings
	PYO3_NO_PYTHON=1 CARGO_TARGET_DIR=$(or $(CARGO_TARGET_DIR),target) $(CARGO) clippy --locked --manifest-path python/Cargo.toml -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps -p vmmfd --features bindings
	scripts/test-users $(CARGO) $(BIN)/libfakecuda.so
	scripts/check-package $(CARGO)
	scripts/check-deny $(STRICT)
	scripts/check-deploy $(STRICT)
	scripts/check-aarch64 $(CARGO) $(STRICT)

# The parts of `make test` and `make test-all`. The tests' dependencies enable more features of shared packages: programs built without them
# would be built twice. Not --all-targets: as benchmarks it would link the programs a second time.
build-all:
	$(CARGO) build --locked --workspace --lib --bins --examples --tests --features launch

test-suite: build-all
	scripts/without-leftovers $(CARGO) test --locked --workspace --features launch --no-fail-fast

test-c: build-all
	scripts/test-capi $(BIN)

test-rights: build-all
	scripts/test-rights $(CARGO) $(BIN) $(STRICT)

test-protocol: build-all
	scripts/test-protocol $(BIN) $(STRICT)

test-demos: build-all
	scripts/demo $(BIN) --backend auto
	scripts/demo-broker $(BIN) --backend auto

##@ Package

install: ## vmmfd, its man pages and the C library into DESTDIR and PREFIX
	$(CARGO) build --locked --release -p vmmfd-cli --bin vmmfd -p vmmfd-capi
	scripts/install $(or $(CARGO_TARGET_DIR),target)/release/vmmfd "$(DESTDIR)$(PREFIX)"
	STRIP=1 scripts/capi $(or $(CARGO_TARGET_DIR),target)/release/libvmmfd_capi.a "$(DESTDIR)$(PREFIX)"
	$(if $(DESTDIR),,[ "$$(id -u)" -ne 0 ] || ldconfig)

capi: ## the C library, header, pkg-config and CMake files: dist/capi/
	$(CARGO) build --locked --release -p vmmfd-capi
	STRIP=1 scripts/capi $(or $(CARGO_TARGET_DIR),target)/release/libvmmfd_capi.a $(DIST)/capi

wheel: ## the Python package and its sdist, by maturin: dist/
	scripts/wheel $(CARGO) $(DIST) $(TARGET)

deb: ## the Debian packages, by cargo-deb: target/debian/
	scripts/deb $(CARGO)

bundle: ## programs and tests for a GPU node, glibc 2.28 or newer: dist/
	scripts/bundle $(CARGO) $(BUNDLE) $(TARGET)

##@ Maintainers

test-simulation: ## random schedules of kills and delays for the broker, SECONDS=3600
	SECONDS=$(SECONDS) $(CARGO) test --locked --release -p vmmfd --lib simulation_finds_no -- --nocapture

test-pairs: ## two signals to the broker's processes at each distance up to 100 ms, and the windows between two kills
	$(CARGO) build --locked --release -p vmmfd-cli --bins
	VMMFD_TEST_PAIRS=all $(CARGO) test --locked --release -p vmmfd-cli --test suite broker_pairs -- --include-ignored --nocapture --test-threads 1

test-kills: ## random kills of the broker's processes beside eight clients, SECONDS=1800
	$(CARGO) build --locked --release -p vmmfd-cli --bins
	VMMFD_TEST_KILLS=$(SECONDS) $(CARGO) test --locked --release -p vmmfd-cli --test suite broker_kills -- --nocapture

test-streams: ## a slow, a killed and a stopped subscriber beside a healthy one, SECONDS=60
	$(CARGO) build --locked --release -p vmmfd-cli --bins
	VMMFD_TEST_STREAM=$(SECONDS) $(CARGO) test --locked --release -p vmmfd-cli --test suite stalled_subscribers -- --nocapture --test-threads 1

test-nodes: build-all ## kill Ray's actors, agents and brokers, KILLS=200 of each
	VMMFD_TEST_KILLS=$(KILLS) scripts/test-python $(CARGO) $(BIN) $(STRICT) test_ray_kills.py -o faulthandler_timeout=$$((900 + 50 * $(KILLS)))

engines-pack: ## vLLM's wheels for a GPU machine without a network, from PyPI
	python3 tests/engines/pack.py dist-engines

test-engines: ## the load format of vLLM, on a GPU; needs engines-pack, wheel
	python3 tests/engines/run.py $(STRICT) $(ENGINES)

test-deb: deb ## install the Debian package in a root folder, and remove it
	scripts/test-deb target/debian/vmmfd_*.deb

test-systemd: deb ## kill, restart and upgrade the units of a booted systemd
	$(CARGO) build --locked --release --bin vmmfd --test systemd
	VMMFD_TEST_PACKAGE="$$(ls target/debian/vmmfd_*.deb)" scripts/test-systemd $(or $(CARGO_TARGET_DIR),target)/release

check-ptx: ## assemble the GPU's kernels for each architecture, by ptxas
	scripts/check-ptx

clean: ## remove the build
	rm -rf target $(DIST) $(DIST)-*
