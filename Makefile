# Every verb sets itself up: `make demo` and `make test` work on a fresh machine, as root or not.
#   PYTHON=python3.12    interpreter to build the environment from (3.11 or 3.12)
#   TORCH='...'          what pip is given for torch, e.g. TORCH='torch==2.11.0' or options of an index
#   INSTALL=0            use PYTHON as it is, install nothing (hosts without network)
PYTHON ?= python3
TORCH ?= torch==2.13.0
# CUDA builds of torch bring their own. A CPU build has none; there the kernels' tests use Triton's
# interpreter.
TRITON ?= triton==3.9.0
INSTALL ?= 1
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Many tests wait for a timeout of the services: of two cores three processes kept 1.4 busy and four
# 1.8, and so on up to eight (tests/conftest.py has the lanes of tests that start many processes).
# (nproc counts OMP_NUM_THREADS, which is 1 below, as cores; a newer make passes it on.)
TEST_PROCESSES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 2 ? 2 : n < 6 ? n + 2 : 8)))
# Of `make crash`: how many cases, from which number they follow (SEED is also that of `make soak`),
# and how many processes share them.
CASES ?= 200
SEED ?= 0
JOBS ?= 1
# Of `make simulate`: the seed to replay, if one is given (SEED is also that of `make crash`).
REPLAYED := $(if $(filter command line environment,$(origin SEED)),$(SEED))

ROOTS := proto services/common services/planner services/driver services/executor services/checkpoint kernels clients/python clients/cli clients/dashboard
# Every generator of a part of a page or module, such as docs.generate_api.
PAGES := $(basename $(notdir $(wildcard docs/generate_*.py)))
empty :=
space := $(empty) $(empty)
export PYTHONPATH := $(subst $(space),:,$(addprefix $(CURDIR)/,$(ROOTS)))$(if $(PYTHONPATH),:$(PYTHONPATH))
# A slow reverse look-up would delay a rendezvous by five seconds; workers run one thread each.
export RES_OPTIONS := timeout:1 attempts:1
export OMP_NUM_THREADS := 1
# Some container images set it: every process that a test starts would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(INSTALL),0)
PY := $(PYTHON)
READY :=
KERNELS_READY :=
EXPORT_READY :=
SITE_READY :=
else
PY := $(CURDIR)/$(VENV)/bin/python
READY := $(VENV)/.ready
KERNELS_READY := $(VENV)/.triton
EXPORT_READY := $(VENV)/.export
SITE_READY := $(VENV)/.site
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif
PIP = $(PY) -m pip install --quiet --disable-pip-version-check
# promtool, amtool and prometheus, unpacked from the system's packages
TOOLS := $(CURDIR)/.tools/prometheus
# mmdebstrap, which makes Debian roots, unpacked from Debian's package
MMDEBSTRAP := $(CURDIR)/.tools/mmdebstrap
# Ceph's radosgw with a monitor and an OSD, unpacked from Debian's packages
RGW_TOOLS := $(CURDIR)/.tools/ceph
# the jars of an old Hadoop, in which the tests' HDFS runs
HDFS_TOOLS := $(CURDIR)/.tools/hdfs
# kubectl, unpacked from Debian's package
KUBERNETES_TOOLS := $(CURDIR)/.tools/kubernetes

.PHONY: help help-all test-all demo train test crash soak simulate mutants logs-score test-slow test-ha test-builds bench-fleet bench-group-start bench-heartbeats test-export test-gpu test-system test-netns netns-tools test-slurm slurm-tools test-wheel test-image test-kubernetes kubernetes-tools sbom audit proto-breaking test-browser browser-tools test-s3 test-rgw test-hdfs system-tools image-tools rgw-tools hdfs-tools check proto proto-check docs docs-check dashboard dashboard-check format bench clean
.DEFAULT_GOAL := help

help: ## show these verbs (`make help-all` shows all)
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

help-all: #> show all verbs
	@grep -hE '^[a-z0-9-]+:.*#[#>] ' $(MAKEFILE_LIST) | sed -E 's/:.*#[#>] /\t/' | expand -t 19

