"""Drop-ins: other libraries' import paths and other models' functions, switched and switched back.

Models are imitated here by packages of a few lines; tests/clients has the real ones.
"""

import importlib
import importlib.metadata
import importlib.util
import itertools
import sys
import textwrap
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import deepspeed4science
from deepspeed4science import drop_in
from deepspeed4science.drop_in import clients, launching
from deepspeed4science.drop_in.import_hook import Switch, is_installed
from deepspeed4science.errors import DropInError
from tests.unit.imitated_models import ATTENTION, BOLTZ, ROOT, run, write


def test_deepspeed_where_it_is_not_installed():
    assert importlib.util.find_spec("deepspeed") is None
    switched = drop_in.use_as_deepspeed()
    try:
        for name in ("deepspeed", "deepspeed.ops.deepspeed4science", "deepspeed.comm.comm"):
            assert importlib.util.find_spec(name).name == name  # before its import
        import deepspeed
        from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention
        from deepspeed.ops.deepspeed4science.evoformer_attn import EvoformerFusedAttention
        from deepspeed.ops.op_builder import EvoformerAttnBuilder

        assert importlib.util.find_spec("deepspeed").name == "deepspeed"  # after it
        assert DS4Sci_EvoformerAttention is deepspeed4science.DS4Sci_EvoformerAttention
        assert EvoformerFusedAttention is deepspeed4science.EvoformerFusedAttention
        assert EvoformerAttnBuilder.NAME == "evoformer_attn"
        assert deepspeed.comm.comm.is_initialized() is False
        assert deepspeed.checkpointing.is_configured() is False
        with pytest.raises(importlib.metadata.PackageNotFoundError):  # transformers' question
            importlib.metadata.version("deepspeed")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("deepspeed.runtime")
    finally:
        switched.back()
    assert importlib.util.find_spec("deepspeed") is None
    assert not [name for name in sys.modules if name.split(".")[0] == "deepspeed"]
    switched.back()  # harmless


@pytest.mark.parametrize("imported_before", [False, True])
@pytest.mark.parametrize(
    ("use", "name"),
    [
        (drop_in.use_as_deepspeed, "deepspeed.ops.deepspeed4science"),
        (drop_in.use_as_cuequivariance, "cuequivariance_torch.primitives.triangle"),
    ],
    ids=["deepspeed", "cuequivariance"],
)
@pytest.mark.parametrize("order", list(itertools.permutations(range(2))), ids=str)
def test_a_library_is_served_until_the_last_switch_ends(order, use, name, imported_before):
    switches = [use()]
    if imported_before:
        importlib.import_module(name)
    switches.append(use())
    try:
        for number in order:
            assert importlib.import_module(name).__name__ == name
            switches[number].back()
    finally:
        for switch in switches:
            switch.back()
    assert importlib.util.find_spec(name.split(".")[0]) is None


def test_lightning_does_not_believe_in_it(site):
    asks = """
        import importlib.util
        class Asked:  # later, as Lightning's RequirementCache does
            def __bool__(self):
                return importlib.util.find_spec("deepspeed") is not None
        _DEEPSPEED_AVAILABLE = Asked()
    """
    passes_on = "from lightning.fabric.strategies.deepspeed import _DEEPSPEED_AVAILABLE"
    write(
        site,
        {
            "lightning/fabric/strategies/deepspeed.py": asks,
            "lightning/pytorch/strategies/deepspeed.py": passes_on,
            "lightning/pytorch/utilities/deepspeed.py": "",  # a release without the variable
        },
    )
    before = importlib.import_module("lightning.fabric.strategies.deepspeed")
    with drop_in.use_as_deepspeed():
        assert importlib.util.find_spec("deepspeed")
        later = importlib.import_module("lightning.pytorch.strategies.deepspeed")
        assert not before._DEEPSPEED_AVAILABLE and not later._DEEPSPEED_AVAILABLE
        other = importlib.import_module("lightning.pytorch.utilities.deepspeed")
        assert not hasattr(other, "_DEEPSPEED_AVAILABLE")
    assert type(before._DEEPSPEED_AVAILABLE).__name__ == "Asked"
    assert type(later._DEEPSPEED_AVAILABLE).__name__ == "Asked"


