"""Builds the two compiled parts. They are plain shared libraries, not Python extensions: they hold no
Python code and no C++ torch symbol, only the LibTorch stable ABI, so one wheel serves every Python 3
and torch >= 2.11.

    nwor_ops/libnwor_cpu.so    always
    nwor_ops/libnwor_cuda.so   whenever nvcc is found; no GPU and no CUDA build of torch is needed

Environment:
    TORCH_CUDA_ARCH_LIST    architectures, e.g. "9.0" or "8.0;9.0+PTX" (default: the release list)
    NWOR_BUILD_CUDA=0       leave the CUDA library out;  =1: fail where nvcc is missing
    NWOR_GLIBC=2.28         link so that the libraries run with that glibc, where this machine's is newer (`make dist`)
    CXX, CUDA_HOME          compilers
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # the older ones fail on pyproject.toml, in many lines
    sys.exit(
        f"nwor_ops: building needs setuptools >= 77, found {setuptools.__version__}; upgrade it: "
        "pip install --upgrade 'setuptools>=77,<82'"
    )

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# Python 3.10 has no reader of TOML.
MAJOR, MINOR = map(int, re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups())
TARGET = f"0x{MAJOR:02x}{MINOR:02x}000000000000"  # the oldest torch whose stable ABI the libraries use
RELEASE_ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"
MIN_NVCC = (12, 8)  # the first that knows compute capability 12.0
BUILD_VARIABLES = {
    "cpu": ("CXX", "NWOR_GLIBC"),
    "cuda": ("CXX", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "NWOR_GLIBC"),
}
COMMON = ["-std=c++17", "-DTORCH_STABLE_ONLY", f"-DTORCH_TARGET_VERSION={TARGET}"]


def stop(sentence: str) -> None:
    sys.exit(f"nwor_ops: {sentence}")


def find_torch() -> tuple[pathlib.Path, str]:
    """Its folder and version. It is not imported: a CUDA build may lie here without the libraries that it needs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        stop(
            f"building needs torch >= {MAJOR}.{MINOR}, which is not installed in this environment; install it first "
            "and build with `pip install --no-build-isolation .`"
        )
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < (MAJOR, MINOR):
        stop(f"building needs torch >= {MAJOR}.{MINOR} (stable ABI), found torch {version}; upgrade torch")
    return pathlib.Path(spec.origin).parent, version


def find_compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        stop(
            f"no C++ compiler: {compiler!r} is not on the PATH; install one (Debian: apt-get install g++) "
            "or name yours in CXX"
        )
    return compiler


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [pathlib.Path(home) / "bin" / "nvcc"] if home else []
    candidates += [pathlib.Path(found)] if (found := shutil.which("nvcc")) else []
    candidates += [pathlib.Path("/usr/local/cuda/bin/nvcc")]
    return next((str(path) for path in candidates if path.exists()), None)


def nvcc_version(nvcc: str) -> tuple[int, int]:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def cuda_problem() -> str | None:
    """None, or why the CUDA library cannot be built."""
    nvcc = find_nvcc()
    if nvcc is None:
        return "nvcc was not found; install the CUDA toolkit or set CUDA_HOME"
    if (version := nvcc_version(nvcc)) < MIN_NVCC:
        return f"{nvcc} is of CUDA {version[0]}.{version[1]}, 12.8 or newer is needed; install it or set CUDA_HOME"
    return None


def cuda_library_folders(nvcc: str) -> list[str]:
    """Where libcudart_static.a may be. Asked of nvcc itself: it may be a wrapper that lies elsewhere."""
    plan = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    ).stderr
    home = dict(line[3:].split("=", 1) for line in plan.splitlines() if line.startswith("#$ ") and "=" in line)
    top = home.get("TOP", "/usr/local/cuda")
    return [f"{top}/{home.get('_TARGET_DIR_') or 'targets/x86_64-linux'}/lib", f"{top}/lib64"]


def architecture_flags(names: str) -> list[str]:
    flags = []
    for name in names.replace(",", ";").replace(" ", ";").split(";"):
        if not name:
            continue
        number = name.removesuffix("+PTX").replace(".", "")
        if not number.rstrip("af").isdigit():
            stop(f"TORCH_CUDA_ARCH_LIST must be numbers like 9.0 or 9.0+PTX, got {name!r}")
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if name.endswith("+PTX"):
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


class Library(Extension):
    """One shared library; `kind` is "cpu" or "cuda"."""

    def __init__(self, kind: str):
        sources = sorted(str(path.relative_to(ROOT)) for path in (*(CSRC / kind).glob("*.c[pu]*"), CSRC / "glibc.cpp"))
        headers = sorted(str(path.relative_to(ROOT)) for path in (*CSRC.rglob("*.h"), CSRC / "exports.map"))
        super().__init__(f"nwor_ops.libnwor_{kind}", sources, depends=headers)
        self.kind = kind


