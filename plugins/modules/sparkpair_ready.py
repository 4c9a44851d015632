#!/usr/bin/python
"""Module sparkpair_ready: wait until the pair gives a real completion."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_ready
short_description: Wait until the served model really answers
description:
  - Runs on the head. Asks an easy sum until the right answer comes back; ends early when a rank dies,
    and when the pair is busy with others' requests.
options:
  host:
    description: The address that the API listens on.
    type: str
    required: true
  port:
    description: The API's port.
    type: int
    required: true
  key_file:
    description: File with the API key, on the head. Empty where none is asked for.
    type: str
    default: ""
  model:
    description: The served name.
    type: str
    required: true
  wait_seconds:
    description: The limit; 0 tries once.
    type: int
    default: 1800
attributes:
  check_mode:
    description: Reads only; in check mode one try is made and its failure is no error.
    support: full
  diff_mode:
    description: Nothing changes, so there is nothing to show.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Wait for a real completion
  sparkpair_ready: {host: 0.0.0.0, port: 8888, key_file: /etc/sparkpair/api-keys, model: DeepSeek-V4.1-Flash-1017}
"""

RETURN = r"""
answers:
  description: Whether the right answer came back.
  type: bool
  returned: success
busy:
  description: No answer came in time, but the pair's counters move, so it works for others.
  type: bool
  returned: success
seconds:
  description: How long it took until then.
  type: float
  returned: when it answers
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import api, pairstate, ready
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    key_file = Path(params["key_file"]) if params["key_file"] else None
    if check_mode and key_file and not key_file.exists():
        return {"answers": False, "busy": False}
    endpoint = api.endpoint(params["host"], params["port"], key_file)
    if check_mode or params["wait_seconds"] == 0:
        standing = api.standing(endpoint, params["model"], ready.TRY_S)
        return {"answers": standing.wrong is None, "busy": standing.busy}
    waited = ready.wait(endpoint, params["model"], params["wait_seconds"], pairstate.reports)
    return {"answers": not waited["busy"], **waited}


def main() -> None:
    run_module(
        {
            "host": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "key_file": {"type": "str", "default": "", "no_log": False},
            "model": {"type": "str", "required": True},
            "wait_seconds": {"type": "int", "default": 1800},
        },
        work,
    )


if __name__ == "__main__":
    main()
