#!/usr/bin/python
"""Module sparkpair_rank: one rank's unit, asked, started or stopped."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_rank
short_description: Ask, start or stop the unit of one rank
description:
  - Starting reloads systemd first, and fails with the unit's last lines. Stopping proves that unit and
    container are gone.
options:
  rank:
    description: The rank on this node.
    type: int
    required: true
  state:
    description: What to do.
    type: str
    choices: [asked, started, stopped]
    required: true
attributes:
  check_mode:
    description: Says whether it would start or stop; a unit that is not written yet is no error.
    support: full
  diff_mode:
    description: The unit's state before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Start rank 1
  sparkpair_rank: {rank: 1, state: started}
"""

RETURN = r"""
running:
  description: Whether the unit runs at the end.
  type: bool
  returned: success
"""

from typing import Any

from ansible.module_utils.sparkpair import rankunit
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    rank, state = params["rank"], params["state"]
    before = rankunit.running(rank)
    if state == "asked":
        return {"running": before}
    wanted = state == "started"
    if wanted != before and not check_mode:
        rankunit.start(rank) if wanted else rankunit.stop(rank)
    elif not wanted and not check_mode:
        rankunit.require_gone(rank)
    words = {True: "running\n", False: "stopped\n"}
    return {
        "changed": wanted != before,
        "running": wanted,
        "diff": {"before": words[before], "after": words[wanted]},
    }


def main() -> None:
    run_module(
        {
            "rank": {"type": "int", "required": True},
            "state": {"type": "str", "choices": ["asked", "started", "stopped"], "required": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
