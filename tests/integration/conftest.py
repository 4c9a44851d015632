"""Lets the integration tests import the rehearsal, as `python -m rehearsal` does from the project."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
