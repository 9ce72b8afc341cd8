"""`python -m deepspeed4science build`: compiles kernels before they are needed.

    build --preset openfold --arch 9.0a --out DIR    a model's calls, for a GPU that is not here
    build --dtype bf16 --head-dim 32 --bias both     one kind of call, for the GPU of this machine
    build --cpu                                      the CPU op, for this machine's processor

Fills the cache, or a folder for an image or a share, to be named in DS4S_CACHE_PATH. Without
--preset, --head-dim and --bias, it compiles the kernels that an install with DS_BUILD_* compiles.
Exit code 0: all kernels are there; 1: one is not, and the reason is printed; 2: the options
contradict each other.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed4science.printing import show
from op_builder import EvoformerAttnBuilder, EvoformerAttnCPUBuilder, paths
from op_builder.build import jit
from op_builder.cache import search
from op_builder.cache.key import CompileJob
from op_builder.cache.loaded_kernel import LoadedKernel
from op_builder.errors import BuildError
from op_builder.ops import presets
from op_builder.ops.instantiations import (
    CUDA_BIASES,
    CUDA_DTYPES,
    DIRECTIONS,
    DTYPES,
    WIDE_TIER,
)
from op_builder.ops.prebuild import build_into, require_kept
from op_builder.ops.presets import Call, Row
from op_builder.toolchain import arch, memo


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.preset and (options.head_dim or options.bias):
        parser.error("--preset says which head dimensions and biases; leave it or them out")
    if options.cpu and options.arch:
        parser.error("--arch names GPUs, --cpu asks for the CPU op; leave one of them out")
    try:
        jobs = _jobs(options)
        if not jobs:
            raise BuildError("no kernel computes such calls")
        kernels = _build(options.out, jobs, verbose=not options.quiet)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(_summary(options.out, kernels))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed4science build",
        description="Compile kernels into the cache, or into a folder for DS4S_CACHE_PATH.",
        epilog="Lists are separated by commas, architectures as in TORCH_CUDA_ARCH_LIST.",
    )
    parser.add_argument("--preset", choices=presets.PRESETS, help="what a kind of model calls")
    parser.add_argument("--dtype", type=_list(CUDA_DTYPES), help="of fp32, tf32, fp16, bf16 (bf16)")
    parser.add_argument("--head-dim", type=_head_dims, help="channels per head, 1 to 256 (32)")
    parser.add_argument("--bias", type=_list(CUDA_BIASES), help="of none, bias1, bias2, both")
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both")
    parser.add_argument(
        "--unaligned",
        action="store_true",
        help="for tensors whose rows are not whole pieces of 16 bytes, too",
    )
    parser.add_argument("--arch", help="architectures (TORCH_CUDA_ARCH_LIST, else the GPUs here)")
    parser.add_argument("--cpu", action="store_true", help="the CPU op instead of the CUDA op")
    parser.add_argument("--out", type=_folder, help="folder to fill (the cache)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def _folder(text: str) -> Path:
    """One that DS4S_CACHE_PATH can name."""
    if not text or os.pathsep in text:
        raise argparse.ArgumentTypeError(f"expected a folder without {os.pathsep!r}, got {text!r}")
    return Path(text)


def _list(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",") if part.strip()]
        wrong = [part for part in found if part not in allowed]
        if wrong or not found:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, got {text!r}")
        return found

    return parse


def _head_dims(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    largest = WIDE_TIER
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= largest for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to {largest}, got {text!r}")
    return [int(part) for part in parts]


def _jobs(options: argparse.Namespace) -> list[CompileJob]:
    wanted = _calls(options)
    if options.cpu:
        cpu = EvoformerAttnCPUBuilder()
        return cpu.jobs(cpu.kernels_for(wanted))
    cuda = EvoformerAttnBuilder()
    targets = arch.parse(options.arch, source="--arch")
    if not targets and (obstacles := cuda.obstacles()):
        without_gpu = any(obstacle.reason.startswith("no GPU") for obstacle in obstacles)
        hint = "; or name one with --arch, or compile the CPU op with --cpu" if without_gpu else ""
        raise BuildError("; ".join(map(str, obstacles)) + hint)
    targets = targets or cuda.requested_archs() or cuda.target_archs()
    cuda.require(targets)
    alignments = (True, False) if options.unaligned else (True,)
    return [
        job
        for aligned in alignments
        for job in cuda.jobs(cuda.kernels_for(wanted, targets, aligned=aligned))
    ]


def _calls(options: argparse.Namespace) -> tuple[Call, ...]:
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)
    chosen = options.dtype or options.head_dim or options.bias
    if not chosen and not options.preset:
        table = presets.INSTALL_CPU if options.cpu else presets.INSTALL
        return tuple(call for call in table if call.direction in directions)
    if options.preset:
        rows = presets.PRESETS[options.preset]
    else:
        pairs = itertools.product(options.head_dim or [32], options.bias or ["both"])
        rows = tuple(Row("", head_dim, bias) for head_dim, bias in pairs)
    dtypes = options.dtype or ["bf16"]
    if options.cpu and not set(dtypes) <= set(DTYPES):
        raise BuildError(f"--dtype: expected some of {', '.join(DTYPES)} with --cpu, got tf32")
    return presets.calls(rows, dtypes=dtypes, directions=directions)


def _build(out: Path | None, jobs: list[CompileJob], *, verbose: bool) -> list[LoadedKernel]:
    if out is None:
        kernels = jit.load(jobs, verbose=verbose)
        require_kept(kernels, [root.path for root in search.roots()])
        return kernels
    kernels = build_into(out, jobs, verbose=verbose)
    memo.export(out)
    return kernels


def _summary(out: Path | None, kernels: list[LoadedKernel]) -> str:
    built = sum(kernel.origin == "built" for kernel in kernels)
    folder = (out or paths.cache_root()).absolute()
    size = sum(kernel.path.stat().st_size for kernel in kernels) / 2**20
    line = f"{len(kernels)} kernels, {size:.1f} MiB, in {folder}: {built} compiled now"
    return line if out is None else f"{line}\nto use it: DS4S_CACHE_PATH={folder}"
