"""`make benchmark`: every budget, one program after the other, so that none disturbs another.

`controller` brings up a pair of its own, on which `converged` is measured too, and takes it down. Where a pair
is up already it is left alone, and only the second is measured, on that one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = ("fixtures", "verify", "fetch", "replicate")
WITH_OWN_PAIR, ON_A_PAIR = "controller", "converged"


def main() -> int:
    """Run them all. Exit code 1 when one is over its budget."""
    is_up = (HERE.parent / ".rehearsal/world.json").exists()
    names = [*PROGRAMS, *([] if is_up else [WITH_OWN_PAIR]), ON_A_PAIR]
    missed = []
    for name in names:
        print(f"\n## {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            missed.append(name)
    if is_up:
        print(f"\n## {WITH_OWN_PAIR}\nnot measured: a rehearsed pair is up (make rehearse-down)")
    else:
        subprocess.run([sys.executable, "-m", "rehearsal", "down"], check=True, cwd=HERE.parent)
    print(f"\nover budget: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
