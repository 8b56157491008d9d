"""Make a CUDA build of torch importable without NVIDIA's libraries, for tests that run on the CPU.

    pip install --no-deps torch==2.15.0    # and its pure-Python dependencies
    python tools/cuda_stubs.py SITE-PACKAGES/torch/lib FOLDER
    LD_LIBRARY_PATH=FOLDER python -c "import torch; print(torch.cuda.is_available())"    # False

It writes to FOLDER an empty library for each name that the loader does not find, and one library with every function
that is still missing. Each function returns 100, "no CUDA-capable device is detected". The stubs contain no code from
NVIDIA.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE


def lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def loaded_with(library: pathlib.Path) -> tuple[set[str], set[str]]:
    """Return the names that the loader misses for this library, and the paths of the libraries that it finds."""
    missing, found = set(), set()
    for line in lines("ldd", str(library)):
        if match := re.match(r"\s*(\S+) => (.+?)(?: \(0x[0-9a-f]+\))?$", line):
            if match[2] == "not found":
                missing.add(match[1])
            else:
                found.add(match[2])
    return missing, found


def symbols(library: str, which: str) -> set[str]:
    """Return symbols by `which`: --undefined-only (weak ones may stay missing) or --defined-only."""
    table = (line.split() for line in lines("nm", "-D", which, library))
    return {row[-1].split("@")[0] for row in table if len(row) > 1 and not (row[-2] in "wv" and "un" in which)}


def write_stubs(torch_libraries: pathlib.Path, folder: pathlib.Path) -> int:
    """Write the stubs and return the number of libraries, which is 0 if nothing is missing."""
    shipped = sorted(torch_libraries.glob("*.so*"))
    missing: set[str] = set()
    found = {str(path) for path in shipped}
    for library in shipped:
        more_missing, more_found = loaded_with(library)
        missing |= more_missing
        found |= more_found
    if not missing:
        return 0
    needed = set().union(*(symbols(str(path), "--undefined-only") for path in shipped))
    needed -= set().union(*(symbols(path, "--defined-only") for path in found))
    functions = sorted(name for name in needed if not re.match(r"_?Py", name))  # the interpreter provides these

    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stubs.c"
    declarations = "".join(f'int {name}(void) __attribute__((alias("no_device")));\n' for name in functions)
    source.write_text(f"static int no_device(void) {{ return {NO_DEVICE}; }}\n{declarations}")
    compiler = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-w", "-nostdlib"]
    # The functions are in a separate library. In a library that torch names, the loader would require versioned
    # symbols.
    subprocess.run([*compiler, "-x", "c", str(source), "-o", str(folder / "libcuda_stubs.so")], check=True)
    for name in sorted(missing):
        link = ["-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", f"-L{folder}", "-lcuda_stubs"]
        subprocess.run([*compiler, "-x", "c", os.devnull, *link, "-o", str(folder / name)], check=True)
    return len(missing)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(write_stubs(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])), "libraries")
