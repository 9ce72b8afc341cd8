"""A shared library's machine, exports and required glibc, read from its bytes without loading it.

Loading runs code, and for a library of another machine only reports "wrong ELF class". Layout: the
System V ABI, chapters 4 and 5 (https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html) and,
for the versions that a library needs, the Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import functools
import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

_DYNSYM, _VERNEED = 11, 0x6FFFFFFE  # section types


@dataclass(frozen=True)
class Library:
    machine: int  # e_machine: 62 is x86-64, 183 is AArch64
    exports: frozenset[str]
    glibc: tuple[int, int]  # the newest GLIBC_x.y it needs; (0, 0) when it needs none


def read(path: Path) -> Library:
    """Raises ValueError, with the reason, when the file is not a 64-bit little-endian library."""
    data = path.read_bytes()
    try:
        return _read(data)
    except (struct.error, IndexError):
        raise ValueError(f"{path} ends in the middle of its tables") from None


def _read(data: bytes) -> Library:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    machine = _machine(data)
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    if table == 0 or table + entry_size * count > len(data):
        raise ValueError("the section table is missing or cut off")
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)
    ]
    exports: set[str] = set()
    glibc = (0, 0)
    for section in sections:
        _, kind, _, _, offset, size, link, *_ = section
        if kind == _DYNSYM:
            strings = sections[link][4]
            for at in range(offset, offset + size, 24):
                name, info, _, where = struct.unpack_from("<IBBH", data, at)
                if where != 0 and info >> 4 in (1, 2):  # defined here, global or weak
                    exports.add(_string(data, strings + name))
        elif kind == _VERNEED:
            glibc = max(glibc, _needed_glibc(data, offset, sections[link][4]))
    return Library(machine, frozenset(exports), glibc)


def _needed_glibc(data: bytes, at: int, strings: int) -> tuple[int, int]:
    newest = (0, 0)
    while True:
        _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, entry)
            found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", _string(data, strings + name))
            if found:
                newest = max(newest, (int(found[1]), int(found[2])))
            entry += step
        if following == 0:
            return newest
        at += following


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(0, at)].decode()


def _machine(data: bytes) -> int:
    return int(struct.unpack_from("<H", data, 18)[0])


def machine(path: str | os.PathLike[str]) -> int:
    """The e_machine of a file; 0 where that cannot be read."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(20)
        return _machine(head) if head[:4] == b"\x7fELF" and len(head) == 20 else 0
    except OSError:
        return 0


@functools.cache
def own_machine() -> int:
    """The e_machine of the running interpreter; a sandbox may have no /proc."""
    return machine(sys.executable or "") or machine("/proc/self/exe")


@functools.cache
def own_glibc() -> tuple[int, int]:
    """This process's glibc; (0, 0) when it has another C library."""
    try:
        found = re.search(r"(\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, OSError):
        return (0, 0)
    return (int(found[1]), int(found[2])) if found else (0, 0)
