"""The code that torch and Inductor generate for this processor, and older ones.

``ATEN_CPU_CAPABILITY`` is torch's own variable. It limits torch's kernels and, by default, Inductor.
``NWOR_TEST_SIMDLEN`` sets the vector width of Inductor's code separately: 0 (no vectors), 256 or 512 bits.
"""

from __future__ import annotations

import os
import pathlib

import processes

SIMDLEN = "NWOR_TEST_SIMDLEN"


def separate_compiler_cache() -> None:
    """Give each checkout and each limited run its own folder for Inductor's cache. Call this before torch is imported.

    Inductor's cache key has neither the schemas of our ops nor the instruction set. torch's default folder serves all
    checkouts of a user. There a test finds code that another branch compiled, for other schemas. A limited run finds
    code that was compiled for a wider instruction set, and then results differ or the process crashes.
    ``TORCHINDUCTOR_CACHE_DIR`` of the user replaces the folder of the checkout.
    """
    limits = "-".join(filter(None, (os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", SIMDLEN))))
    folder = pathlib.Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or processes.ROOT / "build" / "inductor")
    if limits and folder.name != limits:  # workers of pytest-xdist inherit the variable
        folder = folder / limits
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def limit_compiler() -> None:
    """Apply ``NWOR_TEST_SIMDLEN`` to the Inductor of this process.

    Raises:
        ValueError: Inductor cannot generate code of that width for this processor.
    """
    if not (bits := os.environ.get(SIMDLEN)):
        return
    from torch._inductor import config, cpu_vec_isa

    config.cpp.simdlen = int(bits)
    if (width := cpu_vec_isa.pick_vec_isa().bit_width()) != int(bits):
        raise ValueError(f"{SIMDLEN}={bits}, but Inductor generates code of {width} bits for this processor")
