"""Write docs/variables.md from the knobs and the roles' argument specs: `python docs/generate.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from sparkpair import inputs

PROJECT = Path(__file__).resolve().parents[1]
TARGET = PROJECT / "docs/variables.md"

HEAD = """\
# Variables

Set knobs with `-e name=value` for one run, or for good in `inventory/group_vars/pair/` (any file name ending in
`.yml`). Written by `docs/generate.py`; a test compares.

## Knobs

| Knob | Default | Allowed | What it does |
|---|---|---|---|
"""


def knob_rows() -> list[str]:
    """One table row a knob: default and remark from knobs.yml, the rule from the library."""
    text = (PROJECT / "group_vars/all/knobs.yml").read_text()
    defaults: dict[str, Any] = yaml.safe_load(text)
    profiles = yaml.safe_load((PROJECT / "group_vars/all/profiles.yml").read_text())["profiles"]
    rules = inputs.knob_rules(profiles)
    remarks = dict(_remark(line) for line in text.splitlines() if ":" in line and not line.startswith("#"))
    rows = []
    for name, default in defaults.items():
        allowed = rules[name][0].says() if name in rules else ""
        rows.append(f"| `{name}` | `{_shown(default)}` | {allowed} | {remarks.get(name, '')} |\n")
    return rows


def _remark(line: str) -> tuple[str, str]:
    name, _, rest = line.partition(":")
    return name, rest.partition(" # ")[2].strip().replace("|", "\\|")


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("|", "\\|")


def role_tables() -> list[str]:
    """One section a role: its options, as the role's argument specs say them."""
    parts = ["\n## Role variables\n\nSet by `group_vars/all/wiring.yml`; a site sets knobs instead.\n"]
    for path in sorted((PROJECT / "roles").glob("*/meta/argument_specs.yml")):
        spec = yaml.safe_load(path.read_text())["argument_specs"]["main"]
        parts.append(f"\n### {path.parents[1].name}: {spec['short_description']}\n\n")
        parts.append("| Variable | Type | Default | What it is |\n|---|---|---|---|\n")
        for name, option in spec["options"].items():
            description = option["description"]
            words = " ".join(description) if isinstance(description, list) else description
            default = _shown(option.get("default", "")).replace("\n", " ")
            shown = f"`{default}`" if default else ""
            if len(default) > 60:
                shown = "see the role's defaults"
            parts.append(f"| `{name}` | {option['type']} | {shown} | {words} |\n")
    return parts


def render() -> str:
    return HEAD + "".join(knob_rows()) + "".join(role_tables())


if __name__ == "__main__":
    TARGET.write_text(render())
    sys.exit(0)
