#!/usr/bin/python
"""Module sparkpair_image: the engine image's key, and what a node has of that image."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_image
short_description: Compute the engine image's key and look for the image
description:
  - Computes the key from the build's files and pins, without a network, and asks the node's Docker what it has.
  - With O(lay_out) it lays the build's files out on the node, and nothing else.
  - In check mode a node without a Docker engine is one that has nothing yet.
options:
  inputs:
    description: The files of files/engine, name to content.
    type: dict
    required: true
  base:
    description: The base image, by digest.
    type: str
    required: true
  repository:
    description: Where the engine's source is fetched from.
    type: str
    required: true
  commit:
    description: The engine's commit, full or abbreviated, as it is pinned.
    type: str
    required: true
  branch:
    description: Where an abbreviated commit is looked for.
    type: str
    default: ""
  tree:
    description: The git tree id that the commit must have; empty where it is not pinned.
    type: str
    default: ""
  zig:
    description: The compiler's version.
    type: str
    default: 0.17.0
  sm:
    description: GPU architectures, a comma list.
    type: str
    default: "121"
  lay_out:
    description: Make this folder hold the build's files, exactly.
    type: path
attributes:
  check_mode:
    description: Says what would be laid out; the probe only reads.
    support: full
  diff_mode:
    description: Shows the names of files that are laid out or removed.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Look for the engine's image
  sparkpair_image:
    inputs: "{{ image_inputs }}"
    base: "{{ image_base }}"
    repository: "{{ image_engine_repository }}"
    commit: "{{ image_engine_commit }}"
"""

RETURN = r"""
key:
  description: 12 hex digits over all that the image is made from.
  type: str
  returned: success
tag:
  description: The image's name.
  type: str
  returned: success
engine_key:
  description: The engine alone (12 hex digits of its commit at most), for what fits no other engine.
  type: str
  returned: success
present:
  description: Whether the node has the image, with the key as its label.
  type: bool
  returned: success
needed:
  description: The opposite; true also on a bare node in check mode.
  type: bool
  returned: success
identity:
  description: Hash over layers, platform and run-time configuration; empty where the image is not there.
  type: str
  returned: success
base_present:
  description: Whether the node has the base image.
  type: bool
  returned: success
superseded:
  description: Tags of ours that are not this one. They are removed by an explicit action only.
  type: list
  returned: success
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import atomic, image
from ansible.module_utils.sparkpair.dockercli import Docker
from ansible.module_utils.sparkpair.problem import Problem
from ansible.module_utils.sparkpair_module import run_module

PINS = ("base", "repository", "commit", "branch", "tree", "zig", "sm")
BARE = {"docker-missing", "docker-down"}


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    inputs = {name: str(text).encode() for name, text in params["inputs"].items()}
    if params["lay_out"]:
        return lay_out(Path(params["lay_out"]), inputs, check_mode)
    platform = image.platform_of(os.uname().machine)
    pins = image.Pins(**{name: params[name] for name in PINS}, platform=platform)
    key = image.content_key(inputs, pins)
    result = {"key": key, "tag": image.tag_for(key), "engine_key": pins.engine_key, "platform": platform}
    try:
        return {**result, **probe(Docker(), result["tag"], key, pins.base)}
    except Problem as problem:
        if not (check_mode and problem.code in BARE):
            raise
    nothing = {"present": False, "identity": "", "base_present": False, "superseded": [], "needed": True}
    return {**result, **nothing}


def probe(docker: Docker, tag: str, key: str, base: str) -> dict[str, Any]:
    found = docker.inspect(tag)
    present = found is not None and image.label(found, image.KEY_LABEL) == key
    return {
        "present": present,
        "needed": not present,
        "identity": image.identity(found) if found and present else "",
        "base_present": present or docker.inspect(base) is not None,
        "superseded": image.superseded(image.ours(docker), tag),
    }


def lay_out(folder: Path, inputs: dict[str, bytes], check_mode: bool) -> dict[str, Any]:
    there = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
    changed = there != inputs
    if changed and not check_mode:
        folder.mkdir(parents=True, exist_ok=True)
        for name in there.keys() - inputs.keys():
            (folder / name).unlink()
        for name, data in inputs.items():
            atomic.write_bytes(folder / name, data)
    names = ("\n".join(sorted(files)) + "\n" if files else "" for files in (there, inputs))
    before, after = names
    return {"changed": changed, "diff": {"before": before, "after": after, "before_header": str(folder)}}


def main() -> None:
    run_module(
        {
            "inputs": {"type": "dict", "required": True},
            "base": {"type": "str", "required": True},
            "repository": {"type": "str", "required": True},
            "commit": {"type": "str", "required": True},
            "branch": {"type": "str", "default": ""},
            "tree": {"type": "str", "default": ""},
            "zig": {"type": "str", "default": "0.17.0"},
            "sm": {"type": "str", "default": "121"},
            "lay_out": {"type": "path"},
        },
        work,
    )


if __name__ == "__main__":
    main()