demo: $(READY) ## run the main job: train, lose a node, recover, compare with the undisturbed twin
	$(PY) -m megascale_cli demo $(DEMO_ARGS)

train: $(READY) ## train a small model by torchrun on two processes, kill it half-way, start it again, compare
	@$(PY) docs/examples/train_by_hand.py

test: $(READY) $(KERNELS_READY) ## run the tests (about 7 minutes on 2 cores)
	$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS)

crash: $(READY) #> crash the checkpoint daemon at every write, sync, message (CASES=200 SEED=0 JOBS=1): nothing lost, nothing silent
	@$(PY) -m tests.crash --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

soak: $(READY) #> jobs under random overlapping faults on a real cluster (MINUTES=20 SEED=1 DRIVERS=1 or 3 TLS=1; root): every promise checked
	@$(PY) -m tests.soak --minutes $(or $(MINUTES),20) --seed $(if $(filter command line environment,$(origin SEED)),$(SEED),1) --drivers $(or $(DRIVERS),1) $(if $(TLS),--tls)

simulate: $(READY) #> simulate the whole driver shell (NODES=64 DAYS=2 FIRST=0 SEEDS=100 JOBS=cores CSV=file; SEED= replays one with its shortest history)
	@PYTHONHASHSEED=0 $(PY) -m tests.simulation --nodes $(or $(NODES),64) --days $(or $(DAYS),2) --storms $(or $(STORMS),4) $(if $(RATE),--rate $(RATE)) $(if $(SPARES),--spares $(SPARES)) \
	  --first $(or $(FIRST),0) --seeds $(or $(SEEDS),100) $(if $(filter command line environment,$(origin JOBS)),--jobs $(JOBS)) $(if $(CSV),--csv $(CSV)) $(if $(REPLAYED),--seed $(REPLAYED))

mutants: $(READY) #> simulate with one defect at a time: each must break an invariant of a scenario or a seed
	@PYTHONHASHSEED=0 $(PY) -m tests.simulation.mutants $(if $(filter command line environment,$(origin JOBS)),--jobs $(JOBS))

logs-score: $(READY) #> classify the labelled log excerpts: precision, recall, wrong evictions (CORPUS=file)
	@$(PY) -m megascale_driver.analysis.logs score $(or $(CORPUS),tests/data/logs/excerpts.jsonl)

test-slow: $(READY) $(KERNELS_READY) ## run what `make test` leaves out: each benchmark once, the whole demo, further kernels, layouts, drills and crashes
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

# One suite after the other, also past one that fails; the last line names those that failed.
SUITES := test test-slow test-ha test-builds test-export test-gpu test-system test-netns test-slurm test-kubernetes test-wheel test-image test-browser test-rgw test-hdfs
test-all: #> run all suites; each skips what the machine lacks (root for some)
	@failed=; for suite in $(SUITES); do $(MAKE) $$suite || failed="$$failed $$suite"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

test-ha: $(READY) #> three drivers and three etcd members under a training job: leaders killed, stopped, cut off (about 2 minutes)
	$(PY) -m pytest -s -m "slow or not slow" tests/chaos/test_high_availability.py $(PYTEST_ARGS)

test-builds: $(READY) #> this build and the one before (PREVIOUS=commit; by default the newest tag, else HEAD^) lead in turn under a training job
	MEGASCALE_PREVIOUS_BUILD=$(PREVIOUS) $(PY) -m pytest -s -m slow -rs tests/chaos/test_two_builds.py $(PYTEST_ARGS)

test-export: $(READY) $(EXPORT_READY) #> run the tests with other people's libraries: exported models in transformers and Megatron-core, wandb, mlflow
	$(PY) -m pytest -m export tests/export $(PYTEST_ARGS)

test-gpu: $(READY) ## run the tests that need CUDA devices
	$(PY) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

