#!/usr/bin/python
"""Module sparkpair_job: start, ask or stop one piece of long work on a node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sparkpair_job
short_description: Run long work as a transient systemd unit and follow it
description:
  - Starts C(sparkpair-job-<name>.service) or attaches to it when it runs already with the same request.
  - Used as a task, the action plugin of the same name follows the job, prints its progress, and ends
    with the job's result. Cutting the play off leaves the job running; the next run attaches again.
options:
  name:
    description: The job's name.
    type: str
    required: true
  argv:
    description: The command by absolute path; its standard output is one JSON object.
    type: list
    elements: str
  user:
    description: Whom the command runs as.
    type: str
    default: root
  environment:
    description: Variables without secrets.
    type: dict
    default: {}
  credentials:
    description: Secrets by name, handed over as systemd credentials and removed when the job ends.
    type: dict
    default: {}
  follow_seconds:
    description: How long the play follows; the job goes on after it. 0 is without limit.
    type: int
    default: 0
  stall_seconds:
    description: Without any progress for so long the play gives up following. 0 is never.
    type: int
    default: 0
  wait_seconds:
    description: With O(state=queried), how long the node waits for the job's end before it answers.
    type: int
    default: 0
  state:
    description: What to do; C(started) and C(queried) are the action's own calls.
    type: str
    choices: [followed, started, queried, stopped]
    default: followed
attributes:
  check_mode:
    description: Nothing is started; the task reports that it would change. Guard it with a probe.
    support: full
  diff_mode:
    description: What a job changes is the command's business.
    support: none
author: [the sparkpair authors]
"""

EXAMPLES = r"""
- name: Fetch the checkpoint
  sparkpair_job:
    name: fetch-checkpoint
    argv: [/opt/sparkpair/venv/bin/sparkpair, fetch, --lock, /etc/sparkpair/locks/x.json, --to, /srv, --json]
    user: sparkpair
    credentials: {hf_token: "{{ hf_token }}"}
"""

RETURN = r"""
result:
  description: The JSON object that the command printed.
  type: dict
  returned: when the job ended
"""

from typing import Any

from ansible.module_utils.sparkpair import jobs
from ansible.module_utils.sparkpair_module import run_module


def work(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    if params["state"] == "queried":
        return jobs.query(params["name"], wait_s=params["wait_seconds"])
    if check_mode:
        return {"changed": True}
    if params["state"] == "stopped":
        return {"changed": jobs.stop(params["name"])}
    job = jobs.Job(
        params["name"],
        params["argv"],
        params["user"],
        {name: str(value) for name, value in params["environment"].items()},
        {name: value for name, value in params["credentials"].items() if value},
    )
    return {"changed": True, "unit": job.unit, "started": jobs.start(job)}


def main() -> None:
    run_module(
        {
            "name": {"type": "str", "required": True},
            "argv": {"type": "list", "elements": "str"},
            "user": {"type": "str", "default": "root"},
            "environment": {"type": "dict", "default": {}},
            "credentials": {"type": "dict", "default": {}, "no_log": True},
            "follow_seconds": {"type": "int", "default": 0},
            "stall_seconds": {"type": "int", "default": 0},
            "wait_seconds": {"type": "int", "default": 0},
            "state": {
                "type": "str",
                "default": "followed",
                "choices": ["followed", "started", "queried", "stopped"],
            },
        },
        work,
        required_if=[("state", "started", ["argv"]), ("state", "followed", ["argv"])],
    )


if __name__ == "__main__":
    main()
