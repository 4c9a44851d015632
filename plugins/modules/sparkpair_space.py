#!/usr/bin/python
"""Module sparkpair_space: what is to be written, added up for each real filesystem, before the first byte."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_space
short_description: Require room for all that is to come
description:
  - Adds the needs up by the filesystem that will really hold them and fails where one is too small.
options:
  needs:
    description: What will be written, and where.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: The folder; it need not exist yet.
        type: path
        required: true
      bytes:
        description: How much in all.
        type: int
        required: true
      what:
        description: What it is, for the message.
        type: str
        required: true
      less_present:
        description: Take off what the folder holds already.
        type: bool
        default: false
  margin:
    description: Bytes that must be left on each filesystem that is written to.
    type: int
    default: 0
attributes:
  check_mode:
    description: Changes nothing, and runs in check mode too.
    support: full
  diff_mode:
    description: Has nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Require room for the weights and the rank cache
  sparkpair_space:
    needs:
      - {path: /var/lib/sparkpair/weights/dsv41, bytes: 210677479847, what: the checkpoint}
      - {path: /var/lib/sparkpair/rank-cache/dsv41, bytes: 106192000000, what: the rank cache, less_present: true}
    margin: 10000000000
"""

RETURN = r"""
filesystems:
  description: One row a filesystem, with mount, needed and free (bytes).
  type: list
  elements: dict
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import disk
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    needs = [need_of(row) for row in params["needs"]]
    return {"filesystems": disk.require_all(needs, params["margin"])}


def need_of(row: dict[str, Any]) -> disk.Need:
    path = Path(row["path"])
    there = disk.tree_bytes(path) if row["less_present"] else 0
    return disk.Need(path, max(row["bytes"] - there, 0), row["what"])


def main() -> None:
    needs = {
        "path": {"type": "path", "required": True},
        "bytes": {"type": "int", "required": True},
        "what": {"type": "str", "required": True},
        "less_present": {"type": "bool", "default": False},
    }
    run_module(
        {
            "needs": {"type": "list", "elements": "dict", "required": True, "options": needs},
            "margin": {"type": "int", "default": 0},
        },
        work,
    )


if __name__ == "__main__":
    main()
