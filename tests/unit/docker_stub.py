"""A stand-in `docker` for tests: logs its words and answers from a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sparkpair.dockercli import Docker

PROGRAM = """#!{python}
import json, re, sys, time
from pathlib import Path
here = Path({here!r})
words = " ".join(sys.argv[1:])
with (here / "log").open("a") as log:
    log.write(words + "\\n")
for rule in json.loads((here / "script.json").read_text()):
    if re.search(rule["words"], words):
        if rule.get("reads"):
            Path(here / "read").write_bytes(sys.stdin.buffer.read())
        sys.stdout.write(rule.get("out", ""))
        sys.stdout.flush()
        time.sleep(rule.get("sleeps", 0))
        sys.stderr.write(rule.get("err", ""))
        sys.exit(rule.get("code", 0))
sys.stderr.write("no rule for: " + words)
sys.exit(99)
"""


class Stub:
    """The stand-in, its script and its log."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        program = folder / "docker"
        program.write_text(PROGRAM.format(python=sys.executable, here=str(folder)))
        program.chmod(0o755)
        self.docker = Docker(program=str(program))

    def play(self, *rules: dict[str, object]) -> None:
        """The first rule whose `words` are found answers; the listing of sizes is empty if none does."""
        sizes = {"words": "image ls --no-trunc"}
        (self.folder / "script.json").write_text(json.dumps([*rules, sizes]))

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []
