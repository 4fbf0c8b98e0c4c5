"""``bench hash-ids``: ids of short strings, beside what else hashes many of them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from embedrock.bench.harness.bench import EFFORT, Bench, Task
from embedrock.bench.harness.comparison import Step, compare
from embedrock.bench.harness.contenders import Unavailable
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Line, Target, each, faster
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step.contenders import StepContender

DIGITS = 10  # of a string
WANTED = 20.0  # million strings a second


def strings_of(workload: Workload) -> list[np.ndarray]:
    """Return batches of ids, each written with `DIGITS` digits: "S10" (batch,)."""
    return [np.char.zfill(ids.reshape(-1).astype(f"S{DIGITS}"), DIGITS) for ids in workload.ids()]


def our_hash(workload: Workload, form: str) -> Step:
    """Hash strings in an array of NumPy, a list or an array of Arrow."""
    import embedrock as er

    batches: list[Any] = strings_of(workload)
    if form == "list":
        batches = [batch.astype(str).tolist() for batch in batches]
    if form == "arrow":
        try:
            import pyarrow
        except ImportError as error:
            raise Unavailable(f"pyarrow does not import: {error}. pip install pyarrow") from error
        batches = [pyarrow.array(batch.astype(str).tolist()) for batch in batches]
    return lambda index: er.hash_ids(batches[index])


def tensorflow_hash(workload: Workload, name: str, **options: Any) -> Step:
    """Hash tensors of strings by an operator of TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import tensorflow
    except ImportError as error:
        raise Unavailable(f"TensorFlow does not import: {error}. pip install 'embedrock[keras]'") from error
    tensorflow.config.threading.set_intra_op_parallelism_threads(int(os.environ["EMBEDROCK_THREADS"]))
    batches = [tensorflow.constant(batch) for batch in strings_of(workload)]
    operator = getattr(tensorflow.strings, name)
    return lambda index: operator(batches[index], 2**63 - 1, **options).numpy()


def python_hash(workload: Workload) -> Step:
    """Hash each string by Python, whose hashes are other ones in each process; copies, as a string keeps its hash."""
    batches = [batch.tolist() for batch in strings_of(workload)]
    return lambda index: np.fromiter((hash(bytes(memoryview(one))) for one in batches[index]), np.int64)


def _ours(name: str, label: str, form: str) -> StepContender:
    return StepContender(name, f"er.hash_ids of {label}", partial(our_hash, form=form), 0)


def _tensorflow(name: str, operator: str, label: str, **options: Any) -> StepContender:
    make = partial(tensorflow_hash, name=operator, **options)
    return StepContender(name, f"tf.strings.{operator}{label}", make, 0, process_bytes=1 << 30)


CONTENDERS = (
    _ours("ours", "an array of bytes", "array"),
    _ours("ours-arrow", "an Arrow array of strings", "arrow"),
    _ours("ours-list", "a list of str", "list"),
    _tensorflow("tf-strong", "to_hash_bucket_strong", ": the same ids", key=[0, 0]),
    _tensorflow("tf-fast", "to_hash_bucket_fast", ": FarmHash, which has no key"),
    StepContender("python", "hash(bytes) of each", python_hash, 0),
)


def measure(task: Task) -> Report:
    """Measure batches of strings."""
    workload = task.workload
    print(f"{workload.lookups:,} strings of {DIGITS} bytes at once; times of all of them")
    return compare([one.racer(workload) for one in task.contenders], task.bench.targets, task.effort)


def _millions(line: Line) -> float:
    sizes = line["workload"]
    return sizes["batch"] * sizes["features"] / line["median_ms"] / 1e3


HASH_IDS = Bench(
    "hash-ids",
    "ids of strings of 10 bytes, beside TensorFlow's and Python's hashes",
    measure,
    ("batch", "batches", "seed", *EFFORT),
    CONTENDERS,
    (
        *(Target(f"strings a second of {one.label}", each(_millions, "median_ms", name=one.name), WANTED, "M")
          for one in CONTENDERS[:3]),
        faster("ours", "tf-strong", 1),
    ),
    (Workload(rows=10**9, features=1, batch=1 << 20, batches=4, zipf=0),),
    texts={"batch": "strings that are hashed at once"},
)  # fmt: skip
