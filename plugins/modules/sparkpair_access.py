#!/usr/bin/python
"""Module sparkpair_access: one cheap request a repository that tells whether it may be read."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_access
short_description: Ask the Hub for access before anything large
description:
  - Sends one authenticated request for one real file of each lock, from the host that will fetch. Needs nothing
    but the node's own Python.
  - Tells apart no token, a token that is refused, terms not accepted, a wrong name, a wrong revision and a Hub
    out of reach.
options:
  locks:
    description: The locks, as decoded JSON.
    type: list
    elements: dict
    required: true
  endpoint:
    description: The Hub's address.
    type: str
    default: https://huggingface.co
  token:
    description: The Hub token; none where the repository is open to everybody.
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
- name: Ask the Hub for access to the checkpoint
  sparkpair_access:
    locks:
      - "{{ lookup('ansible.builtin.file', 'locks/dsv41-checkpoint.json') | from_json }}"
    token: "{{ hf_token }}"
"""

RETURN = r"""
answers:
  description: For each lock C(repo), C(path) of the file that was asked for, C(status), C(commit) and C(size).
  type: list
  elements: dict
  returned: success
"""

from typing import Any

from ansible.module_utils.sparkpair import hub, locks
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    asked = [locks.parse(lock, "of the play") for lock in params["locks"]]
    return {
        "answers": [
            hub.check_lock_access(lock, token=params["token"], endpoint=params["endpoint"]) for lock in asked
        ]
    }


def main() -> None:
    run_module(
        {
            "locks": {"type": "list", "elements": "dict", "required": True},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
