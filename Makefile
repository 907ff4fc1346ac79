# What a person types. Everything here works from a fresh clone on Debian with a Rust toolchain and root;
# `setup` installs the rest.

CARGO ?= cargo
PREFIX ?= /usr/local
SEEDS ?= 0..500
FRESH ?= 100
CYCLES ?= 200
MINUTES ?= 5
MIB ?= 1024
RUNS ?= 5
LONG_SEEDS ?= 0..20000
FUZZ := memory/messages memory/receiver nbd/client nbd/protocol nbd/server migrate/wire_messages migrate/wire_receiver migrate/wire_sender

.PHONY: help build release install setup test test-long quick test-qemu10 check fmt sim sim-long mutations torture torture-hosts torture-vms fuzz demo demo-vm bench-local bench-large bench-range-lock bench-wire bench-vm bench-caches paper-esx-real deny docs clean

help: ## Show what can be made
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

build: ## Build transhume and transhumed (debug)
	$(CARGO) build --locked

release: ## Build transhume and transhumed as they are installed
	$(CARGO) build --locked --release --package transhume-cli --package transhume-preload

install: release ## Install both programs and the systemd unit below PREFIX (default /usr/local)
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/bin \
		$(or $(CARGO_TARGET_DIR),target)/release/transhume $(or $(CARGO_TARGET_DIR),target)/release/transhumed
	install -D -m 755 -t $(DESTDIR)$(PREFIX)/lib/transhume \
		$(or $(CARGO_TARGET_DIR),target)/release/libtranshume_preload.so
	install -D -m 644 packaging/transhumed.service $(DESTDIR)$(PREFIX)/lib/systemd/system/transhumed.service
	install -D -m 755 packaging/vm-hook-tap $(DESTDIR)$(PREFIX)/share/doc/transhume/examples/vm-hook-tap
	sed -i 's|/usr/local/bin|$(PREFIX)/bin|' $(DESTDIR)$(PREFIX)/lib/systemd/system/transhumed.service

setup: ## Install what tests, demo and benchmarks need (Debian packages; needs root)
	@$(CARGO) xtask setup

