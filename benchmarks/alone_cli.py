"""`python -m benchmarks replay | beside | load`: this op alone, without peers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import masks
from benchmarks.environment import describe
from benchmarks.options import DTYPES, among, count, known
from benchmarks.result_file import make_result, save
from benchmarks.shapes import Workload, select


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    replay = commands.add_parser(
        "replay", help="device time of this op alone, by CUDA graphs: masks and versions compared"
    )
    replay.add_argument(
        "--append",
        action="store_true",
        help="add to the file of --json: another version, or another process of the same",
    )
    replay.set_defaults(command=_replay)

    beside = commands.add_parser(
        "beside", help="versions of this package in turn: folders or revisions, with nvcc's flags"
    )
    beside.add_argument("versions", nargs="+", metavar="[NAME=]WHAT[@FLAGS]")
    beside.add_argument("--rounds", type=count, default=9)
    beside.set_defaults(command=_beside)

    load = commands.add_parser(
        "load", help="time, energy and clock of this op under load: calls without pauses"
    )
    load.add_argument("--seconds", type=float, default=2.0, help="for each call")
    load.set_defaults(command=_load)

    for command, shapes, mask in (
        (replay, "tri384,tri768", "none"),
        (beside, "tri384", "the shape's own"),
        (load, "tri768", "none"),
    ):
        command.add_argument(
            "--shapes", default=shapes, type=known(select), help="ids or groups, with commas"
        )
        command.add_argument(
            "--masks",
            type=known(masks.named),
            help=f"each shape under each of these, with commas, or all (default: {mask})",
        )
        command.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
        command.add_argument(
            "--direction",
            default="fwd,bwd",
            type=among("direction", ("fwd", "bwd")),
            help="fwd, bwd, with commas",
        )
    return [replay, beside, load]


def _replay(arguments: argparse.Namespace) -> int:
    from benchmarks.replay import METHOD, ReplayRow, RowKey, measure_replays, read_rows

    if arguments.append and (arguments.json is None or arguments.json.suffix != ".json"):
        print("--append: expected --json FILE.json, the file to add to")
        return 2
    device = torch.device("cuda")
    environment = describe(device, commit=arguments.commit)
    workloads = under_masks(arguments, otherwise="none")
    settings = _settings(arguments, METHOD)
    rows: dict[RowKey, ReplayRow] = {}
    if arguments.append and arguments.json.is_file():
        before = json.loads(arguments.json.read_text())
        there = before["environment"]["gpu"], before["environment"]["torch"], before["settings"]
        if there != (environment.gpu, environment.torch, settings):
            print(f"{arguments.json} was measured otherwise: {there}; name another file")
            return 2
        rows = read_rows(before)
    for row in measure_replays(
        workloads,
        directions=arguments.direction.split(","),
        dtype=DTYPES[arguments.dtype],
        family=environment.cuda_family or "",
        commit=environment.commit,
    ):
        print(
            f"{row.family:<6}{row.commit or '':<14}{'x'.join(map(str, row.shape)):<18}"
            f"{row.direction:<5}{row.mask:<14}{row.median_us[0]:>10.1f} us",
            flush=True,
        )
        rows[row.key] = row.joined(rows.get(row.key))
        results = [asdict(entry) for entry in rows.values()]
        result = make_result(environment, "graph-replay", settings=settings, results=results)
        save(arguments, environment, result)
    return 0


def _beside(arguments: argparse.Namespace) -> int:
    from benchmarks.beside import METHOD, Version, measure

    environment = describe(torch.device(arguments.device), commit=arguments.commit)
    versions = [Version.of(text) for text in arguments.versions]
    settings = _settings(arguments, METHOD)
    dtype = settings["dtype"]
    rows: list[dict[str, object]] = []
    try:
        for workload, direction, microseconds in measure(
            versions,
            under_masks(arguments),
            directions=arguments.direction.split(","),
            dtype=dtype,
            device=arguments.device,
            rounds=arguments.rounds,
        ):
            first = microseconds[versions[0].name]
            figures = (f"{name} {us:.1f} us {us / first:.3f}" for name, us in microseconds.items())
            print(f"{workload.id:<20} {direction:<4}", *figures, sep="   ", flush=True)
            rows += [
                {
                    "family": environment.cuda_family or "cpu",
                    "commit": name,
                    "shape": workload.shape,
                    "direction": direction,
                    "mask": workload.mask.id,
                    "dtype": dtype,
                    "median_us": [round(us, 2)],
                }
                for name, us in microseconds.items()
            ]
            result = make_result(environment, "variants", settings=settings, results=rows)
            save(arguments, environment, result)
    except (ValueError, RuntimeError) as error:
        print(error)
        return 2
    return 0


def _load(arguments: argparse.Namespace) -> int:
    from benchmarks.load import METHOD, measure_load

    device = torch.device("cuda")
    environment = describe(device, commit=arguments.commit)
    settings = {**_settings(arguments, METHOD), "seconds": arguments.seconds}
    rows: list[dict[str, object]] = []
    for workload in under_masks(arguments, otherwise="none"):
        for direction, load in measure_load(
            workload,
            directions=arguments.direction.split(","),
            dtype=DTYPES[arguments.dtype],
            device=device,
            seconds=arguments.seconds,
        ):
            print(f"{workload.id:<20} {direction:<4} {load}", flush=True)
            rows.append(
                {
                    "family": environment.cuda_family,
                    "commit": environment.commit,
                    "shape": workload.shape,
                    "direction": direction,
                    "mask": workload.mask.id,
                    **asdict(load),
                }
            )
            result = make_result(environment, "load", settings=settings, results=rows)
            save(arguments, environment, result)
    return 0


def _settings(arguments: argparse.Namespace, method: str) -> dict[str, str]:
    dtype = str(DTYPES[arguments.dtype]).removeprefix("torch.")
    return {"dtype": dtype, "gradients": "dq, dk, dv, dbias2", "method": method}


def under_masks(arguments: argparse.Namespace, otherwise: str = "") -> list[Workload]:
    """The workloads: those with a mask in their name, tri384/half, under that one; the others under
    each of the named masks that fits them, by default `otherwise` or the workload's own.
    """
    names = arguments.masks or otherwise
    found: list[Workload] = []
    for workload in select(arguments.shapes.split(",")):
        if "/" in workload.id or not names:
            found.append(workload)
            continue
        chosen = masks.named(names.split(","))
        fit = [mask for mask in chosen if workload.N == workload.L or not mask.hides_rows]
        found += [workload.with_mask(mask) for mask in fit]
        if left := [mask.id for mask in chosen if mask not in fit]:
            print(f"{workload.id}: no pair map, left out under {', '.join(left)}", file=sys.stderr)
    if not found:
        raise SystemExit(2)  # the lines above say why
    return found
