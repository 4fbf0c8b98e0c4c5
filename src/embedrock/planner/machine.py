"""`Machine`: what this machine can do, measured once and kept in a file of the user's cache folder."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from embedrock.errors import EmbedrockError
from embedrock.machine import probe
from embedrock.machine.ram import memory_limit, rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.machine.threads import get_threads, set_threads
from embedrock.planner.calibration import Say, calibrate
from embedrock.planner.cost import TERMS, Disk, Runs, Taken, Work, faster, fit
from embedrock.planner.near import Gpu
from embedrock.planner.sharing import Network
from embedrock.process import platform
from embedrock.store.reading import LONGEST_REQUEST

FORMAT = 5
FILE = f"machine-{FORMAT}.json"  # another version of Embedrock has another one
READ_BYTES = 192 << 20  # of the file that is read at random
AT_ONCE = (1, 4, 16, 64, 256, 1024, 4096)
PROBE_S = 0.25  # for each measurement of the disk
STREAMS = 32  # long reads at once
ROW_BYTES = (64, 256, 1024)
PROBE, PROBE_LIMIT_S = "embedrock.device.probe", 60.0  # a program of its own


class MachineFileError(EmbedrockError, ValueError):
    """The file of a machine's numbers cannot be read."""


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        time: when, seconds since 1970.
        load: processes that wanted a core meanwhile; more than there are cores make all numbers too low.
        cores: that this process may use.
        ram_bytes: that it may use.
        base_bytes: RAM of a process with next to no rows: Python, NumPy, Numba, the kernels, and what uses files.
        copy: bytes/s, from memory to memory, by one thread.
        rows: rows/s gathered at random, by their bytes.
        scaling: how many times faster than one thread so many gather rows of 256 bytes.
        folder: whose disk was measured.
        disk: what it gives.
        constants: of `embedrock.planner.cost`, found by the runs.
        runs: steps that were measured.
        gpus: what each can do, none where there is none; None: it could not be found out, as PyTorch is not there.
        network: between two processes of this machine; None: likewise.
    """

    time: float
    load: float
    cores: int
    ram_bytes: int
    base_bytes: int
    copy: float
    rows: dict[int, float]
    scaling: dict[int, float]
    folder: str
    disk: Disk
    constants: dict[str, float]
    gpus: tuple[Gpu, ...] | None = None
    network: Network | None = None
    runs: Runs = ()

    def joined(self, other: Machine) -> Machine:
        """Return it with whatever was faster in another measurement: nothing takes less time than it needs."""
        runs, disk = faster(self.runs, other.runs), self.disk.faster(other.disk)
        rows = {size: max(rate, other.rows.get(size, rate)) for size, rate in self.rows.items()}
        copy, load = max(self.copy, other.copy), min(self.load, other.load)
        constants = fit(runs, disk) if runs else self.constants
        return replace(self, runs=runs, disk=disk, rows=rows, copy=copy, load=load, constants=constants)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        gpus = None if self.gpus is None else [gpu._asdict() for gpu in self.gpus]
        network = None if self.network is None else self.network._asdict()
        own = {"disk": self.disk._asdict(), "gpus": gpus, "network": network}
        runs = [[work._asdict(), taken._asdict()] for work, taken in self.runs]
        return {"format": FORMAT, **asdict(self), **own, "runs": runs}

    @classmethod
    def of_json(cls, told: Any) -> Machine:
        """Return what `to_json` told.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        if told.pop("format") != FORMAT:
            raise ValueError("another format")
        at_once, seconds, append, stream = (told["disk"][name] for name in Disk._fields)
        told["disk"] = Disk(tuple(map(int, at_once)), tuple(map(float, seconds)), float(append), float(stream))
        told["gpus"] = None if told["gpus"] is None else tuple(Gpu(**gpu) for gpu in told["gpus"])
        told["network"] = None if told["network"] is None else Network(**told["network"])
        told["runs"] = [(Work(**work), Taken(**taken)) for work, taken in told["runs"]]
        for name, kind in (("rows", int), ("scaling", int), ("constants", str)):
            told[name] = {kind(key): float(value) for key, value in told[name].items()}
        return cls(**told)


