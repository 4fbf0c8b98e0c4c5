"""`Pending`: gradients of rows that wait for a step, behind one number that stands for them outside."""

from __future__ import annotations

from torch import Tensor

from embedrock.torch.training.side import Gradients, RowSide


class Pending:
    """Row gradients since the last zeroing, whose number (`Gradients.shown`) everybody sees.

    Whoever scales the number scales the rows, and whoever zeroes it drops them: that is how loss scaling,
    clipping by norm and zeroing reach rows that nobody outside can see.

    Attributes:
        side: where the rows are used, and the gradients are.
        grads: the gradients, None when there are none.
    """

    def __init__(self, side: RowSide) -> None:
        self.side = side
        self.grads: Gradients | None = None

    def drop(self) -> None:
        """Forget the gradients."""
        self.grads = None

    def follow(self, shown: Tensor | None) -> None:
        """Do to the gradients what was done to the number since it was shown (None: it is gone)."""
        if self.grads is not None:
            self.grads = None if shown is None else self.grads.seen_as(shown)

    def add(self, grads: Gradients) -> float | Tensor:
        """Add gradients, and return the number to show from now on."""
        both = grads if self.grads is None else self.side.merge(self.grads, grads)
        self.grads = both
        return both.shown

    def arrive(self, earlier: Gradients | None, grads: Gradients) -> tuple[Gradients, float | Tensor]:
        """Add gradients to those that arrived earlier in the same backward.

        Returns:
            The sum, and what autograd has to add: by how much the number of this backward's gradients grew.
        """
        both = grads if earlier is None else self.side.merge(earlier, grads)
        return both, both.growth_since(earlier)
