"""`python -m deepspeed4science run`: a model's command line with its functions switched.

Models are imitated here by packages of a few lines; tests/clients has the real ones.
"""

import pytest

from tests.unit.imitated_models import ATTENTION, BOLTZ, run, write

pytest.importorskip("torch")


def test_command_line_survives_every_way_of_starting_processes_again(site):
    """Lightning starts a rank by `__main__.__spec__` if there is one, else by path; both with
    sys.argv[1:]. multiprocessing imports the script of the parent. The arguments are the model's.
    """
    cli = f"""
        import multiprocessing, os, subprocess, sys, __main__

        def where():
            import {ATTENTION} as module
            return module.kernel_triangular_attn.__module__

        def cli():
            print(os.getenv("RANK", "0"), where(), sys.argv[1:], flush=True)
            if "RANK" in os.environ:
                return 0
            if __main__.__spec__ is None:
                again = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
            else:
                again = [sys.executable, "-m", __main__.__spec__.name, *sys.argv[1:]]
            environment = {{**os.environ, "RANK": "1", "PYTHONPATH": {str(site)!r}}}
            subprocess.run(again, env=environment, check=True)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print("spawned", pool.apply(where))
            return 3
    """
    write(site, {**BOLTZ, "boltz/main.py": cli})
    arguments = ("run", "boltz", "predict", "--dry-run", "a b")
    done = run(site, "-m", "deepspeed4science", *arguments, check=False)
    ours = "deepspeed4science.drop_in.functions"
    assert done.stdout.splitlines() == [
        f"0 {ours} ['predict', '--dry-run', 'a b']",
        f"1 {ours} ['predict', '--dry-run', 'a b']",
        f"spawned {ours}",
    ], done.stderr
    assert done.returncode == 3
    told = [line for line in done.stderr.splitlines() if line.startswith("deepspeed4science ")]
    assert len(told) == 3 and all(f"{ATTENTION}.kernel_triangular_attn" in line for line in told)


def test_ranks_run_the_same_clone(tmp_path):
    """Started in a clone: its code, not that of an installed version, runs in all processes."""
    installed, clone = tmp_path / "installed", tmp_path / "clone"
    cli = """
        import os, subprocess, sys

        def cli():
            print(os.getenv("RANK", "0"), __file__, flush=True)
            if "RANK" not in os.environ:
                again = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
                subprocess.run(again, env={**os.environ, "RANK": "1"}, check=True)
    """
    for folder in (installed, clone):
        write(folder, {**BOLTZ, "boltz/main.py": cli})
    done = run(installed, "-m", "deepspeed4science", "run", "boltz", "predict", cwd=clone)
    assert done.stdout.splitlines() == [f"{rank} {clone}/boltz/main.py" for rank in range(2)]


def test_steps_of_boltzgen_are_switched(site):
    """Its command line starts a process of its own script for each step."""
    place = "boltzgen.model.layers.triangular_attention.primitives"
    write(
        site,
        {
            f"{place.replace('.', '/')}.py": "def kernel_triangular_attn(): ...",
            "boltzgen/resources/main.py": f"""
                def main(config, overrides):
                    import {place} as module
                    print(config, overrides, module.kernel_triangular_attn.__module__)
            """,
            "boltzgen/cli/boltzgen.py": """
                import subprocess, sys
                main_script = "resources/main.py"
                def main():
                    subprocess.check_call([sys.executable, str(main_script), "x.yaml", "a=1"])
            """,
            "boltzgen-0.3.2.dist-info/METADATA": "Name: boltzgen\nVersion: 0.3.2\n",
        },
    )
    done = run(site, "-m", "deepspeed4science", "run", "boltzgen", "run", "design.yaml")
    assert done.stdout.split("\n")[0] == "x.yaml ['a=1'] deepspeed4science.drop_in.functions"


def test_dry_run_says_what_would_be_switched_and_what_is_gone(site):
    write(site, BOLTZ)
    done = run(site, "-m", "deepspeed4science", "run", "--dry-run", "boltz", "predict")
    assert "boltz 2.2.1" in done.stdout
    assert f"{ATTENTION}.kernel_triangular_attn -> deepspeed4science." in done.stdout
    (site / f"{ATTENTION.replace('.', '/')}.py").write_text("")
    done = run(site, "-m", "deepspeed4science", "run", "--dry-run", "boltz", check=False)
    assert done.returncode == 1 and "expected kernel_triangular_attn" in done.stderr


def test_dry_run_of_a_model_that_fails_while_it_is_imported(site):
    write(site, BOLTZ)
    compiles = "raise OSError('CUDA_HOME environment variable is not set.')"
    (site / f"{ATTENTION.replace('.', '/')}.py").write_text(compiles)
    done = run(site, "-m", "deepspeed4science", "run", "--dry-run", "boltz", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{ATTENTION} cannot be imported: OSError: CUDA_HOME environment" in done.stderr


def test_a_model_that_is_not_installed_is_told(tmp_path):
    done = run(tmp_path, "-m", "deepspeed4science", "run", "boltz", "predict", check=False)
    assert done.returncode == 1
    assert "boltz: expected it to be installed" in done.stderr and "Traceback" not in done.stderr
    assert 'pip install "boltz>=2.2,<2.3"' in done.stderr


def test_a_folder_of_a_models_or_librarys_name_is_none(tmp_path):
    """Results in `boltz/`, settings in `deepspeed/`, in the folder where Python is started."""
    for name in ("boltz", "deepspeed"):
        (tmp_path / name).mkdir()
    done = run(tmp_path, "-m", "deepspeed4science", "run", "boltz", "predict", check=False)
    assert done.returncode == 1
    assert "boltz: expected it to be installed" in done.stderr and "Traceback" not in done.stderr
    use = "from deepspeed4science import drop_in; drop_in.use_as_deepspeed(); "
    use += "from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention as it; print(it)"
    assert "DS4Sci_EvoformerAttention" in run(tmp_path, "-c", use).stdout
