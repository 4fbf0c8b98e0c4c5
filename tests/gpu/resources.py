"""What kernels take of a GPU: registers, stack, and how wide they load. Run by test_gpu_compiles.py.

An argument is the compute capability that they are compiled for, 90 for an H200. Two variants of each kernel are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import compile_all
import triton
from compile_all import NoGPU
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from embedrock.kernels.gpu import runtime

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
USE = re.compile(r"REG:(\d+) STACK:(\d+)")


def used(binary: Any) -> dict[str, int]:
    """Return registers and bytes of stack of a thread, and how many loads of its program are of 16 bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = [
            subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        ]
    found = USE.search(said[0])
    assert found is not None, said[0]
    wide = len(re.findall(r"\bLDG\.E\S*\.128", said[1]))
    return {"registers": int(found[1]), "stack": int(found[2]), "wide_loads": wide}


if __name__ == "__main__":
    compile_all.H200 = GPUTarget("cuda", int(sys.argv[1]), 32)
    gpu: Any = NoGPU()
    driver.set_active(gpu)
    compile_all.compile_at_most(2)
    compile_all.run_examples()
    print(json.dumps({kernel.__name__: [used(b) for b in compile_all.compiled(kernel)] for kernel in runtime.KERNELS}))
