#!/usr/bin/python
"""Module sparkpair_sealed: make ready for what another node sends: its locks, and nothing in the way."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_sealed
short_description: Take the locks of folders that come from another node, and clear what is in the way
description:
  - Writes each lock, by which the folder is checked at every run and start.
  - Removes what sending files does not put right, which is small files that were changed, links, and files that
    the lock does not name.
options:
  folders:
    description: The folders, one entry each.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: The folder.
        type: path
        required: true
      lock:
        description: Its lock, as decoded JSON; unknown in a dry run before anything was made.
        type: dict
      lock_file:
        description: Where the lock is kept on this node.
        type: path
        required: true
      alone:
        description: Whether nothing else may lie in the folder.
        type: bool
        default: true
attributes:
  check_mode:
    description: Says what it would write and remove.
    support: full
  diff_mode:
    description: Shows the locks' names and the files that go.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Make ready for the kit
  sparkpair_sealed:
    folders:
      - path: /var/lib/sparkpair/kit
        lock: "{{ hostvars['spark-a'].__fixtures_made.locks.kit }}"
        lock_file: /var/lib/sparkpair/receipts/kit.json
"""

RETURN = r"""
removed:
  description: The files that were in the way.
  type: list
  elements: str
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import atomic, fixtures, locks, sealed
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    before, after, removed = "", "", []
    for entry in params["folders"]:
        folder, lock_file = Path(entry["path"]), Path(entry["lock_file"])
        before += f"{lock_file} {fixtures.key_of(lock_file) or 'absent'}\n"
        if entry["lock"] is None:
            after += f"{lock_file} known once it is made\n"
            continue
        lock = locks.parse(entry["lock"], f"for {folder}")
        found = sealed.in_the_way(lock, folder, alone=entry["alone"])
        removed += [f"{folder}/{item}" for item in found]
        if not check_mode:
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(lock_file, locks.dump(lock))
            sealed.clear(folder, found)
        after += f"{lock_file} {fixtures.key_of_lock(lock)}\n"
    before += "".join(f"{name}\n" for name in removed)
    return {"changed": before != after, "removed": removed, "diff": {"before": before, "after": after}}


def main() -> None:
    folder = {
        "path": {"type": "path", "required": True},
        "lock": {"type": "dict"},
        "lock_file": {"type": "path", "required": True},
        "alone": {"type": "bool", "default": True},
    }
    run_module({"folders": {"type": "list", "elements": "dict", "required": True, "options": folder}}, work)


if __name__ == "__main__":
    main()
