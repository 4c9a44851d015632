"""The rules of the house, as tests: what would drift if nobody looked."""

from __future__ import annotations

import importlib
import importlib.util
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (PROJECT / "roles").iterdir() if path.is_dir())
TASK_FILES = sorted((PROJECT / "roles").glob("*/tasks/*.yml"))
MODULES = sorted(path.stem for path in (PROJECT / "plugins/modules").glob("*.py"))
PLAYBOOKS = sorted([*PROJECT.glob("*.yml"), *(PROJECT / "playbooks").glob("*.yml")])


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def tasks_of(path: Path) -> list[dict[str, Any]]:
    """All tasks of a file, blocks opened."""
    found: list[dict[str, Any]] = []

    def walk(entries: Any) -> None:
        for entry in entries or []:
            found.append(entry)
            for part in ("block", "rescue", "always"):
                walk(entry.get(part))

    walk(load(path))
    return found


@pytest.mark.parametrize("role", ROLES)
def test_a_roles_argument_specs_equal_its_defaults(role: str) -> None:
    defaults = load(PROJECT / "roles" / role / "defaults/main.yml") or {}
    options = load(PROJECT / "roles" / role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {name: option.get("default") for name, option in options.items()} == defaults
    assert all(name.startswith(f"{role}_") for name in options)
    assert all(option.get("description") for option in options.values())


def test_task_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in TASK_FILES}
    assert max(lengths.values()) <= 120
    assert statistics.median(lengths.values()) <= 40


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda p: f"{p.parents[1].name}-{p.stem}")
def test_tasks_are_named_in_the_imperative_and_hide_no_fault(path: Path) -> None:
    for task in tasks_of(path):
        assert task.get("name"), f"{path}: a task without a name"
        assert "ignore_errors" not in task, f"{path}: {task['name']}"
        verb = task["name"].split()[0]
        assert not verb.endswith("ing") or verb == "Bring", task["name"]
        if "ansible.builtin.assert" in task:
            told = task["ansible.builtin.assert"]["fail_msg"]
            assert all(word in told for word in ("found:", "needed:", "do:")), f"{path}: {task['name']}"
        if "when" in task:
            # R8: since ansible-core 2.19 a condition must be a boolean.
            assert task["when"] not in ("true", "false"), task["name"]


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_documentation_equals_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    documented = yaml.safe_load(module.DOCUMENTATION)
    yaml.safe_load(module.EXAMPLES)
    yaml.safe_load(module.RETURN)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(module, "run_module", lambda spec, work, **more: seen.update(spec=spec))
    module.main()
    options = documented.get("options") or {}
    assert set(options) == set(seen["spec"])
    for option, spec in seen["spec"].items():
        assert options[option]["type"] == spec["type"], option
        assert bool(options[option].get("required")) == bool(spec.get("required")), option
        assert options[option].get("default") == spec.get("default"), option
        assert options[option].get("choices") == spec.get("choices"), option
    assert {"check_mode", "diff_mode"} <= set(documented["attributes"])


@pytest.mark.parametrize("path", [PROJECT / "site.yml", *PLAYBOOKS], ids=lambda p: p.stem)
def test_plays_gather_no_facts_they_do_not_read(path: Path) -> None:
    for play in load(path):
        assert play["gather_facts"] is False, play["name"]


def test_site_yml_fits_one_screen_and_runs_the_phases_in_order() -> None:
    text = (PROJECT / "site.yml").read_text()
    assert len(text.splitlines()) <= 80
    roles = [role for play in load(PROJECT / "site.yml") for role in play.get("roles", [])]
    assert roles == ["preflight", "host", "link", "image", "weights", "fixtures", "ranks", "verify"]


def test_device_names_are_host_facts_never_group_variables() -> None:
    """Field report 7."""
    for path in [*(PROJECT / "group_vars").rglob("*.yml"), PROJECT / "inventory/hosts.example.yml"]:
        assert not re.search(r"\b(enp\d|enP\d|roce[pP]\d|mlx5_)", path.read_text()), path


