"""tensorfold-native: rank 0 and the HTTP server."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from . import VERSION, link, pictures
from .errors import EngineError
from .faults import Faults
from .keys import Keys
from .link import Leader
from .loading import Loaded, environment, load
from .replies import Defaults, Engine, Pool
from .server import Api
from .settings import DEFAULT_POOL, MAX_POOL, Options, from_environment

_TOP_USAGE = "usage: tensorfold-native --version | capabilities --json | serve MODEL [flags]"
_DRAIN_S = 2.0
_ENVIRONMENT = re.findall(
    r"\w+",
    "TF_TP_WORLD TF_TP_MASTER TF_TP_PORT TF_DS_RANK_CACHE TF_DS_KIT TENSORFOLD_CUDA_KERNELS TF_DS_ENGRAM "
    "TF_DS_TOKEN_MAP TF_RDMA_DEVICES TF_RDMA_GID_INDEX TF_DS_RDMA_KERNELS TF_DS_GRAPHS TF_DS_HC_SIDE "
    "TF_DS_L2_PREFETCH TF_DS_ENGRAM_AIO TF_DS_REPLAY_FLOOR TF_DS_ARENA_GIB TF_DS_STREAMS TF_DS_ROUND_ROWS",
)


class _Parser(argparse.ArgumentParser):
    """Usage on stderr, then the words, exit 2: as the native parser ends."""

    def error(self, message: str) -> NoReturn:
        raise EngineError("Usage", f"{self.format_usage()}tensorfold serve: error: {message}", code=2)


def _parser() -> _Parser:
    parser = _Parser(prog="tensorfold serve", allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--name")
    parser.add_argument("--alias", action="append", default=[])
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--metrics-open", action="store_true")
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("--keep-warm", action="store_true")
    parser.add_argument("--context", type=int, default=DEFAULT_POOL)
    parser.add_argument("--parallel", default="auto")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--reasoning-effort", choices=("low", "medium", "high", "xhigh"), default="high")
    parser.add_argument("--thinking-budget", type=int)
    parser.add_argument("--loop-guard", action="store_true")
    parser.add_argument("--no-drafts", action="store_true")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--compact-at", type=float)
    parser.add_argument("--compact-keep", type=float)
    parser.add_argument("--compact-memory", type=float)
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--learn-dir", type=Path)
    parser.add_argument("--learn-gib", type=float)
    parser.add_argument("--prompt-cache-gib", type=float)
    parser.add_argument("--no-update-check", action="store_true")
    parser.add_argument("--backend", choices=("auto", "cuda"), default="auto")
    return parser


def _checked(parser: _Parser, args: argparse.Namespace) -> int:
    """The values' limits; returns the number of parallel streams."""
    limits: tuple[tuple[str, float, float], ...] = (
        ("port", 0, 65535),
        ("context", 1, MAX_POOL),
        ("max_tokens", 1, MAX_POOL),
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("top_k", 0, 1 << 20),
        ("min_p", 0, 1),
    )
    for name, low, high in limits:
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: {low:g} to {high:g}")
    if args.loop_guard:
        parser.error("--loop-guard: this engine has none")
    if args.parallel != "auto" and not str(args.parallel).isdigit():
        parser.error(f"--parallel {args.parallel}: a number or auto")
    streams = 1 if args.parallel == "auto" else int(args.parallel)
    if streams < 1:
        parser.error("--parallel must be at least 1")
    return streams


def capabilities() -> dict[str, object]:
    """What `capabilities --json` prints: the family, the flags and the variables that are read."""
    flags = [o for a in _parser()._actions for o in a.option_strings if o.startswith("--")]
    return {
        "version": VERSION,
        "families": [{"model_type": "deepseek_v41", "formats": ["exl3-mul1"], "backend": "cuda"}],
        "flags": sorted(flags),
        "environment": _ENVIRONMENT,
    }


