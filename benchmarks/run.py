"""Runs the benchmarks beside this file, one after the other, each in a process of its own.

python benchmarks/run.py            all of them
python benchmarks/run.py NAME ...   those named
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ASKING = ("doctor", "gpu_step", "imports")
"""Those that have to be told of what."""


def main() -> int:
    """The number of benchmarks that failed."""
    names = sorted({file.stem for file in HERE.glob("*.py")} - {"run", "harness", "meters", "figures", "gpu", *ASKING})
    wanted = sys.argv[1:] or names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    failed = 0
    for name in wanted:
        print(f"\n== {name} ==", flush=True)
        failed += subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
