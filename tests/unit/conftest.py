"""Lets the tests import Ansible modules and the library they ship, without any installation."""

from __future__ import annotations

import sys
from pathlib import Path

import ansible.module_utils

PROJECT = Path(__file__).resolve().parents[2]
ansible.module_utils.__path__.append(str(PROJECT / "plugins" / "module_utils"))
sys.path.append(str(PROJECT / "plugins" / "modules"))
sys.path.append(str(PROJECT))
