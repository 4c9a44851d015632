#!/usr/bin/python
"""Module sparkpair_lock: a lock file on the controller, resolved on first use and kept from then on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_lock
short_description: Pin the files of repositories in locks
description:
  - Reads each lock of O(locks). Where one is missing, or O(refresh) is said, asks the Hub which commit the
    revision means and writes every file of it with size and hash.
  - That runs on the controller, by a Python that has C(huggingface_hub).
  - An entry with C(lock) is only written, which is how a node gets its copies.
options:
  locks:
    description: The locks, one entry each.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: The lock file.
        type: path
        required: true
      repo:
        description: The repository, C(owner/name).
        type: str
      revision:
        description: A branch, a tag, a full or an abbreviated commit.
        type: str
        default: main
      include:
        description: Patterns of the files to lock; none means all of them.
        type: list
        elements: str
        default: []
      lock:
        description: A lock as decoded JSON, to be written as it is.
        type: dict
  refresh:
    description: Ask the Hub also where a lock exists, and write what differs.
    type: bool
    default: false
  endpoint:
    description: The Hub's address.
    type: str
    default: https://huggingface.co
  token:
    description: The Hub token; none where the repositories are open to everybody.
    type: str
attributes:
  check_mode:
    description: Resolves and shows what would be written, writes nothing.
    support: full
  diff_mode:
    description: The text of each lock before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Pin the checkpoint
  sparkpair_lock:
    locks:
      - path: "{{ playbook_dir }}/files/locks/dsv41-checkpoint.json"
        repo: Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw
        revision: 64ba41b6
  delegate_to: localhost
  register: pinned

- name: Give the node its copy
  sparkpair_lock:
    locks:
      - path: /etc/sparkpair/locks/dsv41-checkpoint.json
        lock: "{{ pinned.locks[0].lock }}"
"""

RETURN = r"""
locks:
  description:
    - One row for each entry, in the same order. C(lock) is the lock that holds from now on, in check mode the one
      that would hold; C(difference) how the Hub differs from the lock as it was, one line a file, empty where the
      Hub was not asked; further C(path), C(repo), C(revision), C(files), C(bytes), C(message) and C(changed).
  type: list
  elements: dict
  returned: success
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import locks, pinning
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    pinned = [pin(entry, params, check_mode) for entry in params["locks"]]
    return {
        "changed": any(one.changed for one in pinned),
        "locks": [{**one.as_dict(), "lock": json.loads(locks.dump(one.lock))} for one in pinned],
        "diff": [
            {
                "before": one.before,
                "after": one.after,
                "before_header": str(one.path),
                "after_header": str(one.path),
            }
            for one in pinned
            if one.changed
        ],
    }


def pin(entry: dict[str, Any], params: dict[str, Any], check_mode: bool) -> pinning.Pinned:
    path = Path(entry["path"])
    if entry["lock"]:
        lock = locks.parse(entry["lock"], f"for {path}")
        lock = lock.subset(entry["include"]) if entry["include"] else lock
        return pinning.place(path, lock, dry_run=check_mode)
    return pinning.pin(
        path,
        entry["repo"],
        entry["revision"],
        include=entry["include"],
        refresh=params["refresh"],
        dry_run=check_mode,
        token=params["token"],
        endpoint=params["endpoint"],
    )


def main() -> None:
    entry = {
        "path": {"type": "path", "required": True},
        "repo": {"type": "str"},
        "revision": {"type": "str", "default": "main"},
        "include": {"type": "list", "elements": "str", "default": []},
        "lock": {"type": "dict"},
    }
    run_module(
        {
            "locks": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": entry,
                "required_one_of": [("repo", "lock")],
            },
            "refresh": {"type": "bool", "default": False},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
