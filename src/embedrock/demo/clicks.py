"""The demo on planted clicks, from top to bottom."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from embedrock.demo.course import format_sizes, train
from embedrock.demo.data.planted import ZIPF, PlantedLog, PlantedSplit
from embedrock.demo.model_spec import PairSpec
from embedrock.demo.options import ClickOptions
from embedrock.demo.training import Framework
from embedrock.machine.ram import available_bytes
from embedrock.terminal.tables import format_facts


def run(options: ClickOptions) -> dict[str, Any]:
    """Train on planted clicks and print how it goes; return all numbers, as plain JSON values."""
    framework = _framework(options)
    framework.use_threads(options.threads)
    spec = _spec_in_ram(options)
    print(_format_start(options, spec))
    framework.warm_up(spec)
    log = PlantedLog(options.users, options.items, options.seed)
    split = PlantedSplit(log, options.batch_size)
    results: dict[str, Any] = {"training": train(framework.make_learner, spec, split, options)}
    if options.compare and not options.keras:
        from embedrock.demo.torch.contest import compare_backends

        results["contest"] = [asdict(each) for each in compare_backends(spec, replace(log), options)]
    return results


def _framework(options: ClickOptions) -> Framework:
    # Only the one that is asked for has to be installed.
    if options.keras:
        from embedrock.demo.keras import learner
    else:
        from embedrock.demo.torch import learner
    return learner


def _spec_in_ram(options: ClickOptions) -> PairSpec:
    """Return the spec of the model with its tables in RAM, in what is available of it."""
    return PairSpec(
        model=options.model,
        users=options.users,
        items=options.items,
        dim=options.dim,
        lr=options.lr,
        seed=options.seed,
        memory=available_bytes(),
    )


def _format_start(options: ClickOptions, spec: PairSpec) -> str:
    """Return what is going to be trained, and on what."""
    clicks = f"{options.users:,} users x {options.items:,} items, popularity Zipf({ZIPF}), seed {options.seed}"
    model = f"{options.model}, Adam(lr={options.lr:g}), {options.steps:,} batches of {options.batch_size:,}"
    return f"{format_facts({'clicks': clicks, 'model': model})}\n\n{format_sizes(spec.embeddings)}"
