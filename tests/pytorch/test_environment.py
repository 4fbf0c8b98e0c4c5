"""What surrounds a layer: compilation, tracing, worker processes, replicas, devices."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from ranks import new_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from twins import DIM, ROWS, embedding_twins, gradient_of, rows_of, weight_of

import embedrock as er
import embedrock.torch as ert
from slow import slow

IDS = torch.tensor([3, 1, 3, 7])


# ---------------------------------------------------------------- tracing (torch.compile: test_compiled.py)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_tracing_is_refused():
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(er.UnsupportedError, match=r"torch\.jit\.trace.*torch\.compile works"):
        torch.jit.trace(layer, IDS)


@pytest.mark.parametrize(("strict", "error"), [(False, er.UnsupportedError), (True, RuntimeError)])
def test_export_is_refused(strict: bool, error: type[Exception]):
    with pytest.raises(error, match=r"Embedding\(23, 5\) cannot be exported .*Export ert\.freeze\(model\)"):
        torch.export.export(ert.Embedding(ROWS, DIM).eval(), (IDS,), strict=strict)


# ---------------------------------------------------------------- replicas and processes


def test_a_replaced_handle_is_refused():
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(er.UnsupportedError, match="DataParallel"):
        torch.func.functional_call(layer, {"handle": torch.zeros((), requires_grad=True)}, (IDS,))


def test_function_transforms_are_refused_by_torch():
    layer = ert.Embedding(ROWS, DIM)
    with pytest.raises(RuntimeError):
        torch.func.vmap(layer)(IDS)


def test_sharing_memory_is_refused():
    with pytest.raises(er.UnsupportedError, match="share_memory"):
        nn.Sequential(ert.Embedding(ROWS, DIM)).share_memory()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("in_buckets", [False, True])
def test_one_distributed_process(in_buckets: bool):
    mine, theirs = embedding_twins()
    dense = nn.Linear(DIM, 1)
    for layer in (mine, theirs):
        model = nn.Sequential(layer, copy.deepcopy(dense))
        optimizer = ert.SGD(mine, lr=0.5) if layer is mine else torch.optim.SGD(theirs.parameters(), lr=0.5)
        replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=in_buckets)
        for _ in range(3):
            model.zero_grad()
            replica(IDS).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    torch.testing.assert_close(weight_of(mine), theirs.weight.detach())


class Ids(Dataset[Tensor]):
    """Batches of ids, for a DataLoader; with a layer, a worker looks rows up too."""

    def __init__(self, layer: ert.Embedding | None = None) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        ids = torch.randint(0, 100_000, (9000,), generator=torch.Generator().manual_seed(index))
        return ids if self.layer is None else self.layer(ids).detach()


def in_a_worker(_: object) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def several_threads() -> Iterator[None]:
    before = er.get_threads()
    er.set_threads(4)
    yield
    er.set_threads(before)


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), *slow(("spawn", 1), ("spawn", 2))])
def test_data_loader_workers_beside_a_table(method: str, workers: int):
    layer = ert.Embedding(100_000, 16)
    optimizer = ert.Adam(layer)
    loader = DataLoader(Ids(), batch_size=None, num_workers=workers, multiprocessing_context=method)
    expected = list(map(Ids().__getitem__, range(20)))
    for ids, same in zip(loader, expected, strict=True):
        optimizer.zero_grad()
        assert torch.equal(ids, same)
        layer(ids).square().sum().backward()
        optimizer.step()
    assert layer.table.steps == 20


@pytest.mark.usefixtures("several_threads")
def test_forked_workers_may_look_rows_up():
    layer = ert.Embedding(100_000, 16)
    optimizer = ert.SGD(layer, lr=0.1)
    layer(torch.arange(50_000)).square().sum().backward()  # the threads have worked before the fork
    optimizer.step()
    data = Ids(layer.eval())
    loader = DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context="fork", worker_init_fn=in_a_worker
    )
    for index, rows in enumerate(loader):
        assert torch.equal(rows, data[index])


def test_spawned_workers_cannot_be_given_rows():
    loader = DataLoader(Ids(ert.Embedding(9, 2)), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(er.UnsupportedError, match="cannot be pickled"):
        next(iter(loader))


def in_child(expression: str) -> np.ndarray:
    return eval(expression, {"er": er}).lookup(np.arange(9))


@pytest.mark.parametrize("of", ["a group", *slow("a table")])
def test_the_remedy_for_a_table_on_disk_opens_it_in_a_new_process(tmp_path: Path, of: str) -> None:
    path = tmp_path / "users.rock"
    if of == "a group":
        group = er.Group(path=str(path), memory="2MiB")
        layer = ert.Embedding(9, 2, group=group, name="users")
    else:
        layer = ert.Embedding(9, 2, path=path, memory="1MiB")
    layer.table.assign([3], np.ones((1, 2), np.float32))
    layer.table.commit()
    with new_processes().Pool(1) as pool:
        with pytest.raises((er.UnsupportedError, er.ArgumentError)) as caught:
            pool.apply(pickle.loads, (pickle.dumps(layer),))
        found = re.search(r"er\.open\(.*?mode=\"r\"\)(\['\w+'\])?", str(caught.value))
        assert found is not None
        assert "state()" not in str(caught.value)
        np.testing.assert_array_equal(pool.apply(in_child, (found[0],)), layer.table.lookup(np.arange(9)))


# ---------------------------------------------------------------- devices and moves


def test_moves_that_change_nothing():
    mine, theirs = embedding_twins()
    model = nn.Sequential(mine, nn.Linear(DIM, 1))
    handle = mine.handle
    for move in (model.cpu, model.float, lambda: model.to("cpu"), lambda: model.to("meta")):
        move()
        assert mine.handle is handle
    assert mine(IDS).device.type == "cpu"
    for layer in (mine, theirs):
        layer(IDS).sum().backward()
    mine.to("cpu")
    assert theirs.weight.grad is not None
    assert torch.equal(gradient_of(mine), theirs.weight.grad)  # also what is pending stays


def test_a_model_made_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    model.to_empty(device="cpu")
    optimizer = ert.SGD(model)
    model[0](IDS).sum().backward()
    optimizer.step()
    assert rows_of(model[0]).steps == 1


def test_a_default_dtype_is_that_of_outputs_and_not_of_the_handle():
    torch.set_default_dtype(torch.float64)
    try:
        layer, told = ert.Embedding(ROWS, DIM), ert.Embedding(ROWS, DIM, dtype=torch.float32)
        pretrained = ert.Embedding.from_pretrained(torch.ones(ROWS, DIM, dtype=torch.float32))
        nn.Linear(DIM, 1)(layer(IDS)).sum().backward()  # of that dtype, too
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.handle.dtype == told(IDS).dtype == pretrained(IDS).dtype == torch.float32
    assert layer(IDS).dtype == torch.float64
    assert layer.table.spec.dtype == "float32"


def test_a_dtype_that_rows_are_not_stored_in():
    with pytest.raises(er.ArgumentError, match=r"got torch\.float64\. For .* call layer\.to\(torch\.float64\)"):
        ert.Embedding(ROWS, DIM, dtype=torch.float64)
    assert ert.Embedding(ROWS, DIM).to(torch.float64)(IDS).dtype == torch.float64


@pytest.mark.gpu
def test_outputs_follow_the_model_to_the_gpu():
    mine, theirs = embedding_twins(ROWS, 16)
    models = [nn.Sequential(layer, nn.Linear(16, 1)).cuda() for layer in (mine, theirs)]
    models[1][1].load_state_dict(models[0][1].state_dict())
    rows, dense = ert.SGD(models[0], lr=0.5), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(3):
        ids = (IDS + step).to("cpu" if step == 1 else "cuda")
        for model, optimizer in zip(models, (rows, dense), strict=True):
            optimizer.zero_grad()
            out = model(ids if model is models[0] else ids.cuda())
            assert out.device.type == "cuda"
            out.square().sum().backward()
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
            optimizer.step()
    torch.testing.assert_close(weight_of(mine), theirs.weight.detach().cpu(), rtol=1e-5, atol=1e-5)


def test_autocast():
    layer = ert.Embedding(ROWS, DIM)
    optimizer = ert.SGD(layer, lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        out = nn.Linear(DIM, 1)(layer(IDS))
        assert out.dtype == torch.bfloat16
    out.sum().backward()
    optimizer.step()
    assert np.isfinite(layer.table.lookup(IDS.numpy())).all()
