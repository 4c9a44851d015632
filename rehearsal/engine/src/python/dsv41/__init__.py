"""The stand-in for the TensorFold dsv41 engine: its two ranks and its input tools, without a GPU."""

from __future__ import annotations

VERSION = "1.0.2"
