"""CUDA architectures: the requested ones, the device's, nvcc's, and their intersection.

    requested = arch.parse(text)                           # "8.0;9.0a+PTX", "Volta Turing", ...
    chosen = arch.intersect(requested, device, supported)  # a refusal names all three lists
    flags = arch.gencode(chosen)

All are pure functions of their arguments: the caller reads the environment; it is never written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import ToolchainError

# PyTorch's names of the generations, with the architectures that it compiles for each.
NAMES: dict[str, str] = {
    "kepler+tesla": "3.7",
    "kepler": "3.5+PTX",
    "maxwell+tegra": "5.3",
    "maxwell": "5.0 5.2+PTX",
    "pascal": "6.0 6.1+PTX",
    "volta+tegra": "7.2",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0 8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0 10.3 12.0 12.1+PTX",
}
# Without a list and without a device: the first architecture of each template family, and PTX for
# later ones.
DEFAULT = "7.0 7.5 8.0 9.0+PTX"

_SYNTAX = re.compile(r"(\d{1,2})\.(\d)([af]?)(\+ptx)?")
_FOREIGN = re.compile(r"(?:sm_?|compute_?)?(\d{1,2})\.?(\d)([af]?)(?:-real|-virtual)?")


@dataclass(frozen=True, order=True)
class Arch:
    """One target: `9.0a+PTX` is Arch(9, 0, "a", ptx=True)."""

    major: int
    minor: int
    suffix: str = ""  # "a": this one architecture's own instructions; "f": its family's
    ptx: bool = False  # also PTX, which the driver translates for later GPUs

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}{'+PTX' if self.ptx else ''}"

    @property
    def number(self) -> str:
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def real(self) -> str:
        return f"sm_{self.number}"

    @property
    def virtual(self) -> str:
        return f"compute_{self.number}"

    def gencode(self) -> tuple[str, ...]:
        """nvcc's flags for machine code and, if requested, PTX."""
        codes = (self.real, self.virtual) if self.ptx else (self.real,)
        return tuple(f"-gencode=arch={self.virtual},code={code}" for code in codes)

    def unit_flags(self) -> tuple[str, ...]:
        """`gencode`, and the macro by which a unit knows that it has PTX (csrc/.../arch.h)."""
        return (*self.gencode(), *(["-DDS4S_HAS_PTX"] if self.ptx else []))

    def has_code_for(self, device: tuple[int, int]) -> bool:
        """Whether the machine code (not the PTX) runs on the device.

        Machine code runs on the same major version from its minor version up, with suffix `a` on
        exactly this one (CUDA C++ Programming Guide, "Compute Capability and Streaming
        Multiprocessor Versions").
        """
        if self.suffix == "a":
            return device == (self.major, self.minor)
        return device[0] == self.major and device[1] >= self.minor

    def runs_on(self, device: tuple[int, int]) -> bool:
        if self.has_code_for(device):
            return True
        return self.ptx and not self.suffix and device >= (self.major, self.minor)


def parse(text: str | None, *, source: str = "TORCH_CUDA_ARCH_LIST") -> tuple[Arch, ...]:
    """The architectures in a list as PyTorch's users write it; empty for an empty list.

    Parts are separated by blanks or semicolons, in any number. A part is `X.Y`, with `a` (from 9.0)
    or `f` (from 10.0) behind it, or a generation's name; `+PTX` may follow. Case does not matter.
    The order is kept, and repeated ones appear once. Raises ToolchainError, naming the part, for
    anything else.
    """
    found: dict[str, Arch] = {}
    for token in re.split(r"[;\s]+", text or ""):
        for one in _parse_token(token, source) if token else ():
            known = found.get(one.number)
            found[one.number] = replace(one, ptx=one.ptx or (known is not None and known.ptx))
    return tuple(found.values())


def _parse_token(token: str, source: str) -> tuple[Arch, ...]:
    lower = token.lower()
    if lower in NAMES:
        return parse(NAMES[lower])
    if lower.endswith("+ptx") and lower[:-4] in NAMES:
        *others, last = parse(NAMES[lower[:-4]])
        return (*others, replace(last, ptx=True))
    match = _SYNTAX.fullmatch(lower)
    if match is None:
        raise _illegal(token, source, _meant(lower))
    one = Arch(int(match[1]), int(match[2]), match[3], ptx=match[4] is not None)
    if one.suffix == "a" and one.major < 9:
        raise _illegal(
            token, source, f"suffix 'a' exists from 9.0 on; write {one.major}.{one.minor}"
        )
    if one.suffix == "f" and one.major < 10:
        raise _illegal(
            token, source, f"suffix 'f' exists from 10.0 on; write {one.major}.{one.minor}"
        )
    return (one,)


def _meant(token: str) -> str:
    if "," in token:
        return "separate architectures by ';' or blanks"
    if token in ("native", "auto", "all", "all-major", "common"):
        return "unset it (the device's own architecture is the default) or list the architectures"
    match = _FOREIGN.fullmatch(token)
    return f"write {match[1]}.{match[2]}{match[3]}" if match else ""


