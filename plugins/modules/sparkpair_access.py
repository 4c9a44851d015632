#!/usr/bin/python
"""Module sparkpair_access: one cheap request that tells whether a lock's repository may be read."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_access
short_description: Ask the Hub for access before anything large
description:
  - Sends one authenticated request for one real file of the lock, from the host that will fetch. Needs nothing
    but the node's own Python.
  - Tells apart no token, a token that is refused, terms not accepted, a wrong name, a wrong revision and a Hub
    out of reach.
options:
  lock:
    description: The lock, as decoded JSON.
    type: dict
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
    lock: "{{ lookup('ansible.builtin.file', 'locks/dsv41-checkpoint.json') | from_json }}"
    token: "{{ hf_token }}"
"""

RETURN = r"""
path:
  description: The file that was asked for.
  type: str
  returned: success
status:
  description: The Hub's answer, 200 or a redirect to its storage.
  type: int
  returned: success
"""

from typing import Any

from ansible.module_utils.sparkpair import hub, locks
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    lock = locks.parse(params["lock"], "of the play")
    return hub.check_lock_access(lock, token=params["token"], endpoint=params["endpoint"])


def main() -> None:
    run_module(
        {
            "lock": {"type": "dict", "required": True},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
