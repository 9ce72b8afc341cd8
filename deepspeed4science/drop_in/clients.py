"""The models whose own functions are replaced when they are imported, and their versions.

The replaced functions are those around the calls of other kernels, so that these kernels and the
casts that they need are not used.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed4science.drop_in.import_hook import Switch, is_installed
from deepspeed4science.errors import DropInError

LAUNCHERS = Path(__file__).with_name("launch")


@dataclass(frozen=True)
class Client:
    """One model's package."""

    name: str  # of the distribution
    versions: tuple[str, str]  # from the first, before the second
    command: str  # its console script, and the function behind it
    entry_point: str
    # By module and name of a function, its replacement: "module:function".
    functions: Mapping[str, Mapping[str, str]]
    # The same, but only where cuEquivariance's kernels, which provide this function, are not
    # installed.
    without_cuequivariance: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # By module, flags that are set to True: "these kernels are installed".
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # By module and name, a script of LAUNCHERS that replaces one of which the client starts
    # processes.
    scripts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hint: str = ""  # how to turn this path on, where it is not the default


_FUNCTIONS = "deepspeed4science.drop_in.functions"
_BOLTZ = f"{_FUNCTIONS}:triangle_attention_of_boltz"
_HEADS_FIRST = f"{_FUNCTIONS}:heads_first_attention"
_TRIANGLE_ATTENTION = "deepspeed4science.triangle:triangle_attention"
_MULTIPLICATION = "deepspeed4science.triangle:triangle_multiplicative_update"

CLIENTS = {
    client.name: client
    for client in (
        Client(
            "boltz",
            ("2.2", "2.3"),
            command="boltz",
            entry_point="boltz.main:cli",
            functions={
                "boltz.model.layers.triangular_attention.primitives": {
                    "kernel_triangular_attn": _BOLTZ
                }
            },
            without_cuequivariance={
                "boltz.model.layers.triangular_mult": {"kernel_triangular_mult": _MULTIPLICATION}
            },
            hint="for structures, not for affinities, whose model is loaded without use_kernels; "
            "not with --no_kernels, nor below compute capability 8.0",
        ),
        Client(
            "boltzgen",
            ("0.3", "0.4"),
            command="boltzgen",
            entry_point="boltzgen.cli.boltzgen:main",
            functions={
                "boltzgen.model.layers.triangular_attention.primitives": {
                    "kernel_triangular_attn": _BOLTZ
                }
            },
            without_cuequivariance={
                "boltzgen.model.layers.triangular": {"_kernel_triangular_mult": _MULTIPLICATION}
            },
            scripts={"boltzgen.cli.boltzgen": {"main_script": "run_boltzgen_step.py"}},
            hint="with --use_kernels true, or auto from compute capability 8.0",
        ),
        Client(
            "protenix",
            ("2.0", "2.1"),
            command="protenix",
            entry_point="runner.batch_inference:protenix_cli",
            functions={
                "protenix.model.triangular.layers": {
                    "cuequivariance_triangular_attn": _TRIANGLE_ATTENTION,
                    "_deepspeed_evo_attn": _HEADS_FIRST,
                }
            },
            without_cuequivariance={
                "protenix.model.triangular.triangular": {"kernel_triangular_mult": _MULTIPLICATION}
            },
            hint="with --triatt_kernel cuequivariance (the default) or deepspeed, which wants "
            "CUTLASS_PATH to be set; not below compute capability 8.0",
        ),
        Client(
            "openfold3",
            ("0.5", "0.6"),
            command="run_openfold",
            entry_point="openfold3.run_openfold:cli",
            functions={
                "openfold3.core.model.primitives.attention": {
                    "_deepspeed_evo_attn": _HEADS_FIRST,
                    "_triton_evo_attn": _HEADS_FIRST,
                    "_cueq_triangle_attn": _HEADS_FIRST,
                }
            },
            flags={
                "openfold3.core.model.primitives.attention": (
                    "TRITON_AVAILABLE",
                    "TritonEvoformer",
                )
            },
            hint="with use_triton_triangle_kernels (its default in evaluation) or "
            "use_deepspeed_evo_attention",
        ),
        Client(
            "intellifold",
            ("2.0", "2.0.3"),  # whose command runs AlphaFold 3's JAX code
            command="intellifold",
            entry_point="runner.intellifold_inference:intellifold_cli",
            functions={
                "intellifold.openfold.model.primitives": {"_deepspeed_evo_attn": _HEADS_FIRST},
                "intellifold.openfold.model.pairformer": {"_deepspeed_evo_attn": _HEADS_FIRST},
            },
            hint="with USE_DEEPSPEED_EVO_ATTENTION=true, and CUTLASS_PATH of any folder",
        ),
    )
}