class BuildLibraries(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", os.sep) + ".so"  # no Python ABI tag: it is not a Python module

    def build_extension(self, library: Library) -> None:
        self.torch_folder, torch_version = find_torch()
        self.scratch = pathlib.Path(self.build_temp) / library.kind
        self.scratch.mkdir(parents=True, exist_ok=True)
        target = pathlib.Path(self.get_ext_fullpath(library.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        inputs = [pathlib.Path(path) for path in (*library.sources, *library.depends, __file__)]
        # Built with other compilers, flags or headers it is not fresh either.
        built_with = self.scratch / "built_with.txt"
        wanted = f"{torch_version} {target} {[os.environ.get(name) for name in BUILD_VARIABLES[library.kind]]}"
        same = built_with.exists() and built_with.read_text() == wanted
        if not self.force and same and target.exists() and self.is_fresh(target, inputs):
            return
        link = self.compile_cpu if library.kind == "cpu" else self.compile_cuda
        # Linked beside the target and renamed: a process that has the old file open keeps it.
        unfinished = target.with_suffix(".unfinished")
        command = [*link(library.sources), "-o", str(unfinished)]
        run(command)
        if glibc := os.environ.get("NWOR_GLIBC"):
            self.link_for(glibc, command, unfinished)
        built_with.unlink(missing_ok=True)  # until here what it says is true, also where the compiler failed
        unfinished.replace(target)
        built_with.write_text(wanted)

    @staticmethod
    def is_fresh(target: pathlib.Path, inputs: list[pathlib.Path]) -> bool:
        return all(path.stat().st_mtime <= target.stat().st_mtime for path in inputs)

    def link_for(self, glibc: str, command: list[str], library: pathlib.Path) -> None:
        sys.path.insert(0, str(ROOT / "tools"))
        from older_glibc import link_flags

        newest = tuple(int(part) for part in glibc.split("."))
        if flags := link_flags(library, newest, find_compiler(), self.scratch / "older_glibc"):
            run([*command, *flags])

    def includes(self) -> list[str]:
        # torch's headers as system headers: their warnings are not ours.
        return ["-isystem", str(self.torch_folder / "include"), f"-I{CSRC}"]

    def compile_each(self, sources: list[str], compile_one) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_one, sources))

    def link_flags(self, *libraries: str) -> list[str]:
        # Python loads torch's libraries with local visibility, so ours must name the ones it needs.
        folder = self.torch_folder / "lib"
        exports = f"-Wl,--version-script={CSRC / 'exports.map'}"
        return [exports, f"-L{folder}", "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)]

    def compile_cpu(self, sources: list[str]) -> list[str]:
        compiler = find_compiler()
        flags = [*COMMON, "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=return-type"]
        # The stable ABI's headers are the same for every torch; its location is not ours to keep.
        flags += [f"-ffile-prefix-map={ROOT}=.", *self.includes()]
        flags += ["-ffp-contract=off"]  # csrc/gumbel.h: the same bits as on CUDA

        def compile_one(source: str) -> str:
            target = str(self.scratch / (pathlib.Path(source).stem + ".o"))
            run([compiler, *flags, "-c", source, "-o", target])
            return target

        return [compiler, "-shared", *self.compile_each(sources, compile_one),
                *self.link_flags("torch", "torch_cpu", "c10")]  # fmt: skip

    def compile_cuda(self, sources: list[str]) -> list[str]:
        nvcc = find_nvcc()
        assert nvcc is not None
        host_flags = f"-fPIC,-fvisibility=hidden,-ffile-prefix-map={ROOT}=."
        flags = [*COMMON, "-DUSE_CUDA", "-O3", "-cudart", "static", "-Xcompiler", host_flags, *self.includes()]
        architectures = architecture_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or RELEASE_ARCHITECTURES)

        def compile_one(source: str) -> str:
            target = str(self.scratch / (pathlib.Path(source).stem + ".o"))
            run([nvcc, *flags, *architectures, "-c", source, "-o", target])
            return target

        objects = self.compile_each(sources, compile_one)
        compiler = find_compiler()
        if not (self.torch_folder / "lib" / "libtorch_cuda.so").exists():
            # A CPU build of torch: link against an empty library of that name. Only the name is kept.
            stub = str(self.scratch / "libtorch_cuda.so")
            run([compiler, "-shared", "-x", "c", os.devnull, "-Wl,-soname,libtorch_cuda.so", "-o", stub])
        # Linked by the host compiler: nvcc would write its own command line into the library.
        folders = [self.scratch, *cuda_library_folders(nvcc)]
        return [compiler, "-shared", *objects, *(f"-L{folder}" for folder in folders),
                "-lcudart_static", "-ldl", "-lrt", "-lpthread",
                *self.link_flags("torch", "torch_cpu", "torch_cuda", "c10")]  # fmt: skip


class PlatformWheel(bdist_wheel):
    """The libraries hold machine code but nothing of Python's ABI."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


def libraries() -> list[Library]:
    wanted = os.environ.get("NWOR_BUILD_CUDA")
    if wanted == "0":
        return [Library("cpu")]
    problem = cuda_problem()
    if problem is not None:
        if wanted == "1":
            stop(f"NWOR_BUILD_CUDA=1 but {problem}")
        print(f"nwor_ops: building the CPU library only: {problem}", flush=True)
        return [Library("cpu")]
    return [Library("cpu"), Library("cuda")]


if __name__ == "__main__":
    setup(
        ext_modules=libraries(),
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
        distclass=BinaryDistribution,
    )
