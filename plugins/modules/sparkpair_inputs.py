#!/usr/bin/python
"""Module sparkpair_inputs: the knobs and the inventory, checked without a connection."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_inputs
short_description: Check knobs and inventory before any connection
description:
  - Checks what the user typed, and tells everything that is wrong at once. Run it on the controller.
options:
  knobs:
    description: The public knobs, name to value; secrets are replaced by whether they are set.
    type: dict
    required: true
  profiles:
    description: The known profiles, by name.
    type: dict
    required: true
  groups:
    description: Ansible's groups.
    type: dict
    required: true
  hosts:
    description: Connection values of each host.
    type: dict
    required: true
  playing:
    description: The hosts that this run acts on.
    type: list
    elements: str
    required: true
  tags:
    description: The tags of this run.
    type: list
    elements: str
    default: [all]
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
- name: Check what was typed
  sparkpair_inputs:
    knobs: {context: 1048576}
    profiles: "{{ profiles }}"
    groups: "{{ groups }}"
    hosts: {}
    playing: "{{ ansible_play_hosts_all }}"
  delegate_to: localhost
"""

RETURN = r"""
problem:
  description: On failure, the first or the combined finding (code, found, needed, do).
  type: dict
  returned: failure
"""

from typing import Any

from ansible.module_utils.sparkpair import inputs
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    problems = inputs.check_inventory(params["groups"], params["hosts"])
    if not problems:
        pair = [*params["groups"]["head"], *params["groups"]["worker"]]
        problems = inputs.check_limit(pair, params["playing"], params["tags"])
    problems += inputs.check_knobs(params["knobs"], params["profiles"])
    combined = inputs.report(problems)
    if combined:
        raise combined
    return {}


def main() -> None:
    run_module(
        {
            "knobs": {"type": "dict", "required": True, "no_log": False},
            "profiles": {"type": "dict", "required": True},
            "groups": {"type": "dict", "required": True},
            "hosts": {"type": "dict", "required": True},
            "playing": {"type": "list", "elements": "str", "required": True},
            "tags": {"type": "list", "elements": "str", "default": ["all"]},
        },
        work,
    )


if __name__ == "__main__":
    main()
