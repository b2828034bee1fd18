"""Known vulnerabilities of the packages of an environment, by pip-audit.

    python tools/audit.py PYTHON

PYTHON is the environment to audit; the Python that runs this has pip-audit. Where PyPI's advisory database cannot be reached
(behind a mirror that serves packages alone), pip-audit finds no release there, or reports none as vulnerable. So one that is
known to be is audited first, and the answer is "not checked" unless it is found.

Exit status: 0 no known vulnerability, 1 some, or a release that could not be audited, 3 not checked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

KNOWN_TO_BE_VULNERABLE = "jinja2==2.4.1"
NOT_CHECKED = 3
Audit = Callable[[str], "tuple[int, str]"]


def pip_audit(requirements: str) -> tuple[int, str]:
    """(exit status, output) of pip-audit on pinned requirements; a release that cannot be audited is an error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text(requirements)
        command = [sys.executable, "-m", "pip_audit", "--strict", "--no-deps", "--disable-pip", "--progress-spinner=off",
                   "--requirement", str(file)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def installed(python: str) -> str:
    """Requirements that pin each installed release; this package is an editable one."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "list", "--format=freeze", "--exclude-editable"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def audit(requirements: str, run: Audit = pip_audit) -> int:
    """Audit pinned requirements, tell what was found, and return the exit status."""
    count = requirements.count("==")
    _, told = run(KNOWN_TO_BE_VULNERABLE + "\n")
    if "PYSEC-" not in told and "CVE-" not in told and "GHSA-" not in told:
        print(
            f"audit: NOT CHECKED: {count} releases. No advisory was found for {KNOWN_TO_BE_VULNERABLE}, which has some: the "
            "advisory database cannot be reached from here. Run `make audit` where pypi.org itself can."
        )
        return NOT_CHECKED
    status, told = run(requirements)
    if status:
        print(f"{told.strip()}\naudit: of {count} releases, the above have known vulnerabilities or could not be audited.")
        return 1
    print(f"audit: no known vulnerability in {count} releases.")
    return 0


if __name__ == "__main__":
    sys.exit(audit(installed(sys.argv[1])))
