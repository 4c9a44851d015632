#!/usr/bin/python
"""Module sparkpair_weights: what a folder holds of its lock, by stat and receipts, without reading a file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_weights
short_description: Say which files of a lock a folder lacks
description:
  - Compares a folder with a lock by sizes and receipts; no content is read, nothing is changed.
  - Refuses a folder with another user's files, links or shards that the lock does not name.
options:
  lock:
    description: The lock, as decoded JSON.
    type: dict
    required: true
  include:
    description: Patterns of the files that belong into this folder; none means all of the lock.
    type: list
    elements: str
    default: []
  path:
    description: The folder. One that does not exist yet lacks everything.
    type: path
    required: true
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
    lock: "{{ lookup('ansible.builtin.file', 'locks/dsv41-checkpoint.json') | from_json }}"
    path: /var/lib/sparkpair/weights/dsv41
    owner: sparkpair
"""

RETURN = r"""
needed:
  description: Whether files are missing or wait for their verification.
  type: bool
  returned: success
files:
  description: Number of files in the lock.
  type: int
  returned: success
bytes:
  description: Their bytes together.
  type: int
  returned: success
missing_files:
  description: Number of files that have to be brought.
  type: int
  returned: success
missing_bytes:
  description: Bytes that still have to come; what a partial holds is taken off.
  type: int
  returned: success
unread_files:
  description: Number of files of the right size without a receipt, to be hashed.
  type: int
  returned: success
message:
  description: The same in words.
  type: str
  returned: success
"""

import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import locks, staging
from ansible.module_utils.sparkpair.console import size
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    lock = locks.parse(params["lock"], "of the play")
    if params["include"]:
        lock = lock.subset(params["include"])
    directory = Path(params["path"])
    staging.require_fit(lock, directory, uid_of(params["owner"]))
    state = staging.survey(lock, directory).as_dict()
    message = f"{lock.repo}: {state['missing_files']} files, {size(state['missing_bytes'])} missing"
    if state["unread_files"]:
        message += f", {state['unread_files']} to be verified"
    return {**state, "needed": not state["complete"], "message": message}


def uid_of(user: str | None) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid if user else None
    except KeyError:
        return None


def main() -> None:
    run_module(
        {
            "lock": {"type": "dict", "required": True},
            "include": {"type": "list", "elements": "str", "default": []},
            "path": {"type": "path", "required": True},
            "owner": {"type": "str"},
        },
        work,
    )


if __name__ == "__main__":
    main()
