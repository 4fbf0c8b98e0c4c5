"""Lookups: rows of a table as a tensor, and their gradient for the table's handle."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

from embedrock.batch.wrong_ids import AS_BITS, OF_LISTS, in_array, rounded, told
from embedrock.distributed.stages import GradientBlock
from embedrock.errors import IdTypeError, UnsupportedError
from embedrock.system.spans import spanned
from embedrock.table import batches
from embedrock.table.batches import FLOAT32, FeatureLayout
from embedrock.table.event_time import newest_event
from embedrock.table.missing import Missing, check_reads
from embedrock.table.table import rows_of
from embedrock.torch.training.backward import ANCHOR, NODE_OF_ANCHOR, BackwardPass, Block, as_it_is, each_once
from embedrock.torch.training.cpu_executor import WORDS, CpuExecutor, host_grads, host_weights, tensor_of
from embedrock.torch.training.generation import generation
from embedrock.torch.training.handle import Handle, check_untouched
from embedrock.torch.training.ranks import are_there_groups
from embedrock.torch.training.sharing import PositionGradients

ID_DTYPES = (torch.int32, torch.int64)


def host_ids(ids: Tensor, label: str) -> np.ndarray:
    """Return a tensor of ids, on any device, as an array. Raises the errors of `check_ids`."""
    checked = check_ids(ids, label)
    return checked.numpy() if checked.is_cpu else checked.cpu().numpy()


def check_ids(ids: Tensor, label: str) -> Tensor:
    """Return a tensor of ids after a check.

    Raises:
        IdTypeError: it is not a dense tensor of int32 or int64.
    """
    is_dense = isinstance(ids, Tensor) and ids.layout is torch.strided and not ids.is_nested
    if not is_dense or ids.dtype not in ID_DTYPES:
        got, remedy = _tensor_fault(ids) if isinstance(ids, Tensor) else _other_fault(ids)
        raise IdTypeError(
            f"`input` of {label} must be a dense tensor of torch.int32 or torch.int64: got {got}. {remedy}"
        )
    return ids.resolve_neg() if ids.is_neg() else ids  # otherwise a negating view would be read without its sign


def _tensor_fault(ids: Tensor) -> tuple[str, str]:
    """Return the fault of a tensor of ids, in words, and the remedy."""
    got = f"{ids.dtype}, {ids.layout}"
    if ids.is_nested:
        return f"{got}, nested", "Of nested tensors, layers take those of layout=torch.jagged, (n, j)."
    if ids.layout is not torch.strided:
        return got, "Convert it, for example with .to_dense(); the ids of bags go with offsets."
    if ids.dtype == torch.uint64:
        return got, "Hashes of 64 bits go by their bits into a layer with num_embeddings=None: ids.view(torch.int64)."
    if ids.is_floating_point() and ids.device.type != "meta":
        values = ids.detach().cpu().double().numpy()
        whole = np.isfinite(values) & (values == np.trunc(values))
        lost = rounded(values, round(1 - np.log2(torch.finfo(ids.dtype).eps)), str(ids.dtype))
        if not whole.all():
            first = int(np.argmin(whole))
            filled = (
                "Leave out what is missing, ids[~ids.isnan()].long(), or give it an id that no other has, 0 for "
                "example: torch.where(ids.isnan(), 0, ids).long()."
            )
            remedy = filled if np.isnan(values.flat[first]) else "That is no whole number: pass ids, not weights."
            return f"{got}, {values.flat[first]} {in_array(values.shape)(first)}", lost or remedy
        if lost:
            return got, lost
    return got, "Convert it, for example ids.long()."


def _other_fault(ids: Any) -> tuple[str, str]:
    name = type(ids).__name__
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        return name, f"{OF_LISTS} Make tensors of both, torch.from_numpy(ids), for ert.EmbeddingBag(...)(ids, offsets)."
    made = "torch.from_numpy(np.asarray(ids).astype('int64'))"
    if array.size and array.dtype.kind not in "iu":
        got, remedy = told(array, ids)
        is_code = re.search(r"\(ids|ids\.\w", remedy)
        return f"{name} of {got}", f"{remedy} Make a tensor of that: {made}." if is_code else remedy
    if array.size and int(array.max()) >= 2**63:  # PyTorch makes no tensor of these
        return name, f"{AS_BITS} Make a tensor of that: {made}."
    return name, f"Make a tensor of it: {made}."


def refuse_second_derivative() -> NoReturn:
    """Raise `UnsupportedError` in a backward that records its own graph."""
    raise UnsupportedError(
        "gradients of embedding rows cannot be differentiated again (create_graph=True). Ask for the graph of the "
        "other parameters only: torch.autograd.grad(loss, ert.dense_parameters(model), create_graph=True)."
    )


class LayerLayout:
    """Common facts of lookups of features by layers, for one `generation`.

    It has no reference to the layers, so that one of them may keep it.

    Args:
        now: the generation.
        layers: layers of the features.

    Attributes:
        handles: of the features.
        parameters: of each layer.
        owned: the identities of their handles.
        distinct: each handle once.
        by_table: these, by their table.
        features: their tables, modes and paddings, if the CPU has the rows; else None.
        paddings: of the features.
        dtypes: of the outputs.
        executor: of the rows, if the CPU has them; else None.
        missing: values of rows that are not there, of all features; None: those of each table.
        are_alike: all outputs have one device and dtype.
        words: dtype in which the CPU reads rows for them.
        are_as_read: these are the CPU and float32.
        are_as_found: these are float32, on the GPU that has the rows.
        most_dims: most dimensions of a feature's ids.
    """

    def __init__(self, now: int, layers: Sequence[Any]) -> None:
        self.generation = now
        self.handles: list[Handle] = [layer.handle for layer in layers]
        each = dict.fromkeys(layers)
        self.parameters: list[dict[str, Any]] = [layer._parameters for layer in each]
        self.owned = [id(layer.handle) for layer in each]
        self.distinct: list[Handle] = list({id(handle): handle for handle in self.handles}.values())
        self.by_table = {handle.table: handle for handle in self.distinct}
        tables, modes = [layer.table for layer in layers], [getattr(layer, "mode", None) for layer in layers]
        self.paddings = [layer.padding_idx for layer in layers]
        self.dtypes, self.by_frequency = [layer.dtype for layer in layers], layers[0].scale_grad_by_freq
        executor: Any = self.handles[0].executor()
        self.executor = executor if isinstance(executor, CpuExecutor) else None
        self.features: FeatureLayout | None = None
        self.missing: Missing | None = layers[0].missing
        is_elsewhere = self.executor is None or self.executor.rows is not None
        check_reads(self.missing, self.handles[0].label, is_elsewhere=is_elsewhere)
        if self.executor is not None:
            own_lock = rows_of(executor.table).table_lock
            self.features = FeatureLayout(own_lock, tables, modes, self.paddings, self.missing)
        forms = set(zip([handle.device for handle in self.handles], self.dtypes, strict=True))
        self.are_alike = len(forms) == 1
        self.words = WORDS.get(self.dtypes[0], FLOAT32) if len(set(self.dtypes)) == 1 else FLOAT32
        self.are_as_read = forms == {(torch.device("cpu"), torch.float32)}
        self.are_as_found = forms == {(getattr(executor, "device", None), torch.float32)}
        self._executors, self._locks = [], []
        if self.executor is None:
            self._executors = [handle.executor() for handle in self.handles]
            self._locks = [rows_of(handle.table).table_lock for handle in self.distinct]
        self._generations, self._families = list(map(_GENERATION, self._locks)), list(map(_FAMILY, self._executors))
        self.by_executor = dict(zip(self._executors, self.handles, strict=False))
        self._on_device: dict[tuple[int, ...], Any] = {}
        self.most_dims = 64 if modes[0] is None else 2  # bags are the rows of ids
        generation.layouts.add(self)

    def leave(self, handle: Handle) -> None:
        """Drop the tables if one is of this handle: their records may go."""
        if any(own is handle for own in self.distinct):
            self.features, self.executor, self.by_table = None, None, {}
            self._executors, self.by_executor, self._on_device = (), {}, {}

    def on_device(self, share: Sequence[int]) -> Any:
        """Return the `FeatureLayout` of `embedrock.device` of some of the features."""
        known = self._on_device.get(which := tuple(share))
        if known is None:
            from embedrock.device.features import FeatureLayout as OnDevice  # needs Triton, like the executors

            executors, paddings = [self._executors[k] for k in which], [self.paddings[k] for k in which]
            known = self._on_device[which] = OnDevice(executors, paddings)
        return known

    def shares(self, bags: Sequence[Any] | None) -> list[list[int]]:
        """Return lists of features that a GPU looks up together."""
        from embedrock.device.features import shares_of  # needs Triton, like the executors

        return shares_of(self._executors, bags or [None] * len(self.handles), self.paddings)

    @staticmethod
    def ids_on_device(given: Sequence[Any]) -> Sequence[Tensor] | None:
        """Return ids that a GPU can look up as they are; None if some need a check."""
        if set(map(type, given)) != _TENSORS or not _ID_FORMS.issuperset(map(_ID_FORM, given)):
            return None
        return None if any(map(_IS_NEG, given)) else given

    def is_current(self, parameters: dict[str, Any]) -> bool:
        """Return whether it still is the layout of the layer with these parameters."""
        if self.generation != generation.now or self.parameters[0] is not parameters or not self.has_its_handles():
            return False
        handle, own = self.handles[0], self.executor
        if (own is None or own is handle._host) and not are_there_groups():
            return True
        return own is handle.executor()  # a process group may share the rows from now on

    def has_its_handles(self) -> bool:
        """Return whether no layer has lost its handle, as `torch.func.functional_call` replaces it, and no GPU rows.

        A table of open ids that outgrows its memory leaves its family: the others go on together.
        """
        if list(map(_GENERATION, self._locks)) != self._generations:
            return False
        if list(map(_FAMILY, self._executors)) != self._families:
            return False
        try:
            return list(map(id, map(_HANDLE, self.parameters))) == self.owned
        except KeyError:
            return False

    def trained(self, layers: Sequence[Any]) -> list[Handle]:
        """Return each handle whose rows train, after the checks of a forward."""
        if torch._C._is_tracing():
            raise UnsupportedError(
                "rows of an embedding layer cannot be traced: torch.jit.trace and torch.onnx would bake this batch's "
                "rows into the graph. Trace ert.freeze(model), which has plain layers; torch.compile works."
            )
        check_untouched(self.distinct)
        for layer in layers if self.missing else ():
            check_reads(self.missing, layer.handle.label, layer.training and layer.handle.requires_grad)
        if not torch.is_grad_enabled():
            return []
        for handle in self.distinct if any(map(_PASSED_BY, self.distinct)) else ():
            passed_by = handle.unapplied.passed_by and handle.requires_grad
            if passed_by and any(layer.training for layer in layers if layer.handle is handle):
                handle.unapplied.check(handle.label)
        if all(map(_TRAINS, self.distinct)):
            return self.distinct
        return [handle for handle in self.distinct if handle.requires_grad]

    @staticmethod
    def newest_event(time: Any, trained: Sequence[Handle]) -> float | None:
        """Return the time of a lookup's newest event, from the times of all. Without training, nothing needs it.

        Raises:
            ArgumentError: see `newest_event`.
        """
        if time is None or not trained:
            return None
        rows = [rows_of(handle.table) for handle in trained]
        if isinstance(time, Tensor):
            if not (time.is_cpu or any(map(_LIFECYCLE, rows))):
                return None  # or the host would wait for a GPU
            time = time.detach().cpu()
        return newest_event(time, rows, trained[0].label)

    def plain(self, given: Sequence[Any]) -> list[np.ndarray] | None:
        """Return ids as arrays; None if some are not dense int64 tensors on the CPU."""
        if set(map(type, given)) != _TENSORS:
            return None
        try:
            arrays = list(map(_AS_ARRAY, given))
        except (RuntimeError, TypeError):  # a negating view, or not dense, or on another device
            return None
        most = self.most_dims
        fit = [dtype is _INT64 and 0 < ndim <= most for dtype, ndim in set(map(_FORM, arrays))]
        return None if False in fit else arrays


_PASSED_BY, _TRAINS = attrgetter("unapplied.passed_by"), attrgetter("requires_grad")
_LIFECYCLE = attrgetter("lifecycle")
_GENERATION, _FAMILY = attrgetter("generation"), attrgetter("family")
_INT64, _TENSORS = np.dtype(np.int64), {Tensor}
_AS_ARRAY: Callable[[Tensor], np.ndarray] = Tensor.numpy
_IS_NEG: Callable[[Any], bool] = Tensor.is_neg
_FORM, _WATCHED, _HANDLE = attrgetter("dtype", "ndim"), attrgetter("is_watched"), itemgetter("handle")


_ID_FORM = attrgetter("dtype", "layout", "is_nested")
_ID_FORMS = {(dtype, torch.strided, False) for dtype in ID_DTYPES}


class HostInput(NamedTuple):
    """Input of a lookup on the CPU, for one feature: see `Batch`. Weights (n,) may get gradients."""

    ids: np.ndarray
    bounds: np.ndarray | None = None
    weights: Tensor | None = None


class LookupState(ABC):
    """Lookup of features: it reads rows or bags, and receives their gradients.

    Args:
        layout: of the layers.
        trained: each handle once whose rows train.
        weights: of the features' positions; empty if no feature has some.

    Attributes:
        handles: of the features.
        side_by_side: the output is one tensor of all bags.
        time: of the newest event of the batch, in seconds since 1970; None: it is not known.
    """

    side_by_side = False
    time: float | None = None

    def at(self, time: float | None) -> Self:
        """Set the time, and return the lookup."""
        self.time = time
        return self

    def __init__(self, layout: LayerLayout, trained: Sequence[Handle], weights: Sequence[Tensor | None]) -> None:
        self.layout, self.trained, self.weights, self.handles = layout, trained, weights, layout.handles

    @abstractmethod
    def read(self, for_weights: bool) -> Sequence[Tensor]:
        """Return the output of each feature, or one output of all. The host does not wait for a GPU.

        With `for_weights`, a call of `weight_grads` follows.
        """

    def row_trains(self) -> list[bool]:
        """Return for each feature whether its rows train."""
        trained = set(map(id, self.trained))
        return [id(handle) in trained for handle in self.handles]

    def without_gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs whose gradients do not come back."""
        if self.side_by_side or len(self.trained) == len(self.layout.distinct):
            return []
        parts = zip(outputs, self.row_trains(), self.weights or [None] * len(outputs), strict=True)
        return [out for out, trains, weights in parts if not (trains or _weights_train(weights))]

    @staticmethod
    def taken(grads: Sequence[Tensor | None]) -> Sequence[Any]:
        """Return the gradients of all outputs in the form that `bring` and `weight_grads` take."""
        if set(map(type, grads)) == _TENSORS and not any(map(_IS_NEG, grads)):
            return grads
        return [None if own is None else own.resolve_neg() for own in grads]

    def bring(self, grads: Sequence[Any], ctx: Any) -> list[Tensor | None]:
        """Sum the gradients of the outputs by row, which become pending when the backward ends.

        Autograd accumulates those that other code must see before: see `Handle.receive`.

        Args:
            grads: what `taken` returned.
            ctx: autograd's context of the lookup.

        Returns:
            What autograd adds for each handle of `trained`.
        """
        brought, run = self.blocks(grads), BackwardPass.current()
        if self.time is not None:
            run.pass_at(self.time, [handle for _, handles in brought for handle in handles])
        run.brought += brought if len(brought) < 2 else each_once(brought)
        is_plain = torch._C._will_engine_execute_node(NODE_OF_ANCHOR) and not run.gradients
        is_plain = is_plain and not are_there_groups() and not compiled_autograd.in_compiled_autograd_region
        found: list[Tensor | None] = [None] * len(self.trained)
        if is_plain and not any(map(_WATCHED, self.trained)):
            return found
        for number, handle in enumerate(self.trained):
            if not is_plain or handle.is_watched:
                summed = run.take(handle)
                if summed is not None:
                    found[number] = handle.receive(summed, ctx.next_functions[number + 1][0], run)
        return found

    @abstractmethod
    def blocks(self, grads: Sequence[Any]) -> list[Block]:
        """Return row gradients that were summed together, with the handle of each table; None: none trains."""

    def weight_grads(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return the gradients (n,) of the positions' weights, for each feature with weights."""
        found = self._weight_grads(grads)
        weights = ((number, own) for number, own in enumerate(self.weights) if own is not None)
        return [torch.as_tensor(found[number], dtype=own.dtype, device=own.device) for number, own in weights]

    @abstractmethod
    def _weight_grads(self, grads: Sequence[Any]) -> Any: ...


class DeviceLookupState(LookupState):
    """Lookup of features of tables of one family on a GPU: see `Executor.joins`.

    Args:
        layout, trained, weights: see `LookupState`.
        ids: of the features.
        bags: of the features; None: the outputs are rows.
    """

    def __init__(
        self,
        layout: LayerLayout,
        trained: Sequence[Handle],
        ids: Sequence[Tensor],
        bags: Sequence[Any] | None = None,
        weights: Sequence[Tensor | None] = (),
    ) -> None:
        from embedrock.device.lookup import DeviceLookup  # needs Triton, like the executors

        super().__init__(layout, trained, weights)
        self._by_executor, of_trained, self._parts = layout.by_executor, set(map(id, trained)), list[Any]()
        for share in layout.shares(bags) if len(ids) > 1 else ((0,),):
            trains = not of_trained.isdisjoint(map(id, map(self.handles.__getitem__, share)))
            own = None if bags is None else list(map(bags.__getitem__, share))
            given = layout.on_device(share), list(map(ids.__getitem__, share)), own, trains, layout.by_frequency
            self._parts.append((share, DeviceLookup(*given)))

    @spanned("read")
    def read(self, for_weights: bool) -> Sequence[Tensor]:
        found: list[Any] = [None] * len(self.handles)
        for share, part in self._parts:
            for number, out in zip(share, part.read(for_weights), strict=True):
                found[number] = out
        if self.layout.are_as_found:
            return found
        forms = zip(found, self.layout.dtypes, self.handles, strict=True)
        return [out.to(handle.device, dtype) for out, dtype, handle in forms]

    def blocks(self, grads: Sequence[Any]) -> list[Block]:
        if len(self.trained) < len(self._by_executor):
            pairs = zip(grads, self.row_trains(), strict=True)
            grads = [own if trains else None for own, trains in pairs]
        by_executor, blocks = self._by_executor.get, list[Block]()
        for share, part in self._parts:
            for sums, executors in part.sums(list(map(grads.__getitem__, share))):
                blocks.append((sums, list(map(by_executor, executors))))
        return blocks

    def _weight_grads(self, grads: Sequence[Any]) -> Any:
        found = dict[int, Tensor]()
        for share, part in self._parts:
            own = part.weight_grads([grads[number] for number in share])
            found |= {share[place]: grad for place, grad in own.items()}
        return found


class HostLookup(LookupState):
    """Lookup by the CPU: of one feature, or of features of tables with one lock.

    Args:
        ids, bounds, weights: of the features: see `HostInput`.
        layout, trained: see `LookupState`.

    Attributes:
        side_by_side: the output is one tensor of all bags: before `read` if possible, then whether it is.
    """

    taken = staticmethod(host_grads)

    def __init__(
        self,
        layout: LayerLayout,
        trained: Sequence[Handle],
        ids: Sequence[np.ndarray],
        side_by_side: bool = False,
        bounds: Sequence[np.ndarray | None] | None = None,
        weights: Sequence[Tensor | None] = (),
    ) -> None:
        super().__init__(layout, trained, weights)
        self._executor: Any = layout.executor
        # A handle may move to another table before the backward.
        self._by_table = layout.by_table if trained is layout.distinct else {own.table: own for own in trained}
        values = [host_weights(own) for own in weights] if weights else None
        self._given: Any = (layout.features, ids, bounds, values)
        self.side_by_side = side_by_side and layout.are_alike and not (weights and any(map(_weights_train, weights)))
        if self._executor.rows is not None:  # of other processes, or averages
            planner: Any = self._executor.planner
            if planner is not None:
                planner = functools.partial(planner, trains=bool(trained))
            self._batch = batches.plan(*self._given, planner=planner)
            self._batch.words = layout.words

    @spanned("read")
    def read(self, for_weights: bool) -> Sequence[Tensor]:
        layout, rows = self.layout, self._executor.rows
        if rows is None:
            self._batch = batches.read(
                *self._given, for_weights=for_weights, side_by_side=self.side_by_side, words=layout.words
            )
        else:
            self._batch = batches.read_planned(self._batch, for_weights, rows(self._batch.parts[0].plan))
        found, self._batch.by_frequency = self._batch, layout.by_frequency
        self.side_by_side = found.side_by_side
        if found.side_by_side:
            whole = torch.from_numpy(found.arrays.pop())  # the lookup does not keep outputs
            return (whole.to(layout.handles[0].device, layout.dtypes[0]),)
        parted = dict[int, Tensor]()
        for numbers, array, sizes in found.take_blocks():
            # Parts of one allocation. To autograd they are tensors of their own, which may be written to.
            whole = tensor_of(array)
            parts = torch.unsafe_split_with_sizes(whole, sizes) if len(sizes) > 1 else (whole,)
            parted |= zip(numbers, parts, strict=True)
        outputs = list(map(parted.__getitem__, range(len(parted))))
        if layout.are_as_read:
            return outputs
        forms = zip(outputs, layout.dtypes, layout.handles, strict=True)
        return [out.to(handle.device, dtype) for out, dtype, handle in forms]

    def blocks(self, grads: Sequence[Any]) -> list[Block]:
        check_reads(self.layout.missing, self.handles[0].label, trains=True)  # a gradient in `eval()`
        handles, tables = self._by_table, self._given[0].tables
        if self.side_by_side:
            blocks = batches.sum_array(self._batch, grads[0])
        else:
            blocks = batches.sum_blocks(self._batch, grads)
            if self._executor.sums_positions:
                lookups = (GradientBlock(*batches.by_position(self._batch, grads)),)
                blocks = [(tables, PositionGradients.of_sums(blocks[0][1], lookups))]
            if type(None) in set(map(type, grads)):
                given = {table for table, own in zip(tables, grads, strict=True) if own is not None}
                handles = {table: handle for table, handle in handles.items() if table in given}
        if len(handles) < len(self.layout.distinct):
            batches.bind_unstepped(self._batch, handles)
        return [(own, list(map(handles.get, tables))) for tables, own in blocks]

    def _weight_grads(self, grads: Sequence[Any]) -> Any:
        return batches.weight_gradients(self._batch, grads)


def looked_up(reading: LookupState) -> Sequence[Tensor]:
    """Return the outputs of a lookup, whose gradients come back."""
    trained, weights = reading.trained, reading.weights and [own for own in reading.weights if own is not None]
    if trained or any(map(needs_gradient, weights)):
        return _apply(reading, ANCHOR, *trained, *weights)
    return reading.read(for_weights=False)


class Lookup(torch.autograd.Function):
    """Autograd function that looks up features. Gradients go to the tables' handles and to the positions' weights."""

    @staticmethod
    def forward(ctx: Any, reading: LookupState, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each feature, or one output of all. `tensors` are the handles, then the weights."""
        ctx.reading, ctx.materialize_grads = reading, False
        weights_train = False
        if reading.weights:
            count = len(reading.trained)
            ctx.save_for_backward(*tensors[count:])  # so that autograd detects writes before the backward
            weights_train = any(ctx.needs_input_grad[2 + count :])
        outputs = reading.read(weights_train)
        if others := reading.without_gradients(outputs):
            ctx.mark_non_differentiable(*others)
        return tuple(outputs)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        ctx.saved_tensors  # noqa: B018  # for PyTorch's errors
        reading, needs = ctx.reading, ctx.needs_input_grad
        given = reading.taken(grad_outputs)
        of_handles = reading.bring(given, ctx) if reading.trained else []
        of_weights: Sequence[Tensor | None] = []
        if reading.weights:
            of_weights = [None] * (len(needs) - 2 - len(of_handles))
            if True in needs[2 + len(of_handles) :]:
                of_weights = reading.weight_grads(given)
        of_anchor = ANCHOR.detach() if compiled_autograd.in_compiled_autograd_region else None  # which takes no None
        return None, of_anchor, *of_handles, *of_weights


# `apply` without its slow checks: no transform of `torch.func` runs.
_base: Any = super(torch.autograd.Function, Lookup)
_apply = _base.apply


def _weights_train(weights: Tensor | None) -> bool:
    return weights is not None and (weights.requires_grad or has_tangent(weights))


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor has a derivative of forward mode."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def needs_gradient(weights: Tensor | None) -> bool:
    """Return whether autograd follows the weights of positions, in backward or in forward mode."""
    return weights is not None and ((weights.requires_grad and torch.is_grad_enabled()) or has_tangent(weights))
