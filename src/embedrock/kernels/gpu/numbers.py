"""Step constants for kernels: arguments of a launch or, for replays of a CUDA graph, device memory."""

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined


@inlined
def loaded(number):
    """Return a number that is an argument of the launch or the address of one."""
    if not isinstance(number, float) and number.dtype.is_ptr():  # in the interpreter, numbers in tuples are Python's
        number = tl.load(number)
    return number


def of_step(step, numbers):
    """Return a step's arguments for kernels: its number, and the results of `apart`.

    Args:
        step: the number of the step, or int64 () with it.
        numbers: see `apart`.
    """
    step = step % 2**32 if type(step) is int else step
    return (step, numbers, 0) if _FLOATS.issuperset(map(type, numbers)) else (step, *apart(numbers))


_FLOATS = frozenset({float})


def apart(numbers):
    """Return a rule's step constants as floats and tensors, and the only integer, which varies from step to step.

    Args:
        numbers: a tuple of `embedrock.kernels.arguments`, with tensors as arrays. Numbers may be in memory: float32 ().
    """
    steps = getattr(numbers, "steps", 0)
    apart = [value if type(value) is float or hasattr(value, "data_ptr") else float(value) for value in numbers]
    return type(numbers)(*apart), steps
