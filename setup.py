"""Build the two compiled libraries. They are plain shared libraries, not Python extensions. They use only the
LibTorch stable ABI: no Python code and no C++ symbol of torch. One wheel therefore serves every Python 3 and
torch >= 2.11.

    nwor_ops/libnwor_cpu.so    always
    nwor_ops/libnwor_cuda.so   whenever nvcc is found; no GPU and no CUDA build of torch is needed

Environment:
    TORCH_CUDA_ARCH_LIST    architectures, e.g. "9.0" or "8.0;9.0+PTX" (default: those of this machine's GPUs; without
                            GPUs and with NWOR_BUILD_CUDA=1 the release list)
    NWOR_BUILD_CUDA=0       leave the CUDA library out;  =1: fail if nvcc is missing (`make dist`). By default the
                            build fails without nvcc if this machine has an NVIDIA GPU.
    NWOR_BUILD=0            leave both libraries out, for an editable installation of a tree that has them
    NWOR_GLIBC=2.28         link so that the libraries run with that glibc, if this machine's is newer (`make dist`)
    NWOR_REPO_URL=https://FORGE/OWNER/NAME
                            home of the project, for the metadata (the release workflow sets it)
    NWOR_SANITIZE=address,undefined
                            compile the CPU library with these sanitizers (`make test-asan`)
    CXX, CUDA_HOME          compilers

Ninja decides what to compile: sources whose command is new, or that include a changed header.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys

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
GPU = runpy.run_path(str(ROOT / "nwor_ops" / "gpu.py"))
RELEASE_ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"
MIN_NVCC = (12, 8)  # the first that knows compute capability 12.0
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


def find_ninja() -> list[str]:
    if importlib.util.find_spec("ninja") is not None:  # also where this environment's programs are not on the PATH
        return [sys.executable, "-m", "ninja"]
    if (found := shutil.which("ninja")) is None:
        stop(
            "building needs ninja, which is neither in this environment nor on the PATH; install it: pip install ninja "
            "(Debian: apt-get install ninja-build)"
        )
    return [found]


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


def version_text(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def nvcc_version(nvcc: str) -> tuple[int, int]:
    found = re.search(r"release (\d+)\.(\d+)", version_text(nvcc))
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
    """Return the folders that may hold libcudart_static.a. nvcc names them, because it may be a wrapper elsewhere."""
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


def default_architectures(nvcc: str) -> str:
    """Those of this machine's GPUs. The release list if there are none, if one is not for us, or for a release."""
    found = GPU["compute_capabilities"]() if os.environ.get("NWOR_BUILD_CUDA") != "1" else []
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False).stdout.split()
    known = all(float(name) >= 8 and f"sm_{name.replace('.', '')}" in listed for name in found)
    return ";".join(found) if found and known else RELEASE_ARCHITECTURES


def tell_user(sentence: str) -> None:
    """Print to the terminal. pip shows what a build prints to stdout or stderr only if it fails."""
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\nnwor_ops: {sentence}\n")


class Library(Extension):
    """One shared library; `kind` is "cpu" or "cuda"."""

    def __init__(self, kind: str):
        paths = (*(CSRC / kind).glob("*.c[pu]*"), CSRC / "glibc.cpp")
        super().__init__(f"nwor_ops.libnwor_{kind}", sorted(str(path.relative_to(ROOT)) for path in paths))
        self.kind = kind


class Plan:
    """A build.ninja. Its commands run where this file lies."""

    def __init__(self, folder: pathlib.Path):
        self.file = folder / "build.ninja"
        self.lines = [f"builddir = {escape(folder)}"]
        self.outputs: list[str] = []

    def add(self, output: pathlib.Path, command: str, inputs: list, *more: str) -> None:
        rule = f"rule{len(self.outputs)}"
        self.lines += [f"rule {rule}", f"  command = {escape(command, '$')}", *more]
        self.lines += [f"build {escape(output)}: {rule} {' '.join(map(escape, inputs))}"]
        self.outputs.append(str(output))

    def run(self) -> None:
        self.file.write_text("\n".join(self.lines) + "\n")
        if subprocess.run([*find_ninja(), "-v", "-f", str(self.file)], cwd=ROOT, check=False).returncode != 0:
            stop("building failed; behind FAILED stands what failed, and why")


