"""Check a release before it is published. ``.github/workflows/release.yml`` runs this on a tag.

    python tools/release.py v0.1.0                  # tag, version and changelog agree
    python tools/release.py v0.1.0 dist/*.whl       # the wheel too: its version, both libraries, every architecture
    python tools/release.py v0.1.0 --notes          # prints the section of the changelog

A wheel without the CUDA library, or without one of the release architectures of setup.py, must not get the name of the
package: an engine on a GPU would start without our kernels. The architectures are read from the library's section
``.nv_fatbin``, so no CUDA toolkit is needed. Exits with 1 and prints each problem.
"""

from __future__ import annotations

import argparse
import email.parser
import io
import pathlib
import re
import runpy
import struct
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARIES = ("nwor_ops/libnwor_cpu.so", "nwor_ops/libnwor_cuda.so")
FATBIN = 0xBA55ED50  # the first word of a container
PTX, ELF = 1, 2  # kinds of its entries


def section(changelog: str, version: str) -> tuple[str, str]:
    """Return the date and the text of a version in the changelog. The date is empty if there is no such section."""
    found = re.search(rf"^## {re.escape(version)} \((.+?)\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return (found[1], found[2].strip()) if found else ("", "")


def problems_of_tag(tag: str, version: str, changelog: str) -> list[str]:
    """Return why a tag must not be released.

    Args:
        tag: name of the tag, such as ``v0.1.0``.
        version: the version in pyproject.toml.
        changelog: the text of CHANGELOG.md.
    """
    problems = [] if tag == f"v{version}" else [f"the tag is {tag}, but pyproject.toml has version {version}"]
    date, _ = section(changelog, version)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        problems.append(f"CHANGELOG.md: expected the heading '## {version} (YEAR-MONTH-DAY)', got {date or 'none'!r}")
    return problems


def problems_of_wheel(wheel: pathlib.Path, version: str, architectures: str) -> list[str]:
    """Return why a wheel must not be published.

    Args:
        wheel: path of the wheel.
        version: the version that its metadata must have.
        architectures: what its CUDA library must contain, in the format of ``TORCH_CUDA_ARCH_LIST``.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
        libraries = {name: archive.read(name) for name in LIBRARIES if name in names}
    found = email.parser.Parser().parsestr("".join(metadata))
    problems = []
    if (found["Name"], found["Version"]) != ("nwor_ops", version):
        problems.append(f"its metadata is of {found['Name']} {found['Version']}, expected nwor_ops {version}")
    problems += [f"{name} is missing" for name in LIBRARIES if name not in libraries]
    if cuda := libraries.get("nwor_ops/libnwor_cuda.so"):
        missing = sorted(expected_code(architectures) - device_code(cuda))
        problems += [f"libnwor_cuda.so has no {name} for compute capability {number / 10}" for name, number in missing]
    return [f"{wheel.name}: {problem}" for problem in problems]


def expected_code(architectures: str) -> set[tuple[str, int]]:
    """Return the kinds of code that a list of architectures stands for: ``9.0+PTX`` is machine code and PTX."""
    expected = set()
    for name in architectures.split(";"):
        number = int(name.removesuffix("+PTX").replace(".", ""))
        expected |= {("machine code", number)} | ({("PTX", number)} if name.endswith("+PTX") else set())
    return expected


def device_code(library: bytes) -> set[tuple[str, int]]:
    """Return the kinds of code in a CUDA library, with their architectures.

    The section has containers. Each has a header (magic, version, its size, size of the entries) and entries. The
    header of an entry begins with its kind, a version, its size, the size of the code; the architecture is at byte 28.
    """
    from elftools.elf.elffile import ELFFile  # the first check of a tag runs before anything is installed

    fatbin = ELFFile(io.BytesIO(library)).get_section_by_name(".nv_fatbin")
    data = b"" if fatbin is None else fatbin.data()
    found, start = set(), 0
    while start + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, start)
        if magic != FATBIN:  # padding
            start += 8
            continue
        entry, start = start + header, start + header + size
        while entry < start:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            [architecture] = struct.unpack_from("<I", data, entry + 28)
            found.add(({PTX: "PTX", ELF: "machine code"}.get(kind, f"code of kind {kind}"), architecture))
            entry += header + size
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", help="for example v0.1.0")
    parser.add_argument("wheels", nargs="*", type=pathlib.Path)
    parser.add_argument("--notes", action="store_true", help="print the section of the changelog")
    options = parser.parse_args()
    text = (ROOT / "pyproject.toml").read_text()
    [version] = re.findall(r'^version = "(.+?)"', text, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    problems = problems_of_tag(options.tag, version, changelog)
    for wheel in options.wheels:
        architectures = runpy.run_path(str(ROOT / "setup.py"))["RELEASE_ARCHITECTURES"]
        problems += problems_of_wheel(wheel, version, architectures)
    if problems:
        print(*(f"release: {problem}" for problem in problems), sep="\n", file=sys.stderr)
        return 1
    print(section(changelog, version)[1] if options.notes else f"release: {options.tag}: no problem found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
