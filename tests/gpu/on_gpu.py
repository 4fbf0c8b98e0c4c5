"""All that is to be known of the GPU tier on a machine with a GPU, in ten minutes: ``make gpu``.

It needs PyTorch with Triton, Numba and pytest, no installation of Embedrock, and goes on after whatever fails. Each
step is a process with a time limit of its own; what they print is in the log, what they found is in the JSON, which is
written anew after each step.

    python tests/gpu/on_gpu.py --out build/gpu         gpu.json and gpu.log there
    python tests/gpu/on_gpu.py --out build/gpu --dry   without a GPU, at the size of a toy: does the script work?
    python tests/gpu/on_gpu.py --out build/gpu --steps facts,rates

Steps that say most come first. For those that ten minutes leave out, run it again with the ``--steps`` that it prints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET_S = 575.0  # of all steps: the machine may be lent for ten minutes a command, and what hangs takes time to end
LEFT_OUT = "left out, for want of time"
FOUND = "FOUND "  # what a step prints before JSON for the report
ENDING_S = 5.0  # that a step has to end, once it was asked to
MOST_SAID = 1 << 20  # characters that a step has in the log
# Of a test, by one process or (in brackets) by several; and why one failed.
OUTCOME = re.compile(r"^(?:(\S+::.*?)|\[gw\d+\] \[ *\d+%\]) (PASSED|FAILED|ERROR|SKIPPED)\b(?: (\S+::.*?) *$)?", re.M)
WHY = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?) - (.*)$", re.M)
PROCESSES = 8  # that run tests, most of whose time is that of the compiler
SANITIZER = "compute-sanitizer"
TOOLS = "memcheck", "racecheck", "synccheck"
# The tests that say most come first, as they may not all be done in time.
TESTS = (
    "tables",
    "joint",
    "open_ids",
    "joint_open",
    "gradients",
    "cache",
    "plan",
    "sums",
    "gate",
    "pooling",
    "limits",
    "pinning",
    "kernels",
    "joint_cache",
    "found",
    "all_or_none",
    "over_disk",
    "come_and_go",
    "group_in_ram",
    "open_ids_in_group",
    "group_on_disk",
    "trace_gate",
    "late",
    "real_graphs",
)
# Rows that the CPU uses for want of something are no test of the GPU. All else that is deprecated there is only told.
ERRORS = "embedrock.storage.listeners.PlacementWarning", "embedrock.device.pinned.PinningWarning"


class Step(NamedTuple):
    """A program that finds something out.

    Attributes:
        name: of the step.
        seconds: after which it is ended.
        command: to run.
        report: a JSON file that it writes, if it does.
        needs: a program without which the step is skipped.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    report: Path | None = None
    needs: str = sys.executable


def steps(out: Path, dry: bool) -> list[Step]:
    """Return all steps, in order."""
    python, own = sys.executable, str(HERE / "on_gpu_steps.py")
    # Without PyTorch's own blocks of memory, of which the tool would see one.
    watched = "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", SANITIZER, "--error-exitcode", "1", "--tool"
    return [
        Step("facts", 50, (python, own, "facts")),
        Step("modes", 80, (python, own, "modes")),
        _bench("bench", 150, "forum", 95, out, dry),
        _bench("cache", 140, "cache", 80, out, dry),
        Step("tests", 150, (python, *_pytest(dry))),
        Step("graphs", 40, (python, own, "graphs")),
        Step("forum", 80, (python, own, "forum")),
        Step("profile", 90, (python, own, "profile")),
        Step("late", 40, (python, own, "late")),
        Step("open ids", 40, (python, own, "open_ids")),
        Step("rates", 40, (python, own, "rates")),
        *(Step(tool, 120, (*watched, tool, python, own, "cached"), needs=SANITIZER) for tool in TOOLS),
    ]


def _bench(name: str, seconds: float, parts: str, budget_s: int, out: Path, dry: bool) -> Step:
    """Return a step of the benchmark, in which nothing begins after its budget, as it writes its report last."""
    report = out / f"{name}.json"
    toy = "--toy", "--rounds", "1", "--steps", "1", "--seconds", "0.001", "--implementations", "torch-sparse-gpu,ours-a"
    options = toy if dry else ("--rounds", "3", "--seconds", "5", "--timeout", "60")
    command = sys.executable, "-m", "benchmarks", "gpu", "--parts", parts, "--budget", str(budget_s), *options
    return Step(name, seconds, (*command, "--json", str(report)), report)


def _pytest(dry: bool) -> list[str]:
    """Return the words for pytest, of whatever version, and with whatever settings that its own may not know."""
    files = [str(HERE / f"test_gpu_{name}.py") for name in (("plan",) if dry else TESTS)]
    marks = "not slow and not gpu" if dry else "not slow"  # conftest.py leaves out what cannot run
    several = not dry and importlib.util.find_spec("xdist") is not None
    processes = ["-p", "xdist", "-n", str(min(PROCESSES, os.cpu_count() or 1))] if several else []
    warnings = [word for name in ERRORS for word in ("-W", f"error::{name}")]
    where = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(ROOT), "-p", "no:cacheprovider"]
    return ["-m", "pytest", "-v", "--tb", "native", *where, *processes, *warnings, "-m", marks, *files]