def cache_file() -> Path:
    """Return where the numbers are kept."""
    from embedrock.kernels.cpu.machine_code import user_cache_folder  # which loads Numba

    return user_cache_folder() / FILE


def load(path: Path | None = None) -> Machine | None:
    """Return what was measured before; None where nothing was.

    Raises:
        MachineFileError: the file is something else.
    """
    path = path or cache_file()
    try:
        return Machine.of_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise MachineFileError(
            f"the numbers of this machine in {str(path)!r} cannot be read ({type(error).__name__}: {error}). "
            "Measure anew: embedrock machine --again."
        ) from None


def save(machine: Machine, path: Path | None = None) -> Path:
    """Keep what was measured, for the next programs."""
    path = path or cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(machine.to_json(), file, indent=1)
    os.replace(file.name, path)
    return path


def measure(folder: str | os.PathLike[str], say: Say = lambda text: None) -> Machine:
    """Measure this machine, and the disk that a folder lies on: half a minute, 400 MB of RAM and of disk.

    Args:
        folder: that exists; a folder in it is made, and removed.
        say: is told what is being measured.
    """
    say("memory")
    rows = {size: probe.row_rate(size) for size in ROW_BYTES}
    copy, scaling = probe.copy_rate(), _scaling()
    base, load = _base_bytes(), platform.load_average()
    with tempfile.TemporaryDirectory(prefix="embedrock-machine-", dir=folder) as scratch:
        say("disk")
        disk = _disk(Path(scratch) / "probe")
        runs = calibrate(Path(scratch), say)
    say("GPUs and the network")
    found = _by_pytorch()
    cores, ram, where = platform.usable_cores(), memory_limit(), os.path.abspath(folder)
    fitted = fit(runs, disk)
    return Machine(time.time(), load, cores, ram, base, copy, rows, scaling, where, disk, fitted, *found, runs)


def _by_pytorch() -> tuple[tuple[Gpu, ...] | None, Network | None]:
    """Return what a process found out that imports PyTorch, so that this one need not; None where it is not there."""
    if importlib.util.find_spec("torch") is None:
        return None, None
    words = [sys.executable, "-m", PROBE]
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=_environment(), timeout=PROBE_LIMIT_S)
        told = json.loads(done.stdout)
        gpus = tuple(Gpu(**gpu) for gpu in told["gpus"])
        return gpus, None if told["network"] is None else Network(**told["network"])
    except (subprocess.TimeoutExpired, ValueError, TypeError, KeyError):
        return None, None


def _scaling() -> dict[int, float]:
    """Return how many times faster several threads gather rows than one."""
    before, rates = get_threads(), dict[int, float]()
    try:
        for threads in sorted({1, 2, 4, 8, 16, platform.usable_cores()}):
            if threads <= platform.usable_cores():
                set_threads(threads)
                rates[threads] = probe.row_rate(256)
    finally:
        set_threads(before)
    return {threads: rate / rates[1] for threads, rate in rates.items()}


def _base_bytes() -> int:
    """Return the RAM that a process without tables takes: one that has stepped a table on disk, of very few rows.

    The first one may have to compile kernels, which takes 100 MiB more; the second finds them.
    """
    return min(_small_process_bytes() for _ in range(2))


def _small_process_bytes() -> int:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", _SMALL, os.path.join(folder, "small.rock")]
        done = subprocess.run(words, capture_output=True, text=True, env=_environment())
    return int(done.stdout) if done.returncode == 0 else rss_bytes()


# Rows leave its cache and are read again, so that all that reads and writes is there.
_SMALL = """
import sys
import embedrock as er
from embedrock.machine.ram import rss_bytes
with er.Table(10**6, 16, rule=er.Adam(), path=sys.argv[1], memory="256KiB") as table:
    for step in range(24):
        ids = [100 * (step % 12) + row for row in range(200)]
        table.update(ids, table.lookup(ids))
    table.commit()
    print(rss_bytes())
"""


