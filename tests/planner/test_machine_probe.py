"""What a process finds out for `embedrock machine` that imports PyTorch: GPUs, and the network between processes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from embedrock.planner import machine as machines

TOLD = {
    "gpus": [{"name": "G", "memory_bytes": 1, "copy": 1.0, "rows": 1.0, "to_device": 1.0, "to_host": 1.0}],
    "network": {"latency": 1e-4, "rate": 1e9, "how": "gloo"},
}


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (json.dumps(TOLD), (1, "gloo")),
        (json.dumps({"gpus": [], "network": None}), (0, None)),
        ("Segmentation fault", (None, None)),
        (json.dumps({"gpus": [{"name": "G"}], "network": None}), (None, None)),
    ],
)
def test_what_the_process_prints(monkeypatch: pytest.MonkeyPatch, printed: str, found: tuple[Any, Any]):
    done = subprocess.CompletedProcess([], 0, printed, "")
    monkeypatch.setattr(machines.subprocess, "run", lambda *words, **options: done)
    monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: object())
    gpus, network = machines._by_pytorch()
    assert (None if gpus is None else len(gpus), network and network.how) == found


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines.importlib.util, "find_spec", lambda name: None)
    assert machines._by_pytorch() == (None, None)
    told = machines.told(machines.EXAMPLE)
    assert told["GPU"] == told["network"] == "not measured: PyTorch is not there"


@pytest.mark.slow
def test_two_processes_meet():
    pytest.importorskip("torch")
    gpus, network = machines._by_pytorch()
    assert gpus is not None
    assert network is not None
    assert 0 < network.latency < 1
    assert network.rate > 1e6


@pytest.mark.slow
def test_a_device_is_timed():
    torch = pytest.importorskip("torch")
    from embedrock.device.probe import gpu_facts

    found = gpu_facts(torch.device("cpu"), lambda: None, nbytes=1 << 20)
    assert set(found) == {"copy", "rows", "to_device", "to_host"}
    assert all(rate > 0 for rate in found.values())
