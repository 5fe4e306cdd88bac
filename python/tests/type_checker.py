# mypy on a text that uses heed: the lines with `# wrong: CODE` are errors with this code, and no others are errors.
import os
import pathlib
import re
import subprocess
import sys

import heed


# mypy's cache of PyTorch and NumPy, which are most of its work, is shared by all tests in all processes. mypy checks
# whether files have changed since, and replaces cache files atomically.
CACHE = pathlib.Path(__file__).resolve().parents[2] / "build/mypy"


def check_types(text, folder):
    consumer = folder / "consumer.py"
    consumer.write_text(text)
    package = pathlib.Path(heed.__file__).parent.parent
    path = {} if package.name == "site-packages" else {"MYPYPATH": str(package)}  # the heed that is tested, not another
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent"]
    result = subprocess.run([*command, f"--cache-dir={CACHE}", str(consumer)], capture_output=True, text=True,
                            check=False, cwd=folder, env={**os.environ, **path})
    errors = re.findall(r"consumer\.py:(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.MULTILINE)
    reported = {int(line): code for line, code in errors}
    wrong = {n: line.split("# wrong: ")[1] for n, line in enumerate(text.split("\n"), 1) if "# wrong: " in line}
    assert reported == wrong, result.stdout + result.stderr
    assert all("consumer.py" in line for line in result.stdout.splitlines() if ": error: " in line), result.stdout
