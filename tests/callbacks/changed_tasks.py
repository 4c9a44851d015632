"""Callback changed_tasks: which tasks of a play changed something, by host, as one file a run.

Written to $CHANGED_TASKS_DIR/{check,real}-N.json. The dry run and the real run must give the same list.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: changed_tasks
type: aggregate
short_description: Keep which tasks changed something
description: For the rehearsal's proof that the dry run is honest.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "changed_tasks"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._changed: set[str] = set()
        self._check = False
        self._site = False

    def v2_playbook_on_start(self, playbook: Any) -> None:
        self._site = Path(playbook._file_name).name == "site.yml"

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._check = bool(play.get_variable_manager().extra_vars.get("ansible_check_mode")) or self._check

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._check = bool(task.check_mode) or self._check

    def v2_runner_on_ok(self, result: Any) -> None:
        if result._result.get("changed"):
            self._changed.add(f"{result._host.get_name()} {result._task.get_name()}")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        folder = os.environ.get("CHANGED_TASKS_DIR")
        if not folder or not self._site:
            return
        kind = "check" if self._check else "real"
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = len(list(Path(folder).glob(f"{kind}-*.json"))) + 1
        (Path(folder) / f"{kind}-{number}.json").write_text(json.dumps(sorted(self._changed), indent=1))
