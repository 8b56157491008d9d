"""Settings that all tests share."""

import sys
from pathlib import Path

from hypothesis import settings

# For `import oracle` also where pytest's `pythonpath` setting is not read.
_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

# Compiling and thread start-up make single examples slow; the same examples every time keep a red test red.
settings.register_profile("nwor", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("nwor")
