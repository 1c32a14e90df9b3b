# Each target does its own set-up: virtual environment, build, dependencies.
PYTHON ?= python3
PIP = -m pip install --quiet --disable-pip-version-check

.PHONY: demo test bench clean

demo: .venv/demo/ready
	.venv/demo/bin/python -m ktcy demo

test: .venv/test/ready
	.venv/test/bin/python -m pytest tests

bench: .venv/test/ready
	.venv/test/bin/python $(PIP) -e '.[bench]' --no-build-isolation
	.venv/test/bin/python -m pytest bench

SOURCES = $(shell find ktcy -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h') setup.py pyproject.toml

.venv/demo/ready: $(SOURCES)
	$(PYTHON) -m venv .venv/demo
	.venv/demo/bin/python $(PIP) --force-reinstall --no-deps .
	.venv/demo/bin/python $(PIP) .
	touch $@

# Editable, with the emulated twins; torch exactly, since a bare torch pulls its CUDA build.
.venv/test/ready: $(SOURCES)
	$(PYTHON) -m venv .venv/test
	.venv/test/bin/python $(PIP) torch==2.13.0
	KTCY_VARIANTS=twins .venv/test/bin/python $(PIP) -e '.[test,transformers]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
	find ktcy -name '*.so' -delete
