#!/usr/bin/python
"""Module sparkpair_library: the library and its command in a node's virtual environment."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_library
short_description: Install the library on a node, offline
description:
  - Says whether the environment is as wanted; with O(bundle) or O(wheels) makes it so.
options:
  venv:
    description: The virtual environment.
    type: path
    required: true
  key:
    description: The key that it must have.
    type: str
    required: true
  complete:
    description: With the library's own needs too.
    type: bool
    default: true
  bundle:
    description: A tar of wheels on the node, unpacked to O(wheels) and removed.
    type: path
  wheels:
    description: The folder of wheels to install from.
    type: path
  probe:
    description: Only say whether something is needed.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says whether it would change.
    support: full
  diff_mode:
    description: The keys before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Ask for the library's state
  sparkpair_library: {venv: /opt/sparkpair/venv, key: 0123456789ab, probe: true}
"""

RETURN = r"""
needed:
  description: Whether the environment differs from what is wanted.
  type: bool
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import library
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    venv = Path(params["venv"])
    key, complete = library.installed_key(venv)
    # A complete environment serves where only the library is asked for.
    needed = key != params["key"] or (params["complete"] and not complete)
    result: dict[str, Any] = {"needed": needed}
    if params["probe"] or not needed:
        return result
    result["changed"] = True
    result["diff"] = {"before": f"library {key or 'absent'}\n", "after": f"library {params['key']}\n"}
    if not check_mode:
        wheels = Path(params["wheels"])
        if params["bundle"]:
            library.unpack(Path(params["bundle"]), wheels)
            Path(params["bundle"]).unlink()
        library.install(venv, wheels, complete=params["complete"])
    return result


def main() -> None:
    run_module(
        {
            "venv": {"type": "path", "required": True},
            "key": {"type": "str", "required": True, "no_log": False},
            "complete": {"type": "bool", "default": True},
            "bundle": {"type": "path"},
            "wheels": {"type": "path"},
            "probe": {"type": "bool", "default": False},
        },
        work,
        required_if=[("probe", False, ["wheels"])],
    )


if __name__ == "__main__":
    main()
