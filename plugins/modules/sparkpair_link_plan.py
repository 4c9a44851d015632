#!/usr/bin/python
"""Module sparkpair_link_plan: rails, addresses and netplan files of the whole pair, from every node's facts."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_link_plan
short_description: Plan the link of the pair
description:
  - Computes which ports make a rail, which addresses they keep or get, and our netplan file of each node.
  - Pure; it reads nothing and changes nothing. Run it once, on any host.
options:
  hosts:
    description: The facts of every node by M(sparkpair_link_facts), rank 0 first.
    type: list
    elements: dict
    required: true
  heard:
    description: Host to what it heard by M(sparkpair_rail_meet); leave out where the wire was not asked.
    type: dict
  rails:
    description: How many rails are wanted.
    type: int
    default: 2
  rails_required:
    description: Fewer rails than this are an error, a missing one beyond it a warning.
    type: int
    default: 2
  mtu:
    description: The MTU that is wanted, in bytes.
    type: int
    default: 9000
  subnets:
    description: A subnet for each rail; the host part is the rank plus one.
    type: list
    elements: str
    default: [10.20.0.0/24, 10.21.0.0/24]
attributes:
  check_mode:
    description: Computes only; the same in check mode.
    support: full
  diff_mode:
    description: Nothing changes, so there is nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Plan the link
  sparkpair_link_plan:
    hosts: "{{ groups['pair'] | map('extract', hostvars, ['__link_facts', 'facts']) }}"
  run_once: true
  register: __link_plan
"""

RETURN = r"""
plan:
  description: mtu, rails (ends by rank), files (host to text), subnets, master_address, warnings.
  type: dict
  returned: success
"""

from typing import Any

from ansible.module_utils.sparkpair import linkplan, netplan
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    plan = linkplan.make(
        params["hosts"],
        params["heard"],
        rails=params["rails"],
        required=params["rails_required"],
        mtu=params["mtu"],
        subnets=params["subnets"],
    )
    return {"plan": plan.as_dict(), "told": [str(problem) for problem in plan.warnings]}


def main() -> None:
    run_module(
        {
            "hosts": {"type": "list", "elements": "dict", "required": True},
            "heard": {"type": "dict"},
            "rails": {"type": "int", "default": 2},
            "rails_required": {"type": "int", "default": 2},
            "mtu": {"type": "int", "default": 9000},
            "subnets": {"type": "list", "elements": "str", "default": list(netplan.DEFAULT_SUBNETS)},
        },
        work,
    )


if __name__ == "__main__":
    main()