def escape(text: str | pathlib.Path, special: str = "$ :") -> str:
    return re.sub(f"([{special}])", r"$\1", str(text))


class BuildLibraries(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", os.sep) + ".so"  # no Python ABI tag: it is not a Python module

    def build_extension(self, library: Library) -> None:
        self.torch_folder, torch_version = find_torch()
        self.scratch = pathlib.Path(self.build_temp).resolve() / library.kind
        self.is_first = not self.scratch.exists()
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.plan = Plan(self.scratch)
        # The versions of torch and the compilers. Ninja does not see them, but every object depends on them.
        self.built_with = self.scratch / "built_with.txt"
        compilers = [find_compiler(), *([find_nvcc()] if library.kind == "cuda" else [])]
        versions = "\n".join([f"torch {torch_version}", *map(version_text, compilers)])
        if self.force or not self.built_with.exists() or self.built_with.read_text() != versions:
            self.built_with.write_text(versions)
        target = pathlib.Path(self.get_ext_fullpath(library.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        command = self.compile_cpu(library.sources) if library.kind == "cpu" else self.compile_cuda(library.sources)
        self.link(command, target)
        self.plan.run()

    def link(self, command: list[str], target: pathlib.Path) -> None:
        # Link next to the target and rename. A process that has the old file open keeps it.
        unfinished = target.with_suffix(".unfinished")
        exports = CSRC / "exports.map"
        command = [*command, f"-Wl,--version-script={exports}", "-o", str(unfinished)]
        if glibc := os.environ.get("NWOR_GLIBC"):
            tool = str(ROOT / "tools" / "older_glibc.py")
            command = [sys.executable, tool, glibc, str(self.scratch / "older_glibc"), *command]
        rename = shlex.join(["mv", "-f", str(unfinished), str(target)])
        self.plan.add(target, f"{shlex.join(command)} && {rename}", [*self.plan.outputs, exports])

    def copy_extensions_to_source(self) -> None:
        for library in self.extensions:
            target = pathlib.Path(self.get_ext_fullpath(library.name))
            unfinished = target.with_suffix(".unfinished")
            shutil.copy2(pathlib.Path(self.build_lib) / self.get_ext_filename(library.name), unfinished)
            unfinished.replace(target)

    def includes(self) -> list[str]:
        # torch's headers as system headers: their warnings are not ours.
        return ["-isystem", str(self.torch_folder / "include"), f"-I{CSRC}"]

    def compile_each(self, sources: list[str], command: list[str]) -> list[str]:
        """The objects. The compiler writes down which headers each of them includes, the system's left out."""
        first = len(self.plan.outputs)
        for source in sources:
            target = self.scratch / f"{pathlib.Path(source).stem}.o"
            depfile = f"{target}.d"
            words = [*command, "-MMD", "-MF", depfile, "-c", source, "-o", str(target)]
            record = ("  deps = gcc", f"  depfile = {escape(depfile)}")
            self.plan.add(target, shlex.join(words), [source, self.built_with], *record)
        return self.plan.outputs[first:]

    def link_flags(self, *libraries: str) -> list[str]:
        # Python loads torch's libraries with local visibility, so ours must name the ones it needs.
        folder = self.torch_folder / "lib"
        return [f"-L{folder}", "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)]

    def compile_cpu(self, sources: list[str]) -> list[str]:
        compiler = find_compiler()
        flags = [*COMMON, "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=return-type"]
        # The stable ABI's headers are the same for every torch; its location is not ours to keep.
        flags += [f"-ffile-prefix-map={ROOT}=.", *self.includes()]
        flags += ["-ffp-contract=off"]  # csrc/common/gumbel.h: the same bits as on CUDA
        if sanitizers := os.environ.get("NWOR_SANITIZE"):
            compiler_and_sanitizers = [compiler, f"-fsanitize={sanitizers}"]
            flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
        else:
            compiler_and_sanitizers = [compiler]
        objects = self.compile_each(sources, [*compiler_and_sanitizers, *flags])
        return [*compiler_and_sanitizers, "-shared", *objects, *self.link_flags("torch", "torch_cpu", "c10")]

    def compile_cuda(self, sources: list[str]) -> list[str]:
        nvcc, compiler = find_nvcc(), find_compiler()
        assert nvcc is not None
        host_flags = f"-fPIC,-fvisibility=hidden,-ffile-prefix-map={ROOT}=."
        flags = [*COMMON, "-DUSE_CUDA", "-O3", "-cudart", "static", "-Xcompiler", host_flags, *self.includes()]
        names = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(nvcc)
        if self.is_first:
            minutes = -(-3 * len(names.split(";")) // (os.cpu_count() or 1))  # measured on 2 cores
            tell_user(f"compiling CUDA kernels for compute capability {names} (about {minutes} min); "
                      "TORCH_CUDA_ARCH_LIST chooses others")  # fmt: skip
        objects = self.compile_each(sources, [nvcc, *flags, *architecture_flags(names)])
        if not (self.torch_folder / "lib" / "libtorch_cuda.so").exists():
            # A CPU build of torch: link against an empty library of that name. Only the name is kept.
            stub = self.scratch / "libtorch_cuda.so"
            words = ["-shared", "-x", "c", os.devnull, "-Wl,-soname,libtorch_cuda.so", "-o", str(stub)]
            self.plan.add(stub, shlex.join([compiler, *words]), [])
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


def wheel_name() -> str:
    """The file that `make dist` makes."""
    text = (ROOT / "pyproject.toml").read_text()
    version, glibc = (re.search(rf'^{name} = "(.+?)"', text, re.MULTILINE)[1] for name in ("version", "manylinux"))
    return f"nwor_ops-{version}-py3-none-manylinux_{glibc}_x86_64.whl"


def libraries() -> list[Library]:
    if os.environ.get("NWOR_BUILD") == "0":
        return []
    wanted = os.environ.get("NWOR_BUILD_CUDA")
    if wanted == "0":
        return [Library("cpu")]
    problem = cuda_problem()
    if problem is not None:
        if wanted == "1":
            stop(f"NWOR_BUILD_CUDA=1 but {problem}")
        # pip shows what a build prints only if it fails.
        if gpu := GPU["find_gpu"]():
            stop(
                f"this machine has a GPU ({gpu}), but the CUDA library cannot be built: {problem}. "
                f"Or install the wheel with both libraries, which needs no compiler: pip install {wheel_name()} "
                "(`make dist` makes it). NWOR_BUILD_CUDA=0 builds the CPU library only"
            )
        print(f"nwor_ops: building the CPU library only: {problem}", flush=True)
        return [Library("cpu")]
    return [Library("cpu"), Library("cuda")]


def metadata() -> dict:
    """README and links. The package index shows README without the files, so its links lead to the project's home."""
    home, text = os.environ.get("NWOR_REPO_URL", "").rstrip("/"), (ROOT / "README.md").read_text()
    if not home:
        return {"long_description": text, "project_urls": {}}
    tag = f"v{wheel_name().split('-')[1]}"
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{home}/raw/{tag}/", text)
    text = re.sub(r"(\]\()(?!https?:|#)", rf"\1{home}/blob/{tag}/", text)
    urls = {"Source": home, "Issues": f"{home}/issues", "Changelog": f"{home}/blob/{tag}/CHANGELOG.md"}
    return {"long_description": text, "project_urls": urls}


if __name__ == "__main__":
    setup(
        **metadata(),
        long_description_content_type="text/markdown",
        ext_modules=libraries(),
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
        distclass=BinaryDistribution,
    )
