"""The tables of benchmarks/RESULTS.md about layers, blocks, host time and first calls, each from
the newest file of its kind.
"""

from __future__ import annotations

from typing import Any

from benchmarks.archive import latest
from benchmarks.results_tables import PEERS, link, number, table


def layers() -> list[str]:
    newest = latest("layers", device="cuda")
    if newest is None:
        return []
    file, content = newest
    rows = [
        [str(r["length"]), r["layer"], r["mode"], number(r["median_ms"])] for r in content["rows"]
    ]
    return [
        "Triangle attention with its residual, 128 channels, 4 heads of 32, "
        "forward and backward under bfloat16 autocast, "
        f"{content['environment']['gpu']}, {link(file, content['environment']['date'])}:",
        table(["L", "node", "", "ms"], rows),
    ]


def blocks() -> list[str]:
    newest = latest("blocks", device="cuda")
    if newest is None:
        return []
    file, content = newest
    times = {(r["path"], r["crop"]): number(r["median_ms"]) for r in content["rows"]}
    paths, crops = (list(dict.fromkeys(key)) for key in zip(*times, strict=True))
    rows = [[path, *(times.get((path, crop), "-") for crop in crops)] for path in paths]
    return [
        "Forward and backward, milliseconds, in training mode under bfloat16 autocast, "
        f"{content['environment']['gpu']}, {link(file, content['environment']['date'])}. "
        '"This op" is the package\'s own block with `drop_in.switch("openfold3")`; "our layers" '
        "replace its three attention layers:",
        table(["kernels", *(f"{crop} tokens" for crop in crops)], rows),
        *(f"Left out: {path}: {why}." for path, why in content["skipped"].items()),
    ]


def newest_of(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The newest file of that kind from a GPU, and from a CPU."""
    found = [latest(kind, device=device) for device in ("cuda", "cpu")]
    return [file for file in found if file is not None]


def startup() -> list[str]:
    blocks = []
    for file, content in newest_of("startup"):
        environment, seconds = content["environment"], dict(content["startup"])
        compiled = seconds.pop("compile_s", {})
        machine = f"{environment['gpu'] or environment['cpu']}, {environment['num_cores']} cores"
        blocks.append(
            f"{machine}, {link(file, environment['date'])}; seconds beyond `import torch`, "
            "and of each kernel's compilation:"
        )
        rows = [
            [name.removesuffix("_s").replace("_", " "), number(value)]
            for name, value in seconds.items()
        ]
        rows += [[f"`{name}`", number(value)] for name, value in compiled.items()]
        blocks.append(table(["", "s"], rows))
    return blocks


def host() -> list[str]:
    blocks = []
    for file, content in newest_of("host"):
        environment, dtype = content["environment"], content["settings"]["dtype"]
        peers = list(dict.fromkeys(row["peer"] for row in content["rows"]))
        times = {(row["call"], row["peer"]): number(row["median_us"]) for row in content["rows"]}
        rows = [
            [call, *(times.get((call, peer), "") for peer in peers)]
            for call in dict.fromkeys(row["call"] for row in content["rows"])
        ]
        machine = environment["gpu"] or environment["cpu"]
        blocks.append(
            f"{machine}, {dtype}, both biases, {link(file, environment['date'])}; microseconds of "
            "the host for one call, with inputs so small that the device takes no time. autograd: "
            "a function that computes nothing:"
        )
        blocks.append(table(["", *(PEERS.get(peer, peer) for peer in peers)], rows))
    return blocks
