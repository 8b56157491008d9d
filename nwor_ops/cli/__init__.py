"""The command ``nwor-ops``. Its packages (typer, rich, matplotlib) are optional: ``nwor_ops[cli]``."""

from nwor_ops.cli.extras import require


def main() -> None:
    require("typer", "rich")
    from nwor_ops.cli.app import app

    app()
