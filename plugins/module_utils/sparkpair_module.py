"""The frame that every module of this project shares: a library call in, one result or one Problem out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair.problem import Problem, problem_from


def run_module(
    argument_spec: dict[str, Any],
    work: Callable[[dict[str, Any], bool], dict[str, Any]],
    **module_options: Any,
) -> None:
    """Run `work(params, check_mode)` as an Ansible module and exit with its result.

    `work` returns the result (with `changed`, and `diff` where it changes something) or raises
    Problem, which becomes the failure's message in three parts and its `problem` field.
    """
    module = AnsibleModule(argument_spec=argument_spec, supports_check_mode=True, **module_options)
    try:
        result = work(module.params, module.check_mode)
    except Problem as problem:
        module.fail_json(msg=str(problem), problem=problem.as_dict())
    except OSError as error:
        problem = problem_from(error)
        module.fail_json(msg=str(problem), problem=problem.as_dict())
    else:
        module.exit_json(**{"changed": False, **result})
