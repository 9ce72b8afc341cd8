"""`python -m benchmarks layers | blocks | ceilings`."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.environment import describe
from benchmarks.options import among, count, counts
from benchmarks.result_file import make_result, save


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    layers = commands.add_parser(
        "layers",
        help="triangle attention layers with residual, forward and backward, bf16 autocast",
    )
    layers.add_argument("--lengths", default="384,768", type=counts, help="with commas")
    layers.add_argument(
        "--modes",
        default="eager,compiled",
        type=among("mode", ("eager", "compiled")),
        help="eager, compiled",
    )
    layers.add_argument("--seconds", type=float, default=5.0, help="for each length")
    layers.add_argument("--runs", type=count, default=30, help="at most so many of each")
    layers.set_defaults(command=_layers)

    blocks = commands.add_parser(
        "blocks",
        help="OpenFold 3's PairFormer block on every path of kernels, forward and backward, "
        "bf16 autocast; needs the package",
    )
    blocks.add_argument("--crops", default="256,384,768", type=counts, help="with commas")
    blocks.add_argument("--seconds", type=float, default=10.0, help="for each crop")
    blocks.add_argument("--runs", type=count, default=20, help="at most so many of each")
    blocks.set_defaults(command=_blocks)

    ceilings = commands.add_parser("ceilings", help="what bounds a kernel on this GPU")
    ceilings.set_defaults(command=_ceilings)
    return [layers, blocks, ceilings]


# The layers are imported where they are measured: other commands time versions without them.
def _layers(arguments: argparse.Namespace) -> int:
    from benchmarks.layers import measure_layers

    device = torch.device(arguments.device)
    environment = describe(device, commit=arguments.commit)
    rows = measure_layers(
        arguments.lengths,
        modes=arguments.modes.split(","),
        device=device,
        budget_s=arguments.seconds,
        max_runs=arguments.runs,
    )
    save(
        arguments,
        environment,
        make_result(environment, "layers", rows=[asdict(row) for row in rows]),
    )
    for row in rows:
        print(
            f"{row.length:6d} {row.layer:<9} {row.mode:<9} {row.median_ms:8.3f} ms "
            f"(p20 {row.p20_ms:.3f}, p80 {row.p80_ms:.3f})"
        )
        for name, calls, ms in row.kernels if row.mode == "compiled" else ():
            print(f"       {ms:8.3f} ms {calls:3d}x {name[:110]}")
    return 0


def _blocks(arguments: argparse.Namespace) -> int:
    from benchmarks.blocks import PATHS, BlockRow, measure_block, missing

    if importlib.util.find_spec("openfold3") is None:
        print("the block is OpenFold 3's, which is not installed: pip install openfold3")
        return 2
    device = torch.device(arguments.device)
    environment = describe(device, commit=arguments.commit)
    skipped = {path.name: why for path in PATHS if (why := missing(path, device))}
    paths = [path for path in PATHS if path.name not in skipped]
    rows: list[BlockRow] = []
    for crop in arguments.crops:
        budget = {"budget_s": arguments.seconds, "max_runs": arguments.runs}
        rows += measure_block(crop, paths, device=device, **budget)
        result = make_result(
            environment, "blocks", rows=[asdict(row) for row in rows], skipped=skipped
        )
        save(arguments, environment, result)  # after each, as in _run
    for row in rows:
        print(row)
    for name, why in skipped.items():
        print(f"       {name:<52} left out: {why}")
    return 0


def _ceilings(arguments: argparse.Namespace) -> int:
    from benchmarks.ceilings import measure_ceilings

    device = torch.device("cuda")
    environment = describe(device, commit=arguments.commit)
    ceilings = asdict(measure_ceilings(device))
    save(arguments, environment, make_result(environment, "ceilings", per_second=ceilings))
    for name, value in ceilings.items():
        print(f"{name:<14} {value / 1e12:10.3f} T/s")
    return 0
