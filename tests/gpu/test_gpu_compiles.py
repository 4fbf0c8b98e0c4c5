"""Every GPU kernel is compiled for an H200, whether there is one or not; and what its launches cost the host."""

from __future__ import annotations

import faulthandler
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from embedrock.kernels import gpu
from embedrock.kernels.gpu import runtime
from slow import slow


def all_kernels() -> set[str]:
    """Return the names of all kernels, whatever other tests have imported."""
    for module in pkgutil.iter_modules(gpu.__path__):
        importlib.import_module(f"{gpu.__name__}.{module.name}")
    return {kernel.__name__ for kernel in runtime.KERNELS}


@pytest.fixture(scope="module", params=[["1"], *slow([])], ids=["one of each", "all"])
def told(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return what compile_all.py says, by the first word of its lines."""
    program = Path(__file__).with_name("compile_all.py")
    faulthandler.cancel_dump_traceback_later()  # all kernels may take more than a test may: half an hour at most
    done = subprocess.run([sys.executable, program, *request.param], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_every_kernel_compiles(told: dict[str, str]) -> None:
    missing = sorted(name for name in all_kernels() if told.get(name, "0") == "0")
    assert not missing, f"no function example_* in tests/gpu/examples_*.py launches {', '.join(missing)}"


def said_by_host_cost(argument: str) -> dict[str, Any]:
    """Return what host_cost.py prints."""
    program = Path(__file__).with_name("host_cost.py")
    done = subprocess.run([sys.executable, program, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# In a step of a table, or of ten that are looked up by a collection, ids or bags of two: kernels launched, calls of
# PyTorch that allocate or do work there, and functions of Python called beside PyTorch's own. Fewer is better.
COSTS = {"near": (5, 2, 149), "in place": (5, 3, 160), "cached": (7, 3, 174), "open ids": (6, 2, 169)}
COSTS["open ids in place"] = 6, 4, 192  # of which one asks how many rows there are, while there is room for few more
COSTS |= {"ten near": (5, 4, 201), "ten cached": (7, 5, 261), "ten open ids": (7, 5, 237)}
COSTS |= {"ten of bags, mean": (7, 8, 574), "ten of bags, max": (7, 8, 574)}
COSTS |= {"near, replayed": (0, 2, 60), "ten near, replayed": (0, 2, 89)}  # what is beside the graph
COSTS |= {"near, prefetched": (5, 2, 166), "ten near, prefetched": (5, 4, 236)}  # nothing is done ahead
COSTS |= {"cached, prefetched": (8, 3, 219), "ten cached, prefetched": (8, 5, 326)}
# Beside those of the model alone, whose rows are given.
COSTS |= {"forum, near": (5, 2, 169), "forum, cached": (7, 3, 197), "forum, prefetched": (8, 3, 245)}
MOST_AHEAD = 0.4  # of a step's cost, for the plan of the next batch


def test_a_step_costs_the_host_no_more_than_it_did(told: dict[str, str]) -> None:
    costs = beside_the_model(json.loads(told["costs"]))
    for where, (launches, calls, _) in COSTS.items():
        found = costs[where]
        assert found["launches"] == launches, (where, found["kernels"])
        assert found["calls"] == calls, (where, found["of calls"])
    check_ahead(costs, "launches", "calls")


def beside_the_model(costs: dict[str, Any]) -> dict[str, Any]:
    """Return the costs, for the forum's model without those of the model alone."""
    alone = costs["forum, alone"]
    kinds = "launches", "calls", "python"
    return {
        where: {**found, **{kind: found[kind] - alone[kind] for kind in kinds}} if "forum" in where else found
        for where, found in costs.items()
    }


def check_ahead(costs: dict[str, Any], *kinds: str) -> None:
    """Check what it costs to plan the next batch during a step."""
    pairs = [(f"{where}, prefetched", where) for where in ("near", "ten near", "cached", "ten cached")]
    for ahead, where in (*pairs, ("forum, prefetched", "forum, cached")):
        for kind in kinds:
            assert costs[ahead][kind] <= (1 + MOST_AHEAD) * costs[where][kind], (ahead, kind)


@pytest.mark.slow  # the kernels that steps launch have to be compiled, all of them
def test_a_step_calls_no_more_of_python_than_it_did() -> None:
    costs = beside_the_model(said_by_host_cost("0"))
    for where, (*_, functions) in COSTS.items():
        assert costs[where]["python"] <= functions, where  # later versions of Python call fewer
    check_ahead(costs, "python")


@pytest.mark.slow
def test_no_size_of_a_batch_compiles_a_kernel_anew() -> None:
    later = said_by_host_cost("compiles")
    assert later.keys() >= {"near", "cached", "ten near", "ten cached"}
    assert not any(later.values()), later


# Of a thread, at most: more registers leave room for too few warps, and stack is memory. Ours are few where it matters.
MOST_REGISTERS, MOST_STACK_BYTES = 240, 16
FEW_REGISTERS = {"_step": 80, "_read": 64, "_sum": 128}
FEW_REGISTERS |= {"_search": 96, "_enter": 104, "_file": 64}


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["75", "80", "90", "100"])
def test_kernels_take_no_more_registers_than_they_have_to(capability: str) -> None:
    program = Path(__file__).with_name("resources.py")
    done = subprocess.run([sys.executable, program, capability], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    used = json.loads(done.stdout)
    assert set(used) >= all_kernels()  # and those of tests
    for name, variants in used.items():
        for found in variants:
            assert found["registers"] <= FEW_REGISTERS.get(name, MOST_REGISTERS), name
            assert found["stack"] <= MOST_STACK_BYTES, name
    assert all(found["wide_loads"] for found in used["_step"])  # rows of 64 float32 by 16 bytes
