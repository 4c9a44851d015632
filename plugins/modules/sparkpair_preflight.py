#!/usr/bin/python
"""Module sparkpair_preflight: is this node fit to be one half of the pair?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_preflight
short_description: Judge a node before anything on it is changed
description:
  - Reads architecture, GPU, memory, disk, Docker and ports, and fails with every shortfall at once.
options:
  host:
    description: The node's name in the inventory, for the messages.
    type: str
    required: true
  root:
    description: Stands in for / where a recorded or rehearsed tree has the memory facts.
    type: path
    default: /
  architecture:
    description: What uname -m must say.
    type: str
    required: true
  memory_bytes:
    description: MemTotal at least.
    type: int
    required: true
  disk_bytes:
    description: All that will lie under /var/lib/sparkpair.
    type: int
    required: true
  ports:
    description: TCP ports that must be free or our own.
    type: list
    elements: int
    default: []
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
- name: Judge the node
  sparkpair_preflight:
    host: "{{ inventory_hostname }}"
    architecture: aarch64
    memory_bytes: 126701535232
    disk_bytes: 600000000000
    ports: [8888, 29620]
"""

RETURN = r"""
facts:
  description: What the node is (machine, machine_id, memory_bytes, gpus, docker, python, ...).
  type: dict
  returned: success
pair:
  description: What an earlier run settled of the link (/etc/sparkpair/pair.json); empty before the first.
  type: dict
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import inputs, pairfile, preflight
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    facts = preflight.gather(Path(params["root"]), params["ports"])
    needs = preflight.Needs(
        params["architecture"], params["memory_bytes"], params["disk_bytes"], params["ports"]
    )
    combined = inputs.report(preflight.judge(facts, needs, params["host"]))
    if combined:
        raise combined
    pair = pairfile.load().as_dict() if pairfile.FILE.exists() else {}
    return {"facts": facts.as_dict(), "pair": pair}


def main() -> None:
    run_module(
        {
            "host": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/"},
            "architecture": {"type": "str", "required": True},
            "memory_bytes": {"type": "int", "required": True},
            "disk_bytes": {"type": "int", "required": True},
            "ports": {"type": "list", "elements": "int", "default": []},
        },
        work,
    )


if __name__ == "__main__":
    main()
