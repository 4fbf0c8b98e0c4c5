"""Run tests on an emulated GPU, through the real torch.cuda: ``make gpu-emulated PYTHON=...``, of PyTorch for CUDA.

    python tests/gpu/emulate.py                       all tests in tests/gpu that run on a GPU, but the slow ones
    python tests/gpu/emulate.py tests/gpu/test_gpu_plan.py -x         what pytest is to be told
    python tests/gpu/emulate.py --steps modes,graphs                  steps of on_gpu.py instead
    EMULATED_GPU_POISON=1 python tests/gpu/emulate.py                 memory that was never written is NaN, or -1
    EMULATED_GPU_BYTES=300000000 python tests/gpu/emulate.py          of a small GPU

PyTorch is as it is installed, but CUDA's runtime library is the one of ``emulator/*.cpp``: compiled into build/, and
loaded before PyTorch looks for its own (LD_PRELOAD, as PyTorch's libraries name a path of theirs for it, which comes
before LD_LIBRARY_PATH). ``emulated_gpu.py`` is loaded by PyTorch itself, in each process of the tests: the environment
says so, and nothing is installed. It needs g++, and the headers that come with PyTorch's wheels.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import on_gpu

SOURCES = Path(__file__).resolve().parent / "emulator"
BUILD = on_gpu.ROOT / "build" / "emulator"
# Libraries of PyTorch, and what they take from CUDA's runtime library, and from the driver's.
PYTORCH = "torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg", "torch_nvshmem", "caffe2_nvrtc"
OF_CUDA = re.compile(r"(\w+)@libcudart\.so.*|(cu[A-Z]\w+)")
CUDA = "13"
STEP_S = 600.0
# It copies a table of 8 GiB to the GPU, and this one's memory is RAM as well.
TOO_LARGE = "tests/gpu/test_gpu_kernels.py::TestGPU::test_addresses_beyond_2_to_the_31"
NEED = "An emulated GPU needs PyTorch for CUDA 13 (`pip install torch`, in an environment of its own: 5 GB), and g++."


def missing() -> str:
    """Return why there can be no emulated GPU, or nothing."""
    import torch

    version = torch.version.cuda
    if version is None or version.partition(".")[0] != CUDA:
        what = f"for CUDA {version}" if version else "without CUDA"
        return f"PyTorch {torch.__version__} of {sys.executable} is {what}. {NEED}"
    for program in ("g++", "nm"):
        if shutil.which(program) is None:
            return f"There is no {program} on PATH. {NEED}"
    if len(headers()) < 2:
        return f"CUDA's headers are not beside PyTorch (nvidia/cu13/include, triton/backends/nvidia/include). {NEED}"
    return ""


def headers() -> list[Path]:
    """Return the folders of CUDA's headers. NVIDIA's wheel lacks a few, which Triton's has."""
    wanted = {"nvidia": "cu13/include/cuda_runtime_api.h", "triton": "backends/nvidia/include/crt/host_defines.h"}
    found = list[Path]()
    for package, header in wanted.items():
        spec = importlib.util.find_spec(package)
        places = [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]
        found += [place / header.partition("include")[0] / "include" for place in places if (place / header).exists()]
    return found


def built() -> Path:
    """Compile the library, and return it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    name = f"libcudart.so.{CUDA}"
    library, versions, stubs, own = BUILD / name, BUILD / "versions", BUILD / "stubs.cpp", BUILD / "own.o"
    versions.write_text(f"{name} {{ global: *; }};\n")
    options = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", *(f"-I{folder}" for folder in headers())]
    sources = sorted(SOURCES.glob("*.cpp"))
    subprocess.run([*options, "-r", "-o", str(own), *map(str, sources)], check=True)
    stubs.write_text(_stubs(own))
    linked = ["-shared", f"-Wl,--version-script={versions}", f"-Wl,-soname,{name}", "-o", str(library)]
    subprocess.run([*options, *linked, str(own), str(stubs)], check=True)
    driver = BUILD / "libcuda.so.1"
    driver.unlink(missing_ok=True)
    driver.symlink_to(library)
    return library


def _stubs(own: Path) -> str:
    """Return functions that only fail, for what PyTorch's libraries are linked to beside our own."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libraries = [Path(spec.origin).parent / "lib" / f"lib{name}.so" for name in PYTORCH]
    wanted = set[str]()
    for library in libraries:
        if library.exists():
            matches = map(OF_CUDA.fullmatch, _symbols("-D", "--undefined-only", library))
            wanted |= {match[1] or match[2] for match in matches if match}
    names = sorted(wanted - _symbols("--defined-only", own))
    lines = [f'int {name}() {{ return emulator_refuses("{name}"); }}' for name in names]
    return "\n".join(['extern "C" {', "int emulator_refuses(const char*);", *lines, "}"])


def _symbols(*options: str | Path) -> set[str]:
    """Return names that a library has, or wants."""
    said = subprocess.run(
        ["nm", "--format=just-symbols", *map(str, options)], check=True, capture_output=True, text=True
    )
    return set(said.stdout.split())


def environment(library: Path) -> dict[str, str]:
    """Return the variables of processes that have the emulated GPU."""
    entry = BUILD / "emulated_gpu-0.dist-info" / "entry_points.txt"
    entry.parent.mkdir(exist_ok=True)
    entry.write_text("[torch.backends]\nemulated_gpu = emulated_gpu:install\n")  # PyTorch calls it at its end
    variables = on_gpu.environment(dry=False)
    return variables | {
        "LD_PRELOAD": os.pathsep.join(path for path in (str(library), os.environ.get("LD_PRELOAD", "")) if path),
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in (str(BUILD), os.environ.get("LD_LIBRARY_PATH")) if path),
        "PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], str(BUILD)]),
        "TRITON_INTERPRET": "1",
        "EMULATED_GPU": str(library),
    }


def run_steps(names: Sequence[str], variables: dict[str, str]) -> int:
    """Make steps of on_gpu.py, at the sizes of toys. (Those of the benchmark are on the CPU.)"""
    out = BUILD / "steps"
    own = [step for step in on_gpu.steps(out, dry=True) if step.command[1].endswith("on_gpu_steps.py")]
    every = {step.name: step._replace(seconds=STEP_S) for step in own}
    if unknown := set(names) - every.keys():
        sys.exit(f"no steps: {', '.join(sorted(unknown))}. There are {', '.join(every)}")
    is_fine = on_gpu.Run(out, variables, STEP_S * len(names)).make([every[name] for name in names])
    print(f"{out / 'gpu.json'}, {out / 'gpu.log'}")
    return 0 if is_fine else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests, or steps; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", default="", help="of on_gpu.py, by commas, instead of the tests")
    given, for_pytest = parser.parse_known_args(arguments)
    if why := missing():
        sys.exit(why)
    variables = environment(built())
    if given.steps:
        return run_steps(given.steps.split(","), variables)
    is_named = any(word.partition("::")[0].endswith(".py") for word in for_pytest)
    told = for_pytest if is_named else [*for_pytest, str(on_gpu.HERE)]
    command = sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "--deselect", TOO_LARGE, *told
    return subprocess.run(command, cwd=on_gpu.ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