def switch(client: str, *, any_version: bool = False) -> Switch:
    """Make a model use this op; before or after it is imported.

    Args:
        client: boltz, boltzgen, protenix, openfold3 or intellifold.
        any_version: accept versions with which this has not been tried.

    Returns:
        The switch, on: `with switch("boltz"): ...` or `.back()` turns it off.

    Raises:
        DropInError: there is no such client, or it has another version, or this runs within the
            import of one of its modules. Also later, when one of its modules is imported that no
            longer has the function.
    """
    chosen = find(client)
    _check_version(chosen, any_version)
    return Switch(changed=changes(chosen), served={})


def find(name: str) -> Client:
    if name in CLIENTS:
        return CLIENTS[name]
    raise DropInError(
        f"client: expected one of {', '.join(CLIENTS)}; got {name!r}. Models that call DeepSpeed "
        "or cuEquivariance themselves take use_as_deepspeed() or use_as_cuequivariance()."
    )


def installed(client: Client) -> tuple[str, str] | None:
    """Name and version of the installed distribution that contains the model; that of a fork has
    another name. None where there is none, as for a clone on sys.path, or its metadata are damaged.
    """
    try:
        name, version = client.name, importlib.metadata.version(client.name)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package(client), [""])
        name, version = names[0], importlib.metadata.version(names[0]) if names[0] else ""
    return (name, version) if version else None


def package(client: Client) -> str:
    return next(iter(client.functions)).partition(".")[0]


def requirement(client: Client) -> str:
    """What pip installs: a version that this has been tried with."""
    first, end = client.versions
    return f'"{client.name}>={first},<{end}"'


def functions(client: Client) -> list[tuple[str, str, str]]:
    """(module, name, replacement) of every function that is replaced on this machine."""
    kernels = ("cuequivariance_torch", "cuequivariance_ops_torch")
    alone = not all(map(is_installed, kernels))
    tables = (client.functions, client.without_cuequivariance if alone else {})
    return [
        (module, name, replacement)
        for table in tables
        for module, names in table.items()
        for name, replacement in names.items()
    ]


def changes(client: Client) -> dict[str, Callable[[ModuleType], Mapping[str, Any]]]:
    modules = [module for module, _, _ in functions(client)]
    return {module: partial(_attributes, client) for module in [*modules, *client.scripts]}


def _attributes(client: Client, module: ModuleType) -> Mapping[str, Any]:
    own = [(name, where) for name_, name, where in functions(client) if name_ == module.__name__]
    found: dict[str, Any] = {name: _replacement(where) for name, where in own}
    for name, script in client.scripts.get(module.__name__, {}).items():
        found[name] = LAUNCHERS / script
    for name in (*found, *client.flags.get(module.__name__, ())):
        if not hasattr(module, name):
            raise DropInError(
                f"{module.__name__}: expected {name}, as in {client.name} "
                f"{client.versions[0]}; {' '.join(installed(client) or (client.name, 'here'))} "
                f"does not have it. Install {requirement(client)}."
            )
    return found | dict.fromkeys(client.flags.get(module.__name__, ()), True)


def _replacement(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_version(client: Client, any_version: bool) -> None:
    found, (first, end) = installed(client), client.versions
    if any_version or found is None:
        return
    name, version = found
    if name == client.name and _key(first) <= _key(version) < _key(end):
        return
    raise DropInError(
        f"{client.name}: expected version {first} or later, before {end}; got {name} {version}. "
        f"Install {requirement(client)}, or try it: any_version=True, on the command line "
        "--any-version."
    )


def _key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: a pre-release counts as its release."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()