def _environment() -> dict[str, str]:
    """Return environment variables by which a process finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _disk(path: Path) -> Disk:
    append = probe.write_rate(path, READ_BYTES, keep=True)
    reader = probe.BlockReader([path])
    try:
        seconds = tuple(count / reader.rate(PROBE_S, count) for count in AT_ONCE)
        stream = reader.rate(PROBE_S, STREAMS, LONGEST_REQUEST) * LONGEST_REQUEST
    finally:
        reader.close()
        path.unlink()
    return Disk(AT_ONCE, seconds, append, stream)


# A laptop of some years: for examples and tests that should not depend on where they run.
EXAMPLE = Machine(
    time=0.0,
    load=0.0,
    cores=4,
    ram_bytes=8 << 30,
    base_bytes=140 << 20,
    copy=1e10,
    rows={64: 8e7, 256: 4e7, 1024: 1e7},
    scaling={1: 1.0, 2: 1.8, 4: 2.5},
    folder=".",
    disk=Disk((1, 16, 256, 4096), (1e-4, 3e-4, 3e-3, 4.5e-2), 1e9, 1e9),
    constants=dict.fromkeys(TERMS, 0.0)
    | {"first": 1.5e-4, "next": 1.5e-4, "position": 1e-8, "position_byte": 4e-10, "row": 8e-8, "row_byte": 2e-10}
    | {
        "new": 2e-7,
        "new_number": 1e-8,
        "grown_byte": 3e-10,
        "first_disk": 1e-4,
        "next_disk": 1e-4,
        "come": 4e-7,
        "leave_call": 2e-4,
    }
    | {"leave": 4e-7, "moved_byte": 2e-10, "spill_call": 1e-4, "spill": 4e-7, "spill_byte": 2e-9, "read_call": 2e-4}
    | {"read": 1e-6, "read_byte": 1e-9, "reader": 5e-6, "cached_request": 1e-6, "disk_read": 1.0},
)


def told(machine: Machine) -> dict[str, str]:
    """Return what was measured, for people."""
    threads = ", ".join(f"{n} threads {factor:.1f}x" for n, factor in machine.scaling.items())
    by_count = zip(machine.disk.at_once, machine.disk.seconds, strict=True)
    busy = f"; busy, with a load of {machine.load:.1f}: measure again" if machine.load > machine.cores else ""
    return {
        "cores": f"{machine.cores}; gathering rows, {threads}{busy}",
        "RAM": f"{format_bytes(machine.ram_bytes)}; a process without tables takes {format_bytes(machine.base_bytes)}",
        "copy": f"{machine.copy / 1e9:.1f} GB/s by one thread",
        "random rows": ", ".join(f"{rate / 1e6:.1f} M/s of {size} bytes" for size, rate in machine.rows.items()),
        "disk of": machine.folder,
        "random reads": ", ".join(f"{n / taken:,.0f}/s {n} at once" for n, taken in by_count) + ", of 4 KiB",
        "append": f"{machine.disk.append / 1e6:,.0f} MB/s",
        "GPU": _told_gpus(machine.gpus),
        "network": _told_network(machine.network),
        "a step": ", ".join(f"{name} {value:.3g}" for name, value in machine.constants.items()),
    }


NOT_KNOWN = "not measured: PyTorch is not there"


def _told_gpus(gpus: tuple[Gpu, ...] | None) -> str:
    if not gpus:
        return "none" if gpus is not None else NOT_KNOWN
    return "\n".join(
        f"{gpu.name}, {format_bytes(gpu.memory_bytes)}; copy {gpu.copy / 1e9:.0f} GB/s, {gpu.rows / 1e6:.0f} M/s "
        f"random rows of 256 bytes; from pinned RAM {gpu.to_device / 1e9:.1f} GB/s, to it {gpu.to_host / 1e9:.1f} GB/s"
        for gpu in gpus
    )


def _told_network(network: Network | None) -> str:
    if network is None:
        return NOT_KNOWN
    speed = f"{network.rate / 1e6:,.0f} MB/s each way, {network.latency * 1e6:,.0f} µs a message"
    return f"two processes here, by {network.how}: {speed}"
