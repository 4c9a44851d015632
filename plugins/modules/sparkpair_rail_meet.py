#!/usr/bin/python
"""Module sparkpair_rail_meet: which port is cabled to which, asked on the wire."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_rail_meet
short_description: Learn which ports of the Sparks meet
description:
  - Broadcasts small Ethernet frames of its own kind on each port and listens for those of the other hosts.
  - Needs no addresses and changes nothing. It must run on all hosts of the pair at the same time.
options:
  host:
    description: This host's inventory name.
    type: str
    required: true
  others:
    description: The other hosts' names.
    type: list
    elements: str
    required: true
  netdevs:
    description: The ports to use.
    type: list
    elements: str
    required: true
  run_id:
    description: A word that only this run of the play knows, so that another pair on the same switch is not heard.
    type: str
    required: true
  seconds:
    description: How long to listen at most.
    type: int
    default: 15
attributes:
  check_mode:
    description: Sends nothing in check mode, and returns an empty C(heard) with C(asked) false.
    support: partial
  diff_mode:
    description: Nothing changes, so there is nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Ask the wire
  sparkpair_rail_meet:
    host: spark-a
    others: [spark-b]
    netdevs: [enp1s0f0np0, enP2p1s0f0np0]
    run_id: "1f0c2d"
"""

RETURN = r"""
asked:
  description: Whether anything was sent.
  type: bool
  returned: always
heard:
  description: Triples of own port, other host and its port.
  type: list
  returned: always
"""

from typing import Any

from ansible.module_utils.sparkpair import probe
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    if check_mode:
        return {"asked": False, "heard": [], "msg": "not asked: a dry run sends nothing"}
    heard = probe.find_meetings(
        params["netdevs"], params["host"], params["others"], params["run_id"], params["seconds"]
    )
    return {"asked": True, "heard": [list(item) for item in heard]}


def main() -> None:
    run_module(
        {
            "host": {"type": "str", "required": True},
            "others": {"type": "list", "elements": "str", "required": True},
            "netdevs": {"type": "list", "elements": "str", "required": True},
            "run_id": {"type": "str", "required": True},
            "seconds": {"type": "int", "default": 15},
        },
        work,
    )


if __name__ == "__main__":
    main()
