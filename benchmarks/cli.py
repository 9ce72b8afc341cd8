"""`python -m benchmarks run | replay | beside | load | layers | blocks | ceilings | host |
startup | show | plot | results`
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import alone_cli, archive, masks, models_cli, quoted, results_page, table
from benchmarks.environment import describe
from benchmarks.options import DTYPES, among, count, known
from benchmarks.peers import PEER_GROUPS, all_peers, peer_names
from benchmarks.result_file import make_folder, make_result, save
from benchmarks.run import DIRECTIONS, Options, Row, Skipped, run_workload
from benchmarks.shapes import GROUPS, WORKLOADS, select
from benchmarks.startup import measure_startups
from benchmarks.timing import MAX_RUNS
from deepspeed4science.printing import show


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    arguments.words = sys.argv[1:] if argv is None else argv
    if getattr(arguments, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("this is measured on a GPU: PyTorch finds no CUDA GPU here")
        return 2
    if getattr(arguments, "json", None) is not None:
        try:
            make_folder(arguments.json)  # before minutes of measuring
        except OSError as error:
            print(f"--json {arguments.json}: expected a place that can be written, got: {error}")
            return 2
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="time peers on workloads")
    shapes, under = known(select), known(masks.named)
    run.add_argument(
        "--shapes",
        default="cpu",
        type=shapes,
        help=f"ids or groups, with commas; groups: {', '.join(GROUPS)}",
    )
    run.add_argument(
        "--masks",
        type=under,
        help="each workload under each of these, with commas, or all; "
        f"there are: {', '.join(masks.BY_ID)} (default: random)",
    )
    run.add_argument(
        "--dtype",
        default="fp32,bf16",
        type=among("dtype", DTYPES),
        help="fp32, bf16, fp16, with commas",
    )
    run.add_argument("--direction", default="fwd,fwd+bwd", help=", ".join(DIRECTIONS))
    run.add_argument(
        "--peers", default="cpu", help="names or groups, with commas; `list` shows them"
    )
    run.add_argument(
        "--seconds", type=float, default=8.0, help="time for one workload, dtype and direction"
    )
    run.add_argument("--runs", type=count, default=MAX_RUNS, help="at most this many of each call")
    run.add_argument("--bias1-grad", action="store_true", help="ask for the mask's gradient too")
    run.add_argument(
        "--check",
        action="store_true",
        help="also the errors of O and of the gradients against float64",
    )
    run.add_argument("--seed", type=int, default=0)
    run.set_defaults(command=_run)

    host = commands.add_parser("host", help="host time of a call, beside autograd's own")
    host.set_defaults(command=_host)

    startup = commands.add_parser("startup", help="first call, compiled and from the cache")
    for command in (host, startup):
        command.add_argument("--dtype", default="fp32", choices=tuple(DTYPES))
    startup.set_defaults(command=_startup)

    replay, beside, load = alone_cli.add_commands(commands)
    layers, blocks, ceilings = models_cli.add_commands(commands)
    for command in (run, host, startup, replay, beside, load, layers, blocks, ceilings):
        devices = ("cuda",) if command in (replay, load, ceilings) else ("cpu", "cuda")
        command.add_argument("--device", default=devices[0], choices=devices)
        command.add_argument(
            "--json", type=Path, help="result file, or a folder: DATE-MACHINE-WHAT.json in it"
        )
        command.add_argument("--what", help="the last part of that file's name")
        command.add_argument("--commit", help="for a copy of the tree without .git")

    listing = commands.add_parser("list", help="peers and workloads, with their sources")
    listing.set_defaults(command=_list)
    for name, command_function in (("show", _show), ("plot", _plot)):
        command = commands.add_parser(name, help=f"{name} a result file")
        command.add_argument("file", type=Path)
        command.set_defaults(command=command_function)
    results = commands.add_parser("results", help="write RESULTS.md and its pictures anew")
    results.add_argument(
        "--check", action="store_true", help="only say whether the page is current"
    )
    results.set_defaults(command=_results)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    environment = describe(device, commit=arguments.commit)  # before: the tree may change meanwhile
    factories = all_peers()
    names = peer_names(arguments.peers)
    directions = arguments.direction.split(",")
    if unknown := [n for n in names if n not in factories] + [
        d for d in directions if d not in DIRECTIONS
    ]:
        print(
            f"not known: {', '.join(unknown)}; peers: {', '.join(factories)}; "
            f"directions: {', '.join(DIRECTIONS)}"
        )
        return 2
    peers = [factories[name]() for name in names]
    options = Options(
        directions,
        arguments.seconds,
        arguments.runs,
        with_bias1_gradient=arguments.bias1_grad,
        with_errors=arguments.check,
        seed=arguments.seed,
    )
    rows: list[Row] = []
    skipped: list[Skipped] = []
    result = {}
    for workload in alone_cli.under_masks(arguments):
        for dtype in arguments.dtype.split(","):
            new, left_out = run_workload(
                workload, peers, dtype=DTYPES[dtype], device=device, options=options
            )
            rows += new
            skipped += left_out
            result = make_result(
                environment,
                "run",
                settings={**asdict(options), "peers": names},
                results=[asdict(row) for row in rows],
                skipped=[asdict(entry) for entry in skipped],
            )
            # After each: a run that is cut short keeps what it has.
            save(arguments, environment, result)
            print(f"{workload.id} {dtype} done", file=sys.stderr)
    show(table.as_text(result))
    return 0


def _host(arguments: argparse.Namespace) -> int:
    from benchmarks.host import measure_overhead

    device = torch.device(arguments.device)
    environment = describe(device, commit=arguments.commit)
    overheads = measure_overhead(dtype=DTYPES[arguments.dtype], device=device)
    environment = replace(environment, num_threads=torch.get_num_threads())  # one on a CPU
    rows = [asdict(entry) for entry in overheads]
    settings = {"dtype": arguments.dtype}
    save(arguments, environment, make_result(environment, "host", settings=settings, rows=rows))
    for entry in overheads:
        print(
            f"{entry.call:<22} {entry.peer:<8} {entry.median_us:8.1f} us a call "
            f"(p20 {entry.p20_us:.1f}, p80 {entry.p80_us:.1f})"
        )
    return 0


def _startup(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    environment = describe(device, commit=arguments.commit)
    dtype = DTYPES[arguments.dtype]
    startups = measure_startups(dtype=str(dtype).removeprefix("torch."), device=arguments.device)
    result = make_result(
        environment,
        "startup",
        settings={"dtype": arguments.dtype},
        startup=asdict(startups),
    )
    save(arguments, environment, result)
    whole = asdict(startups)
    for name, seconds in whole.pop("compile_s").items():
        print(f"{name:<40} {'?' if seconds is None else format(seconds, '.3f'):>8} s to compile")
    for name, seconds in whole.items():
        print(f"{name:<40} {seconds:8.3f} s beyond import torch")
    return 0


def _list(_: argparse.Namespace) -> int:
    show("peers: " + ", ".join(all_peers()))
    for name, members in PEER_GROUPS.items():
        show(f"peers {name}: {', '.join(members)}")
    for name, members in GROUPS.items():
        show(f"group {name}: {', '.join(members)}")
    for workload in WORKLOADS:
        biases = " ".join(["bias1"] * workload.bias1 + ["bias2"] * workload.bias2)
        shape = "x".join(map(str, workload.shape))
        show(f"{workload.id:<14} {shape:<18} {biases:<12} {workload.source}")
    for mask in masks.MASKS:
        show(f"mask {mask.id:<14} {mask.source}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    if (content := _run_of_peers(arguments.file)) is None:
        return 2
    show(table.as_text(content))
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    if (content := _run_of_peers(arguments.file)) is None:
        return 2
    target = arguments.file.with_suffix(".svg")
    target.write_text(table.as_svg(content))
    print(target)
    return 0


def _run_of_peers(file: Path) -> dict[str, Any] | None:
    """The content of a result file of `run`. None, said to the user, if it is none."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        kind = content["kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{file}: expected a result file, got {type(error).__name__}: {error}")
        return None
    if kind == "run":
        return content
    print(f"{file} is a result of kind {kind!r}; only those of `run` have a table")
    return None


def _results(arguments: argparse.Namespace) -> int:
    target = archive.RESULTS.parent / "RESULTS.md"
    measurements = archive.load()
    if arguments.check:
        current = target.read_text() == results_page.page(measurements)
        print(f"{target.name} is {'current' if current else 'not what the result files say'}")
        return 0 if current else 1
    from benchmarks.pictures import draw  # matplotlib, which only this needs

    draw(measurements, target.parent / "pictures")
    target.write_text(results_page.page(measurements))
    for path, text in quoted.pages().items():
        path.write_text(text)
    print(target)
    return 0
