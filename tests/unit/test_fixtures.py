"""What a node still lacks, who gets what from the head, and the role's door to it."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sparkpair_fixtures
import sparkpair_sealed
import yaml
from ansible.module_utils.testing import patch_module_args
from cache_engine import Engine, quiet
from kit_world import World, flip, put_back_time
from small_checkpoint import checkpoint, checkpoint_files, small_tokenizer
from sparkpair import bias, cli, fixtures, kit, locks, made, rankcache, rope, sealed
from sparkpair.problem import Problem

ROLE = Path(__file__).parents[2] / "roles/fixtures"


class Pair:
    """A head with a small checkpoint and a kit repository, all below one folder; a worker beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.world = World(root)
        files = checkpoint_files()
        config = json.loads(files["config.json"])
        config["text_config"] |= {
            "vocab_size": 3,
            "engram_compressed_vocab_size": 2,
            "head_dim": 512,
            "qk_rope_head_dim": 16,  # tables of 2 MB
            "max_position_embeddings": 1000,
            "rope_theta": 10_000,
            "compress_rope_theta": 160_000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 65_536,
            },
        }
        files["config.json"] = json.dumps(config).encode()
        self.model = checkpoint(root / "weights/small", files)
        small_tokenizer(self.model, ["a", "A", "b"])
        self.head = fixtures.Places(
            root / "head/fixtures/small",
            root / "head/kit",
            root / "head/rank-cache/v",
            root / "head/receipts",
        )
        self.worker = fixtures.Places(
            root / "worker/fixtures/small",
            root / "worker/kit",
            root / "worker/rank-cache/v",
            root / "worker/receipts",
        )
        self.kit_commit = "0" * 40

    def recipe(self, **changed: Any) -> fixtures.Recipe:
        values: dict[str, Any] = {
            "model": self.model,
            "rope_expect": {},
            "token_map_sha256": "",
            "bias_repo": "",
            "bias_text": "the small one",
            "bias_sha256": "",
            "kit_repository": str(self.world.repository),
            "kit_commit": self.kit_commit,
            "kit_branch": "main",
            "kit_subfolder": "kit",
        }
        return fixtures.Recipe(**{**values, **changed})

    def cache(self, places: fixtures.Places, rank: int) -> rankcache.Cache:
        return rankcache.Cache(places.cache, rank, 2, {"checkpoint": "c"}, places.cache_lock(rank))

    def state(self, **changed: Any) -> dict[str, Any]:
        return fixtures.state(self.head, self.cache(self.head, 0), self.recipe(**changed))

    def worker_state(self) -> dict[str, Any]:
        return fixtures.state(self.worker, self.cache(self.worker, 1), None)

    def make_tables(self) -> None:
        config, out = str(self.model / "config.json"), self.head.fixtures
        run(["rope", "--config", config, "--out", str(out)])
        tokenizer = str(self.model / "tokenizer.json")
        words = [
            "token-map",
            "--tokenizer",
            tokenizer,
            "--config",
            config,
            "--out",
            str(out / fixtures.MAP_FILE),
        ]
        run([*words, "--lock", str(self.head.fixtures_lock)])
        words = ["bias", "--model", str(self.model), "--config", config, "--out", str(out / fixtures.BIAS)]
        run([*words, "--source", "the small one"])

    def make_kit(self) -> None:
        """A kit whose MANIFEST records these very tables."""
        out = self.head.fixtures
        files = {"aot/aot.json": b"{}", **{name: (out / name).read_bytes() for name in rope.TABLES}}
        files[kit.BIAS] = b"of another checkpoint"
        manifest = "".join(f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files))
        self.kit_commit = self.world.publish({"aot/aot.json": b"{}"}, manifest.encode())
        kit.lay_out(fixtures.kit_order(self.recipe(), self.head))

    def send(self) -> None:
        """What replicate does: the files of the locks, verified, with receipts."""
        for lock_file, here, there, there_lock in (
            (self.head.kit_lock, self.head.kit, self.worker.kit, self.worker.kit_lock),
            (self.head.fixtures_lock, self.head.fixtures, self.worker.fixtures, self.worker.fixtures_lock),
        ):
            lock = locks.load(lock_file)
            for entry in lock.files:
                (there / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (there / entry.path).write_bytes((here / entry.path).read_bytes())
            made.record(there, "sent", "", {entry.path: entry.digest for entry in lock.files})
            made.note_path(there, "sent").unlink()
            there_lock.parent.mkdir(parents=True, exist_ok=True)
            there_lock.write_bytes(lock_file.read_bytes())


def run(words: list[str]) -> None:
    assert cli.main(words) == 0


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def lacking(state: dict[str, Any]) -> set[str]:
    return {name for name in ("rope", "token_map", "bias", "kit", "fixtures", "cache") if state[name]}


def test_a_bare_head_lacks_everything_and_is_told_so_without_a_checkpoint(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    state = pair.state(model=tmp_path / "absent")
    assert lacking(state) == {"rope", "token_map", "bias", "kit", "fixtures", "cache"}
    assert state["needed"]
    assert state["renewed"]
    assert state["keys"] == {"kit": "", "fixtures": ""}


def test_what_was_made_is_not_lacking_and_the_rest_is(pair: Pair) -> None:
    pair.make_tables()
    assert lacking(pair.state()) == {"kit", "cache"}
    pair.make_kit()
    assert lacking(pair.state()) == {"cache"}
    assert not pair.state()["renewed"]
    rankcache.write(pair.cache(pair.head, 0), pair.model, Engine(), progress=quiet)
    state = pair.state()
    assert not state["needed"]
    assert state["message"] == []


def test_a_second_look_reads_no_file_over_a_mebibyte(pair: Pair) -> None:
    """A second run of the phase on a converged pair reads no file over 1 MiB again."""
    pair.make_tables()
    pair.make_kit()
    opened: list[Path] = []
    watching = True

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | Path):
            opened.append(Path(arguments[0]))

    sys.addaudithook(look)
    assert lacking(pair.state()) == {"cache"}
    watching = False
    ours = [path for path in opened if path.is_relative_to(pair.root) and path.is_file()]
    assert pair.head.kit / "aot/aot.json" in ours
    assert [path for path in ours if path.stat().st_size >= 2**20] == []
    assert (pair.head.kit / rope.TABLES[0]).stat().st_size > 2**20


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (fixtures.MAP_FILE, {"token_map", "fixtures", "cache"}),
        (fixtures.BIAS, {"bias", "kit", "cache"}),
        (rope.SUMMARY, {"rope", "kit", "cache"}),
    ],
)
def test_a_small_file_that_was_changed_behind_its_time_is_made_again(
    pair: Pair, name: str, expected: set[str]
) -> None:
    pair.make_tables()
    pair.make_kit()
    put_back_time(pair.head.fixtures / name, flip)
    assert lacking(pair.state()) == expected
    pair.make_tables()
    kit.lay_out(fixtures.kit_order(pair.recipe(), pair.head))
    assert lacking(pair.state()) == {"cache"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"bias_text": "told otherwise"}, {"bias", "cache"}),
        ({"bias_repo": "example/original@main"}, {"bias", "cache"}),
        ({"bias_sha256": "0" * 64}, {"bias", "cache"}),
        ({"token_map_sha256": "0" * 64}, {"token_map", "cache"}),
        ({"kit_commit": "f" * 40}, {"kit", "cache"}),
    ],
)
def test_a_changed_recipe_asks_for_what_it_changes(
    pair: Pair, changed: dict[str, Any], expected: set[str]
) -> None:
    pair.make_tables()
    pair.make_kit()
    assert lacking(pair.state(**changed)) == expected