test-system system-tools: export PATH := $(PATH):$(TOOLS)/usr/bin
test-system: $(READY) system-tools #> run the tests of deploy/ that need promtool, amtool, a Prometheus or systemd-analyze
	$(PY) -m pytest -m system -rs tests/system $(PYTEST_ARGS)

test-netns: $(READY) netns-tools #> a job on hosts of its own (network namespaces): partitions, loss, delay, IPv6 (root; 3 minutes)
	unshare --net $(PY) -m pytest -m netns -rs tests/netns $(PYTEST_ARGS)

netns-tools:
	@if command -v ip >/dev/null && command -v tc >/dev/null && command -v iptables >/dev/null && command -v ip6tables >/dev/null; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing iproute2 and iptables" >&2; \
	  apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 iptables >&2; \
	fi; \
	command -v iptables >/dev/null || echo "no iptables: install your system's package; its tests are skipped" >&2

test-slurm: export PATH := $(PATH):/usr/sbin
test-slurm: $(READY) slurm-tools #> jobs through a real SLURM: a lost node, the time limit, the next allocation (root; 5 minutes)
	$(PY) -m pytest -m slurm -rs tests/slurm $(PYTEST_ARGS)

# Without /etc/slurm/slurm.conf Debian's packages start no daemon of SLURM by themselves.
slurm-tools:
	@if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing slurmctld, slurmd, slurm-client and munge"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; \
	fi; \
	command -v slurmctld >/dev/null || echo "no slurmctld: install your system's packages; its tests are skipped" >&2

test-kubernetes: export PATH := $(PATH):$(KUBERNETES_TOOLS)/usr/bin
test-kubernetes: $(READY) kubernetes-tools #> jobs on pods: a pod deleted, machines evicted, lost, drained; kubectl and manifests (about 2 minutes)
	$(PY) -m pytest -m "kubernetes or not kubernetes" -rs tests/unit/test_kubernetes_decisions.py tests/unit/test_kubernetes_manifests.py tests/integration/test_kubernetes_api.py tests/integration/test_kubernetes_driver_calls.py tests/integration/test_kubernetes_platform.py tests/integration/test_checkpoint_sidecar.py tests/chaos/test_kubernetes_jobs.py $(PYTEST_ARGS)

test-wheel: $(READY) #> build the wheel, install it into empty environments, train outside of the tree (4 minutes)
	MEGASCALE_TEST_TORCH="$(TORCH)" $(PY) -m pytest -m wheel -rs tests/packages $(PYTEST_ARGS)

test-image image-tools: export PATH := $(PATH):$(MMDEBSTRAP)/usr/bin
test-image: $(READY) image-tools #> run the install steps of deploy/Containerfile in Debian roots (root; 5 minutes)
	MEGASCALE_TEST_TORCH="$(TORCH)" $(PY) -m pytest -m image -rs tests/packages $(PYTEST_ARGS)

test-browser: $(READY) browser-tools #> run the tests of the dashboard in a real Chromium: 1,536 nodes, accessibility (SCREENSHOTS=1 renews docs/images)
	MEGASCALE_SCREENSHOTS=$(SCREENSHOTS) $(PY) -m pytest -m browser -rs tests/system/test_dashboard_pages.py $(PYTEST_ARGS)

# Debian's, with a plain font, so that pictures are the same everywhere.
browser-tools:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium (some 100 MB)"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	fi; \
	command -v chromium >/dev/null || echo "no chromium: install your system's package (as root \`make browser-tools\` does); its tests are skipped" >&2

test-s3: $(READY) ## run the contract of storages on an S3 server (also part of `make test`)
	$(PY) -m pytest -m s3 -rs tests/integration/test_storage_contract.py $(PYTEST_ARGS)

test-rgw: $(READY) rgw-tools #> run the contract of storages on Ceph's S3 server
	$(PY) -m pytest -m rgw -rs tests/integration/test_storage_contract.py $(PYTEST_ARGS)

test-hdfs: $(READY) hdfs-tools #> run the contract of storages on a real HDFS (needs java)
	$(PY) -m pytest -m hdfs -rs tests/integration/test_storage_contract.py $(PYTEST_ARGS)

