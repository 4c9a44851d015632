"""nvidia-smi of a Spark: one GB10 whose total memory is not told, and the ranks that run on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rehearsal.tree import DRIVER

UUID = "GPU-0a1b2c3d-1111-5222-9333-0a1b2c3d4e5f"
RANK_MIB = 108544
GPU = {
    "index": "0",
    "name": "NVIDIA GB10",
    "gpu_name": "NVIDIA GB10",
    "uuid": UUID,
    "gpu_uuid": UUID,
    "count": "1",
    "driver_version": DRIVER,
    "compute_cap": "12.1",
    "pci.bus_id": "0000000F:01:00.0",
    "persistence_mode": "Enabled",
    "temperature.gpu": "38",
    "pstate": "P8",
    "memory.total": "[N/A]",
    "memory.used": "[N/A]",
    "memory.free": "[N/A]",
    "power.limit": "[N/A]",
    "power.draw": "4.12 W",
    "utilization.gpu": "0 %",
    "clocks.sm": "208 MHz",
    "clocks.max.sm": "3003 MHz",
}
_UNITS = {"power.draw": "[W]", "utilization.gpu": "[%]", "clocks.sm": "[MHz]", "clocks.max.sm": "[MHz]"}
_UNITS |= {f"memory.{what}": "[MiB]" for what in ("total", "used", "free")}

Apps = Sequence[tuple[int, str]]


def csv(header: Sequence[str], rows: Sequence[Sequence[str]], style: Sequence[str]) -> str:
    """Rows in nvidia-smi's csv: a header unless `noheader`, figures without units if `nounits`."""
    lines = [] if "noheader" in style else [", ".join(header)]
    for row in rows:
        lines.append(", ".join(_bare(value) if "nounits" in style else value for value in row))
    return "".join(f"{line}\n" for line in lines)


def _bare(value: str) -> str:
    number, _, unit = value.partition(" ")
    return number if unit in {"MiB", "W", "%", "MHz"} else value


def query_gpu(fields: Sequence[str], style: Sequence[str]) -> tuple[str, int]:
    """`--query-gpu`: the named fields, or the tool's complaint about one it does not know."""
    for name in fields:
        if name not in GPU:
            return f'Field "{name}" is not a valid field to query.\n\n', 2
    header = [f"{name} {_UNITS[name]}" if name in _UNITS else name for name in fields]
    return csv(header, [[GPU[name] for name in fields]], style), 0


def query_apps(fields: Sequence[str], style: Sequence[str], apps: Apps) -> tuple[str, int]:
    """`--query-compute-apps`: one row a rank. Use by process works on a GB10 though the total does not."""
    names = {"process_name", "name"}
    for name in fields:
        if name not in {"pid", "used_gpu_memory", "used_memory", "gpu_uuid", "gpu_name", *names}:
            return f'Field "{name}" is not a valid field to query.\n\n', 2
    header = ["used_gpu_memory [MiB]" if "memory" in name else name for name in fields]
    rows = []
    for pid, program in apps:
        known = {"pid": str(pid), "gpu_uuid": UUID, "gpu_name": GPU["name"]}
        rows.append(
            [
                program if name in names else (f"{RANK_MIB} MiB" if "memory" in name else known[name])
                for name in fields
            ]
        )
    return csv(header, rows, style), 0


def table(apps: Apps, now: str) -> str:
    """The screen without arguments, in the tool's own layout."""
    watts, level = ("10W", "P0") if apps else ("4W", "P8")
    bar, double = "-" * 89, "=" * 89
    lines = [
        now,
        f"+{bar}+",
        f"| NVIDIA-SMI {DRIVER:<22} Driver Version: {DRIVER:<14} CUDA Version: 13.0     |",
        f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+",
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|",
        "|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |",
        f"| N/A   38C    {level}           {watts:>5} /  N/A  | Not Supported          |      0%      Default |",
        "|                                         |                        |                  N/A |",
        f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+",
        "",
        f"+{bar}+",
        f"| {'Processes:':<88}|",
        f"| {' GPU   GI   CI              PID   Type   Process name                        GPU Memory':<88}|",
        f"| {'       ID   ID                                                               Usage':<88}|",
        f"|{double}|",
    ]
    for pid, program in apps:
        row = f"   0   N/A  N/A {pid:>15}      C   {program[:28]:<28} {f'{RANK_MIB}MiB':>18}"
        lines.append(f"| {row:<88}|")
    if not apps:
        lines.append(f"| {' No running processes found':<88}|")
    return "\n".join([*lines, f"+{bar}+", ""])


def details() -> str:
    """The part of `-q` that tells versions."""
    rows = {"Product Name": GPU["name"], "VBIOS Version": "9A.0B.25.00.00", "GSP Firmware Version": DRIVER}
    head = f"\n==============NVSMI LOG==============\n\n{'Driver Version':<55}: {DRIVER}\n{'CUDA Version':<55}: 13.0\n"
    return head + "GPU 0000000F:01:00.0\n" + "".join(f"    {k:<51}: {v}\n" for k, v in rows.items())


def answer(words: Sequence[str], apps: Apps, now: str) -> tuple[str, int]:
    """Output and exit code for a command line."""
    options: dict[str, str] = {}
    for at, word in enumerate(words):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
            options[name] = value if equals else following
    style = [part.strip() for part in options.get("--format", "csv").split(",")]
    for name, asked in options.items():
        fields = [field.strip() for field in asked.split(",")]
        if name == "--query-gpu":
            return query_gpu(fields, style)
        if name == "--query-compute-apps":
            return query_apps(fields, style, apps)
        if name in {"-L", "--list-gpus"}:
            return f"GPU 0: {GPU['name']} (UUID: {UUID})\n", 0
        if name in {"-q", "--query"}:
            return details(), 0
        if name not in {"--format", "-i", "--id"}:
            return (
                f"Invalid combination of input arguments ({name}). Please run 'nvidia-smi -h' for help.\n",
                1,
            )
    return table(apps, now), 0


def main() -> None:
    from rehearsal.node.spark_tree import running_engines

    text, code = answer(sys.argv[1:], running_engines(), time.strftime("%a %b %e %H:%M:%S %Y"))
    sys.stdout.write(text)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
