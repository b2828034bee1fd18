# Each target sets up everything it needs (tools/bootstrap). VENV= and PYTHON= choose the environment and its Python.
.POSIX:
# Two processes, a file's tests in one of them. The slow offdevice tests use two processes of their own, and print tables.
PARALLEL = -n 2 --dist loadscope
.PHONY: demo test test-slow test-all lint audit wheel clean

demo:
	@python=$$(tools/bootstrap) && "$$python" examples/demo.py

lint:
	@python=$$(tools/bootstrap) && tools/lint "$$python"

# Known vulnerabilities of what is installed; an error too where no advisories can be reached.
audit:
	@python=$$(tools/bootstrap) && tools/audit "$$python"

test: lint
	@python=$$(tools/bootstrap) && "$$python" -m pytest -m "not slow and not thorough" $(PARALLEL)

# What CI has time for beside the fast loop.
test-slow:
	@python=$$(tools/bootstrap) && "$$python" -m pytest -m "thorough and not slow" $(PARALLEL)
	@python=$$(tools/bootstrap) && "$$python" -m pytest -m slow tests/offdevice/test_compile_matrix.py tests/models/test_survey.py tests/test_properties.py

# Everything: about an hour on two cores.
test-all: test
	@python=$$(tools/bootstrap) && "$$python" -m pytest -m "slow or thorough"

wheel:
	@python=$$(tools/bootstrap) && "$$python" -m pip wheel --no-deps --no-build-isolation -w dist .

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
