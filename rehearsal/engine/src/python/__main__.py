"""Where `python3 PROGRAM` starts: the program's name says which of the engine's commands it is."""

from __future__ import annotations

import importlib

importlib.import_module("dsv41.programs").run()
