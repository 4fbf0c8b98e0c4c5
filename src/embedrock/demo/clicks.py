"""The demo on planted clicks, from top to bottom."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
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
    with _framework(options) as framework:
        framework.use_threads(options.threads)
        spec = _spec_in_ram(options)
        print(_format_start(options, spec))
        framework.warm_up(spec)
        training = train(framework.make_learner, spec, _split(options), options)
    results: dict[str, Any] = {"training": training}
    if options.compare and not options.keras:
        from embedrock.demo.torch.contest import compare_backends

        results["contest"] = [asdict(each) for each in compare_backends(spec, _log(options), options)]
    return results


def _log(options: ClickOptions) -> PlantedLog:
    return PlantedLog(options.users, options.items, options.seed)


def _split(options: ClickOptions) -> PlantedSplit:
    return PlantedSplit(_log(options), options.batch_size)


def _framework(options: ClickOptions) -> AbstractContextManager[Framework]:
    # Only the one that is asked for has to be installed.
    if options.keras:
        from embedrock.demo.keras import learner
    elif options.ranks > 1:
        from embedrock.demo.torch.ranks import Ranks

        return Ranks(options, _split)
    else:
        from embedrock.demo.torch import learner
    return nullcontext(learner)


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
    facts = {"clicks": clicks, "model": model}
    if options.ranks > 1:
        facts["ranks"] = f"{options.ranks} processes, each with its part of the rows and of every batch"
    return f"{format_facts(facts)}\n\n{format_sizes(spec.embeddings)}"
