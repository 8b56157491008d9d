"""Link a library here so that it runs with an older glibc.

Since glibc 2.34 libc contains libpthread, libdl and librt, with a new symbol version. The old versions are still there
for programs that were linked before, but the linker never chooses them. This tool gives the linker
libraries of the three names with only the old versions. The result equals that of an older system's linker. On a newer
system, the loader finds the same functions in libc.

    python tools/older_glibc.py 2.28 FOLDER g++ -shared ... -o LIBRARY

runs the link command that follows FOLDER, and reads which versions the library needs. If one is too new, it links
again. The three libraries are written to FOLDER.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

HOMES = {"libdl.so.2": r"dl", "libpthread.so.0": r"(pthread|sem)_", "librt.so.1": r"(shm|mq|timer|aio|clock)_"}
Version = tuple[int, ...]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(library: str, undefined: bool) -> list[tuple[str, Version]]:
    """Return pairs (name, version of glibc) that a library needs, or that it provides in all versions."""
    rows = re.findall(r"^(.*?)\(?\bGLIBC_([\d.]+)\)?\s+(\S+)$", output("objdump", "-T", library), re.MULTILINE)
    return [
        (name, tuple(map(int, version.split(".")))) for start, version, name in rows if ("*UND*" in start) == undefined
    ]


def link_flags(library: pathlib.Path, newest: Version, compiler: str, folder: pathlib.Path) -> list[str]:
    """Return flags for the command that linked `library`, so that it needs no glibc newer than `newest`.

    Symbols without an older version are left; `auditwheel` reports them.
    """
    too_new = {name for name, version in symbols(str(library), undefined=True) if version > newest}
    older: dict[str, Version] = {}
    for name, version in symbols(output(compiler, "-print-file-name=libc.so.6").strip(), undefined=False):
        if name in too_new and older.get(name, ()) < version <= newest:
            older[name] = version
    flags = []
    for home, pattern in HOMES.items():
        names = {name: version for name, version in older.items() if re.match(pattern, name)}
        if names:
            flags.append(str(write_library(home, names, compiler, folder)))
    return ["-Wl,--no-as-needed", *flags] if flags else []


def write_library(home: str, names: dict[str, Version], compiler: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a library for linking only: its functions have these names and versions, and do nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    source, versions, library = folder / f"{home}.c", folder / f"{home}.map", folder / home
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    nodes = {
        version: [name for name, its in names.items() if its == version] for version in sorted(set(names.values()))
    }
    versions.write_text(
        "".join(f"GLIBC_{'.'.join(map(str, version))} {{ {'; '.join(of)}; }};\n" for version, of in nodes.items())
    )
    flags = ["-shared", "-fPIC", "-w", "-nostdlib", "-fno-builtin", f"-Wl,-soname,{home}"]
    script = f"-Wl,--version-script={versions}"
    subprocess.run([compiler, *flags, script, "-x", "c", str(source), "-o", str(library)], check=True)
    return library


def main(glibc: str, folder: str, *command: str) -> None:
    subprocess.run(command, check=True)
    newest = tuple(int(part) for part in glibc.split("."))
    if flags := link_flags(pathlib.Path(command[-1]), newest, command[0], pathlib.Path(folder)):
        subprocess.run([*command, *flags], check=True)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
