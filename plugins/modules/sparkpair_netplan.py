#!/usr/bin/python
"""Module sparkpair_netplan: the link's netplan file, put into force with a way back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_netplan
short_description: Set the link's addresses by netplan, revertible
description:
  - Writes C(/etc/netplan/60-sparkpair-link.yaml) and configures only the link's ports anew.
  - Before that it probes the link for the address, has netplan read the files in a folder of its own, refuses if
    the SSH session runs over such a port, and sets a timer that brings the old state back.
  - O(state=confirmed) takes the timer off. Call it in a later task, when the connection has answered again.
options:
  state:
    description: V(present) sets, V(confirmed) keeps what was set.
    type: str
    choices: [present, confirmed]
    default: present
  plan:
    description: The plan of M(sparkpair_link_plan).
    type: dict
  host:
    description: This host's name in the plan.
    type: str
  renderer:
    description: Who carries out netplan's plans on this node.
    type: str
    choices: [networkd, NetworkManager]
    default: networkd
  revert_after:
    description: Seconds until the change goes back unless confirmed.
    type: int
    default: 90
attributes:
  check_mode:
    description: Compares the file and the live addresses; probes and sets nothing.
    support: full
  diff_mode:
    description: Shows the file, and what is live but not as wanted as comment lines.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Set the addresses
  sparkpair_netplan:
    plan: "{{ __link_plan.plan }}"
    host: "{{ inventory_hostname }}"
  register: __link_netplan

- name: Keep them
  sparkpair_netplan:
    state: confirmed
  when: __link_netplan.pending
"""

RETURN = r"""
pending:
  description: Whether a timer runs that would bring the old state back.
  type: bool
  returned: when O(state=present)
"""

from typing import Any

from ansible.module_utils.sparkpair import netapply, nodefacts
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    result: dict[str, Any]
    if params["state"] == "confirmed":
        result = netapply.confirm(check_mode=check_mode)
        return result
    plan, host = params["plan"], params["host"]
    ends = [end for ends in plan["rails"] for end in ends if end["host"] == host]
    wanted = [
        netapply.WantedPort(end["netdev"], f"{end['address']}/{end['prefix']}", int(end["mtu"]))
        for end in ends
    ]
    result = netapply.apply(
        plan["files"][host],
        wanted,
        renderer=params["renderer"],
        session=nodefacts.session_address(),
        revert_after=params["revert_after"],
        check_mode=check_mode,
    )
    return result


def main() -> None:
    run_module(
        {
            "state": {"type": "str", "choices": ["present", "confirmed"], "default": "present"},
            "plan": {"type": "dict"},
            "host": {"type": "str"},
            "renderer": {"type": "str", "choices": ["networkd", "NetworkManager"], "default": "networkd"},
            "revert_after": {"type": "int", "default": 90},
        },
        work,
        required_if=[("state", "present", ("plan", "host"))],
    )


if __name__ == "__main__":
    main()
