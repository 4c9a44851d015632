"""The stand-in kit's repository: the real kit's layout, a MANIFEST that also lists what a node generates."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from rehearsal import kit

GENERATED = {
    "rope-compressed-cos.f32": "e1c30aeb3eb357ebf0590025251ad488c93af14814321cb36df5c47ca869f203",
    "rope-compressed-sin.f32": "77092e22e8840e0052e66927796033a88f8f994dd4a525c0854db441b98a46dd",
    "rope-plain-cos.f32": "ee15897f6f340a6e86e1a27acc1eede22a774dff311b0823717ab6f9bb2b029e",
    "rope-plain-sin.f32": "bbba9940e95990bb73de48ac3d5c5e1e4468fb6223f2b108b51133179d8f2d28",
    "vision/gate_bias_vl.safetensors": "0cbdebfbffed15722f096d6b8290933135d4393d0920059f7bcad4789f19387b",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    kit.build(tmp_path)
    return tmp_path


def listed(repository: Path) -> dict[str, str]:
    lines = (repository / "MANIFEST").read_text().splitlines()
    return {line[66:]: line[:64] for line in lines}


def test_manifest_is_sha256sums_format_sorted_and_without_comments(repository: Path) -> None:
    lines = (repository / "MANIFEST").read_text().splitlines()
    assert all(len(line) > 66 and line[64:66] == "  " and int(line[:64], 16) >= 0 for line in lines)
    assert [line[66:] for line in lines] == sorted(line[66:] for line in lines)
    assert 30 <= len(lines) <= 220


def test_every_file_is_listed_and_only_the_generated_ones_are_missing(repository: Path) -> None:
    there = {str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file()} - {"MANIFEST"}
    assert set(listed(repository)) - there == set(GENERATED)
    assert there <= set(listed(repository))
    for path in there:
        assert listed(repository)[path] == hashlib.sha256((repository / path).read_bytes()).hexdigest()


def test_the_generated_files_have_their_recorded_hashes(repository: Path) -> None:
    assert {p: listed(repository)[p] for p in GENERATED} == GENERATED


def test_rope_json_is_the_recorded_file(repository: Path) -> None:
    digest = "78d881ad91d9dc36a53cab598e250eaf1f105ef22fbd7b637e07fbf57c08edc3"
    assert hashlib.sha256((repository / "rope.json").read_bytes()).hexdigest() == digest
    assert listed(repository)["rope.json"] == digest


def test_the_bucket_primes_add_up_to_the_tables_of_the_model(repository: Path) -> None:
    primes = json.loads((repository / "engram.json").read_bytes())["primes"]
    assert [sum(p) for p in primes] == [384006168, 384016682]
    every = [p for layer in primes for p in layer]
    assert len(set(every)) == len(every) == 48
    assert min(every) >= 16_000_000


def test_the_kernel_set_names_its_cubins_and_holds_the_variant_of_256(repository: Path) -> None:
    """Engine facts 1.5: a kit without it stumbles over prompts of exactly 512 or 513 tokens."""
    variants = json.loads((repository / "aot/aot.json").read_bytes())["variants"]
    for variant in variants:
        assert (repository / "aot/cubins" / f"{variant['cubin']}.cubin").is_file()
    assert len(list((repository / "aot/cubins").iterdir())) == len(variants)
    assert {"N": 256, "KK": 256} in [v["constants"] for v in variants if v["kernel"] == "_topk_sel"]


def test_the_same_content_comes_out_each_time(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("kit")
    kit.build(other)
    assert (repository / "MANIFEST").read_bytes() == (other / "MANIFEST").read_bytes()


def test_its_own_tool_finds_a_changed_file(repository: Path) -> None:
    (repository / "MANIFEST").write_text(
        "".join(f"{d}  {p}\n" for p, d in listed(repository).items() if p not in GENERATED)
    )
    tool = ["sh", str(repository / "tools/verify_kit.sh")]
    good = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, f"kit OK: {len(listed(repository))} files match MANIFEST\n")
    (repository / "cubins/linear.cubin").write_bytes(b"x")
    bad = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "cubins/linear.cubin" in bad.stdout
