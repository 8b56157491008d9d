"""``python -m nwor_ops`` is the command ``nwor-ops``."""

from nwor_ops.cli import main

if __name__ == "__main__":
    main()
