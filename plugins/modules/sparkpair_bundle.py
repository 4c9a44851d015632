#!/usr/bin/python
"""Module sparkpair_bundle: the wheels for a node, gathered on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_bundle
short_description: Gather the wheels that a node's environment is made from
description:
  - Run it on the controller. Says the key of the library; with O(target) it also makes the bundle.
options:
  project:
    description: The project's folder.
    type: path
    required: true
  cache:
    description: Where bundles are kept.
    type: path
    required: true
  machine:
    description: The node's architecture; without it only the key is computed.
    type: str
    default: ""
  python:
    description: The node's system Python, major.minor.
    type: str
    default: ""
  complete:
    description: With the library's own needs, or only pip and the library.
    type: bool
    default: true
attributes:
  check_mode:
    description: Only the key is computed.
    support: full
  diff_mode:
    description: A bundle is a cache on the controller.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Gather the wheels
  sparkpair_bundle: {project: "{{ playbook_dir }}", cache: .cache/wheels, machine: aarch64, python: "3.12"}
  delegate_to: localhost
"""

RETURN = r"""
key:
  description: 12 hex digits over the library's source and its lock.
  type: str
  returned: success
path:
  description: The bundle.
  type: path
  returned: with a target
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import library
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    project = Path(params["project"])
    result: dict[str, Any] = {"key": library.source_key(project)}
    if params["machine"] and not check_mode:
        target = library.Target(params["machine"], ".".join(params["python"].split(".")[:2]))
        bundle = library.build_bundle(
            project, target, complete=params["complete"], cache=Path(params["cache"])
        )
        result["path"] = str(bundle)
    return result


def main() -> None:
    run_module(
        {
            "project": {"type": "path", "required": True},
            "cache": {"type": "path", "required": True},
            "machine": {"type": "str", "default": ""},
            "python": {"type": "str", "default": ""},
            "complete": {"type": "bool", "default": True},
        },
        work,
        required_together=[("machine", "python")],
    )


if __name__ == "__main__":
    main()
