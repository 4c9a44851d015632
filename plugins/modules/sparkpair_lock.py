#!/usr/bin/python
"""Module sparkpair_lock: a lock file on the controller, resolved on first use and kept from then on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_lock
short_description: Pin a repository's files in a lock
description:
  - Reads the lock at O(path). Where it is missing, or O(refresh) is said, asks the Hub which commit the
    revision means and writes every file of it with size and hash.
  - Runs on the controller, by a Python that has C(huggingface_hub).
options:
  path:
    description: The lock file.
    type: path
    required: true
  repo:
    description: The repository, C(owner/name).
    type: str
    required: true
  revision:
    description: A branch, a tag, a full or an abbreviated commit.
    type: str
    default: main
  include:
    description: Patterns of the files to lock; none means all of them.
    type: list
    elements: str
    default: []
  refresh:
    description: Ask the Hub also where the lock exists, and write what differs.
    type: bool
    default: false
  endpoint:
    description: The Hub's address.
    type: str
    default: https://huggingface.co
  token:
    description: The Hub token; none where the repository is open to everybody.
    type: str
attributes:
  check_mode:
    description: Resolves and shows what would be written, writes nothing.
    support: full
  diff_mode:
    description: The lock's text before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Pin the checkpoint
  sparkpair_lock:
    path: "{{ playbook_dir }}/files/locks/dsv41-checkpoint.json"
    repo: Mia-AiLab/DeepSeek-V4.1-Flash-EXL3-2.9bpw
    revision: 64ba41b6
  delegate_to: localhost
"""

RETURN = r"""
lock:
  description: The lock that holds from now on; in check mode the one that would hold.
  type: dict
  returned: success
difference:
  description: How the Hub differs from the lock as it was, one line a file; empty where the Hub was not asked.
  type: list
  elements: str
  returned: success
revision:
  description: The full commit.
  type: str
  returned: success
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import locks, pinning
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    pinned = pinning.pin(
        Path(params["path"]),
        params["repo"],
        params["revision"],
        include=params["include"],
        refresh=params["refresh"],
        dry_run=check_mode,
        token=params["token"],
        endpoint=params["endpoint"],
    )
    result = {**pinned.as_dict(), "lock": json.loads(locks.dump(pinned.lock))}
    if pinned.changed:
        result["diff"] = {"before": pinned.before, "after": pinned.after, "before_header": params["path"]}
    return result


def main() -> None:
    run_module(
        {
            "path": {"type": "path", "required": True},
            "repo": {"type": "str", "required": True},
            "revision": {"type": "str", "default": "main"},
            "include": {"type": "list", "elements": "str", "default": []},
            "refresh": {"type": "bool", "default": False},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
