"""All that is to be known of the GPU tier on a machine with a GPU, in ten minutes: ``make gpu``.

It needs PyTorch with Triton, Numba and pytest, no installation of Embedrock, and goes on after whatever fails. Each
step is a process with a time limit of its own; what they print is in the log, what they found is in the JSON, which is
written anew after each step.

    python tests/gpu/on_gpu.py --out build/gpu         gpu.json and gpu.log there
    python tests/gpu/on_gpu.py --out build/gpu --dry   without a GPU, at the size of a toy: does the script work?
    python tests/gpu/on_gpu.py --out build/gpu --steps facts,rates
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET_S = 590.0  # of all steps: the machine may be lent for ten minutes a command
FOUND = "FOUND "  # what a step prints before JSON for the report
ENDING_S = 5.0  # that a step has to end, once it was asked to
OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
SANITIZER = "compute-sanitizer"
TOOLS = "memcheck", "racecheck", "synccheck"
# The tests that say most come first, as they may not all be done in time.
TESTS = (
    "tables",
    "joint",
    "open_ids",
    "gradients",
    "cache",
    "plan",
    "sums",
    "gate",
    "pooling",
    "limits",
    "pinning",
    "kernels",
)


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
    files = [str(HERE / f"test_gpu_{name}.py") for name in (("plan",) if dry else TESTS)]
    marks = "not slow and not gpu" if dry else "not slow"  # conftest.py leaves out what cannot run
    pytest = "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "minversion=7", "-m", marks, *files
    bench, report = ("-m", "embedrock", "bench", "gpu"), out / "bench.json"
    effort = ("--toy", "--parts", "limits") if dry else ("--rounds", "3", "--seconds", "5", "--timeout", "60")
    # Without PyTorch's own blocks of memory, of which the tool would see one.
    watched = "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", SANITIZER, "--error-exitcode", "1", "--tool"
    return [
        Step("facts", 30, (python, own, "facts")),
        Step("warm", 60, (python, own, "warm")),
        Step("tests", 150, (python, *pytest)),
        Step("rates", 40, (python, own, "rates")),
        Step("late", 40, (python, own, "late")),
        Step("open ids", 40, (python, own, "open_ids")),
        Step("graphs", 30, (python, own, "graphs")),
        Step("bench", 150, (python, *bench, *effort, "--budget", "120", "--json", str(report)), report),
        Step("profile", 40, (python, own, "profile")),
        *(Step(tool, 40, (*watched, tool, python, own, "cached"), needs=SANITIZER) for tool in TOOLS),
    ]


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
        if shutil.which(step.needs) is None:
            return {"name": step.name, "status": "skipped", "why": f"{step.needs} is not installed"}
        if seconds <= 0:
            return {"name": step.name, "status": "left out, for want of time"}
        begin, start = self._log.stat().st_size, time.monotonic()
        with self._log.open("a") as log:
            log.write(f"\n===== {step.name}: {' '.join(step.command)}\n")
            log.flush()
            status = self._status(step, seconds, log)
        with self._log.open(errors="replace") as log:
            log.seek(begin)
            said = log.read()
        taken = round(time.monotonic() - start, 2)
        return {"name": step.name, "status": status, "seconds": taken, **dict(_found(said)), **_report(step.report)}

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
    outcomes = OUTCOME.findall(said)
    if outcomes:
        yield "tests", {kind: sum(one == kind for _, one in outcomes) for _, kind in outcomes}
        yield "failed", [name for name, kind in outcomes if kind in ("FAILED", "ERROR")]


def _report(path: Path | None) -> dict[str, Any]:
    return {"report": json.loads(path.read_text())} if path is not None and path.exists() else {}


def environment(dry: bool) -> dict[str, str]:
    """Return the variables of steps: they find Embedrock in the checkout, and a stand-in for Hypothesis if need be."""
    paths = [str(ROOT / "src"), str(HERE), str(ROOT / "tests" / "support")]
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        paths.append(str(HERE / "stand_in"))
    inherited = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    of_dry = {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join([*paths, *inherited]), "TRITON_INTERPRET": "1" if dry else "0",
        "PYTHONUNBUFFERED": "1", "EMBEDROCK_THREADS": str(os.cpu_count()), **of_dry,
    }  # fmt: skip


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
    run = Run(given.out, environment(given.dry))
    is_fine = run.make([step for step in every if step.name in wanted])
    print(f"{given.out / 'gpu.json'}, {given.out / 'gpu.log'}")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
