"""`make benchmark`: every budget, one program after the other, so that none disturbs another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The last needs a rehearsed pair that is up.
PROGRAMS = ("fixtures", "verify", "fetch", "replicate")
ON_A_PAIR = "converged"


def main() -> int:
    """Run them all. Exit code 1 when one is over its budget."""
    names = [*PROGRAMS, *([ON_A_PAIR] if (HERE.parent / ".rehearsal/world.json").exists() else [])]
    missed = []
    for name in names:
        print(f"\n## {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            missed.append(name)
    if ON_A_PAIR not in names:
        print(f"\n## {ON_A_PAIR}\nnot measured: no rehearsed pair is up (make rehearse)")
    print(f"\nover budget: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
