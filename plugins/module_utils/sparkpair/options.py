"""Types of command-line options that several subcommands share; a wrong value is a usage error (exit 2)."""

from __future__ import annotations

import argparse
import re


def sha256_text(value: str) -> str:
    """64 hex digits, given in lower case."""
    if not re.fullmatch(r"[0-9a-f]{64}", value.lower()):
        raise argparse.ArgumentTypeError(f"{value!r} is no sha256: needed are 64 hex digits")
    return value.lower()
