"""Ways to read a log of ids into `tf.data`, for ``bench tf-data``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embedrock.bench.harness.contenders import Contender, Unavailable
from embedrock.bench.harness.workload import Workload

SHARDS = 5


class ClickLog(NamedTuple):
    """Ids of samples, the same in several files.

    Attributes:
        folder: of the files: ids.npy, int64 (samples, features); its parts; and these as Parquet files.
        workload: what they are drawn by.
    """

    folder: Path
    workload: Workload

    @property
    def ids(self) -> Path:
        """All ids."""
        return self.folder / "ids.npy"

    def parts(self, kind: str) -> list[str]:
        """Return the files of one kind that have the ids in parts."""
        return [str(self.folder / f"part{k}.{kind}") for k in range(SHARDS)]

    @property
    def record_bytes(self) -> int:
        """Bytes of the ids of one sample."""
        return 8 * self.workload.features


@dataclass(frozen=True)
class Reading(Contender):
    """A way to read the ids: `make` returns a dataset of batches."""

    make: Callable[[ClickLog], Any]
    passes: int = 1  # the last of which counts


def _from_tensor_slices(log: ClickLog) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(np.load(log.ids, mmap_mode="r")).batch(log.workload.batch)


def _from_generator(log: ClickLog) -> Any:
    import tensorflow as tf

    ids, batch = np.load(log.ids, mmap_mode="r"), log.workload.batch

    def slices() -> Iterator[np.ndarray]:
        for start in range(0, len(ids), batch):
            yield ids[start : start + batch]

    return tf.data.Dataset.from_generator(slices, output_signature=_signature(log))


def _numpy_function(log: ClickLog) -> Any:
    import tensorflow as tf

    ids, batch = np.load(log.ids, mmap_mode="r"), log.workload.batch

    def read(start: Any) -> Any:
        out = tf.numpy_function(lambda at: np.array(ids[at : at + batch]), [start], tf.int64)
        return tf.ensure_shape(out, [None, ids.shape[1]])

    starts = tf.data.Dataset.range(0, len(ids), batch)
    return starts.map(read, num_parallel_calls=tf.data.AUTOTUNE)


def records(path: Any, log: ClickLog, samples: int) -> Any:
    """Read the .npy file at `path` as it is, so many samples at a time."""
    import tensorflow as tf

    size, header = samples * log.record_bytes, _header_bytes(str(log.ids))
    data = tf.data.FixedLengthRecordDataset(path, size, header_bytes=header)
    if samples == 1:
        data = data.batch(log.workload.batch)
    return data.map(lambda raw: tf.reshape(tf.io.decode_raw(raw, tf.int64), [-1, log.workload.features]))


def _header_bytes(path: str) -> int:
    """Return where the data of a .npy file begin. (It is 128 for most.)"""
    ids = np.load(path, mmap_mode="r")
    return int(ids.offset)


def _interleaved(log: ClickLog) -> Any:
    import tensorflow as tf

    files = tf.data.Dataset.from_tensor_slices(log.parts("npy"))
    read = partial(records, log=log, samples=log.workload.batch)
    return files.interleave(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _samples(log: ClickLog) -> Any:
    return records(str(log.ids), log, 1)


def _batches(log: ClickLog) -> Any:
    return records(str(log.ids), log, log.workload.batch)


def _cached(log: ClickLog) -> Any:
    return _batches(log).cache()


def _parquet_batches(path: bytes, batch: int) -> Iterator[np.ndarray]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path.decode()) as file:
        for part in file.iter_batches(batch):
            yield np.column_stack(part.columns)


def _parquet_file(path: Any, log: ClickLog) -> Any:
    import tensorflow as tf

    read = partial(_parquet_batches, batch=log.workload.batch)
    return tf.data.Dataset.from_generator(read, args=(path,), output_signature=_signature(log))


def _parquet(log: ClickLog, parallel: bool) -> Any:
    import tensorflow as tf

    if not Path(log.parts("parquet")[0]).exists():
        raise Unavailable("pyarrow is not installed")
    files = tf.data.Dataset.from_tensor_slices(log.parts("parquet"))
    read = partial(_parquet_file, log=log)
    return files.interleave(read, num_parallel_calls=tf.data.AUTOTUNE) if parallel else files.flat_map(read)


def _signature(log: ClickLog) -> Any:
    import tensorflow as tf

    return tf.TensorSpec((None, log.workload.features), tf.int64)


READINGS = (
    Reading("tensor-slices", "from_tensor_slices(memmap).batch", _from_tensor_slices),
    Reading("generator", "from_generator over slices of a memmap", _from_generator),
    Reading("numpy-function", "range().map(numpy_function over slices), parallel", _numpy_function),
    Reading("records", "FixedLengthRecordDataset on the .npy, a sample each, .batch", _samples),
    Reading("record-batches", "the same, a batch each", _batches),
    Reading("interleave", "record-batches of several files, parallel interleave", _interleaved),
    Reading("cache", "record-batches with cache(), second pass", _cached, passes=2),
    Reading("parquet", "Parquet by pyarrow in a generator", partial(_parquet, parallel=False)),
    Reading("parquet-interleave", "the same, parallel interleave of files", partial(_parquet, parallel=True)),
)
