"""The fixtures of the rehearsed pair."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[1:3])

from pair import client, head, key, node, url, worker, world

__all__ = ["client", "head", "key", "node", "url", "worker", "world"]
