"""`torchrun --max-restarts`: a rank dies in the middle of a step, all begin again, and rows end as if nothing was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Rank 1 is killed in a step between two checkpoints, the first time it gets there, where a step is given.
TRAIN = """
import os, signal, sys
import numpy as np, torch, torch.distributed as dist
import embedrock as er, embedrock.torch as ert

folder, killed_at = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = ert.Embedding(10**6, 8, path=f"{folder}/users.rock", memory="1MiB", sharded=True, seed=1)
        self.goods = ert.Embedding(10**6, 8, sharded=True, seed=2)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.users(ids) + self.goods(ids))

model = Net()
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.05)
try:
    begin = ert.load(model, f"{folder}/checkpoints", optimizer=optimizer)
except ert.NoCheckpointError:
    begin = 0
print(f"begins at {begin}\\n", end="", flush=True)  # one write, which the other rank's does not cut
for step in range(begin, 12):
    ids = torch.from_numpy(np.random.default_rng([step, dist.get_rank()]).integers(0, 1000, 64))
    loss = net(ids).square().mean()
    if (step, dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]) == (killed_at, 1, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 4 == 0:
        ert.save(model, f"{folder}/checkpoints", step=step + 1, optimizer=optimizer)
dense = [parameter.detach().numpy() for parameter in ert.dense_parameters(model)]
np.savez(f"{folder}/rank{dist.get_rank()}.npz", *model.users.table.export(), *model.goods.table.export(), *dense)
dist.destroy_process_group()
"""


def train(folder: Path, killed_at: int) -> tuple[list[int], list[dict[str, np.ndarray]]]:
    """Return the steps at which ranks began, and what each had at the end."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    # Else gloo may find addresses of those that died: PyTorch keeps one store for all attempts.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command += [str(folder / "train.py"), str(folder), str(killed_at)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    begun = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("begins at")]
    return begun, [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_is_killed_changes_no_bit(tmp_path: Path) -> None:
    begun, expected = train(tmp_path / "whole", -1)
    assert begun == [0, 0]
    begun, found = train(tmp_path / "killed", 6)
    assert begun == [0, 0, 4, 4]
    for rank in range(2):
        assert found[rank].keys() == expected[rank].keys()
        assert len(expected[rank]["arr_0"]) > 300
        assert all(np.array_equal(found[rank][name], expected[rank][name]) for name in expected[rank])