check: $(READY) $(KERNELS_READY) proto-check docs-check dashboard-check ## check style, types, layers, wire contract, pages, deploy/, the last commit's subject
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib $(wildcard *.md) benchmarks clients deploy docs kernels proto services
	$(PY) -m mypy $(wildcard services/*/megascale_*) $(wildcard kernels/megascale_*) $(wildcard clients/*/megascale_*) proto/generate.py proto/breaking.py $(wildcard docs/*.py) $(wildcard deploy/*/*.py)
	$(PY) -m pytest -n 2 -m check $(PYTEST_ARGS)
	lint-imports
	cd proto && buf lint
	$(PY) proto/breaking.py --skip-without-history

format: $(READY) #> format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

proto: $(VENV)-proto/.ready #> generate the Python code of the protos
	$(VENV)-proto/bin/python proto/generate.py

proto-check: $(VENV)-proto/.ready #> check that the generated code is up to date
	$(VENV)-proto/bin/python proto/generate.py --check

proto-breaking: $(READY) #> compare the protos with the newest tag, or with main (AGAINST=commit)
	$(PY) proto/breaking.py $(if $(AGAINST),--against $(AGAINST))

sbom: $(READY) $(VENV)-audit/.ready #> write dist/sbom.cdx.json, all that is installed as a CycloneDX bill of materials
	mkdir -p dist
	$(VENV)-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file dist/sbom.cdx.json $(PY)

# Of a local version (2.13.0+cpu) advisories name the public part.
audit: $(READY) $(VENV)-audit/.ready #> ask OSV for advisories about all that is installed (SOURCE=url of a mirror)
	@$(PY) -m pip --disable-pip-version-check list --format=freeze --exclude-editable | sed -e '/^megascale==/d' -e 's/+.*//' > $(VENV)-audit/installed.txt
	@$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off --vulnerability-service osv $(if $(SOURCE),--osv-url $(SOURCE)/v1/query) --requirement $(VENV)-audit/installed.txt

docs: $(READY) $(SITE_READY) ## write the generated parts of pages, and build the site (site/)
	@for page in $(PAGES); do $(PY) -m docs.$$page || exit 1; done
	$(build_site)

docs-check: $(READY) $(SITE_READY) #> check that these generated parts are up to date, and the site's links
	@for page in $(PAGES); do $(PY) -m docs.$$page --check || exit 1; done
	@$(PY) -m docs.check_prose
	$(build_site)

dashboard: $(READY) #> write deploy/grafana/megascale.json from the metrics in the code
	$(PY) -m deploy.grafana.generate

dashboard-check: $(READY) #> check that deploy/grafana/megascale.json is up to date
	$(PY) -m deploy.grafana.generate --check

bench: $(READY) ## measure training on this CPU (benchmarks/README.md has the other questions)
	$(PY) benchmarks/throughput.py --device cpu --tp 2 --pp 2 --dp 2

bench-heartbeats: $(READY) #> heartbeats of many nodes: the driver's CPU beside a bare echo (NODES=1536 INTERVAL=1 WINDOW=60 RECONNECT=1)
	@$(PY) benchmarks/heartbeats.py --nodes $(or $(NODES),1536) --interval $(or $(INTERVAL),1) --window $(or $(WINDOW),60) $(if $(RECONNECT),--reconnect)

bench-fleet: $(READY) #> time of a failover with a large state and history in etcd (NODES=12500 LINES=1000000)
	@$(PY) benchmarks/fleet.py --nodes $(or $(NODES),12500) --lines $(or $(LINES),1000000)

bench-group-start: $(READY) #> how long the rendezvous store takes for the start of a large job, with emulated ranks (RANKS="2048 12288" ROUNDS=3)
	@$(PY) benchmarks/group_start.py --ranks $(or $(RANKS),2048 12288) --rounds $(or $(ROUNDS),3)

clean: ## remove environments, caches and runs
	rm -rf $(VENV) $(VENV)-proto $(VENV)-audit .tools runs site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With --quiet mkdocs would count no warning, and so fail for none.