# What is printed says what is being done from the first second on: a build of everything takes minutes.
quick: ## Format, clippy, unit tests and 100 seeds: what to run before every commit (a minute once it is built)
	@echo "format" && $(CARGO) fmt --all --check
	@echo "clippy" && $(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@echo "unit tests" && $(CARGO) xtask test --unit
	@echo "seeds 0..100" && $(CARGO) xtask sim --seeds 0..100

test: setup ## Run everything that decides whether main is green: unit, tool, QEMU and crash tests, seeds, some torture
	@echo "building all there is, with the tests: minutes, if little of it is built"
	$(CARGO) xtask test --seeds $(SEEDS) --fresh $(FRESH)

# What is slow and rare. Each part keeps a record in docs/runs, so docs/reliability.md tells what was run on which commit: commit first.
# A part that fails ends the run; `make -k test-long` runs the others as well.
LONG := long-tests long-covers long-seeds long-torture long-torture-hosts long-torture-vms long-fuzz
.PHONY: $(LONG)
test-long: $(LONG) ## Run what is slow and rare, two hours at most: before what it covers is called done (-k: go on after a failure)
long-tests: CHORE = $(CARGO) xtask test --long
long-covers: CHORE = $(CARGO) xtask sim --covers --seeds 0..100
long-seeds: CHORE = $(CARGO) xtask sim --seeds $(LONG_SEEDS)
long-torture: CHORE = $(CARGO) xtask torture --cycles 200
long-torture: KEEP = --keep "200 cycles" --keep blows --keep strategies --keep occurred
long-torture-hosts: CHORE = $(CARGO) xtask torture-hosts --cycles 100
long-torture-hosts: KEEP = --keep "100 cycles" --keep blows
long-torture-vms: CHORE = $(CARGO) xtask torture-vms --cycles 60
long-torture-vms: KEEP = --keep "60 cycles" --keep moves --keep blows
long-fuzz: CHORE = $(MAKE) --no-print-directory fuzz MINUTES=$(words $(FUZZ))
long-fuzz: KEEP = --keep fuzzing --keep Done
$(LONG): setup
	$(CARGO) xtask record --name $@ $(KEEP) -- $(CHORE)

# Its packages would replace the distribution's QEMU: they are unpacked, not installed.
QEMU10 = $(abspath $(or $(CARGO_TARGET_DIR),target))/qemu10
test-qemu10: setup ## Run the tests of adoption on QEMU 10 of Debian's backports, unpacked below target/
	$(CARGO) build --locked --package transhume-preload
	programs=$$(xtask/qemu10.sh $(QEMU10)) && PATH=$$programs:$$PATH TRANSHUME_TEST_QEMU=10. \
		$(CARGO) xtask test --only "vm adoption::,vm recovery::,vm refusals::,vm monitor::,vm attachments::,vm access::" \
		--only "cli adoption::,cli all_disks::,cli whole_machines::,cli vm_postcopy::,cli vm_parallel::"
	TRANSHUME_TEST_OTHER_QEMU=$(QEMU10)/bin/qemu-system-x86_64 \
		$(CARGO) xtask test --only another_qemu

sim: ## Run the simulator's seeds (SEEDS=A..B), some of today (FRESH=N), and each scenario until it shows what it must
	$(CARGO) xtask sim --seeds $(SEEDS) --fresh $(FRESH)
	$(CARGO) xtask sim --covers --seeds 0..100

sim-long: ## Run 100,000 of the simulator's seeds, and kill the process at every await of a few
	$(CARGO) xtask sim --seeds 0..100000
	$(CARGO) xtask sim --every-await --seeds 0..20

mutations: ## Make mistakes in the engine, each of which the simulator must see (ONLY=NAME,NAME)
	$(CARGO) xtask mutations $(if $(ONLY),--only $(ONLY))

torture: setup ## Kill, cut, throttle, freeze and fill the real daemon (CYCLES=200)
	$(CARGO) xtask torture --cycles $(CYCLES)

torture-hosts: setup ## The same between two daemons in networks of their own (CYCLES=200: a quarter of an hour)
	@$(CARGO) xtask torture-hosts --cycles $(CYCLES)

torture-vms: setup ## The same while a whole VM goes back and forth between them (CYCLES=200: an hour)
	@$(CARGO) xtask torture-vms --cycles $(CYCLES)

# Each target, CRATE/NAME, has its share of the minutes. What is found is kept in crates/CRATE/fuzz/artifacts, with the
# command to repeat it.
# A stable compiler that is told to take unstable options serves as well as a nightly one.
fuzz: ## Fuzz what parses foreign bytes (MINUTES=5; installs cargo-fuzz)
	@command -v cargo-fuzz >/dev/null || $(CARGO) install --locked cargo-fuzz
	@for target in $(FUZZ); do \
		echo "fuzzing $$target"; \
		(cd crates/$${target%/*} && RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run $${target#*/} -- -max_total_time=$$(( $(MINUTES) * 60 / $(words $(FUZZ)) ))) || exit 1; \
	done

check: ## Format, clippy, documentation and the house rules
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps --quiet
	$(CARGO) xtask tidy

fmt: ## Format the code
	$(CARGO) fmt --all

# Without root or packages the demo falls back to a guest of its own and says so: a failing setup does not stop it.
demo: ## Move a running guest's disk and print the report
	@echo "looking for what the demo needs (make setup installs it)"
	-@$(CARGO) xtask setup
	@echo "building the programs and the demo: minutes, if little of it is built"
	@$(CARGO) xtask demo

demo-vm: setup ## Move a whole running guest to another host while a client asks it, and print the report (needs root)
	@echo "building the programs and the demo: minutes, if little of it is built"
	@$(CARGO) xtask demo-vm

bench-local: setup ## Measure against nbdkit, QEMU and plain copies; prints a table and writes JSON
	@$(CARGO) xtask bench-local

bench-large: ## Measure what a guest feels that writes all over 16 TiB while they are moved (some GiB of memory; five minutes)
	@$(CARGO) xtask bench-local --only large

bench-range-lock: ## Measure the range lock beside simpler locks at 1, 2, 4 and 8 threads (one minute)
	@$(CARGO) xtask bench-range-lock

bench-wire: setup ## Measure moves between two hosts against nbdcopy, QEMU and plain TCP (needs root; ONLY=links; twenty minutes)
	@$(CARGO) xtask bench-wire $(if $(ONLY),--only $(ONLY))

GUEST_PROGRAMS = @$(CARGO) xtask setup --guest-programs
bench-vm: setup ## Measure moves of whole VMs between two hosts against QEMU's own (needs root; ONLY=idle, RUNS=5)
	$(if $(ONLY),$(if $(findstring guests,$(ONLY)),$(GUEST_PROGRAMS)),$(GUEST_PROGRAMS))
	@$(CARGO) xtask bench-vm --runs $(RUNS) $(if $(ONLY),--only $(ONLY))

bench-caches: setup ## Move a VM with its flash cache by every way, under the Firepan paper's load (needs root; RUNS=2: forty minutes; ONLY=none,hybrid)
	@$(CARGO) xtask bench-caches --runs $(RUNS) $(if $(ONLY),--ways $(ONLY))

# Any paper of crates/experiments. It fails if a result did not hold that no experiment of the same run explains.
paper-%: ## Repeat a paper's evaluation in the simulator: HTML with plots, and JSON (paper-esx, -pmigrate, -waio, -iofollow, -firepan; SCALE=16, TRACES=directory)
	@$(CARGO) xtask paper $* $(if $(SCALE),--scale $(SCALE)) $(if $(ONLY),--only $(ONLY)) $(if $(TRACES),--traces $(TRACES))

paper-esx-real: setup ## Make the evaluation's moves on real files, by the daemon and QEMU (MIB=1024, RUNS=5: half an hour)
	@$(CARGO) xtask paper-esx-real --mib $(MIB) --runs $(RUNS)

deny: ## Licences, duplicate and banned crates (installs cargo-deny)
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny check bans licenses sources

docs: ## Build the crates' documentation
	$(CARGO) doc --locked --workspace --no-deps

clean: ## Remove what was built
	$(CARGO) clean
