"""`Pending`: gradients of rows that wait for a step, behind one number that stands for them outside."""

from __future__ import annotations

from torch import Tensor

from embedrock.process import forks
from embedrock.torch.training.handle_gradient import HandleGradient
from embedrock.torch.training.side import Executor, Gradients


class Pending:
    """Row gradients since the last zeroing, whose number (`Gradients.shown`) everybody sees.

    Whoever scales the number scales the rows, and whoever zeroes it drops them: that is how loss scaling,
    clipping by norm and zeroing reach rows that nobody outside can see.

    Attributes:
        side: where the rows are used, and the gradients are.
        grads: the gradients, None when there are none.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.grads: Gradients | None = None
        self._lock = forks.lock(forks.LockRank.SECTION)

    @property
    def shown(self) -> float | Tensor:
        """The number that stands for the gradients."""
        return 0.0 if self.grads is None else self.grads.shown

    def drop(self) -> None:
        """Forget the gradients."""
        self.grads = None

    def drop_unless_shown(self, handle: Tensor) -> None:
        """Forget the gradients if those of the handle are gone. Backwards of other threads may add to them."""
        if self.grads is not None and handle.grad is None:
            with self._lock:
                if handle.grad is None:  # else one of those has shown its own
                    self.grads = None

    def follow(self, shown: Tensor | None) -> None:
        """Do to the gradients what was done to the number since it was shown (None: it is gone)."""
        if type(shown) is HandleGradient:
            self.grads = shown.rows()
        elif self.grads is not None:
            self.grads = None if shown is None else self.grads.rescaled_by(shown)

    def show(self, grads: Gradients, number: Tensor) -> HandleGradient:
        """Let a number stand for gradients that take the place of those that there are; return it."""
        with self._lock:
            self.grads = grads
            return HandleGradient.show(grads, number, self)

    def add(self, grads: Gradients, shown: Tensor) -> HandleGradient:
        """Add gradients to those that a number stands for, and return it, which stands for the sum from then on."""
        with self._lock:
            self.follow(shown)
            both = grads if self.grads is None else self.executor.merge(self.grads, grads)
            self.grads = both
            return HandleGradient.show(both, shown, self)
