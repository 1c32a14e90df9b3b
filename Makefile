# demo and test do their own set-up: virtual environment, build, dependencies.
PYTHON ?= python3
PIP = -m pip install --quiet --disable-pip-version-check

.PHONY: demo test bench sanitize clean

demo: .venv/demo/ready
	.venv/demo/bin/ktcy demo

test: .venv/test/ready
	.venv/test/bin/python -m pytest tests -n auto --dist worksteal

bench: .venv/test/ready
	.venv/test/bin/python $(PIP) 'pytest-benchmark>=4'
	.venv/test/bin/python -m pytest bench

# The kernels and the layer under ASan and UBSan. pytest itself, not python -m: that would import the tree's modules.
SANITIZED = tests/test_vocabulary.py tests/test_quantizer.py tests/test_gemm.py tests/test_layer.py tests/test_moving.py
sanitize: .venv/test/ready
	KTCY_DEBUG=1 KTCY_VARIANTS=twins .venv/test/bin/python setup.py -q build
	PYTHONPATH=$$(echo build/debug/lib.*) LD_PRELOAD=$$(gcc -print-file-name=libasan.so) \
	    ASAN_OPTIONS=detect_leaks=0 .venv/test/bin/pytest $(SANITIZED)

# A Debian machine with python3, gcc and make may lack two parts of Python; root gets them here.
NEEDED = import ensurepip, os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')
DEBIAN = python3-venv python3-dev
define environment
@$(PYTHON) -c "$(NEEDED)" 2>/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -q update && apt-get -q -y install $(DEBIAN); } || \
	{ echo "$(PYTHON) lacks venv or Python.h; on Debian: sudo apt-get install $(DEBIAN)" >&2; exit 1; }
$(PYTHON) -m venv $(@D)
endef

SOURCES = $(shell find ktcy -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h') setup.py pyproject.toml

.venv/demo/ready: $(SOURCES)
	$(environment)
	$(@D)/bin/python $(PIP) .
	touch $@

# Editable, with the emulated twins; torch exactly, since a bare torch pulls its CUDA build.
.venv/test/ready: $(SOURCES)
	$(environment)
	$(@D)/bin/python $(PIP) torch==2.13.0
	KTCY_VARIANTS=twins $(@D)/bin/python $(PIP) -e '.[test,transformers]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
	find ktcy -name '*.so' -delete
