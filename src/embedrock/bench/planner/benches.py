"""``bench plan``: what `er.plan` predicts beside what is measured, for settings drawn by a seed."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import embedrock as er
from embedrock.bench.disk.files import scratch_folder
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.processes import ChildError
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Found, Line, Target
from embedrock.bench.planner.contender import Trainer
from embedrock.bench.planner.settings import Setting, drawn
from embedrock.bench.planner.splits import split_over_best
from embedrock.errors import ArgumentError
from embedrock.machine.sizes import format_bytes
from embedrock.planner import machine as machines
from embedrock.planner.cost import Taken
from embedrock.planner.machine import Machine
from embedrock.planner.trial import QUIET, quarter, touch_memory
from embedrock.terminal.arguments import count
from embedrock.terminal.progress import say
from embedrock.terminal.tables import Field, format_lines, format_number, format_whole

SETTINGS = 20
TURNS = 2  # of the machine and all settings, of which the fastest counts
TRIES = 3  # of a setting in a turn, while other programs use the machine
MOST_TOUCHED = 1 << 30  # bytes, before a setting
SPLIT = SETTINGS + 1  # the number of the split, after the settings
SPACE_BYTES = 2 << 30
MACHINE = "machine"  # the name of the line that has its numbers
FIELDS = (
    Field("setting", "name"),
    Field("tables", "tables"),
    Field("rows", "rows", format_whole),
    Field("dim", "dim"),
    Field("batch", "batch", format_whole),
    Field("zipf", "zipf"),
    Field("memory", lambda line: f"{line['share']:.0%}" if line["memory"] else "RAM"),
    Field("ms", lambda line: format_number(line["step_s"] * 1e3)),
    Field("told", lambda line: format_number(line["told_step_s"] * 1e3)),
    Field("off", lambda line: f"{line['step_off']:+.0%}"),
    Field("slowest turn", lambda line: f"{max(line['turns']) / line['step_s'] - 1:+.0%}"),
    Field("misses", "misses", format_whole),
    Field("off", "misses_off", lambda off: f"{off:+.1%}"),
    Field("RAM", "peak_bytes", format_bytes),
    Field("off", lambda line: f"{line['peak_off']:+.1%}"),
    Field("others", lambda line: f"{line['others']:.2f}"),
)


@dataclass(frozen=True)
class PlanEffort(Effort):
    """How much to measure, and where: files go to a new folder in `folder`, which is removed at the end."""

    timeout_s: float = 120.0
    folder: Path = Path()
    seed: int = 17


def numbers(text: str) -> tuple[int, ...]:
    """Read numbers of settings, such as 1-5,8."""
    found = list[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ends = [int(end) if end.isdigit() else 0 for end in (first, last or first)]
        found += range(ends[0], ends[1] + 1) or [0]
    if not all(1 <= number <= SPLIT for number in found):
        raise ArgumentTypeError(f"must be numbers from 1 to {SPLIT} (the split), as 3,7 or 1-5: got {text!r}")
    return tuple(found)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of its own."""
    text = f"numbers of the settings to run, {SPLIT} is the split of memory (default: all)"
    parser.add_argument("--settings", type=numbers, default=tuple(range(1, SPLIT + 1)), metavar="N-N,N,...", help=text)
    text = f"of the machine and all settings, one after the other: the fastest of each counts (default: {TURNS})"
    parser.add_argument("--turns", type=count, default=TURNS, metavar="N", help=text)
    join = "what earlier runs wrote by --json, of these settings or others, to be judged together with these"
    parser.add_argument("--join", type=Path, nargs="+", default=[], metavar="FILE", help=join)
    kept = "do not measure the machine before, but take what `embedrock machine` has kept"
    parser.add_argument("--kept", action="store_true", help=kept)


def measure(task: Task) -> Report:
    """Train each setting in a process of its own, compare it with the plan, and print what came out."""
    effort, arguments, report = task.effort, task.arguments, Report()
    chosen = [
        (number, one) for number, one in enumerate(drawn(SETTINGS, effort.seed), 1) if number in arguments.settings
    ]
    if chosen:
        with scratch_folder(effort.folder, SPACE_BYTES) as folder:
            report.add(_measured(chosen, folder, effort, arguments))
    report.results = best_of([*_joined(arguments.join), *report.results])
    lines = [line for line in report.results if "step_s" in line]
    print(format_lines(FIELDS, lines) if lines else "no setting was measured")
    if SPLIT in arguments.settings:
        report.results.append({"name": "split", "status": "ok", "over_best": split_over_best(effort.seed)})
    report.judge(TARGETS)
    return report