def test_no_task_upgrades_kernel_or_driver() -> None:
    """Field reports 20 and 21."""
    for path in TASK_FILES:
        for task in tasks_of(path):
            words = str(task).lower()
            assert "ansible.builtin.apt" not in words or "docker" not in words, path
            assert "upgrade" not in words, path


def test_paths_are_the_same_in_library_and_wiring() -> None:
    from sparkpair import pairfile, paths

    wiring = load(PROJECT / "group_vars/all/wiring.yml")
    assert wiring["opt_dir"] == str(paths.VENV.parent)
    assert wiring["etc_dir"] == str(paths.ETC)
    assert wiring["state_dir"] == str(paths.STATE)
    assert wiring["service_user"] == paths.SERVICE_USER
    assert wiring["master_port"] == pairfile.MASTER_PORT


def test_every_role_variable_that_wiring_sets_exists() -> None:
    known = {
        name
        for role in ROLES
        for name in load(PROJECT / "roles" / role / "meta/argument_specs.yml")["argument_specs"]["main"][
            "options"
        ]
    }
    set_there = {
        name
        for name in load(PROJECT / "group_vars/all/wiring.yml")
        if any(name.startswith(f"{role}_") for role in ROLES)
    }
    # Facts that a role sets anew, with what an earlier run settled as their first value.
    facts = {"image_tag", "link_master_address", "link_peer_address"}
    assert set_there - facts <= known


def test_the_two_locks_are_one_resolution() -> None:
    def pins(name: str) -> set[tuple[str, tuple[str, ...]]]:
        text = (PROJECT / "requirements" / name).read_text()
        entries = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
        return {(entry.split()[0], tuple(re.findall(r"sha256:\w+", entry))) for entry in entries}

    assert pins("node.lock") <= pins("controller.lock")


def test_every_package_is_pinned_with_a_hash() -> None:
    text = (PROJECT / "requirements/controller.lock").read_text()
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        assert "==" in entry and "--hash=sha256:" in entry, entry[:60]
    assert "://" not in text


def test_the_package_lists_every_folder_of_the_library() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    root = PROJECT / "plugins/module_utils"
    found = {str(p.parent.relative_to(root)).replace("/", ".") for p in root.rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_the_library_imports_only_the_standard_library_at_the_top() -> None:
    """Ansible ships it to a bare node: `--check` works before anything is installed."""
    import ast
    import sys

    for path in (PROJECT / "plugins/module_utils/sparkpair").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [(node.module or "").split(".")[0]]
            else:
                continue
            assert set(names) <= set(sys.stdlib_module_names), f"{path}: {names}"


def test_the_page_of_variables_is_written_anew() -> None:
    """`python docs/generate.py` after a change to a knob or a role's argument specs."""
    spec = importlib.util.spec_from_file_location("generate", PROJECT / "docs/generate.py")
    assert spec and spec.loader
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (PROJECT / "docs/variables.md").read_text() == page.render()


def test_every_message_that_the_readme_quotes_is_one() -> None:
    table = (PROJECT / "README.md").read_text().split("| It says | It means |")[1].split("More:")[0]
    quoted = [
        part
        for row in table.splitlines()[2:]
        for part in re.findall(r"`([^`]+)`", row.split("|")[1] if "|" in row else "")
    ]
    assert len(quoted) >= 8
    folders = ("plugins", "roles")
    code = "\n".join(
        path.read_text()
        for folder in folders
        for path in (PROJECT / folder).rglob("*")
        if path.suffix in {".py", ".yml"}
    )
    for words in quoted:
        assert words in code, words


@pytest.mark.parametrize("name", MODULES)
def test_no_module_returns_a_word_that_ansible_keeps_for_itself(name: str) -> None:
    """ansible-core 2.21 makes `skipped` a boolean whatever a module meant by it."""
    returned = yaml.safe_load(importlib.import_module(name).RETURN) or {}
    kept = {
        "skipped",
        "failed",
        "unreachable",
        "warnings",
        "deprecations",
        "exception",
        "invocation",
        "ansible_facts",
    }
    assert not kept & set(returned)
