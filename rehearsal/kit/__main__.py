"""python -m rehearsal.kit DIR: write the stand-in kit's repository content into DIR."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.kit", description=__doc__)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    print(f"{len(build(args.directory))} files in {args.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
