"""The numbers of a step: arguments of a launch or, for what a CUDA graph launches again and again, in memory."""

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined


@inlined
def loaded(number):
    """Return a number that is an argument of the launch, or lies where the argument says."""
    if not isinstance(number, float) and number.dtype.is_ptr():  # in the interpreter, those in tuples are Python's
        number = tl.load(number)
    return number


def of_step(step, numbers):
    """Return what kernels take of a step: its number, a rule's numbers as `apart` returns them.

    Args:
        step: the number of the step, or where it is, int64 ().
        numbers: see `apart`.
    """
    return (step % 2**32 if type(step) is int else step), *apart(numbers)


_FLOATS = frozenset({float})


def apart(numbers):
    """Return a rule's numbers as floats and tensors, and its only integer, which varies from step to step.

    Args:
        numbers: a tuple of `embedrock.kernels.arguments`. Its arrays are tensors; so are its numbers where they are in
            memory: float32 ().
    """
    if _FLOATS.issuperset(map(type, numbers)):
        return numbers, 0
    steps = getattr(numbers, "steps", 0)
    apart = [value if type(value) is float or hasattr(value, "data_ptr") else float(value) for value in numbers]
    return type(numbers)(*apart), steps
