"""The git repositories that a real pair clones: the engine's source and the kit.

A commit is a function of the files alone (fixed author, date and message), so a pin holds in each clone
of the project and changes only when a file does.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from . import shell
from .plan import Plan

_WHO = {
    "GIT_AUTHOR_NAME": "rehearsal",
    "GIT_AUTHOR_EMAIL": "rehearsal@sparkpair.invalid",
    "GIT_AUTHOR_DATE": "2026-10-17T00:00:00Z",
    "GIT_COMMITTER_NAME": "rehearsal",
    "GIT_COMMITTER_EMAIL": "rehearsal@sparkpair.invalid",
    "GIT_COMMITTER_DATE": "2026-10-17T00:00:00Z",
    # The user's own settings (signing, line ends, hooks) would change the commit.
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".zig-cache", "zig-out", ".git")


def publish(source: Path, repository: Path, message: str) -> str:
    """Commit the files below `source` to the bare `repository`. Returns the commit's 40 hex digits."""
    if not (repository / "HEAD").exists():
        repository.parent.mkdir(parents=True, exist_ok=True)
        shell.run("git", "init", "-q", "--bare", "--initial-branch=main", repository, env=_WHO)
        # A pin is a commit, not a branch: it must be fetchable by its name.
        shell.run("git", "-C", repository, "config", "uploadpack.allowAnySHA1InWant", "true", env=_WHO)
    with tempfile.TemporaryDirectory(prefix=".publish-", dir=repository.parent) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(source, copy, ignore=_LEFT_OUT, symlinks=True)
        env = {
            **_WHO,
            "GIT_DIR": str(repository),
            "GIT_WORK_TREE": str(copy),
            "GIT_INDEX_FILE": f"{folder}/index",
        }
        shell.run("git", "-c", "core.autocrlf=false", "add", "--all", "--force", ".", env=env, cwd=copy)
        tree = shell.run("git", "write-tree", env=env, cwd=copy).strip()
        commit = shell.run("git", "commit-tree", tree, "-m", message, env=env, cwd=copy).strip()
        shell.run("git", "update-ref", "refs/heads/main", commit, env=env, cwd=copy)
    return commit


def publish_all(plan: Plan) -> dict[str, str]:
    """Both repositories, brought up to date. Returns their commits."""
    engine = publish(
        Path(__file__).parent / "engine", plan.state / "git" / "engine.git", "The stand-in engine"
    )
    with tempfile.TemporaryDirectory(prefix=".kit-", dir=plan.state) as folder:
        kit = Path(folder) / "kit"
        shell.run(sys.executable, "-m", "rehearsal.kit", kit, cwd=plan.root)
        commit = publish(kit, plan.state / "git" / "kit.git", "The stand-in kit")
    return {"engine": engine, "kit": commit}