# In an environment that is used as it is, the site is built only if mkdocs is there.
define build_site
@if $(PY) -c 'import material' 2>/dev/null; then NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict; \
	  else echo "no mkdocs-material: the site is not built" >&2; fi
endef

# Debian has venv in a package of its own: install it as root, else print what to do.
define make_venv
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo "$(PYTHON) has no ensurepip: install your system's python3-venv package, or give PYTHON=" >&2; exit 1; fi; }
	$(PYTHON) -m venv $(1)
endef

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	@echo "installing $(TORCH) and the pinned requirements into $(VENV) (about a minute)"
	$(PIP) $(TORCH)
	$(PIP) setuptools wheel
	$(PIP) --constraint constraints.txt --editable '.[executor,checkpoint,s3,hdfs,plot,dev]'
	@touch $@

$(VENV)/.triton: $(VENV)/.ready
	@$(PY) -c 'import triton' 2>/dev/null || { echo "installing $(TRITON) for the kernels' tests"; $(PIP) $(TRITON); }
	@touch $@

# Megatron-core needs torch, numpy and packaging, which are there; no user needs it.
$(VENV)/.export: $(VENV)/.ready
	$(PIP) --constraint constraints.txt --editable '.[export,trackers]'
	$(PIP) --no-deps megatron-core==0.16.1
	@touch $@

$(VENV)/.site: $(VENV)/.ready
	$(PIP) --constraint constraints.txt mkdocs-material
	@touch $@

$(VENV)-proto/.ready:
	$(call make_venv,$(VENV)-proto)
	$(VENV)-proto/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.66.2 mypy-protobuf==3.7.0 'setuptools<81'
	@touch $@

