"""Command line: `scripts/fixtures list`, `scripts/fixtures NAME OUT [options]`."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scripts import fixture_maker
from scripts.fixture_maker import make_k2_shaped, make_token_ids
from scripts.fixture_maker.headers import make_k25_headers
from scripts.fixture_maker.inventory import K2_SHAPE
from scripts.fixture_maker.shaped import VOCABULARY, experts_for

_NAMES = (
    *("tiny", "k25", "split", "reap", "cut", "short", "i64", "minus8", "zeros", "subnormal", "wide"),
    *("k2-thinking-headers", "k3-tiny", "k3-edges", "k3-shaped", "k3-headers"),
)
MAKERS: dict[str, Callable[[Path], Path]] = {
    **{name: getattr(fixture_maker, f"make_{name.replace('-', '_')}") for name in _NAMES},
    "k2.5-headers": make_k25_headers,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/fixtures", description="Make checkpoints for tests and benchmarks.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    commands.add_parser("list", help="print each name and what it makes")
    for name, maker in MAKERS.items():
        commands.add_parser(name, help=_summary(maker)).add_argument("out", type=Path, metavar="OUT")
    shaped = commands.add_parser("k2-shaped", help=_summary(make_k2_shaped))
    shaped.add_argument("out", type=Path, metavar="OUT")
    size = shaped.add_mutually_exclusive_group()
    size.add_argument("--experts", type=int, default=8, help="experts per layer (8; the real model has 384)")
    size.add_argument("--gigabytes", type=float, help="size of one MoE layer in GB (10^9), instead of --experts")
    shaped.add_argument("--layers", type=int, default=1, help="MoE layers (1)")
    shaped.add_argument("--shards", type=int, help="spread the MoE layers over this many shards (one per layer)")
    shaped.add_argument("--dense-layers", type=int, default=1, help="dense layers before the MoE layers, 1 GB each (1)")
    shaped.add_argument("--hidden", type=int, default=K2_SHAPE.hidden)
    shaped.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"tokens ({VOCABULARY}; K2 has 163,840)")
    shaped.add_argument("--intermediate", type=int, default=K2_SHAPE.moe_intermediate, help="width of an expert")
    ids = commands.add_parser("token-ids", help=_summary(make_token_ids))
    ids.add_argument("out", type=Path, metavar="OUT")
    ids.add_argument("--tokens", type=int, default=512)
    return parser


def _summary(maker: Callable[..., Path]) -> str:
    return (maker.__doc__ or "").strip().splitlines()[0]


def _make_shaped(options: argparse.Namespace) -> Path:
    shape = replace(
        K2_SHAPE,
        hidden=options.hidden,
        moe_intermediate=options.intermediate,
        moe_layers=options.layers,
        dense_layers=options.dense_layers,
        vocabulary=options.vocabulary,
    )
    experts = experts_for(options.gigabytes * 1e9, shape) if options.gigabytes else options.experts
    shape = replace(shape, experts=experts)
    return make_k2_shaped(options.out, shape=shape, shards=options.shards)


def main(arguments: list[str] | None = None) -> None:
    """Run one maker and print what it made."""
    options = _parser().parse_args(arguments)
    if options.name == "list":
        for name, maker in (MAKERS | {"k2-shaped": make_k2_shaped, "token-ids": make_token_ids}).items():
            print(f"{name:20} {_summary(maker)}")
        return
    if options.name == "token-ids":
        print(f"{make_token_ids(options.out, tokens=options.tokens)}: {options.tokens:,} ids")
        return
    out = _make_shaped(options) if options.name == "k2-shaped" else MAKERS[options.name](options.out)
    files = [path.stat() for path in out.rglob("*") if path.is_file()]
    apparent = sum(stat.st_size for stat in files)
    on_disk = sum(stat.st_blocks * 512 for stat in files)
    print(f"{out}: {len(files)} files, {apparent:,} bytes ({on_disk / 1e6:,.1f} MB on disk)")


if __name__ == "__main__":
    main()
