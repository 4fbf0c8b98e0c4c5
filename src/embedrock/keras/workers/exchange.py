"""TensorFlow's collective operations as what carries messages between the workers of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from embedrock.keras.workers.cluster import has_several_workers
from embedrock.shards.messages import MessageReader, pack


class WorkerGroup:
    """The workers that train a model together, as one of them sees them. All must ask it the same, in the same order.

    Attributes:
        rank: of this worker, from 0.
        count: how many there are; one process is the only one.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self.rank, self.count = strategy, 0, 1
        if has_several_workers(strategy):
            self.rank, self.count = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync

    def all(self, is_so: bool) -> bool:
        """Return whether something is so on all workers."""
        if self.count == 1:
            return is_so
        return not self._strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(float(not is_so)), axis=None)

    def common(self, numbers: Sequence[int]) -> list[int]:
        """Return those numbers that all workers have given, in their order."""
        if self.count == 1:
            return list(numbers)
        given = self._told(numbers)
        return [number for number in numbers if all(number in others for others in given)]

    def first(self, number: int) -> int:
        """Return the number that the first worker has given."""
        return number if self.count == 1 else self._told([number])[0][0]

    def _told(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers that each worker has given."""
        message = tf.constant(pack([np.array([len(numbers), *numbers], np.int64)]))
        reader = MessageReader(np.asarray(self._strategy.run(tf.function(lambda: gather(message)))))
        return [reader.ints(int(reader.ints(1)[0])).tolist() for _ in range(self.count)]


def gather(message: tf.Tensor) -> tf.Tensor:
    """Return the messages of all workers, int32 (n,) each, one after the other in the order of their ranks.

    It is called in a replica context. The messages may differ in length.
    """
    message.set_shape([None])
    context = tf.distribute.get_replica_context()
    return context.all_gather(tf.identity(message), axis=0)  # on the replica's device
