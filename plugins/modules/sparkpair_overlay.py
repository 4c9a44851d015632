#!/usr/bin/python
"""Module sparkpair_overlay: a checkpoint with changed tensors on top, as a folder of hard links."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_overlay
short_description: Lay an overlay over a checkpoint
description:
  - Makes a folder of hard links to the checkpoint, the overlay under a name that sorts last, and an index that
    points the overlaid tensors at it. The checkpoint itself is not touched, and no big file is read or written.
options:
  stock:
    description: The folder of the verified checkpoint.
    type: path
    required: true
  lock:
    description: Its lock, as decoded JSON.
    type: dict
    required: true
  overlay:
    description: The verified overlay file, on the same filesystem.
    type: path
    required: true
  overlay_lock:
    description: The lock that names it, as decoded JSON.
    type: dict
    required: true
  out:
    description: The folder of the result, on the same filesystem.
    type: path
    required: true
attributes:
  check_mode:
    description: Says whether the result would have to be made.
    support: full
  diff_mode:
    description: The overlay's hash before and after.
    support: full
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Lay the overlay over the checkpoint
  sparkpair_overlay:
    stock: /var/lib/sparkpair/weights/dsv41
    lock: "{{ weights_locks.checkpoint }}"
    overlay: /var/lib/sparkpair/weights/dsv41-overlay/mia_exl3_wo_b_l10_35.safetensors
    overlay_lock: "{{ weights_locks.overlay }}"
    out: /var/lib/sparkpair/weights/dsv41-ablit
"""

RETURN = r"""
tensors:
  description: Number of overlaid tensors.
  type: int
  returned: when the result was made
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.sparkpair import locks, overlay, variants
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    top, out = Path(params["overlay"]), Path(params["out"])
    lock = locks.parse(params["lock"], "of the checkpoint")
    overlay_lock = locks.parse(params["overlay_lock"], "of the overlay")
    if variants.stands(lock, overlay_lock, top.name, out):
        return {}
    wanted = overlay_lock.by_path.get(top.name)
    result: dict[str, Any] = {
        "changed": True,
        "diff": {
            "before": "",
            "after": f"{out}: {lock.repo} under {wanted.digest if wanted else top.name}\n",
        },
    }
    if not check_mode:
        laid = overlay.lay(Path(params["stock"]), lock, top, overlay_lock, out, quiet=True)
        result.update(changed=laid.changed, tensors=laid.tensors)
    return result


def main() -> None:
    run_module(
        {
            "stock": {"type": "path", "required": True},
            "lock": {"type": "dict", "required": True},
            "overlay": {"type": "path", "required": True},
            "overlay_lock": {"type": "dict", "required": True},
            "out": {"type": "path", "required": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