def test_a_checkpoint_of_another_family_is_refused_by_the_look(pair: Pair) -> None:
    (pair.model / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Problem, match="model_type is 'llama'"):
        pair.state()


def test_a_worker_holds_what_it_was_sent_and_a_changed_file_is_noticed(pair: Pair) -> None:
    pair.make_tables()
    pair.make_kit()
    assert lacking(pair.worker_state()) == {"kit", "fixtures", "cache"}
    pair.send()
    state = pair.worker_state()
    assert lacking(state) == {"cache"}
    assert state["keys"] == pair.state()["keys"]
    (pair.worker.kit / "aot/aot.json").write_bytes(b"[]")
    assert lacking(pair.worker_state()) == {"kit", "cache"}


def state_of(**changed: Any) -> dict[str, Any]:
    same = {"kit": "k", "fixtures": "f"}
    return {"renewed": False, "kit": False, "fixtures": False, "cache": False, "keys": same, **changed}


@pytest.mark.parametrize(
    ("head", "peer", "share"),
    [
        ({}, {}, False),
        ({"renewed": True}, {}, True),
        ({"kit": True}, {}, False),  # repaired on the head: the peer has its own
        ({}, {"kit": True}, True),
        ({}, {"fixtures": True}, True),
        ({}, {"keys": {"kit": "old", "fixtures": "f"}}, True),
        ({}, {"cache": True}, False),
    ],
)
def test_a_peer_gets_kit_and_map_when_its_own_are_not_the_heads(
    head: dict[str, Any], peer: dict[str, Any], share: bool
) -> None:
    plan = fixtures.plan(state_of(**head), {"spark-b": state_of(**peer)}, sliced=True)
    assert plan["share"] == (["spark-b"] if share else [])


def test_caches_are_sent_to_those_without_one_unless_each_writes_its_own() -> None:
    peers = {"b": state_of(cache=True), "c": state_of(), "d": state_of(cache=True)}
    assert fixtures.plan(state_of(), peers, sliced=True)["cache"] == ["b", "d"]
    assert fixtures.plan(state_of(), peers, sliced=False)["cache"] == []


# The modules