def test_deepspeed_where_it_is_installed(site):
    write(
        site,
        {
            "deepspeed/runtime/engine.py": "",
            "deepspeed/ops/deepspeed4science/evoformer_attn.py": """
                def DS4Sci_EvoformerAttention(): ...
                class EvoformerFusedAttention: ...
            """,
        },
    )
    own = "from .evoformer_attn import DS4Sci_EvoformerAttention, EvoformerFusedAttention"
    (site / "deepspeed/ops/deepspeed4science/__init__.py").write_text(own)
    with drop_in.use_as_deepspeed():
        module = importlib.import_module("deepspeed.ops.deepspeed4science")
        assert module.DS4Sci_EvoformerAttention is deepspeed4science.DS4Sci_EvoformerAttention
        assert Path(module.__file__).parent == site / "deepspeed/ops/deepspeed4science"
        assert type(module.__loader__) is type(module.__spec__.loader)
        assert module.__loader__.get_source(module.__name__) == own
        importlib.import_module("deepspeed.runtime.engine")
    assert module.DS4Sci_EvoformerAttention.__module__ == f"{module.__name__}.evoformer_attn"


@pytest.mark.parametrize("installed", [False, True])
def test_cuequivariance(site, installed):
    if installed:
        own = "def triangle_attention(): ...\ndef triangle_multiplicative_update(): ...\n"
        write(site, {"cuequivariance_torch/primitives/triangle.py": own})
        (site / "cuequivariance_torch/__init__.py").write_text(f"{own}other = 1\n")
    with drop_in.use_as_cuequivariance():
        import cuequivariance_torch
        from cuequivariance_torch.primitives import triangle

        for module in (cuequivariance_torch, triangle):
            for name in ("triangle_attention", "triangle_multiplicative_update"):
                assert getattr(module, name) is getattr(deepspeed4science, name)
        assert not installed or cuequivariance_torch.other == 1
    assert (importlib.util.find_spec("cuequivariance_torch") is not None) == installed
    if installed:
        assert triangle.triangle_attention is not deepspeed4science.triangle_attention


def test_of_cuequivariance_with_kernels_attention_alone_is_replaced(site):
    own = "def triangle_attention(): ...\ndef triangle_multiplicative_update(): ...\n"
    files = {"cuequivariance_torch/primitives/triangle.py": own}
    write(site, {**files, "cuequivariance_ops_torch/x.py": ""})
    with drop_in.use_as_cuequivariance():
        triangle = importlib.import_module("cuequivariance_torch.primitives.triangle")
        assert triangle.triangle_attention is deepspeed4science.triangle_attention
        assert triangle.triangle_multiplicative_update.__module__ == triangle.__name__


def test_what_models_import_beside_cuequivariances_functions():
    with drop_in.use_as_cuequivariance():
        from cuequivariance_ops_torch import init_triton_cache
        from cuequivariance_ops_torch.triangle_attention import CUEQ_TRIATTN_FALLBACK_THRESHOLD
        from cuequivariance_torch import TriMulPrecision, mask_to_kv_lengths

        assert init_triton_cache() is None
        names = ["NONE", "DEFAULT", "TF32", "TF32x3", "IEEE"]
        assert list(TriMulPrecision.__members__) == names
        assert list(TriMulPrecision) == [-1, 0, 1, 2, 3]
        assert CUEQ_TRIATTN_FALLBACK_THRESHOLD == 0  # this op serves every length
        assert mask_to_kv_lengths(torch.ones(2, 1, 1, 4)).tolist() == [[[[[4]]], [[[4]]]]]
        with pytest.raises(ImportError):  # which models take for "not installed"
            from cuequivariance_torch import attention_pair_bias  # noqa: F401


@pytest.mark.parametrize("installed", [False, True])
def test_models_that_import_the_part_without_pytorch_find_it(site, installed):
    if installed:  # without the part for PyTorch
        write(site, {"cuequivariance/irreps.py": ""})
    with drop_in.use_as_cuequivariance():
        for name in ("cuequivariance", "cuequivariance_torch", "cuequivariance_ops_torch"):
            assert importlib.util.find_spec(name) is not None
            importlib.import_module(name)
        if installed:
            importlib.import_module("cuequivariance.irreps")
    assert (importlib.util.find_spec("cuequivariance") is not None) == installed


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_model_is_switched_and_switched_back(site, imported_before):
    write(site, BOLTZ)
    if imported_before:
        importlib.import_module(ATTENTION)
    with drop_in.switch("boltz"):
        module = importlib.import_module(ATTENTION)
        function = module.kernel_triangular_attn
        multiplication = importlib.import_module("boltz.model.layers.triangular_mult")
        assert function.__module__ == "deepspeed4science.drop_in.functions"
        ours = deepspeed4science.triangle_multiplicative_update
        assert multiplication.kernel_triangular_mult is ours
    assert module.kernel_triangular_attn(1, 2, 3, 4, 5, 6) == "its own"
    assert multiplication.kernel_triangular_mult(1, 2, 3) == "its own"


