"""The demo of DLRM, from top to bottom: on planted impressions, or on a log in Criteo's format."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from embedrock.bench.harness.many_tables import ManyTables
from embedrock.demo.course import format_sizes, train
from embedrock.demo.data.criteo import CriteoLog, CriteoSplit
from embedrock.demo.data.planted_impressions import NUMBERS, ImpressionLog, ImpressionSplit
from embedrock.demo.model_spec import DlrmSpec
from embedrock.demo.options import DlrmOptions
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_count, format_facts

PLANTED_STEPS = 1000  # of a log that does not end
# Widths of the hidden layers, at the bottom and at the top; MLPerf's are those of --full.
SMALL, FULL = ((64,), (128, 64)), ((512, 256), (1024, 1024, 512, 256))


def run(options: DlrmOptions) -> dict[str, Any]:
    """Train a DLRM and print how it goes; return all numbers, as plain JSON values."""
    from embedrock.demo.torch.learner import use_threads

    use_threads(options.threads)
    return _on_planted(options) if options.data is None else _on_log(options.data, options)


def _on_planted(options: DlrmOptions) -> dict[str, Any]:
    options = replace(options, steps=options.steps or PLANTED_STEPS)
    tables = ManyTables(max_rows=options.max_rows, max_bag=options.max_bag, dim=options.dim)
    log = ImpressionLog(tables, options.seed)
    spec = _spec(options, tables.rows, tables.bags)
    print(_format_planted(tables, spec, options))
    results = _train(spec, ImpressionSplit(log, options.batch_size), options)
    if options.compare:
        from embedrock.demo.torch.contest import compare_backends

        results["contest"] = [asdict(each) for each in compare_backends(spec, replace(log), options)]
    return results


def _on_log(path: Path, options: DlrmOptions) -> dict[str, Any]:
    with CriteoLog(path, options.ids_below) as log:
        split = CriteoSplit(log, options.batch_size)
        options = replace(options, steps=options.steps or split.batches)
        spec = _spec(options, (options.ids_below,) * log.features, (1,) * log.features)
        print(_format_log(log, split, options))
        return _train(spec, split, options)


def _train(spec: DlrmSpec, source: ImpressionSplit | CriteoSplit, options: DlrmOptions) -> dict[str, Any]:
    from embedrock.demo.torch.learner import make_learner, warm_up

    warm_up(spec)
    return {"training": train(make_learner, spec, source, options)}


def _spec(options: DlrmOptions, rows: tuple[int | None, ...], bags: tuple[int, ...]) -> DlrmSpec:
    bottom, top = FULL if options.full else SMALL
    sizes = {"rows": rows, "bags": bags, "numbers": NUMBERS, "bottom": bottom, "top": top}
    return DlrmSpec(dim=options.dim, lr=options.lr, seed=options.seed, **sizes)


# ---------------------------------------------------------------- printing


def _format_planted(tables: ManyTables, spec: DlrmSpec, options: DlrmOptions) -> str:
    clicks = (
        f"{format_count(NUMBERS, 'number')} and {len(tables.rows)} features with "
        f"{format_count(sum(tables.bags), 'id')}, popularity Zipf({tables.zipf}), seed {options.seed}"
    )
    largest = sorted(spec.embeddings, key=lambda each: -each.rows)[:5]
    weights = sum(each.weight_bytes for each in spec.embeddings)
    rows = format_count(sum(tables.rows), "row")
    sizes = f"{rows} x {spec.dim}, {format_bytes(3 * weights)} with Adam's state; the largest:"
    return (
        f"{format_facts({'clicks': clicks, 'model': _describe(options), 'tables': sizes})}\n\n{format_sizes(largest)}"
    )


def _format_log(log: CriteoLog, split: CriteoSplit, options: DlrmOptions) -> str:
    ids = "as they are: any integer" if options.ids_below is None else f"modulo {options.ids_below:,}"
    counts = f"{format_count(log.lines, 'line')}, the last {len(split.test.labels):,} of them to test on"
    text = {"log": f"{log.path.name}: {counts}\nids {ids}", "model": _describe(options)}
    return format_facts(text)


def _describe(options: DlrmOptions) -> str:
    bottom, top = FULL if options.full else SMALL
    layers = "-".join(map(str, (NUMBERS, *bottom, options.dim))), "-".join(map(str, (*top, 1)))
    adam = f"Adam(lr={options.lr:g}), {options.batches:,} batches of {options.batch_size:,}"
    return f"DLRM, bottom {layers[0]}, top {layers[1]}, {adam}"
