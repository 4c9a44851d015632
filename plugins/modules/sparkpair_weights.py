#!/usr/bin/python
"""Module sparkpair_weights: what folders hold of their locks, by stat and receipts, without reading a file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_weights
short_description: Say which files of their locks folders lack
description:
  - Compares each folder with its lock by sizes and receipts; no content is read, nothing is changed.
  - Refuses a folder with another user's files, links or shards that the lock does not name.
options:
  folders:
    description: The folders, one entry each.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: The folder. One that does not exist yet lacks everything.
        type: path
        required: true
      lock:
        description: Its lock, as decoded JSON.
        type: dict
        required: true
      include:
        description: Patterns of the files that this node needs; none means all of the lock.
        type: list
        elements: str
        default: []
  owner:
    description: The user that all of it must belong to; not looked at while that user does not exist.
    type: str
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
- name: Ask which files of the checkpoint are missing
  sparkpair_weights:
    folders:
      - path: /var/lib/sparkpair/weights/dsv41
        lock: "{{ lookup('ansible.builtin.file', 'locks/dsv41-checkpoint.json') | from_json }}"
    owner: sparkpair
"""

RETURN = r"""
needed:
  description: Whether any folder lacks files or has some that wait for their verification.
  type: bool
  returned: success
folders:
  description:
    - One row for each entry, in the same order. C(needed), C(files) and C(bytes) of the lock, C(missing_files),
      C(missing_bytes) (what partials hold is taken off), C(missing) (paths), C(unread_files) (of the right size,
      without a receipt), C(need) for M(sparkpair_space) and C(message), the same in words.
  type: list
  elements: dict
  returned: success
"""

import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import locks, staging
from ansible.module_utils.sparkpair.console import size
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    owner = uid_of(params["owner"])
    rows = [look(entry, owner) for entry in params["folders"]]
    return {"folders": rows, "needed": any(row["needed"] for row in rows)}


def look(entry: dict[str, Any], owner: int | None) -> dict[str, Any]:
    lock, directory = locks.parse(entry["lock"], f"for {entry['path']}"), Path(entry["path"])
    staging.require_fit(lock, directory, owner)
    if entry["include"]:  # more of the lock may lie there all the same
        lock = lock.subset(entry["include"])
    state = staging.survey(lock, directory).as_dict()
    missing = state["missing_files"]
    message = f"{lock.repo}: {missing} file{'s' * (missing != 1)}, {size(state['missing_bytes'])} missing"
    if state["unread_files"]:
        message += f", {state['unread_files']} to be verified"
    need = {"path": str(directory), "bytes": state["missing_bytes"], "what": f"files of {lock.repo}"}
    return {**state, "needed": not state["complete"], "need": need, "message": message}


def uid_of(user: str | None) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid if user else None
    except KeyError:
        return None


def main() -> None:
    folder = {
        "path": {"type": "path", "required": True},
        "lock": {"type": "dict", "required": True},
        "include": {"type": "list", "elements": "str", "default": []},
    }
    run_module(
        {
            "folders": {"type": "list", "elements": "dict", "required": True, "options": folder},
            "owner": {"type": "str"},
        },
        work,
    )


if __name__ == "__main__":
    main()