def _measured(
    settings: Sequence[tuple[int, Setting]], folder: Path, effort: PlanEffort, arguments: Namespace
) -> Report:
    """Measure the machine, train each setting, and both again: its pace may change meanwhile."""
    report, kept = Report(), machines.load() if arguments.kept else None
    for turn in range(arguments.turns):
        machine = kept or machines.measure(folder, lambda text: say(f"measuring: {text}", transient=True))
        report.results.append({"name": MACHINE, "status": "ok", "machine": machine.to_json()})
        for number, setting in settings:
            say(f"turn {turn + 1}, setting {number}", transient=True)
            touch_memory(min(MOST_TOUCHED, setting.nbytes))
            try:
                found = _quietest(setting, folder / f"{number}-{turn}", effort)
            except ChildError as error:
                report.failures.append((str(number), error.details or str(error)))
                continue
            line = {"name": str(number), "status": "ok", **setting.to_json(), **found}
            report.results.append(line | {"turns": [found["step_s"]]})
    return report


def best_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each setting the line of the turn that took least, with what a plan tells by the best of the machine.

    A machine's own pace differs from one minute to the next: what takes least, in several turns, is what it can do.
    """
    known: Machine | None = None
    best: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["name"] == MACHINE:
            one = Machine.of_json(deepcopy(line["machine"]))
            known = known.joined(one) if known else one
        elif "step_s" in line:
            other = best.get(line["name"], line)
            turns = [*other["turns"], *line["turns"]] if other is not line else line["turns"]
            best[line["name"]] = min(other, line, key=lambda each: each["step_s"]) | {"turns": turns}
        else:
            best[line["name"]] = line
    found = sorted(best.values(), key=_number)
    if known is None:
        return found
    for line in found:
        if "step_s" in line:
            line |= compared(Setting.of_line(line), known, line)
    return [{"name": MACHINE, "status": "ok", "machine": known.to_json()}, *found]


def _number(line: Mapping[str, Any]) -> int:
    return int(line["name"]) if line["name"].isdigit() else SPLIT


def _joined(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the lines of earlier runs."""
    lines = []
    for path in files:
        try:
            lines += json.loads(path.read_text())["results"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ArgumentError(
                f"--join takes what `embedrock bench plan --json FILE` wrote: {str(path)!r} cannot be read "
                f"({type(error).__name__}: {error})."
            ) from None
    return lines


def _quietest(setting: Setting, folder: Path, effort: PlanEffort) -> dict[str, float]:
    """Measure again where other programs used the machine meanwhile, and return the run with the fewest of them."""
    tries: list[dict[str, float]] = []
    while len(tries) < TRIES and (not tries or tries[-1]["others"] > QUIET):
        own = folder / str(len(tries))
        own.mkdir(parents=True)
        with effort.child(Trainer, setting, own, effort.seed) as child:
            tries.append(child.call("run"))
    return min(tries, key=lambda one: one["others"])


def compared(setting: Setting, machine: Machine, found: Mapping[str, float]) -> dict[str, Any]:
    """Return what a plan tells of a setting, and how far it is off.

    What counts of the steps is the same of both: the round that took longer than a quarter of them, as what a step does
    may change while they are timed. Misses and RAM are those of the step in the middle.
    """
    demands = setting.demands()
    told, *rounds = (
        er.plan(demands, setting.batch, steps=steps, machine=machine) for steps in (setting.middle, *setting.middles)
    )
    misses, step = sum(one.misses for one in told.tables), quarter([Taken(one.alone_s) for one in rounds]).total
    return {
        "told_step_s": step,
        "told_misses": misses,
        "told_peak_bytes": told.peak_then,
        "step_off": step / found["step_s"] - 1,
        "misses_off": misses / found["misses"] - 1 if found["misses"] else None,
        "peak_off": told.peak_then / found["peak_bytes"] - 1,
    }


def _of_all(key: str, how: Any) -> Any:
    def found(lines: Sequence[Line]) -> list[Found]:
        numbers = [line[key] for line in lines if line.get(key) is not None]
        return [(how(numbers), {})] if numbers else []

    return found


def _typical(offs: Sequence[float]) -> float:
    return 100 * median(map(abs, offs))


def _worst(offs: Sequence[float]) -> float:
    return 100 * max(map(abs, offs))


TARGETS = (
    Target("step: median error", _of_all("step_off", _typical), 10, "%", at_most=True),
    Target("step: largest error", _of_all("step_off", _worst), 30, "%", at_most=True),
    Target("misses: median error", _of_all("misses_off", _typical), 3, "%", at_most=True),
    Target("misses: largest error", _of_all("misses_off", _worst), 10, "%", at_most=True),
    Target("RAM: most above", _of_all("peak_off", lambda offs: 100 * max(offs)), 10, "%", at_most=True),
    Target("RAM: most below", _of_all("peak_off", lambda offs: -100 * min(offs)), 0, "%", at_most=True),
    Target("reads of the split over the best of 200", _of_all("over_best", max), 1.02, "x", at_most=True),
)
PLANNER = Bench(
    "plan",
    "what `embedrock plan` predicts, beside what is measured",
    measure,
    ("seed", "threads", "timeout_s", "folder"),
    workloads=(),
    effort=PlanEffort(),
    add_options=add_options,
    texts={"seed": "of the settings and their ids", "folder": "where a folder for the files is made, and removed"},
)