class Run:
    """Makes steps, one after another, and writes down what came of each.

    Args:
        out: folder of the report.
        environment: of the steps.
        budget_s: seconds in all.
    """

    def __init__(self, out: Path, environment: dict[str, str], budget_s: float = BUDGET_S) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._json, self._log = out / "gpu.json", out / "gpu.log"
        self._environment, self._end = environment, time.monotonic() + budget_s
        self.results: list[dict[str, Any]] = []
        self._log.write_text("")

    def make(self, several: Sequence[Step]) -> bool:
        """Make steps, whatever becomes of those before; return whether none failed."""
        for step in several:
            self.results.append({"name": step.name, "status": "not begun"})
        for index, step in enumerate(several):
            self.results[index] = self._made(step)
            self._write()
            print(f"{step.name:10} {self.results[index]['status']}", flush=True)
        return all(result["status"] in ("ok", "skipped") for result in self.results)

    def _made(self, step: Step) -> dict[str, Any]:
        seconds = min(step.seconds, self._end - time.monotonic())
        if shutil.which(step.needs, path=self._environment.get("PATH")) is None:
            return {"name": step.name, "status": "skipped", "why": f"{step.needs} is not installed"}
        if seconds <= 0:
            return {"name": step.name, "status": LEFT_OUT}
        begin, start = self._log.stat().st_size, time.monotonic()
        with self._log.open("a") as log:
            log.write(f"\n===== {step.name}: {' '.join(step.command)}\n")
            log.flush()
            status = self._status(step, seconds, log)
        said = self._said(begin)
        taken = round(time.monotonic() - start, 2)
        return {"name": step.name, "status": status, "seconds": taken, **dict(_found(said)), **_report(step.report)}

    def _said(self, begin: int) -> str:
        """Return what was said since; if that is very much, the log keeps its beginning and its end."""
        with self._log.open("r+", errors="replace") as log:
            log.seek(begin)
            said = log.read()
            if len(said) > MOST_SAID:
                log.seek(begin)
                log.truncate()
                log.write(f"{said[: MOST_SAID // 2]}\n[...]\n{said[-MOST_SAID // 2 :]}")
        return said

    def _status(self, step: Step, seconds: float, log: Any) -> str:
        try:
            process = subprocess.Popen(
                step.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, env=self._environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"failed: {error}"
        try:
            code = process.wait(seconds)
            return "ok" if code == 0 else f"failed: exit status {code}"
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s"
        finally:  # also what it has started
            _end(process)

    def _write(self) -> None:
        new = self._json.with_suffix(".new")
        new.write_text(json.dumps({"steps": self.results}, indent=1))
        os.replace(new, self._json)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)  # if it runs: pytest tells what failed so far, and others where they were
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _found(said: str) -> Iterator[tuple[str, Any]]:
    for line in said.splitlines():
        if line.startswith(FOUND):
            yield from json.loads(line.removeprefix(FOUND)).items()
    outcomes = [(before or after, kind) for before, kind, after in OUTCOME.findall(said)]
    if outcomes:
        yield "tests", {kind: sum(one == kind for _, one in outcomes) for _, kind in outcomes}
        yield "failed", [name for name, kind in outcomes if kind in ("FAILED", "ERROR")]
        yield "why", dict(WHY.findall(said))


def _report(path: Path | None) -> dict[str, Any]:
    return {"report": json.loads(path.read_text())} if path is not None and path.exists() else {}


def environment(dry: bool) -> dict[str, str]:
    """Return the variables of steps: they find Embedrock in the checkout, and a stand-in for Hypothesis if need be."""
    paths = [str(ROOT / "src"), str(ROOT), str(HERE), str(ROOT / "tests" / "support")]
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        paths.append(str(HERE / "stand_in"))
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    of_dry = {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
    programs = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]  # where CUDA's own are by default
    own = {
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join([*paths, *inherited]),
        "TRITON_INTERPRET": "1" if dry else "0",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "300",  # or pytest tells of long names no reason
        "PYTHONFAULTHANDLER": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "EMBEDROCK_THREADS": str(os.cpu_count()),
    }
    return {**os.environ, **own, **of_dry}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the steps; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of gpu.json and gpu.log")
    parser.add_argument("--dry", action="store_true", help="without a GPU, at the size of a toy")
    parser.add_argument("--steps", default="", help="some of them, by commas")
    given = parser.parse_args(arguments)
    every = steps(given.out.resolve(), given.dry)
    wanted = given.steps.split(",") if given.steps else [step.name for step in every]
    if unknown := set(wanted) - {step.name for step in every}:
        parser.error(f"no steps: {', '.join(sorted(unknown))}. There are {', '.join(step.name for step in every)}")
    run = Run(given.out, environment(given.dry), BUDGET_S)
    is_fine = run.make([step for step in every if step.name in wanted])
    print(f"{given.out / 'gpu.json'}, {given.out / 'gpu.log'}")
    if left := [result["name"] for result in run.results if result["status"] == LEFT_OUT]:
        print(f"there was no time for --steps {shlex.quote(','.join(left))}")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