def _illegal(token: str, source: str, hint: str) -> ToolchainError:
    oldest = parse(DEFAULT)[0]  # older names are read, but refused later: they are no advice
    served = [name for name, of in NAMES.items() if "+" not in name and parse(of)[0] >= oldest]
    names = ", ".join(name.title() for name in served)
    return ToolchainError(
        f"{source}: expected architectures such as 8.0, 9.0a, 12.0f or {names}, each with or "
        f"without +PTX, separated by ';' or blanks; got {token!r}" + (f"; {hint}" if hint else "")
    )


def gencode(archs: Sequence[Arch]) -> tuple[str, ...]:
    return tuple(flag for one in archs for flag in one.gencode())


def target_obstacle(
    target: Arch, requested: Sequence[Arch], supported: Collection[str] | None, first_cuda: str
) -> str:
    """Why code for exactly `target`, such as 9.0a, cannot be compiled; empty where it can.

    requested, supported: as for `intersect`; 9.0 and 9.0a both request 9.0a. supported may be
        None: there is no nvcc, and kernels compiled earlier must do.
    first_cuda: the first CUDA version whose nvcc compiles for it, as text.
    """
    device = (target.major, target.minor)
    if requested and all((one.major, one.minor) != device for one in requested):
        asked = "; ".join(map(str, requested))
        plain = replace(target, suffix="")
        return f"TORCH_CUDA_ARCH_LIST asks for {asked}: neither {plain} nor {target}"
    if supported is not None and target.real not in supported:
        return (
            f"this nvcc does not compile for {target.real}; CUDA {first_cuda} is the first that "
            "does"
        )
    return ""


@functools.cache
def stand_ins(one: Arch) -> tuple[Arch, ...]:
    """Other targets whose code runs wherever that of `one` does, nearest first."""
    if one.suffix:
        return ()
    known = {replace(named, ptx=False) for text in NAMES.values() for named in parse(text)}
    plain = Arch(one.major, one.minor)
    found = []
    for other in sorted((*{plain, *known},), reverse=True):
        if other <= plain:
            has_code = other.major == one.major and not one.ptx
            found += [other] * has_code + [replace(other, ptx=True)]
    return tuple(other for other in found if other != one)


def intersect(
    requested: Sequence[Arch],
    device: tuple[int, int] | None,
    supported: Collection[str],
) -> tuple[Arch, ...]:
    """The targets, best first, that are requested, that nvcc supports and that run on the device.

    requested: from `parse`; empty means the device's own architecture, or without a device DEFAULT.
    device: the compute capability that must be served; None while installing on another machine.
    supported: this nvcc's real architectures, "sm_80" and so on (`toolchain.nvcc_architectures`).
    Raises ToolchainError, naming all three lists, when none is left.
    """
    if requested:
        wanted = tuple(requested)
    elif device is None:
        wanted = parse(DEFAULT)
    else:
        wanted = _for_device(device, supported)
    kept = [
        one for one in wanted if one.real in supported and (device is None or one.runs_on(device))
    ]
    if not kept:
        raise _nothing_left(requested, device, supported)
    if device is None:
        return tuple(kept)
    target = device  # narrowed for the key function
    return tuple(sorted(kept, key=lambda one: _closeness(one, target), reverse=True))


def _for_device(device: tuple[int, int], supported: Collection[str]) -> tuple[Arch, ...]:
    """The device's own target, else the nearest below whose machine code runs there, else PTX."""
    listed = [Arch(int(number[:-1]), int(number[-1])) for number in _plain_numbers(supported)]
    below = sorted((one for one in listed if (one.major, one.minor) <= device), reverse=True)
    for one in below:
        if one.has_code_for(device):
            return (one,)
    return (replace(below[0], ptx=True),) if below else ()


def as_written(supported: Collection[str]) -> str:
    """nvcc's architectures as they are requested: "7.5, 8.0" for sm_80 and sm_75."""
    numbers = sorted(_plain_numbers(supported), key=int)
    return ", ".join(f"{number[:-1]}.{number[-1]}" for number in numbers)


def _plain_numbers(supported: Collection[str]) -> list[str]:
    return [name[3:] for name in supported if name.startswith("sm_") and name[3:].isdecimal()]


def _closeness(one: Arch, device: tuple[int, int]) -> tuple[bool, int, int, bool]:
    return (one.has_code_for(device), one.major, one.minor, bool(one.suffix))


def _nothing_left(
    requested: Sequence[Arch], device: tuple[int, int] | None, supported: Collection[str]
) -> ToolchainError:
    asked = "; ".join(map(str, requested)) or "nothing (TORCH_CUDA_ARCH_LIST is unset)"
    has = "not known" if device is None else f"{device[0]}.{device[1]}"
    can = as_written(supported)
    if requested and device is not None and not any(one.runs_on(device) for one in requested):
        remedy = (
            f"add {has} to TORCH_CUDA_ARCH_LIST, or unset it (a model that compiles kernels of its "
            "own may have set it in this process: start it again, and it finds them compiled)"
        )
    else:
        remedy = (
            "set CUDA_HOME to a CUDA toolkit whose nvcc knows the architecture "
            "(7.0 and 7.2 need CUDA 12.9 or older)"
        )
    return ToolchainError(
        f"no architecture is left to compile for: requested {asked}; the device is {has}; "
        f"this nvcc can do {can or 'nothing'}; {remedy}"
    )