@pytest.mark.parametrize("imported_before", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_switches_end_in_any_order(site, order, imported_before):
    """The model is switched until the last one ends."""
    write(site, BOLTZ)
    if imported_before:
        importlib.import_module(ATTENTION)
    other = {ATTENTION: lambda _: {"kernel_triangular_attn": len}}
    switches = [
        drop_in.switch("boltz"),
        drop_in.switch("boltz"),
        Switch(changed=other, served={}),
        drop_in.switch("boltz"),
    ]
    module = importlib.import_module(ATTENTION)
    replacement = clients._replacement(clients._BOLTZ)
    values = [replacement, replacement, len, replacement]
    on = [0, 1, 2, 3]
    for number in order:
        switches[number].back()
        on.remove(number)
        found = module.kernel_triangular_attn
        assert found is values[on[-1]] if on else found() == "its own", (number, on)


def test_a_switch_that_fails_changes_nothing(site):
    """The first of its modules was there already, as is the second, which lacks its function."""
    lacking = {"boltz/model/layers/triangular_mult.py": "\n"}
    write(site, BOLTZ | lacking)
    module = importlib.import_module(ATTENTION)
    own = module.kernel_triangular_attn
    importlib.import_module("boltz.model.layers.triangular_mult")
    with pytest.raises(DropInError, match="expected kernel_triangular_mult"):
        drop_in.switch("boltz")
    assert module.kernel_triangular_attn is own
    assert not any(isinstance(finder, Switch) for finder in sys.meta_path)


def test_a_switch_within_the_import_of_a_model_is_told(site):
    circular = "import helper\ndef kernel_triangular_attn(): ...\n"
    helper = "from deepspeed4science import drop_in\ndrop_in.switch('boltz')\n"
    place = f"{ATTENTION.replace('.', '/')}.py"
    write(site, BOLTZ | {place: circular, "helper.py": helper})
    with pytest.raises(DropInError, match=rf"{ATTENTION}: expected it to be imported, or not yet"):
        importlib.import_module(ATTENTION)
    assert not any(isinstance(finder, Switch) for finder in sys.meta_path)


def test_a_switch_waits_for_an_import_in_another_thread(site):
    """The other modules of the model, which that thread imports next, are switched, too."""
    slow = f"""
        import threading
        started, goes_on = threading.Event(), threading.Event()
        def load():
            import {ATTENTION}
            import boltz.model.layers.triangular_mult
    """
    waits = "import slow\nslow.started.set()\nslow.goes_on.wait(60)\n"
    place = f"{ATTENTION.replace('.', '/')}.py"
    own = waits + textwrap.dedent(BOLTZ[place])
    write(site, BOLTZ | {place: own, "slow.py": slow})
    slow = importlib.import_module("slow")
    thread = threading.Thread(target=slow.load)
    thread.start()
    assert slow.started.wait(60)
    threading.Timer(0.3, slow.goes_on.set).start()
    with drop_in.switch("boltz"):
        thread.join()
        module = sys.modules[ATTENTION]
        assert module.kernel_triangular_attn.__module__.startswith("deepspeed4science")
        multiplication = sys.modules["boltz.model.layers.triangular_mult"]
        assert multiplication.kernel_triangular_mult.__module__.startswith("deepspeed4science")
    assert module.kernel_triangular_attn() == "its own"


def test_a_stub_without_a_spec_counts_as_installed(site, monkeypatch):
    write(site, BOLTZ)
    for package in ("cuequivariance_torch", "cuequivariance_ops_torch"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    with drop_in.switch("boltz"):
        module = importlib.import_module(ATTENTION)
        assert module.kernel_triangular_attn.__module__.startswith("deepspeed4science")
    monkeypatch.setitem(sys.modules, package, None)  # blocks its import
    assert not is_installed(package)


def test_cuequivariances_multiplication_is_left_where_its_kernels_are(site):
    write(site, {**BOLTZ, "cuequivariance_torch/x.py": "", "cuequivariance_ops_torch/x.py": ""})
    with drop_in.switch("boltz"):
        module = importlib.import_module("boltz.model.layers.triangular_mult")
        assert module.kernel_triangular_mult(1, 2, 3) == "its own"


def test_cuequivariance_without_kernels_has_no_multiplication(site):
    write(site, {**BOLTZ, "cuequivariance_torch/x.py": ""})
    with drop_in.switch("boltz"):
        module = importlib.import_module("boltz.model.layers.triangular_mult")
        ours = deepspeed4science.triangle_multiplicative_update
        assert module.kernel_triangular_mult is ours


def test_flags_of_a_model_say_that_its_kernels_are_installed(site):
    where = "openfold3.core.model.primitives.attention"
    names = clients.CLIENTS["openfold3"].functions[where]
    own = "".join(f"def {name}(): ...\n" for name in names) + "TRITON_AVAILABLE = False\n"
    place = f"{where.replace('.', '/')}.py"
    write(site, {place: f"{own}TritonEvoformer = None\n"})
    with drop_in.switch("openfold3"):
        module = importlib.import_module(where)
        assert module.TRITON_AVAILABLE is module.TritonEvoformer is True
    assert module.TRITON_AVAILABLE is False and module.TritonEvoformer is None
    del sys.modules[where]
    write(site, {place: f"{own}# another\n"})
    with drop_in.switch("openfold3"), pytest.raises(DropInError, match="expected TritonEvoformer"):
        importlib.import_module(where)


def test_the_installed_console_script_decides_what_runs(site):
    scripts = "[console_scripts]\nboltz = boltz.elsewhere:command\n"
    about = "boltz-2.2.1.dist-info/entry_points.txt"
    write(site, {**BOLTZ, about: scripts, "boltz/elsewhere.py": "def command(): return 7\n"})
    with pytest.raises(SystemExit) as ended:
        launching.run("boltz")
    assert ended.value.code == 7


def test_a_function_that_is_gone_is_told(site):
    write(site, {**BOLTZ, "boltz/model/layers/triangular_attention/primitives.py": "new = 1"})
    message = r"expected kernel_triangular_attn, as in boltz 2.2; boltz 2.2.1 does not have it"
    with drop_in.switch("boltz"), pytest.raises(DropInError, match=message):
        importlib.import_module(ATTENTION)


def test_versions(site):
    files = {"boltz-2.3.0rc1.dist-info/METADATA": "Name: boltz\nVersion: 2.3.0rc1\n"}
    write(site, files)
    with pytest.raises(
        DropInError, match=r"expected version 2\.2 or later, before 2\.3; got boltz 2\.3\.0rc1"
    ):
        drop_in.switch("boltz")
    drop_in.switch("boltz", any_version=True).back()
    with pytest.raises(DropInError, match="expected one of boltz, boltzgen"):
        drop_in.switch("openfold")


def test_a_fork_is_refused(site):
    """Its distribution has another name, and versions of its own, such as boltz-community's."""
    fork = {name: text for name, text in BOLTZ.items() if "dist-info" not in name}
    about = "fork-2.2.5.dist-info"
    files = {f"{about}/METADATA": "Metadata-Version: 2.1\nName: fork\nVersion: 2.2.5\n"}
    write(site, {**fork, **files, f"{about}/top_level.txt": "boltz\n"})
    with pytest.raises(DropInError, match=r"before 2\.3; got fork 2\.2\.5"):
        drop_in.switch("boltz")
    with drop_in.switch("boltz", any_version=True):
        assert launching.line("boltz").startswith("deepspeed4science ")
        assert " in fork 2.2.5: " in launching.line("boltz")


def test_damaged_metadata_are_none(site):
    """As an interrupted pip leaves them."""
    write(site, {**BOLTZ, "boltz-2.2.1.dist-info/METADATA": "", "boltz/main.py": ""})
    with drop_in.switch("boltz"):
        assert " in boltz (a clone): " in launching.line("boltz")


def test_a_model_without_a_hint_has_no_empty_one(monkeypatch):
    boltz = replace(clients.CLIENTS["boltz"], hint="")
    monkeypatch.setitem(clients.CLIENTS, "boltz", boltz)
    assert "()" not in launching.line("boltz")


def test_intellifold_on_jax_is_refused(site):
    """Its command has nothing to switch, though the package still contains those functions."""
    write(site, {"intellifold-2.0.3.dist-info/METADATA": "Name: intellifold\nVersion: 2.0.3\n"})
    with pytest.raises(
        DropInError, match=r'got intellifold 2\.0\.3. Install "intellifold>=2\.0,<2\.0\.3"'
    ):
        drop_in.switch("intellifold")


def test_every_client_has_its_launcher_and_its_replacements():
    for client in clients.CLIENTS.values():
        launcher = clients.LAUNCHERS / f"run_{client.name}.py"
        assert f'run("{client.name}")' in launcher.read_text()
        for _, _, where in clients.functions(client):
            module, _, name = where.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_import_loads_none_of_this():
    code = (
        "import sys, deepspeed4science; deepspeed4science.DS4Sci_EvoformerAttention; "
        "print([m for m in sys.modules if m.startswith('deepspeed4science.')])"
    )
    loaded = run(ROOT, "-c", code).stdout
    for name in ("drop_in", "triangle", "nn"):
        assert f"'deepspeed4science.{name}" not in loaded
    code = "import sys, deepspeed4science; print('torch' in sys.modules)"
    assert run(ROOT, "-c", code).stdout.strip() == "False"
