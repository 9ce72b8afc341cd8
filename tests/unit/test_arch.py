"""Architecture lists: every form people write, every refusal, and the meeting of the three
lists."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from op_builder.errors import ToolchainError
from op_builder.toolchain import arch
from op_builder.toolchain.arch import Arch

NVCC_13 = [
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_90a",
    "sm_100",
    "sm_100a",
    "sm_120",
    "sm_120f",
]
NVCC_12 = ["sm_70", *NVCC_13]
NVCC_118 = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"]


@dataclass(frozen=True)
class Written:
    text: str | None
    meant: str  # the architectures, as str(Arch), separated by blanks


WRITTEN = [
    Written("8.0", "8.0"),
    Written("8.0;9.0a", "8.0 9.0a"),
    Written("8.0 8.6+PTX", "8.0 8.6+PTX"),
    Written("8.0;8.6;", "8.0 8.6"),
    Written(";; 8.0 ; 9.0 ;", "8.0 9.0"),
    Written("  7.5\t8.0\n", "7.5 8.0"),
    Written("10.0f;12.0f", "10.0f 12.0f"),
    Written("10.0A+ptx", "10.0a+PTX"),
    Written("Ampere", "8.0 8.6+PTX"),
    Written("ampere", "8.0 8.6+PTX"),
    Written("Volta;Turing", "7.0+PTX 7.5+PTX"),
    Written("Ampere+Tegra", "8.7"),
    Written("Ampere+Tegra+PTX", "8.7+PTX"),
    Written("Hopper+PTX", "9.0+PTX"),
    Written("8.0 8.0+PTX 8.0", "8.0+PTX"),
    Written("9.0 9.0a", "9.0 9.0a"),
    Written("9.0a;10.3a;12.1", "9.0a 10.3a 12.1"),
    Written("HOPPER; blackwell+PTX", "9.0+PTX 10.0 10.3 12.0 12.1+PTX"),
    Written("Blackwell", "10.0 10.3 12.0 12.1+PTX"),
    Written("", ""),
    Written(" ; ", ""),
    Written(None, ""),
]


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: repr(case.text))
def test_each_form_people_write_is_understood(case: Written) -> None:
    assert " ".join(map(str, arch.parse(case.text))) == case.meant


@dataclass(frozen=True)
class Wrong:
    text: str
    named: str  # the part that the message must quote
    hint: str


WRONG = [
    Wrong("8.0;sm_90a", "'sm_90a'", "write 9.0a"),
    Wrong("sm80", "'sm80'", "write 8.0"),
    Wrong("80", "'80'", "write 8.0"),
    Wrong("90-virtual", "'90-virtual'", "write 9.0"),
    Wrong("8.0,8.6", "'8.0,8.6'", "separate architectures by ';'"),
    Wrong("8.0-real", "'8.0-real'", "write 8.0"),
    Wrong("sm_9.0a", "'sm_9.0a'", "write 9.0a"),
    Wrong("auto", "'auto'", "unset it"),
    Wrong('"8.0"', "'\"8.0\"'", "expected architectures such as"),
    Wrong("native", "'native'", "unset it"),
    Wrong("all", "'all'", "unset it"),
    Wrong("8.6a", "'8.6a'", "write 8.6"),
    Wrong("9.0f", "'9.0f'", "write 9.0"),
    Wrong("Amper", "'Amper'", "expected architectures such as 8.0, 9.0a, 12.0f or Volta, Turing"),
    Wrong("8", "'8'", "expected architectures such as"),
    Wrong("8.0+", "'8.0+'", "expected architectures such as"),
    Wrong("8.0 + PTX", "'+'", "expected architectures such as"),
    Wrong("9.0b", "'9.0b'", "expected architectures such as"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: repr(case.text))
def test_anything_else_is_refused_with_the_part_the_forms_and_a_hint(case: Wrong) -> None:
    with pytest.raises(ToolchainError) as raised:
        arch.parse(case.text)
    message = str(raised.value)
    assert message.startswith("TORCH_CUDA_ARCH_LIST: expected")
    assert f"got {case.named}" in message
    assert case.hint in message


def test_gencode_flags() -> None:
    assert Arch(8, 0).gencode() == ("-gencode=arch=compute_80,code=sm_80",)
    assert arch.gencode(arch.parse("9.0a 8.6+PTX")) == (
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_86,code=compute_86",
    )


@dataclass(frozen=True)
class Meeting:
    requested: str
    device: tuple[int, int] | None
    supported: list[str]
    kept: str


MEETINGS = [
    Meeting("", (8, 0), NVCC_13, "8.0"),
    Meeting("", (12, 0), NVCC_13, "12.0"),
    Meeting("", (8, 7), NVCC_13, "8.6"),  # nvcc does not list 8.7: the nearest below runs there
    Meeting(
        "", (12, 0), NVCC_118, "9.0+PTX"
    ),  # a toolkit older than the device: the driver translates
    Meeting("", (7, 0), NVCC_12, "7.0"),
    Meeting("8.0;9.0a", (9, 0), NVCC_13, "9.0a"),
    Meeting("9.0 9.0a", (9, 0), NVCC_13, "9.0a 9.0"),
    Meeting("8.0;8.6", (8, 9), NVCC_13, "8.6 8.0"),
    Meeting("8.0+PTX 9.0", (12, 0), NVCC_13, "8.0+PTX"),
    Meeting("7.5+PTX 8.0", (8, 0), NVCC_13, "8.0 7.5+PTX"),
    Meeting("12.0f", (12, 1), NVCC_13, "12.0f"),
    Meeting("7.0;8.0", (8, 0), NVCC_13, "8.0"),
    Meeting("7.0;8.0;9.0a", None, NVCC_13, "8.0 9.0a"),
    Meeting("", None, NVCC_13, "7.5 8.0 9.0+PTX"),
    Meeting("", None, NVCC_12, "7.0 7.5 8.0 9.0+PTX"),
]


@pytest.mark.parametrize("case", MEETINGS, ids=lambda case: f"{case.requested!r}-{case.device}")
def test_what_is_compiled_is_requested_runs_there_and_nvcc_can_do_it(case: Meeting) -> None:
    kept = arch.intersect(arch.parse(case.requested), case.device, case.supported)
    assert " ".join(map(str, kept)) == case.kept


@dataclass(frozen=True)
class Refusal:
    requested: str
    device: tuple[int, int] | None
    supported: list[str]
    says: tuple[str, ...]


REFUSALS = [
    Refusal(
        "", (7, 0), NVCC_13, ("requested nothing", "the device is 7.0", "7.5, 8.0", "CUDA 12.9")
    ),
    Refusal(
        "7.0", (7, 0), NVCC_13, ("requested 7.0", "the device is 7.0", "7.5, 8.0", "CUDA 12.9")
    ),
    Refusal("7.0;8.0", (7, 0), NVCC_13, ("requested 7.0; 8.0", "is 7.0", "7.5, 8.0", "CUDA 12.9")),
    Refusal(
        "8.0", (9, 0), NVCC_13, ("requested 8.0", "is 9.0", "7.5, 8.0", "add 9.0 to TORCH_CUDA")
    ),
    Refusal("9.0a+PTX", (12, 0), NVCC_13, ("requested 9.0a+PTX", "is 12.0", "add 12.0 to")),
    Refusal("8.6", (8, 0), NVCC_13, ("requested 8.6", "is 8.0", "add 8.0 to")),
    Refusal("10.0a", (10, 3), NVCC_13, ("requested 10.0a", "is 10.3", "add 10.3 to")),
    Refusal("7.0", None, NVCC_13, ("requested 7.0", "the device is not known", "CUDA 12.9")),
    Refusal("12.0f", (12, 0), NVCC_118, ("requested 12.0f", "is 12.0", "7.0, 7.5", "CUDA_HOME")),
    Refusal("", (9, 0), [], ("this nvcc can do nothing",)),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: f"{case.requested!r}-{case.device}")
def test_a_refusal_names_all_three_lists_and_what_to_do(case: Refusal) -> None:
    with pytest.raises(ToolchainError) as raised:
        arch.intersect(arch.parse(case.requested), case.device, case.supported)
    for part in ("requested ", "the device is ", "this nvcc can do ", *case.says):
        assert part in str(raised.value)


@pytest.mark.parametrize("requested", ["", "9.0", "9.0a", "8.0;9.0+PTX", "hopper"])
def test_hopper_is_asked_for_by_either_name(requested: str) -> None:
    asked = arch.parse(requested)
    for supported in (NVCC_13, None):
        assert arch.target_obstacle(Arch(9, 0, "a"), asked, supported, "12.0") == ""


def test_why_hopper_cannot_be_had() -> None:
    without = [name for name in NVCC_13 if name != "sm_90a"]
    hopper = Arch(9, 0, "a")
    assert "CUDA 12.0 is the first" in arch.target_obstacle(hopper, (), without, "12.0")
    for nvcc in (NVCC_13, None):
        reason = arch.target_obstacle(hopper, arch.parse("8.0+PTX;10.0a"), nvcc, "12.0")
        assert "asks for 8.0+PTX; 10.0a: neither 9.0 nor 9.0a" in reason


DEVICES = [(7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]


@pytest.mark.parametrize("text", ["7.5", "8.0", "8.6", "9.0", "9.0a", "9.0+PTX", "10.3", "12.0f"])
def test_a_stand_in_runs_wherever_the_other_does(text: str) -> None:
    (one,) = arch.parse(text)
    for other in arch.stand_ins(one):
        assert other != one
        assert [d for d in DEVICES if one.runs_on(d) and not other.runs_on(d)] == [], str(other)


def test_stand_ins_with_machine_code_come_first() -> None:
    names = [str(other) for other in arch.stand_ins(Arch(8, 6))]
    assert names[:4] == ["8.6+PTX", "8.0", "8.0+PTX", "7.5+PTX"]
    assert "8.9" not in names and "7.5" not in names
    assert arch.stand_ins(Arch(9, 0, "a")) == ()


def test_the_environment_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """One op's filtered list must not leak into the next build."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0;8.0;")
    before = dict(os.environ)
    arch.intersect(arch.parse(os.environ["TORCH_CUDA_ARCH_LIST"]), (8, 0), NVCC_13)
    assert dict(os.environ) == before
