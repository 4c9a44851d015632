"""Where things live on a node. `group_vars/all/wiring.yml` holds the same names; a test compares."""

from __future__ import annotations

from pathlib import Path

VENV = Path("/opt/sparkpair/venv")
ETC = Path("/etc/sparkpair")
STATE = Path("/var/lib/sparkpair")
RUN = Path("/run/sparkpair")

SERVICE_USER = "sparkpair"

WEIGHTS = STATE / "weights"
ENGRAM = STATE / "engram"
KIT = STATE / "kit"
FIXTURES = STATE / "fixtures"
RANK_CACHE = STATE / "rank-cache"
RECEIPTS = STATE / "receipts"
LOGS = STATE / "logs"
JOBS = RUN / "jobs"
