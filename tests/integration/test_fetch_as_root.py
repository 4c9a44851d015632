"""`sudo sparkpair fetch` by hand into the service user's folder (field report 33)."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

from sparkpair import hub, locks, staging

from rehearsal.hub import Hub, make_repo

FILES = {"config.json": b"{}", "docs/notes.txt": b"n", "model.safetensors": b"\1" * 300_000}


def test_what_root_fetches_belongs_to_the_folder_s_owner(tmp_path: Path) -> None:
    """Else the next run of the play would stop at root's files."""
    make_repo(tmp_path / "hub", "acme/model", FILES)
    nobody = pwd.getpwnam("nobody")
    with Hub(tmp_path / "hub") as site, tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        owned = Path(folder, "weights")
        owned.mkdir()
        os.chown(owned, nobody.pw_uid, nobody.pw_gid)
        lock = hub.resolve("acme/model", endpoint=site.url)
        (tmp_path / "lock.json").write_text(locks.dump(lock))
        words = [str(Path(sys.executable).with_name("sparkpair")), "fetch", "--json", "--floor", "0"]
        words += ["--lock", str(tmp_path / "lock.json"), "--to", str(owned / "profile")]
        done = subprocess.run(
            words,
            env={**os.environ, "HF_ENDPOINT": site.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["fetched_files"] == len(FILES)
        assert {path.owner() for path in owned.rglob("*")} == {"nobody"}
        staging.require_fit(lock, owned / "profile", owner=nobody.pw_uid)