def called(module: Any, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return dict(json.loads(capsys.readouterr().out))


def folders(places: fixtures.Places) -> dict[str, str]:
    return {
        "fixtures": str(places.fixtures),
        "kit": str(places.kit),
        "receipts": str(places.receipts),
        "cache": str(places.cache),
    }


def test_the_module_tells_a_bare_worker_and_hands_out_the_heads_locks(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"rank": 1, "world": 2, "inputs": {"checkpoint": "c"}, "_ansible_check_mode": True}
    result = called(sparkpair_fixtures, {**folders(pair.worker), **more}, capsys)
    assert result["changed"] is False
    assert lacking(result) == {"kit", "fixtures", "cache"}
    assert result["locks"] == {"kit": None, "fixtures": None}
    pair.make_tables()
    pair.make_kit()
    recipe = {**vars(pair.recipe()), "model": str(pair.model)}
    asked = {**folders(pair.head), "rank": 0, "world": 2, "inputs": {"checkpoint": "c"}, "recipe": recipe}
    result = called(sparkpair_fixtures, asked, capsys)
    assert lacking(result) == {"cache"}
    assert locks.parse(result["locks"]["kit"], "told") == locks.load(pair.head.kit_lock)


def test_two_caches_of_a_rank_fail_the_look_with_both_names(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.worker.cache.mkdir(parents=True)
    for digit in "01":
        (pair.worker.cache / f"rank1of2-{digit * 20}.bin").touch()
    asked = {**folders(pair.worker), "rank": 1, "world": 2, "inputs": {}}
    result = called(sparkpair_fixtures, asked, capsys)
    assert result["failed"]
    assert "rank1of2-" + "0" * 20 in result["msg"]
    assert "rank1of2-" + "1" * 20 in result["msg"]
    assert result["problem"]["code"] == "several-rank-caches"


def sealed_arguments(pair: Pair, *, lock: Any = None, check: bool = False) -> dict[str, Any]:
    entry = {"path": str(pair.worker.kit), "lock_file": str(pair.worker.kit_lock)}
    if lock is not None:
        entry["lock"] = lock
    return {"folders": [entry], "_ansible_check_mode": check}


def test_a_dry_run_before_anything_is_made_predicts_the_locks(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    result = called(sparkpair_sealed, sealed_arguments(pair, check=True), capsys)
    assert result["changed"]
    assert not pair.worker.kit_lock.exists()


def test_what_is_in_the_way_goes_and_what_is_right_stays(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.make_tables()
    pair.make_kit()
    pair.send()
    lock = sealed.as_dict(locks.load(pair.head.kit_lock))
    assert called(sparkpair_sealed, sealed_arguments(pair, lock=lock), capsys)["changed"] is False
    (pair.worker.kit / "aot/aot.json").write_bytes(b"[]")
    (pair.worker.kit / "aot/old.cubin").touch()
    (pair.worker.kit / kit.BIAS).unlink()
    (pair.worker.kit / kit.BIAS).symlink_to("/etc/hostname")
    predicted = called(sparkpair_sealed, sealed_arguments(pair, lock=lock, check=True), capsys)
    assert (pair.worker.kit / "aot/old.cubin").exists()
    result = called(sparkpair_sealed, sealed_arguments(pair, lock=lock), capsys)
    assert result["removed"] == predicted["removed"]
    assert {name.rsplit("/", 1)[1].split(" ")[0] for name in result["removed"]} == {
        "aot.json",
        "old.cubin",
        "gate_bias_vl.safetensors",
    }
    left = sealed.findings(locks.load(pair.worker.kit_lock), pair.worker.kit)
    assert {str(item) for item in left} == {"aot/aot.json (missing)", f"{kit.BIAS} (missing)"}


# The role


def test_defaults_and_argument_specs_of_the_role_are_the_same() -> None:
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    specs = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())
    options = specs["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items()} == defaults


def test_the_role_and_the_library_name_the_same_files() -> None:
    variables = yaml.safe_load((ROLE / "vars/main.yml").read_text())
    places = fixtures.Places(Path("/f/p"), Path("/k"), Path("/c/v"), Path("/r"))
    told = {
        name: text.replace("{{ fixtures_receipts_dir }}", "/r")
        .replace("{{ fixtures_dir | basename }}", "p")
        .replace("{{ fixtures_cache_dir | basename }}", "v")
        for name, text in variables["__fixtures_locks"].items()
    }
    assert told["kit"] == str(places.kit_lock)
    assert told["fixtures"] == str(places.fixtures_lock)
    assert f"{told['cache']}1.json" == str(places.cache_lock(1))
    tasks = (ROLE / "tasks/tables.yml").read_text() + (ROLE / "tasks/bias.yml").read_text()
    assert f"fixtures_dir }}}}/{fixtures.MAP_FILE}" in tasks
    assert f"fixtures_dir }}}}/{fixtures.BIAS}" in tasks
    assert kit.GENERATED[kit.BIAS] == fixtures.BIAS
    assert variables["__fixtures_outgoing"].endswith(f"/{rankcache.OUTGOING}")
    assert bias.SUFFIX.startswith(".ffn")
