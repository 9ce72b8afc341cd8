"""Checks of kernels' machine code, as nvdisasm prints it."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

from op_builder.toolchain import toolkits


def compiled(command):
    """What a command prints that must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def wheel_folders(package):
    """Where the NVIDIA wheels put things: <site-packages>/nvidia/<package>."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else ()
    return [Path(root) / package for root in roots or () if (Path(root) / package).is_dir()]


def disassembler():
    """nvdisasm from the wheel nvidia-cuda-nvdisasm or beside nvcc; None: PTX has to do."""
    folders = [folder / "bin" for folder in wheel_folders("cu13")]
    if nvcc_path := toolkits.find_nvcc().path:
        folders.append(nvcc_path.parent)
    return next((f / "nvdisasm" for f in folders if (f / "nvdisasm").is_file()), None)


def consumers_that_spill(code):
    """Kernels of a disassembly whose warps that multiply by wgmma store to local memory, or load
    from it between their products and exponentials. Their code lies behind the point where they
    take registers over from loading warps; without such a point, everywhere. Behind it only loading
    warps may load, where they repeat a wait.

    Three values a tile cost a forward 4 %: a block's shared memory leaves little of the first-level
    cache, so that they come from the second.
    """
    found = []
    for kernel in code.split("\n.text.")[1:]:
        _, point, consumers = kernel.partition("USETMAXREG.TRY_ALLOC")
        computing = consumers if point else kernel
        hot = [m.start() for m in re.finditer(r"\b(HGMMA|MUFU\.EX2)\b", computing)]
        if "HGMMA." in kernel and (
            re.search(r"\bSTL\b", computing) or re.search(r"\bLDL\b", computing[hot[0] : hot[-1]])
        ):
            found.append(kernel.partition(":")[0])
    return found


def lines_and_labels(kernel):
    """A kernel's instructions, and for each label the number of those before it."""
    lines, labels = [], {}
    for line in kernel.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            lines.append(instruction[1])
    return lines, labels


def innermost_loops(kernel):
    """The instructions of each of a kernel's loops without another loop inside. Waits for barriers
    are no such loops: ptxas puts their repetition behind the kernel's end.
    """
    lines, labels = lines_and_labels(kernel)
    loops = [
        (labels[branch[1]], n)
        for n, line in enumerate(lines)
        if (branch := re.match(r"(?:@\S+ +)?BRA\S* .*?(\.L\w+)", line)) and labels[branch[1]] <= n
    ]
    return [
        lines[begin : end + 1]
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]


def spills_in_steps(kernel):
    """A kernel's accesses to local memory in innermost loops."""
    return [x for loop in innermost_loops(kernel) for x in loop if re.search(r"\b(LDL|STL)\b", x)]


def loops_without_uniform_registers(code):
    """Kernels of a disassembly that move descriptors to uniform registers for each product anew.

    nvcc uses no uniform registers in a loop with a branch on which the lanes of a warp might not
    agree for all it knows (docs/kernels/sm90.md, Uniform registers).
    """
    found = []
    for kernel in code.split("\n.text.")[1:]:
        for loop in innermost_loops(kernel):
            products, moves = (
                sum(re.search(rf"\b{name}\b", line) is not None for line in loop)
                for name in ("HGMMA", "R2UR")
            )
            if products and moves >= products:
                found.append(kernel.partition(":")[0])
    return found


def loads_behind_additions(kernel):
    """A kernel's loads from shared memory, in innermost loops without products, behind the first
    addition of four floats to global memory. A warp's load waits for its additions before it.
    """
    found = []
    for loop in innermost_loops(kernel):
        added = [n for n, line in enumerate(loop) if re.search(r"\bREDG?\b\S*F32x4", line)]
        if added and not any("HGMMA" in line for line in loop):
            found += [line for line in loop[added[0] :] if re.search(r"\bLDS\b", line)]
    return found


def overwritten_operands(code):
    """Instructions of a disassembly that write to a register which an unfinished wgmma still reads.

    ptxas takes an operand's registers for free behind its last use, and that is where the product
    is issued, not where it is waited for (docs/kernels/sm90.md).
    """
    found = []
    for kernel in code.split("\n.text.")[1:]:
        lines, labels = lines_and_labels(kernel)
        for start, line in enumerate(lines):
            if operand := re.search(r"HGMMA\.\S+ R\d+, R(\d+), gdesc", line):
                registers = range(int(operand[1]), int(operand[1]) + 4)
                found += written_before_wait(lines, labels, start, registers)
    return found


def written_before_wait(lines, labels, start, registers):
    """From the product at `start` on, all ways: what is written until the wait for its group."""
    seen, ahead = set(), [(start, -1)]
    while ahead:
        n, later = ahead.pop()  # groups behind the product's own; -1: not committed yet
        while n < len(lines) and (n, later) not in seen:
            seen.add((n, later))
            line = lines[n]
            if "HGMMA" in line:
                later += "gsb0" in line
            elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", line):
                if int(wait[1]) <= later:
                    break
            elif target := re.match(r"(?:@\S+ +)?(?!ST|RED)([A-Z]\S*) R(\d+)\b", line):
                width = 4 if ".128" in target[1] else 2 if re.search("64|WIDE", target[1]) else 1
                if any(int(target[2]) + x in registers for x in range(width)):
                    yield line
            if branch := re.match(r"(@\S+ +)?BRA\S* .*?(\.L\w+)", line):
                ahead.append((labels[branch[2]], later))
                if not branch[1]:
                    break
            n += 1


