"""`python -m deepspeed4science demo`: prints what it does, and exits with 1 when a result is not
right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed4science.demo.alignment import Alignment, load_ubiquitin
from deepspeed4science.demo.checks import Verdict, check, forward_backward
from deepspeed4science.demo.embedding import AttentionCase, attention_cases, embed
from deepspeed4science.demo.kernels import LoadedKernelInfo, eager_attention, loaded_kernels, op
from deepspeed4science.demo.measure import Timing, peak_extra_bytes, time_interleaved
from deepspeed4science.demo.picture import UBIQUITIN_STRUCTURE, draw_attention, query_attention
from deepspeed4science.demo.startup import measure_startup
from deepspeed4science.errors import EvoformerError

PICTURE_NOTE = "8 heads averaged, untrained weights: the alignment alone, not a prediction"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when every tensor keeps the error law, 1 otherwise."""
    arguments = _parser().parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: PyTorch finds no CUDA GPU here; --device cpu runs everywhere.")
        return 2
    device = torch.device(arguments.device if arguments.device != "auto" else _best_device())
    dtype = DTYPES[arguments.dtype]
    alignment = load_ubiquitin()
    _print_family(alignment, device, arguments.dtype)

    cases = list(attention_cases(embed(alignment), dtype=dtype, device=device))
    _prepare_kernels(cases)
    print("\nThe four attentions of one Evoformer block, forward and backward")
    verdicts = [verdict for case in cases for verdict in _show_case(case, device)]

    _show_second_process(device, arguments.dtype)
    _write_picture(cases[0], alignment, arguments.out / "ubiquitin_attention.png")
    return _conclude(verdicts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed4science demo",
        description="Ubiquitin and its relatives through all four Evoformer attentions.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of the picture")
    return parser


def _best_device() -> str:
    """A GPU if the op has kernels for it and they can be made here, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    # Scores enough for a kernel (few_scores.py).
    probe = torch.zeros(1, 1, 65, 1, 16, device="cuda", dtype=torch.float16)
    try:
        op(probe, probe, probe, [])
    except (EvoformerError, NotImplementedError) as error:
        print(f"The GPU is not used: {str(error).splitlines()[0]}")
        return "cpu"
    return "cuda"


def _print_family(alignment: Alignment, device: torch.device, dtype: str) -> None:
    records, length = len(alignment.records), len(alignment.query.columns)
    place = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"Ubiquitin and {records - 1} of its relatives, {length} residues. {place}, {dtype}.")
    for record in (alignment.records[i] for i in (0, records // 2, records - 1)):
        print(f"  {record.columns}  {record.name}")


def _prepare_kernels(cases: list[AttentionCase]) -> None:
    """Make the first call of every kind, so that compiling shows here and not in the timings."""
    print("\nKernels")
    start = time.perf_counter()
    for case in cases:
        forward_backward(op, case, torch.zeros_like(case.q))
    seconds = time.perf_counter() - start
    kernels = loaded_kernels()
    built = [kernel for kernel in kernels if kernel.origin == "built"]
    for kernel in kernels:
        print(f"  {_describe(kernel)}")
    what = f"compiling {len(built)} of them" if built else "none had to be compiled"
    print(f"  First call of everything: {seconds:.2f} s, {what}.")


def _describe(kernel: LoadedKernelInfo) -> str:
    words = {
        "built": "compiled just now",
        "cache": "from the cache of an earlier run",
        "prebuilt": "installed",
    }
    return f"{kernel.name:<24} {words.get(kernel.origin, kernel.origin)}"


def _show_case(case: AttentionCase, device: torch.device) -> list[Verdict]:
    verdicts = check(op, eager_attention, case)
    print(f"\n{case.name}  {case.shape}\n  {case.explanation}")
    print("  error against float64 " + "".join(f"{v.tensor:>10}" for v in verdicts))
    print("    this op             " + "".join(f"{v.ours:>10.1e}" for v in verdicts))
    print("    PyTorch eager       " + "".join(f"{v.eager:>10.1e}" for v in verdicts))
    print("    within the law      " + "".join(f"{'yes' if v.ok else 'NO':>10}" for v in verdicts))

    grad_output = torch.ones_like(case.q)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: forward_backward(op, case, grad_output),
        "eager": lambda: forward_backward(eager_attention, case, grad_output),
    }
    times = time_interleaved(calls, device)
    memory = {name: peak_extra_bytes(call, device) for name, call in calls.items()}
    print(f"  time    {_times(times)}")
    print(f"  memory  {_memory(memory)}")
    return verdicts


def _times(times: dict[str, Timing]) -> str:
    ours, eager = times["ours"].median_ms, times["eager"].median_ms
    ratio = (
        f"{eager / ours:.1f} times faster" if ours < eager else f"{ours / eager:.1f} times slower"
    )
    return f"{ours:8.2f} ms   eager {eager:8.2f} ms   {ratio}"


def _memory(memory: dict[str, int | None]) -> str:
    ours, eager = memory["ours"], memory["eager"]
    if ours is None or eager is None:
        return "not measurable on this system"
    return f"{ours / 2**20:8.2f} MiB  eager {eager / 2**20:8.2f} MiB  on top of the inputs, at most"


def _show_second_process(device: torch.device, dtype: str) -> None:
    startup = measure_startup(device=device.type, dtype=dtype, train=True)
    built = startup.num_built
    kernels = f"which compiled {built} kernels anew" if built else "kernels loaded from the cache"
    print(
        f"\nA second process, {kernels}\n"
        f"  import torch {startup.torch_s:.2f} s\n"
        f"  then until the first forward and backward are done: "
        f"{1e3 * startup.beyond_torch_s:.0f} ms ({1e3 * startup.import_s:.0f} ms of it to import)"
    )


def _write_picture(case: AttentionCase, alignment: Alignment, path: Path) -> None:
    try:
        draw_attention(
            query_attention(op, case),
            alignment.query.columns,
            path,
            title="MSA row attention of human ubiquitin",
            subtitle=PICTURE_NOTE,
            structure=UBIQUITIN_STRUCTURE,
        )
    except ImportError:
        print("\nNo picture: it needs Pillow. pip install pillow")
    else:
        print(f"\nPicture of the query's attention: {path}")


def _conclude(verdicts: list[Verdict]) -> int:
    good = sum(v.ok for v in verdicts)
    law = "error at most 1.25 times eager's plus one unit in the last place"
    print(f"\n{good} of {len(verdicts)} tensors keep the law ({law}).")
    return 0 if good == len(verdicts) else 1
