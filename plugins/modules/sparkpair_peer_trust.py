#!/usr/bin/python
"""Module sparkpair_peer_trust: the head's key, the worker's door, and the host keys between them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_peer_trust
short_description: Let the head run one command on the worker
description:
  - O(part=key) makes the head's key pair once.
  - O(part=door) lets that key run one command as the service user of the worker, from the given addresses only, and
    returns the worker's host keys. It refuses where sshd's settings would turn the user away.
  - O(part=known) writes those host keys on the head, so that nothing is trusted on first use.
options:
  part:
    description: Which of the three.
    type: str
    choices: [key, door, known]
    required: true
  user:
    description: The service user.
    type: str
    default: sparkpair
  public_key:
    description: The head's public key, for V(door); empty in a dry run before there is one.
    type: str
    default: ""
  sources:
    description: The head's link addresses, for V(door).
    type: list
    elements: str
    default: []
  addresses:
    description: The worker's link addresses, for V(door).
    type: list
    elements: str
    default: []
  command:
    description: The one command, for V(door).
    type: str
    default: /opt/sparkpair/venv/bin/sparkpair agent
  known_hosts:
    description: The lines of all workers, for V(known).
    type: str
    default: ""
attributes:
  check_mode:
    description: Says what would change.
    support: full
  diff_mode:
    description: Shows authorized_keys and known_hosts; never a private key.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Make the head's key
  sparkpair_peer_trust:
    part: key
"""

RETURN = r"""
public_key:
  description: The head's public key.
  type: str
  returned: when O(part=key)
known_hosts:
  description: known_hosts lines of this worker.
  type: str
  returned: when O(part=door)
ssh_port:
  description: The port of this worker's sshd.
  type: int
  returned: when O(part=door)
"""

from typing import Any

from ansible.module_utils.sparkpair import trust
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    user = params["user"]
    result: dict[str, Any]
    if params["part"] == "key":
        result = trust.ensure_key(user, check_mode=check_mode)
        return result
    if params["part"] == "known":
        result = trust.ensure_known(params["known_hosts"], check_mode=check_mode)
        return result
    settings = trust.sshd_settings(user, params["sources"][0])
    blocks = trust.sshd_blocks(settings, user, trust.groups_of(user) or [user])
    if blocks:
        raise blocks
    port = trust.sshd_port(settings)
    keys = trust.known_hosts(params["addresses"], trust.host_keys(settings), port)
    door = trust.ensure_door(
        user, params["public_key"], params["sources"], params["command"], check_mode=check_mode
    )
    return {**door, "known_hosts": keys, "ssh_port": port}


def main() -> None:
    run_module(
        {
            "part": {"type": "str", "choices": ["key", "door", "known"], "required": True},
            "user": {"type": "str", "default": "sparkpair"},
            "public_key": {"type": "str", "default": "", "no_log": False},
            "sources": {"type": "list", "elements": "str", "default": []},
            "addresses": {"type": "list", "elements": "str", "default": []},
            "command": {"type": "str", "default": "/opt/sparkpair/venv/bin/sparkpair agent"},
            "known_hosts": {"type": "str", "default": ""},
        },
        work,
        required_if=[("part", "door", ("sources", "addresses"))],
    )


if __name__ == "__main__":
    main()
