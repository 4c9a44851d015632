#!/usr/bin/python
"""Module sparkpair_pair_file: judge the rails and write /etc/sparkpair/pair.json."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_pair_file
short_description: Write what a node knows of the pair
description:
  - Judges the probes of all nodes, drops a rail that does not serve on each of them, and writes the pair's file.
options:
  plan:
    description: The plan of M(sparkpair_link_plan).
    type: dict
    required: true
  probes:
    description: Host to the result of M(sparkpair_rail_probe).
    type: dict
    required: true
  rank:
    description: This host's rank.
    type: int
    required: true
  ssh_ports:
    description: The sshd port of each rank.
    type: list
    elements: int
    required: true
  rails_required:
    description: Fewer rails than this are an error, a missing one beyond it a warning.
    type: int
    default: 2
  root:
    description: Directory that stands in for / where device facts are read.
    type: path
    default: /
attributes:
  check_mode:
    description: Says whether the file would change.
    support: full
  diff_mode:
    description: Shows the file before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Write the pair's file
  sparkpair_pair_file:
    plan: "{{ __link_plan.plan }}"
    probes: {}
    rank: 0
    ssh_ports: [22, 22]
"""

RETURN = r"""
rails:
  description: This node's rails as C(sparkpair link --json) tells them; state "planned" where not live yet.
  type: list
  returned: success
pair:
  description: The file's content.
  type: dict
  returned: success
told:
  description: Why a rail was dropped.
  type: list
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import railprobe
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    result: dict[str, Any] = railprobe.settle(
        params["plan"],
        params["probes"],
        rank=params["rank"],
        ssh_ports=params["ssh_ports"],
        required=params["rails_required"],
        root=Path(params["root"]),
        check_mode=check_mode,
    )
    return result


def main() -> None:
    run_module(
        {
            "plan": {"type": "dict", "required": True},
            "probes": {"type": "dict", "required": True},
            "rank": {"type": "int", "required": True},
            "ssh_ports": {"type": "list", "elements": "int", "required": True},
            "rails_required": {"type": "int", "default": 2},
            "root": {"type": "path", "default": "/"},
        },
        work,
    )


if __name__ == "__main__":
    main()
