"""Lightning starts the processes of other ranks itself: each runs on this op. With Lightning's own
launcher, and Boltz's own layer in what it trains.
"""

import os
import subprocess
import sys

from deepspeed4science.drop_in import clients
from tests.clients import conftest
from tests.unit.imitated_models import ROOT, write

RANKS = 2
DRIVER = """
    import os, pathlib, sys
    import lightning, torch
    from tests.clients import conftest
    sys.modules.update(conftest.stand_ins())
    from boltz.model.layers.triangular_attention import attention, primitives

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = attention.TriangleAttention(16, 8, 2)

        def training_step(self, batch, _):
            o = self.layer(batch, mask=torch.ones(batch.shape[:3]), use_kernels=True)
            return (o - batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def cli():
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4, 20, 20, 16), batch_size=1))
        said = f"{trainer.global_rank} of {trainer.world_size}, {trainer.global_step} steps, "
        said += primitives.kernel_triangular_attn.__module__
        pathlib.Path(sys.argv[1], f"rank{trainer.global_rank}").write_text(said)
"""


def test_every_rank_is_switched(request, tmp_path):
    cache = request.config.cache.mkdir("clients")
    folders = [conftest.installed(cache, name) for name in ("lightning", "boltz")]
    site, said = tmp_path / "site", tmp_path / "said"
    said.mkdir()
    version, _ = clients.find("boltz").versions
    write(
        site,
        {
            "driver.py": DRIVER,
            f"boltz-{version}.dist-info/METADATA": f"Name: boltz\nVersion: {version}\n",
            f"boltz-{version}.dist-info/entry_points.txt": "[console_scripts]\nboltz = driver:cli",
        },
    )
    path = os.pathsep.join(map(str, (site, *folders, ROOT)))
    command = [sys.executable, "-m", "deepspeed4science", "run", "boltz", str(said)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    found = [file.read_text() for file in sorted(said.iterdir())]
    ours = "deepspeed4science.drop_in.functions"
    assert found == [f"{rank} of 2, 2 steps, {ours}" for rank in range(RANKS)], done.stderr[-3000:]
    assert done.stderr.count("deepspeed4science ") >= RANKS