def loads_before_wait(code):
    """Kernels of a disassembly that load by LDG.CONSTANT before they wait for the kernel in front.

    A kernel that may begin beside the one in front reads what that writes after griddepcontrol.wait
    and by ptx::load_written: __ldg is free to move to before the wait.
    """
    found = []
    for kernel in code.split("\n.text.")[1:]:
        before, wait, _ = kernel.partition("ACQBULK")
        if wait and re.search(r"\bLDG\.\S*CONSTANT\b", before):
            found.append(kernel.partition(":")[0])
    return found


def reads_behind_remote_stores(code):
    """Kernels of a disassembly that load from shared memory behind a store to another block, and
    then arrive at a barrier. Such a load waits behind the store, and may come after the arrival,
    which says that it has been done (sm90/backward/row_pairs.h). Stores wait for their own loads.
    """
    found = []
    for kernel in code.split("\n.text.")[1:]:
        before = ""  # STAS; or LDS, if it comes behind a STAS
        for step in re.findall(r"\b(STAS|LDS|SYNCS\.ARRIVE|SYNCS|BAR|HG?MMA)\b", kernel):
            if step == "SYNCS.ARRIVE" and before == "LDS":
                found.append(kernel.partition(":")[0])
                break
            before = step if step == "STAS" or (step == "LDS" and before) else ""
    return found


def arrivals_before_reads(code):
    """Loads from shared memory that need not have come when an arrival behind them says so, in the
    kernels of a disassembly that store dS to another block: nothing uses what they load before.
    """
    found = []
    for kernel in code.split("\n.text.")[1:]:
        if "STAS.128" not in kernel:
            continue
        lines = re.findall(r"^\.L\w+:|/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", kernel, re.MULTILINE)
        for n, line in enumerate(lines):
            load = re.match(r"(?:@\S+ +)?LDS(\S*) R(\d+)", line)
            if not load:
                continue
            width = 4 if "128" in load[1] else 2 if "64" in load[1] else 1
            loaded = {f"R{int(load[2]) + x}" for x in range(width)}
            for later in lines[n + 1 :]:
                used = loaded & set(re.findall(r"\bR\d+\b", later))
                if used or not later or re.match(r"(@\S+ +)?(BRA|EXIT)", later):
                    break
                if "SYNCS.ARRIVE" in later:
                    found.append(line)
                    break
    return found


def branches_before_their_condition(code):
    """Branches in a disassembly with encodings (nvdisasm -hex) that come less than 13 cycles behind
    the comparison whose result they read. The assembler has to count the cycles; ptxas 12.4 forgets
    them where a jump for diverged lanes (BRA.DIV) lies between: behind __syncwarp(), `lane == 0`
    was wrong.
    """
    found = []
    line = r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x\w{16} \*/\s*/\* 0x(\w{16}) \*/"
    for kernel in code.split("\n.text.")[1:]:
        cycle, written = 0, {}  # by predicate: the cycle of the comparison that writes it
        for text, upper in re.findall(line, kernel):
            guard, name, operands = re.match(r"(?:@!?(\w+)\s+)?(\S+)\s*(.*)", text).groups()
            if name.startswith("BRA") and cycle - written.get(guard, -13) < 13:
                found.append(text)
            for predicate in re.findall(r"\bU?P\d\b", ",".join(operands.split(",")[:2])):
                if re.match(r"U?(ISETP|FSETP|LOP3|PLOP3)\b", name):
                    written[predicate] = cycle
                elif not name.startswith("BRA"):  # a result that is waited for, by another counter
                    written.pop(predicate, None)
            cycle += max(int(upper, 16) >> 41 & 15, 1)
            if name in ("BRA", "EXIT") and not guard:
                written = {}
    return found


def instructions_by_kernel(code):
    """The machine instructions of each kernel of a disassembly, by its mangled name."""
    _, *kernels = re.split(r"^\.text\.(?=\w+:)", code, flags=re.MULTILINE)
    return {
        kernel.partition(":")[0]: re.findall(
            r"^ +/\*[0-9a-f]{4,}\*/ +(.*?) *;", kernel, re.MULTILINE
        )
        for kernel in kernels
    }


def newer_instructions(ptx, isa, arch, ptxas):
    """What the assembler says to PTX of another version. A newer one knows when each instruction
    came; what nvcc itself writes for its own assembler is left out.
    """
    text = re.sub(r"^\.version .*", f".version {isa}", ptx.read_text(), flags=re.MULTILINE)
    source = ptx.with_suffix(".older")
    source.write_text(re.sub(r'\.pragma "used_bytes_mask.*', "", text))
    command = [ptxas, "-O0", f"-arch={arch}", "-o", os.devnull, source]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    found = set(re.findall(r"error *: (.*)", done.stdout + done.stderr))
    assert found or done.returncode == 0, done.stdout + done.stderr
    return found