$(VENV)-audit/.ready: deploy/packages/tools.txt
	$(call make_venv,$(VENV)-audit)
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# If they are missing and apt-get exists, the package is unpacked, not installed: that needs no root
# and starts no service. apt checks the package's signature; its lists are our own, so that they are
# never too old.
APT := apt-get -qq -o APT::Sandbox::User=root -o Dir::State=$(TOOLS)/apt -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$(TOOLS)/apt
system-tools:
	@if command -v promtool >/dev/null && command -v amtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then \
	  echo "fetching promtool, amtool and prometheus into $(TOOLS)"; \
	  mkdir -p $(TOOLS)/apt/lists/partial $(TOOLS)/apt/archives/partial && cd $(TOOLS) \
	  && $(APT) update && $(APT) download prometheus prometheus-alertmanager && { $(APT) download promtool 2>/dev/null || :; } \
	  && for package in *.deb; do dpkg-deb -x "$$package" . || exit 1; done; rm -rf ./*.deb apt; \
	fi; \
	command -v promtool >/dev/null || echo "no promtool: install your system's package; its tests are skipped" >&2

# One Perl script, which takes apt and dpkg of the system.
image-tools:
	@if command -v mmdebstrap >/dev/null; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then \
	  echo "fetching mmdebstrap into $(MMDEBSTRAP)"; \
	  mkdir -p $(MMDEBSTRAP)/apt/lists/partial $(MMDEBSTRAP)/apt/archives/partial && cd $(MMDEBSTRAP) \
	  && $(IMAGE_APT) update && $(IMAGE_APT) download mmdebstrap \
	  && for package in *.deb; do dpkg-deb -x "$$package" . || exit 1; done; rm -rf ./*.deb apt; \
	fi; \
	command -v mmdebstrap >/dev/null || echo "no mmdebstrap: its tests are skipped" >&2
IMAGE_APT := $(subst $(TOOLS),$(MMDEBSTRAP),$(APT))

KUBERNETES_APT := $(subst $(TOOLS),$(KUBERNETES_TOOLS),$(APT))
kubernetes-tools:
	@if command -v kubectl >/dev/null; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then \
	  echo "fetching kubectl into $(KUBERNETES_TOOLS)"; \
	  mkdir -p $(KUBERNETES_TOOLS)/apt/lists/partial $(KUBERNETES_TOOLS)/apt/archives/partial && cd $(KUBERNETES_TOOLS) \
	  && $(KUBERNETES_APT) update && $(KUBERNETES_APT) download kubernetes-client \
	  && for package in *.deb; do dpkg-deb -x "$$package" . || exit 1; done; rm -rf ./*.deb apt; \
	fi; \
	command -v kubectl >/dev/null || echo "no kubectl: install it; its tests are skipped" >&2
kubernetes-tools: export PATH := $(PATH):$(KUBERNETES_TOOLS)/usr/bin

# With what they need that the system lacks, as apt finds it (some 70 MB).
RGW_APT := $(subst $(TOOLS),$(RGW_TOOLS),$(APT))
rgw-tools:
	@if [ -x $(RGW_TOOLS)/root/usr/bin/radosgw ]; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then \
	  echo "fetching radosgw into $(RGW_TOOLS) (70 MB)"; \
	  rm -rf $(RGW_TOOLS) && mkdir -p $(RGW_TOOLS)/apt/lists/partial $(RGW_TOOLS)/apt/archives/partial && cd $(RGW_TOOLS) \
	  && $(RGW_APT) update && $(RGW_APT) install --no-install-recommends -y --download-only radosgw ceph-mon ceph-osd ceph-common \
	  && for package in apt/archives/*.deb; do dpkg-deb -x "$$package" new || exit 1; done \
	  && rm -rf apt && mv new root; \
	fi; \
	[ -x $(RGW_TOOLS)/root/usr/bin/radosgw ] || echo "no radosgw: its tests are skipped" >&2

# Hadoop 2.7.3 from pyspark's source archive (220 MB), whose jars of HDFS are complete, and what it
# leaves out from Debian's packages, unpacked and not installed.
HDFS_JARS := hadoop-annotations hadoop-auth hadoop-common hadoop-hdfs commons-cli commons-codec commons-collections \
  commons-configuration commons-io commons-lang-2 commons-logging commons-net guava protobuf-java log4j slf4j-api slf4j-log4j12 \
  jetty netty-all netty-3 htrace-core jackson-core-asl jackson-mapper-asl javax.servlet-api xercesImpl xmlenc leveldbjni gson
HDFS_PACKAGES := libjersey1-core-java libjersey1-server-java libjersey1-servlet-java libjsr311-api-java libcommons-daemon-java libasm-java
hdfs-tools: $(READY)
	@if [ -d $(HDFS_TOOLS)/lib ]; then exit 0; fi; \
	if [ $(INSTALL) = 1 ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then \
	  echo "fetching the jars of HDFS into $(HDFS_TOOLS) (220 MB)"; \
	  rm -rf $(HDFS_TOOLS) && mkdir -p $(HDFS_TOOLS)/apt/lists/partial $(HDFS_TOOLS)/apt/archives/partial $(HDFS_TOOLS)/new && cd $(HDFS_TOOLS) \
	  && $(PY) -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation pyspark==2.4.8 \
	  && tar -xzf pyspark-2.4.8.tar.gz --strip-components 3 --wildcards $(patsubst %,'pyspark-2.4.8/deps/jars/%*.jar',$(HDFS_JARS)) --one-top-level=new \
	  && $(HDFS_APT) update && $(HDFS_APT) download $(HDFS_PACKAGES) \
	  && for package in *.deb; do dpkg-deb -x "$$package" debian || exit 1; done \
	  && cp debian/usr/share/java/*-[0-9]*.jar new && rm -rf ./*.deb ./*.tar.gz apt debian && mv new lib; \
	fi; \
	[ -d $(HDFS_TOOLS)/lib ] || echo "no jars of HDFS: its tests are skipped" >&2; \
	command -v java >/dev/null || echo "no java: install your system's default-jre-headless; the tests of HDFS are skipped" >&2
HDFS_APT := $(subst $(TOOLS),$(HDFS_TOOLS),$(APT))
