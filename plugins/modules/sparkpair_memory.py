#!/usr/bin/python
"""Module sparkpair_memory: what memory a node has to give."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_memory
short_description: Read a node's memory
description:
  - MemTotal, MemFree and MemAvailable, which on a Spark are the GPU's memory too.
options:
  root:
    description: Stands in for / where a rehearsed tree has the memory facts.
    type: path
    default: /
attributes:
  check_mode:
    description: Reads only; the same in check mode.
    support: full
  diff_mode:
    description: Nothing changes, so there is nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Read the memory
  sparkpair_memory:
"""

RETURN = r"""
available_gib:
  description: MemAvailable in GiB, one decimal; free_gib and total_gib likewise.
  type: float
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair.preflight import meminfo
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    values = meminfo(Path(params["root"]))
    names = {"available_gib": "MemAvailable", "free_gib": "MemFree", "total_gib": "MemTotal"}
    return {short: round(values.get(name, 0) / 2**30, 1) for short, name in names.items()}


def main() -> None:
    run_module({"root": {"type": "path", "default": "/"}}, work)


if __name__ == "__main__":
    main()
