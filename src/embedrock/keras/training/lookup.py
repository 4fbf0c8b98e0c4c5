"""Rows out of tables as tensors, and their gradients back to the tables' handles."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from embedrock.batch.wrong_ids import OF_STRINGS, told
from embedrock.errors import IdTypeError, UnsupportedError
from embedrock.keras import callers
from embedrock.keras.serving.table import pooled, serving, serving_table
from embedrock.keras.training import host_calls
from embedrock.keras.training.handle import TableHandle, functions_of
from embedrock.keras.training.pending import SLOTS
from embedrock.keras.training.requests import KEPT_PLANS, HostLookup, LookupRequest, WorkerLookup, planned_apart
from embedrock.keras.training.slices import INSTEAD
from embedrock.keras.workers import shards
from embedrock.system.spans import spanned
from embedrock.table.event_time import newest_event, seconds_of

ID_DTYPES = (tf.int32, tf.int64)
SMALL_DTYPES = (tf.int8, tf.uint8, tf.int16, tf.uint16)
AS_INTEGERS = (
    "Pass integers, ids.astype('int64') of an array, as Keras makes float32 of floats, in which ids above 2**24 are "
    'those of others; and declare the input so: keras.Input(shape, dtype="int64").'
)
_REMEDIES = {
    tf.string: f"Put an erk.Hashing() before it, or a keras.layers.StringLookup. {OF_STRINGS}",
    tf.uint64: "Hashes of 64 bits go by their bits into a layer with input_dim=None: tf.bitcast(ids, tf.int64).",
}


class ProgramLookup:
    """A lookup in a program: rows of several tables on one executor kind, in one host call.

    It is made when the program is traced, once for each replica. At run time the executors work in `look_up` and
    `sum_gradients`.

    Args:
        requests, training: see `look_up`.
        has_time: the last part of the inputs is the `time` of `look_up`.

    Attributes:
        handles: handles of the tables.
        trained: handles whose rows get gradients.
        parts: requests that are planned together.
        functions: keeps the program's host functions: see `host_calls.call`.
        kept: plans by number, see `KeptPlans`.
        fetching: brings rows from other workers; None without sharded tables or other workers.
    """

    _numbers = itertools.count(1)

    def __init__(self, requests: Sequence[LookupRequest], training: bool | None, has_time: bool) -> None:
        keep, self._is_training = training is not False, training is True
        self._number, self._keep, self._count = next(ProgramLookup._numbers), keep, len(requests)
        self.kept: dict[int, list[Any]] = {}
        self.handles = list(dict.fromkeys(request.handle for request in requests))
        self.functions, self.call = functions_of(self.handles), self.handles[0].executor.call
        self.trained = [handle for handle in self.handles if handle.variable.trainable]
        inputs = itertools.count()
        # Without their tensors, which would live as long as the program.
        numbered = [request.of(inputs) for request in requests]
        self._time = next(inputs) if has_time else None
        self._inputs, kind = next(inputs), HostLookup
        if self.handles[0].executor.is_on_gpu:
            from embedrock.keras.training.gpu_lookup import GpuLookup as kind  # needs PyTorch
        self.parts: list[Any] = [kind([numbered[k] for k in which], which) for which in planned_apart(requests)]
        # No group is sharded.
        self._sharded = [part for part in self.parts if part.requests[0].handle.shard is not None]
        self.fetching = WorkerLookup(self._sharded) if self._sharded and shards.has_workers() else None

    @spanned("lookup")
    def look_up(self, values: Any, *inputs: Any) -> list[Any]:
        """Return the number of kept plans, the rows or bags of each request, and saved arrays for the backward pass.

        `inputs` are the parts of the requests, and rows fetched from other workers.
        """
        if values.any():
            for handle, value in zip(self.handles, values, strict=True):
                handle.check_untouched(value)
        for part in self.parts:
            for request in part.requests:
                request.check_missing(self._is_training)
        for handle in self.handles:
            if handle.state.executor is not None:
                handle.executor.begin()
        rows, plans, kept = [None] * self._count, [], []
        fetched = self._fetched(inputs) if self._sharded else {}
        for part in self.parts:
            found, saved, plan = part.read(inputs, self._keep, *fetched.get(part, ()))
            for k, own in zip(part.which, found, strict=True):
                rows[k] = own
            plans.append(plan)
            if part.saved is not None:
                kept.append(saved)
        number = KEPT_PLANS.grant(self, plans) if self._keep else 0
        return [np.int64(number), *rows, *kept]

    def sum_gradients(self, place: int, replica: Any, plans_number: Any, *inputs: Any) -> list[Any]:
        """Sum gradients by row; return a token for each trained handle, and gradients of weights.

        `place` is the part of the program around the backward pass, see `PendingGradients.add`. `inputs` are the parts
        of the requests, the saved arrays of `look_up`, and the gradients of the rows and bags.
        """
        for part in self.parts:
            for request in part.requests:
                request.check_missing(is_training=True)
        saved = iter(inputs[self._inputs :])
        arrays = [None if part.saved is None else next(saved) for part in self.parts]
        grads = list(saved)
        plans = KEPT_PLANS.end(self, int(plans_number)) or [None] * len(self.parts)
        by_handle: dict[TableHandle, list[Any]] = {handle: [] for handle in self.handles}
        of_weights: dict[int, Any] = {}
        for part, plan, array in zip(self.parts, plans, arrays, strict=True):
            summed, weights = part.sum_gradients(inputs, plan, grads, array)
            for handle, of_rows in summed:
                by_handle[handle].append(of_rows)
            pairs = zip(part.which, part.requests, strict=True)
            of_weights.update(zip([k for k, one in pairs if one.weights is not None], weights, strict=True))
        where, tokens, time = (place, int(replica)), [], None
        if self._time is not None and self.trained:
            times = self.handles[0].executor.host_array(inputs[self._time])
            time = newest_event(times, [handle.state for handle in self.trained], self.trained[0].label)
        for handle in self.trained:
            own = by_handle[handle]
            summed = own[0] if len(own) == 1 else handle.executor.sum_of(own)
            tokens.append(handle.pending.add(where, self._number, summed, time))
        return [*tokens, *(of_weights[k] for k in sorted(of_weights))]

    def gradients(
        self, sent: list[tf.Tensor], grads: tuple[tf.Tensor, ...], shapes: list[tf.TensorShape]
    ) -> list[tf.Tensor | None]:
        """Return, in a program, the gradients of the handles' values, None for untrained ones, and of weights.

        `sent` are the arguments of `sum_gradients` before `grads`, and `shapes` those of the weights.
        """
        dtypes = [tf.float32] * (len(self.trained) + len(shapes))

        def summed(*grads: tf.Tensor) -> list[tf.Tensor]:
            # TensorFlow drops a stateless call with unused results. In a loop, calls must run in order.
            inputs, stateful = [*sent, *grads], host_calls.is_in_loop()
            function = functools.partial(self.sum_gradients, host_calls.place())
            return self.call(function, inputs, dtypes, functions=self.functions, stateful=stateful)

        refusal = f"the gradient of rows of {self.handles[0].label} cannot be differentiated again. {INSTEAD}"
        dense = map(tf.convert_to_tensor, grads)  # `tf.gather` of the results gives slices
        found = host_calls.once_differentiable(summed, refusal)(*dense)
        tokens = dict(zip(self.trained, found, strict=False))
        for token in tokens.values():
            token.set_shape([SLOTS])
        for out, shape in zip(found[len(tokens) :], shapes, strict=True):
            out.set_shape(shape)
        return [*(tokens.get(handle) for handle in self.handles), *found[len(tokens) :]]

    def _fetched(self, inputs: Sequence[np.ndarray]) -> dict[HostLookup, tuple[Any, Any]]:
        """Return plans, and rows fetched from other workers. Without other workers, check that no rows are missing."""
        if self.fetching is not None:
            found = self.fetching.rows(inputs, *inputs[self._inputs :])
            return dict(zip(self._sharded, found, strict=True))
        for part in self._sharded:
            handle, ids = part.requests[0].handle, [inputs[request.ids].reshape(-1) for request in part.requests]
            shards.check_own(handle.table, handle.label, np.concatenate(ids))
        return {}


def look_up(requests: Sequence[LookupRequest], training: bool | None = None, time: Any = None) -> list[tf.Tensor]:
    """Look up the rows of several inputs, of any tables, in one call for each of CPU and GPU.

    Args:
        requests: the inputs.
        training: False if gradients are not expected; they are right in either case.
        time: times of the batch's events, from `whole_seconds`; None: not known.

    Returns:
        The result of each request: rows, float32 ``ids.shape + (dim,)``, or bags, (bags, dim).
    """
    if serving.get() is not None:
        return [_served(request) for request in requests]
    for request in requests:
        request.handle.check_strategy()
    places: dict[bool, list[int]] = {}
    for k, request in enumerate(requests):
        places.setdefault(request.handle.executor.is_on_gpu, []).append(k)
    found = {}
    for which in places.values():
        found.update(zip(which, _look_up([requests[k] for k in which], training, time), strict=True))
    return [found[k] for k in range(len(requests))]


def _look_up(requests: Sequence[LookupRequest], training: bool | None, time: Any) -> list[tf.Tensor]:
    """Look up requests whose rows are all on the CPU, or all on the GPU."""
    lookup, context = ProgramLookup(requests, training, time is not None), tf.distribute.get_replica_context()
    # Without a replica (a symbolic build) nothing is trained.
    replica = tf.convert_to_tensor(0 if context is None else context.replica_id_in_sync_group, tf.int32)
    if lookup.trained and callers.local(callers.TF_VECTORIZED, "_pfor_impl", "loop_fn") is not callers.MISSING:
        raise UnsupportedError(
            f"tf.vectorized_map drops the gradients of the rows of {requests[0].handle.label}. Look all ids up before "
            "it, in one call, layer(ids), which takes ids of any shape; or use tf.map_fn."
        )
    # Sources of gradients: handles, whose values carry no information, and weights.
    values = [handle.value() for handle in lookup.handles]
    values = [v if h in lookup.trained else tf.stop_gradient(v) for h, v in zip(lookup.handles, values, strict=True)]
    weights = [request.weights for request in requests if request.weights is not None]
    parts = [part for request in requests for part in request.parts()]
    parts += [] if time is None else [tf.convert_to_tensor(time)]
    fetched = [] if lookup.fetching is None else lookup.fetching.fetch(parts)
    known = host_calls.known_to_programs(lookup)

    @tf.custom_gradient
    def rows_of(*values_and_weights: tf.Tensor) -> Any:
        inputs = [tf.stack(values_and_weights[: len(values)]), *parts, *fetched]
        saved = [part.saved for part in lookup.parts if part.saved is not None]
        dtypes = [tf.int64] + [tf.float32] * len(requests) + saved
        # Stateless, so that calls of several replicas, or in several places, need not wait for each other.
        with tf.control_dependencies(host_calls.after_earlier_steps()):
            made = lookup.call(lookup.look_up, inputs, dtypes, functions=lookup.functions, stateful=False)
        plans_number, *found = made
        rows, kept = found[: len(requests)], found[len(requests) :]
        for request, out in zip(requests, rows, strict=True):
            out.set_shape(_shape(request))
        sent, shapes = [replica, plans_number, *parts, *kept], [weight.shape for weight in weights]
        return rows, lambda *grads: known().gradients(sent, grads, shapes)

    rows = rows_of(*values, *weights)
    host_calls.after_earlier_steps(rows)  # later steps wait for it, even if nothing uses its results
    return rows


def _shape(request: LookupRequest) -> list[int | None]:
    dim = request.handle.table.dim
    if request.offsets is None:
        return [*request.ids.shape, dim]
    ends = request.offsets.shape[0]
    return [None if ends is None else ends - 1, dim]


def _served(request: LookupRequest) -> tf.Tensor:
    """Return a request's result by TensorFlow's own operations, for a program that other processes run."""
    shards.check_whole(request.handle.table, request.handle.label, "exported")
    rows = serving_table(request.handle.table, request.missing)(request.ids)
    return rows if request.offsets is None else pooled(rows, request.offsets, request.weights, request.is_max)


def whole_seconds(time: Any, label: str) -> Any:
    """Return times of events as integers, seconds since 1970. Keras would make float32 of floats.

    Raises:
        ArgumentError: they are neither numbers nor dates.
    """
    if isinstance(time, tf.RaggedTensor):
        time = time.flat_values
    if tf.is_tensor(time) or isinstance(time, keras.KerasTensor):
        is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(time.dtype))
        return keras.ops.cast(keras.ops.floor(time), "int64") if is_float else time
    with np.errstate(invalid="ignore"):  # NaN becomes a number that is refused
        return np.floor(seconds_of(time, label)).astype(np.int64)


def checked_ids(ids: Any, label: str) -> tf.Tensor:
    """Return ids as a tensor.

    Raises:
        IdTypeError: they are not int32 or int64.
    """
    if ids is None:
        raise IdTypeError(f"ids for {label} must be a tensor of integers: got None. Pass the ids of the batch.")
    tensor = tf.convert_to_tensor(ids)
    if tensor.dtype in SMALL_DTYPES:
        return tf.cast(tensor, tf.int32)
    if tensor.dtype == tf.uint32:
        return tf.cast(tensor, tf.int64)
    if tensor.dtype in (tf.float32, tf.float64) and tf.executing_eagerly():
        values = tensor.numpy()
        if not (np.isfinite(values) & (values == np.trunc(values))).all():  # no ids with a missing cast
            raise _no_integers(values, values, label)
    check_id_dtype(tensor.dtype, label)
    return tensor


def checked_column(ids: Any, label: str) -> Any:
    """Return an array, or a column of pandas, polars or Arrow, if it has integers.

    NumPy converts ids beside missing ones to float64, and Keras then to float32, before a layer sees them.

    Raises:
        IdTypeError: it has other values.
    """
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise _no_integers(array, ids, label)
    fits = array.dtype == np.uint64 and array.max(initial=0) < 2**63
    return array.astype(np.int64) if fits else array


def _no_integers(array: np.ndarray, given: Any, label: str) -> IdTypeError:
    got, remedy = told(array, given)
    return IdTypeError(f"ids for {label} must be integers, int32 or int64: got {got}. {remedy}")


def check_id_dtype(dtype: Any, label: str) -> None:
    """Raise `IdTypeError` unless the dtype of a tensor or a `keras.KerasTensor` is valid for ids."""
    dtype = tf.as_dtype(dtype)
    if dtype not in (*ID_DTYPES, *SMALL_DTYPES, tf.uint32):
        remedy = _REMEDIES.get(dtype, AS_INTEGERS)
        raise IdTypeError(f"ids for {label} must be integers, int32 or int64: got {dtype.name}. {remedy}")
