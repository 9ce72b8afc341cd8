"""`python -m deepspeed4science demo`: prints each step and exits with 1 if a tensor breaks the
error law, or no kernel can be compiled here.
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
from deepspeed4science.demo.measure import peak_extra_bytes, time_interleaved
from deepspeed4science.demo.picture import UBIQUITIN_STRUCTURE, draw_attention, query_attention
from deepspeed4science.demo.startup import measure_startup
from deepspeed4science.errors import EvoformerError
from deepspeed4science.printing import show

PICTURE_NOTE = "8 heads averaged, untrained weights: the alignment alone, not a prediction"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when every tensor keeps the error law, 1 otherwise."""
    arguments = _parser().parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        show("--device cuda: PyTorch finds no CUDA GPU here; --device cpu runs everywhere.")
        return 2
    try:
        return _run(arguments)
    except EvoformerError as error:  # such as no compiler; its message says what to do
        show(f"\nerror: {error}")
        return 1


def _run(arguments: argparse.Namespace) -> int:
    devices = _devices(arguments.device, beside=arguments.gpu)
    dtype = DTYPES[arguments.dtype]
    alignment = load_ubiquitin()
    _print_family(alignment)

    representations = embed(alignment)
    cases = {
        device: list(attention_cases(representations, dtype=dtype, device=device))
        for device in devices
    }
    for device in devices:
        _prepare_kernels(cases[device], device)
    verdicts = _show_table(cases, arguments.dtype)

    _show_second_process(devices[-1], arguments.dtype)
    _write_pictures(cases[devices[-1]][0], alignment, arguments.out)
    return _conclude(verdicts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed4science demo",
        description="Ubiquitin and its relatives through all four Evoformer attentions.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU's figures beside the CPU's, where there is one"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of the pictures")
    return parser


def _devices(asked: str, *, beside: bool) -> list[torch.device]:
    """The devices to run on; with `beside` the CPU, then the GPU if there is a usable one."""
    best = _best_device() if beside or asked == "auto" else asked
    if beside and best == "cpu":
        show("--gpu: there is no GPU that the op can use here; the CPU's figures alone.")
    return [torch.device(name) for name in dict.fromkeys(("cpu", best) if beside else (best,))]


def _best_device() -> str:
    """A GPU if the op has kernels for it that can be compiled here, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    try:
        # Scores enough for a kernel (few_scores.py).
        probe = torch.zeros(1, 1, 65, 1, 16, device="cuda", dtype=torch.float16)
        op(probe, probe, probe, [])
    except (EvoformerError, RuntimeError) as error:  # PyTorch's own, too: for a GPU it is not for
        show(f"The GPU is not used: {str(error).splitlines()[0]}")
        return "cpu"
    return "cuda"


def _print_family(alignment: Alignment) -> None:
    records, length = len(alignment.records), len(alignment.query.columns)
    show(f"Ubiquitin and {records - 1} of its relatives, {length} residues:")
    for record in (alignment.records[i] for i in (0, records // 2, records - 1)):
        show(f"  {record.columns}  {record.name}")


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _prepare_kernels(cases: list[AttentionCase], device: torch.device) -> None:
    """Make the first call of every kind, so that compiling shows here and not in the timings."""
    show(f"\nKernels for {_place(device)}")
    known = {kernel.name for kernel in loaded_kernels()}
    start = time.perf_counter()
    for case in cases:
        forward_backward(op, case, torch.zeros_like(case.q))
    seconds = time.perf_counter() - start
    kernels = [kernel for kernel in loaded_kernels() if kernel.name not in known]
    built = [kernel for kernel in kernels if kernel.origin == "built"]
    what = f"{len(built)} of them compiled" if built else "none had to be compiled"
    for kernel in kernels:
        show(f"  {_describe(kernel)}")
    show(f"  First call of everything: {seconds:.2f} s, {what}.")


def _describe(kernel: LoadedKernelInfo) -> str:
    words = {
        "built": "compiled just now",
        "cache": "from the cache of an earlier run",
        "prebuilt": "installed",
    }
    return f"{kernel.name:<24} {words.get(kernel.origin, kernel.origin)}"


HEAD = f"{'':<30}{'B, N, L, H, D':<18}{'time, ms':>10}{'eager':>8}{'memory, MiB':>14}{'eager':>8}"
HEAD += "   error beside what the law allows"


def _show_table(
    cases: dict[torch.device, list[AttentionCase]], dtype: str
) -> dict[str, list[Verdict]]:
    """Prints each row as soon as it is measured; the verdicts by attention and device."""
    show(f"\nThe four attentions of an Evoformer block, forward and backward, {dtype}\n{HEAD}")
    found: dict[str, list[Verdict]] = {}
    for row in zip(*cases.values(), strict=True):
        for case, device in zip(row, cases, strict=True):
            name = case.name if len(cases) == 1 else f"{case.name}, {device.type}"
            found[name] = check(op, eager_attention, case)
            show(_row(name, case, found[name], device))
    return found


def _row(name: str, case: AttentionCase, verdicts: list[Verdict], device: torch.device) -> str:
    grad_output = torch.ones_like(case.q)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: forward_backward(op, case, grad_output),
        "eager": lambda: forward_backward(eager_attention, case, grad_output),
    }
    times = time_interleaved(calls, device)
    memory = {which: peak_extra_bytes(call, device) for which, call in calls.items()}
    worst = max(verdicts, key=lambda v: v.ours / v.allowed)
    shape = ", ".join(str(size) for size in case.q.shape)
    return (
        f"{name:<30}{shape:<18}"
        f"{times['ours'].median_ms:>10.2f}{times['eager'].median_ms:>8.2f}"
        f"{_mib(memory['ours']):>14}{_mib(memory['eager']):>8}"
        f"   {worst.ours:.1e} of {worst.allowed:.1e} ({worst.tensor})"
        f"{'' if worst.ok else '  BROKEN'}"
    )


def _mib(size: int | None) -> str:
    """The size in MiB; a dash if the system does not report it."""
    return "-" if size is None else f"{size / 2**20:.1f}"


def _show_second_process(device: torch.device, dtype: str) -> None:
    startup = measure_startup(device=device.type, dtype=dtype, train=True)
    built = startup.num_built
    kernels = f"which compiled {built} kernels anew" if built else "kernels loaded from the cache"
    show(
        f"\nA second process, {kernels}\n"
        f"  import torch {startup.torch_s:.2f} s\n"
        f"  then until the first forward and backward are done: "
        f"{1e3 * startup.beyond_torch_s:.0f} ms ({1e3 * startup.import_s:.0f} ms of it to import)"
    )


def _write_pictures(case: AttentionCase, alignment: Alignment, folder: Path) -> None:
    try:
        paths = draw_attention(
            query_attention(op, case),
            alignment.query.columns,
            folder / "ubiquitin_attention.png",
            title="MSA row attention of human ubiquitin",
            subtitle=PICTURE_NOTE,
            structure=UBIQUITIN_STRUCTURE,
        )
    except ImportError:
        show("\nNo picture: it needs Pillow. pip install pillow")
    except OSError as error:
        show(f"\nNo picture: {error}. Name a folder that can be written with --out.")
    else:
        small, large = paths
        show(f"\nThe query's attention: {small}, twice as large for slides: {large}")


def _conclude(verdicts: dict[str, list[Verdict]]) -> int:
    every = [verdict for group in verdicts.values() for verdict in group]
    good = sum(v.ok for v in every)
    law = "error at most 1.25 times eager's plus one unit in the last place"
    show(f"\n{good} of {len(every)} tensors keep the law ({law}).")
    for name, group in verdicts.items():
        if broken := [v.tensor for v in group if not v.ok]:
            show(f"  {name}: not {', '.join(broken)}")
    return 0 if good == len(every) else 1
