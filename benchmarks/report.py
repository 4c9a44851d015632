"""How a benchmark tells its rows, as text or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def tell(rows: Sequence[dict[str, Any]], *, as_json: bool, details: Sequence[str] = ()) -> int:
    """Print rows of {"name", "value", "budget", "ok"}, and those of `details` that a row has below it.

    Returns the exit code: 1 when one is over its budget.
    """
    good = all(row["ok"] for row in rows)
    if as_json:
        print(json.dumps({"ok": good, "rows": list(rows)}))
        return 0 if good else 1
    for row in rows:
        verdict = "ok" if row["ok"] else "MISSED"
        print(f"{row['name']}: {row['value']} (budget {row['budget'] or 'none'}) {verdict}")
        for key in details:
            if key in row:
                print(f"  {key}: {row[key]}")
    return 0 if good else 1
