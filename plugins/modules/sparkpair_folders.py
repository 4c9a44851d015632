#!/usr/bin/python
"""Module sparkpair_folders: folders with an owner and a mode, many in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_folders
short_description: Make folders with owner and mode
description:
  - One task for a whole list, as each task on a node costs a third of a second.
options:
  folders:
    description: The folders; owner names the group too.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {type: path, required: true, description: The folder.}
      owner: {type: str, default: root, description: Its user and group.}
      mode: {type: str, default: "0755", description: Its mode in octal.}
attributes:
  check_mode:
    description: Says which folders would change.
    support: full
  diff_mode:
    description: Owner and mode of each, before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Make the folders
  sparkpair_folders:
    folders:
      - {path: /var/lib/sparkpair, owner: sparkpair}
"""

RETURN = r"""
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import folders
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    asked = [folders.Folder(Path(f["path"]), f["owner"], f["mode"]) for f in params["folders"]]
    before, after = folders.ensure(asked, dry=check_mode)
    shown = {"before": "\n".join([*before, ""]), "after": "\n".join([*after, ""])}
    return {"changed": bool(after), "diff": shown if after else {}}


def main() -> None:
    run_module(
        {
            "folders": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "owner": {"type": "str", "default": "root"},
                    "mode": {"type": "str", "default": "0755"},
                },
            }
        },
        work,
    )


if __name__ == "__main__":
    main()
