# The targets for users and checks: see `make help`.

CARGO ?= cargo
BIN   := $(or $(CARGO_TARGET_DIR),target)/debug
DIST  := dist
# --strict: skipped tests are failures.
STRICT ?=
# Most tests wait for other processes: run more of them at once than a small machine has CPUs.
export RUST_TEST_THREADS ?= $(shell n=$$(nproc); echo $$((n < 6 ? 6 : n)))
# The folder of `make install`; packages prefix it with DESTDIR.
PREFIX ?= /usr/local
DESTDIR ?=
# Groups of test-engines: tokens, large, failures, live.
ENGINES ?=
# Kills of each kind in test-nodes.
KILLS ?= 200
# Options of vmmfd bench.
BENCH  ?=
# The bundle's target; another machine than this gets a separate folder.
TARGET ?=
BUNDLE := $(DIST)$(if $(TARGET),-$(TARGET))

# Cargo would wait for the job slots of `make --jobs`.
unexport MAKEFLAGS MFLAGS

.PHONY: help build capi install demo smoke test build-all test-suite test-rights test-protocol test-python test-nodes test-capi test-demos test-gpu test-engines engines-pack bench check check-ptx bundle wheel deb test-deb test-systemd test-skew clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the commands into target/debug
	$(CARGO) build --locked

capi: ## dist/capi/: the C library libvmmfd with header, pkg-config and CMake files
	$(CARGO) build --locked --release -p vmmfd-capi
	STRIP=1 scripts/capi $(or $(CARGO_TARGET_DIR),target)/release/libvmmfd_capi.a $(DIST)/capi

install: ## vmmfd with its man pages and completions, and the C library, below DESTDIR and PREFIX (/usr/local)
	$(CARGO) build --locked --release -p vmmfd-cli --bin vmmfd -p vmmfd-capi
	scripts/install $(or $(CARGO_TARGET_DIR),target)/release/vmmfd "$(DESTDIR)$(PREFIX)"
	STRIP=1 ROOT="$(PREFIX)" scripts/capi $(or $(CARGO_TARGET_DIR),target)/release/libvmmfd_capi.a "$(DESTDIR)$(PREFIX)"

demo: build ## a producer and a consumer, both ways, then a broker; on host memory without a GPU
	scripts/demo $(BIN)
	scripts/demo-broker $(BIN)

smoke: build ## check whether GPU memory can be shared here: vmmfd doctor, then the round trip; fails without a GPU
	scripts/smoke $(BIN)

test: test-suite test-python test-rights test-protocol test-capi test-demos ## every test that needs no GPU, then the round trip of the two commands and the broker, on the GPU if there is one

# The parts of `make test`. The tests' dependencies enable more features of shared packages: programs built without them would be built twice.
build-all:
	$(CARGO) build --locked --workspace --all-targets --features launch

test-suite: build-all
	scripts/without-leftovers $(CARGO) test --locked --workspace --features launch --no-fail-fast

test-rights: build-all
	scripts/test-rights $(CARGO) $(BIN) $(STRICT)

test-protocol: build-all
	scripts/test-protocol $(BIN) $(STRICT)

test-demos: build-all
	scripts/demo $(BIN) --backend auto
	scripts/demo-broker $(BIN) --backend auto

test-gpu: ## every test that needs an NVIDIA GPU; fails without one
	$(CARGO) build --locked --workspace --features launch --bins --examples
	scripts/test-gpu $(STRICT) --bin $(BIN) $(CARGO) test --locked --workspace --features launch --test suite --

test-python: build-all ## the Python package: its wheel in a virtual environment, on host memory and on the emulated driver
	scripts/test-python $(CARGO) $(BIN) $(STRICT)

test-nodes: build-all ## kill Ray's actors, agents and brokers in reads between nodes, KILLS (200) times each, half an hour; make test kills 3 times
	VMMFD_TEST_KILLS=$(KILLS) scripts/test-python $(CARGO) $(BIN) $(STRICT) test_ray_kills.py -o faulthandler_timeout=$$((900 + 50 * $(KILLS)))

engines-pack: ## dist-engines/: vLLM and the wheels that a GPU machine without a network lacks, 46 MB, from PyPI
	python3 tests/engines/pack.py dist-engines

test-engines: ## the load format vmmfd in the real vLLM, on a GPU, with the archives of engines-pack and the wheel; names those that are absent
	python3 tests/engines/run.py $(STRICT) $(ENGINES)

test-capi: build-all ## the C library: programs in C and C++ on host memory and on the emulated driver, with each compiler and checker that is installed
	scripts/test-capi $(CARGO) $(BIN)

# It uses the virtual environment of test-python, which deletes and creates it.
ifneq ($(filter test test-python,$(MAKECMDGOALS)),)
test-capi: | test-python
endif

bench: ## the cost of a handoff beside the driver's own calls: vmmfd bench, as a release build; for example BENCH="repeat --backend host"
	$(CARGO) build --locked --release -p vmmfd-cli -p vmmfd-bench
	$(or $(CARGO_TARGET_DIR),target)/release/vmmfd bench $(BENCH)

check: build-all ## format, lints, documentation and dependencies, warnings as errors; the package; aarch64; programs that use only the library
	$(CARGO) fmt --all --check
	$(CARGO) fmt --all --check --manifest-path python/Cargo.toml
	$(CARGO) clippy --locked --workspace --all-targets --features launch -- -D warnings
	PYO3_NO_PYTHON=1 CARGO_TARGET_DIR=$(or $(CARGO_TARGET_DIR),target) $(CARGO) clippy --locked --manifest-path python/Cargo.toml -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps -p vmmfd --features bindings,launch
	scripts/test-users $(CARGO) $(BIN)/libfakecuda.so
	scripts/check-package $(CARGO)
	scripts/check-deny $(STRICT)
	scripts/check-deploy $(STRICT)
	scripts/check-aarch64 $(CARGO) $(STRICT)

check-ptx: ## assemble the GPU's kernels for every architecture, with ptxas from PyPI
	scripts/check-ptx

bundle: ## dist/: stripped programs and tests for a GPU node, glibc 2.28 or newer; TARGET=aarch64-unknown-linux-gnu for another
	scripts/bundle $(CARGO) $(BUNDLE) $(TARGET)

wheel: ## dist/: the Python package, for glibc 2.28 or newer, by maturin, one for python3.14t, and the sdist; TARGET=aarch64-unknown-linux-gnu for another machine
	scripts/wheel $(CARGO) $(DIST) $(TARGET)

deb: ## target/debian/: a Debian package with vmmfd, its units of systemd, man pages and completions; by cargo-deb
	scripts/deb $(CARGO)

test-systemd: deb ## boot systemd 257 and 252 as root, and kill, restart and upgrade the broker's units under load; not in CI
	$(CARGO) build --locked --release --bin vmmfd --test systemd
	VMMFD_TEST_PACKAGE="$$(ls target/debian/vmmfd_*.deb)" scripts/test-systemd $(or $(CARGO_TARGET_DIR),target)/release

test-skew: ## test the commands and the Python package against an older version, built once from git, in both directions; not in CI
	$(CARGO) build --locked --workspace
	scripts/test-skew $(CARGO) $(BIN) $(STRICT)

test-deb: deb ## install the package into a separate root folder, run it there, and remove it
	scripts/test-deb target/debian/vmmfd_*.deb

clean: ## remove the build
	rm -rf target $(DIST) $(DIST)-*
