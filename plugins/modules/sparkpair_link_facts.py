#!/usr/bin/python
"""Module sparkpair_link_facts: one node's ports, addresses and netplan, for the plan of the link."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_link_facts
short_description: Read what a node's link is made of
description:
  - Reads cages, twins, RDMA devices, GID tables, addresses, routes and netplan's files of a node.
  - Never fails because of what it finds; the findings are in C(facts.problems).
options:
  host:
    description: The node's inventory name.
    type: str
    required: true
  root:
    description: Directory that stands in for / where device facts are read.
    type: path
    default: /
  rails:
    description: How many halves of the cabled port are to serve.
    type: int
    default: 2
  mtu:
    description: The MTU that is wanted, in bytes.
    type: int
    default: 9000
  netdevs:
    description: The node's devices in the order of the rails; empty to find them.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reads only; the same in check mode, also on a bare node.
    support: full
  diff_mode:
    description: Nothing changes, so there is nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Read the ports
  sparkpair_link_facts:
    host: "{{ inventory_hostname }}"
  register: __link_facts
"""

RETURN = r"""
facts:
  description: The node's facts as the module sparkpair_link_plan takes them.
  type: dict
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import nodefacts
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    facts = nodefacts.collect(
        params["host"],
        root=Path(params["root"]),
        rails=params["rails"],
        mtu=params["mtu"],
        netdevs=params["netdevs"],
    )
    return {"facts": facts}


def main() -> None:
    run_module(
        {
            "host": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/"},
            "rails": {"type": "int", "default": 2},
            "mtu": {"type": "int", "default": 9000},
            "netdevs": {"type": "list", "elements": "str", "default": []},
        },
        work,
    )


if __name__ == "__main__":
    main()
