#!/usr/bin/python
"""Module sparkpair_rail_probe: do the planned rails carry full-size packets and TCP to the peers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_rail_probe
short_description: Prove each rail from this node to its peers
description:
  - Waits until each rail is ready (address, MTU, GID), sends full-size unfragmentable packets to the peer and, with
    O(tcp=true), tries TCP on the ranks' ports while the peer does the same.
  - Finds facts only; M(sparkpair_pair_file) judges them for all nodes together.
options:
  plan:
    description: The plan of M(sparkpair_link_plan).
    type: dict
    required: true
  host:
    description: This host's name in the plan.
    type: str
    required: true
  root:
    description: Directory that stands in for / where device facts are read.
    type: path
    default: /
  wait:
    description: Seconds to wait for addresses, GID rows and answers.
    type: int
    default: 20
  tcp:
    description: Try TCP too. All hosts must then run this at the same time.
    type: bool
    default: false
  free_port:
    description: A random high port, the same on all hosts.
    type: int
    default: 45123
  run_id:
    description: A word that only this run of the play knows.
    type: str
    default: sparkpair
attributes:
  check_mode:
    description: The same where the addresses are live; else nothing is sent and C(rails) is empty.
    support: full
  diff_mode:
    description: Nothing changes, so there is nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Prove the rails
  sparkpair_rail_probe:
    plan: "{{ __link_plan.plan }}"
    host: "{{ inventory_hostname }}"
    tcp: true
"""

RETURN = r"""
rails:
  description: For each rail its state, MTU, problem (or null), pings by peer and TCP results.
  type: list
  returned: always
firewall:
  description: Which firewall of the node could filter the link, or an empty string.
  type: str
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import railprobe
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    result: dict[str, Any] = railprobe.run(
        params["plan"],
        params["host"],
        root=Path(params["root"]),
        wait=params["wait"],
        tcp=(params["free_port"], params["run_id"]) if params["tcp"] and not check_mode else None,
        patient=not check_mode,
    )
    return result


def main() -> None:
    run_module(
        {
            "plan": {"type": "dict", "required": True},
            "host": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/"},
            "wait": {"type": "int", "default": 20},
            "tcp": {"type": "bool", "default": False},
            "free_port": {"type": "int", "default": 45123},
            "run_id": {"type": "str", "default": "sparkpair"},
        },
        work,
    )


if __name__ == "__main__":
    main()