def main(words: list[str]) -> int:
    """Serve until SIGTERM or SIGINT. Exit 0 then; 1 where a key file, an input or a port fails; 2 wrong usage."""
    if words == ["--version"]:
        print(f"tensorfold-native {VERSION}")
        return 0
    if words in (["--help"], ["-h"]):
        print(f"{_TOP_USAGE}\n{_parser().format_usage()}", end="")
        return 0
    if words == ["capabilities", "--json"]:
        print(json.dumps(capabilities()))
        return 0
    if not words or words[0] != "serve":
        print(_TOP_USAGE, file=sys.stderr)
        return 2
    if {"--help", "-h"} & set(words):
        print(_parser().format_usage(), end="")
        return 0
    parser = _parser()
    args = parser.parse_args(words[1:])
    return _serve(args, _checked(parser, args))


def _serve(args: argparse.Namespace, streams: int) -> int:
    env = environment()
    keys = Keys(
        args.api_key + ([env["TENSORFOLD_API_KEY"]] if env.get("TENSORFOLD_API_KEY") else []),
        args.api_key_file,
    )
    faults = Faults(0, env)
    if faults.on("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = from_environment(env, args.model, args.context, drafts=not args.no_drafts)
    if streams > options.streams:
        words = (
            f"this engine serves TF_DS_STREAMS streams at once ({options.streams}): --parallel at most that"
        )
        raise EngineError("NoFreeSlot", words)
    loaded = load(options, env, faults)
    leader = Leader.listen(options, link.hello(options, loaded.config, loaded.fabric), loaded.fabric)
    names = tuple(dict.fromkeys([args.name or args.model.name, *args.alias]))
    defaults = Defaults(
        name=names[0],
        model_ids=names,
        context=options.pool,
        max_tokens=args.max_tokens,
        thinking=args.thinking,
        round_rows=options.round_rows,
        sampling={"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k},
    )
    engine = Engine(leader, loaded.secret, defaults, Pool(options.pool, streams), faults)
    try:
        api = Api((args.host, args.port), engine, keys, metrics_open=args.metrics_open)
    except (OSError, OverflowError) as error:
        raise EngineError("BindFailed", f"{args.host}:{args.port}: {error}") from error
    _announce(args, options, loaded, api)
    return _until_told(api, leader, keys, faults)


def _announce(args: argparse.Namespace, options: Options, loaded: Loaded, api: Api) -> None:
    """The lines by which a log reader knows that rank 0 serves."""
    if loaded.config.vision:
        version = pictures.pillow_version()
        words = f"Pillow {version} decodes the formats other than PNG" if version else "no Pillow: PNG only"
        print(json.dumps({"vision": words}), file=sys.stderr)
    sampling = f"temperature {args.temperature:g}, top_p {args.top_p:g}, top_k {args.top_k}"
    drafts = "on" if options.drafts else "off"
    host, port = str(api.server_address[0]), int(api.server_address[1])
    print(
        f"[tensorfold] serving {api.engine.defaults.name} at http://{host}:{port}/v1 (sampling: {sampling}; "
        f"drafts: {drafts}; context: {options.pool}; loaded in {loaded.seconds:.1f}s)",
        file=sys.stderr,
    )
    thinking = f"on, effort {args.reasoning_effort}" if args.thinking else "off"
    print(f"[tensorfold] thinking {thinking}", file=sys.stderr, flush=True)


def _until_told(api: Api, leader: Leader, keys: Keys, faults: Faults) -> int:
    stop = threading.Event()

    def told(number: int, _frame: object) -> None:
        if number != signal.SIGTERM or not faults.on("ignore_term"):
            stop.set()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    signal.signal(signal.SIGHUP, lambda *_: keys.refresh())
    dropped = threading.Event()
    faults.watch(dropped)
    threading.Thread(target=_forget, args=(dropped, leader), daemon=True).start()
    threading.Thread(target=api.serve_forever, daemon=True).start()
    stop.wait()
    api.shutdown()
    api.socket.close()
    if api.wait_idle(_DRAIN_S):
        leader.done()  # with replies still open it leaves without a word, and the others find out by themselves
    api.engine.stopping.set()
    return 0


def _forget(dropped: threading.Event, leader: Leader) -> None:
    dropped.wait()
    leader.forget()
