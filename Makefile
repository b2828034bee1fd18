# Each target sets up everything it needs (tools/bootstrap). VENV= and PYTHON= choose the environment and its Python.
.POSIX:
.PHONY: demo test test-all lint wheel clean

demo:
	@python=$$(tools/bootstrap) && "$$python" examples/demo.py

lint:
	@python=$$(tools/bootstrap) && tools/lint "$$python"

test: lint
	@python=$$(tools/bootstrap) && "$$python" -m pytest -m "not slow"

test-all: lint
	@python=$$(tools/bootstrap) && "$$python" -m pytest

wheel:
	@python=$$(tools/bootstrap) && "$$python" -m pip wheel --no-deps --no-build-isolation -w dist .

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
