#!/usr/bin/python
"""Module sparkpair_api_key: the API's key file, made once and kept."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_api_key
short_description: Keep the API key in a file of mode 0600
description:
  - C(auto) makes a key once and keeps the one that is there; C(none) removes the file; any other text is the key.
options:
  path:
    description: The key file.
    type: path
    required: true
  key:
    description: C(auto), C(none) or the key.
    type: str
    required: true
attributes:
  check_mode:
    description: Says whether the file would change.
    support: full
  diff_mode:
    description: A diff would show the key.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Keep the API key
  sparkpair_api_key: {path: /etc/sparkpair/api-keys, key: auto}
"""

RETURN = r"""
digest:
  description: Eight hex digits that change with the key; a pending key gives C(pending), no key nothing.
  type: str
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import apikey
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    changed, digest = apikey.keep(Path(params["path"]), params["key"], dry=check_mode)
    return {"changed": changed, "digest": digest}


def main() -> None:
    run_module(
        {
            "path": {"type": "path", "required": True},
            "key": {"type": "str", "required": True, "no_log": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
