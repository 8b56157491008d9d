"""The command ``nwor-ops``. It needs typer, rich and matplotlib, the optional packages of ``nwor_ops[cli]``."""

from nwor_ops.cli.extras import require


def main() -> None:
    require("typer", "rich")
    from nwor_ops.cli.app import app

    app(prog_name="nwor-ops")
