"""Types of command-line options that several subcommands share; a wrong value is a usage error (exit 2)."""

from __future__ import annotations

import argparse
import ipaddress
import re
from pathlib import Path


def sha256_text(value: str) -> str:
    """64 hex digits, given in lower case."""
    if not re.fullmatch(r"[0-9a-f]{64}", value.lower()):
        raise argparse.ArgumentTypeError(f"{value!r} is no sha256: needed are 64 hex digits")
    return value.lower()


def tcp_port(value: str) -> int:
    """A port from 1 to 65535."""
    if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= 65535:
        raise argparse.ArgumentTypeError(f"{value!r} is no port: needed is 1 to 65535")
    return int(value)


def subnet(value: str) -> str:
    """A subnet such as 10.20.0.0/24; host bits may be set."""
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is no subnet: needed is one like 10.20.0.0/24") from None
    return value


def folder(value: str) -> Path:
    """A folder that is there."""
    if not Path(value).is_dir():
        raise argparse.ArgumentTypeError(f"{value!r} is no folder")
    return Path(value)


def seconds(value: str) -> float:
    """A finite number of seconds above 0."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} is no time: needed are seconds, more than 0")
    return number
