"""The `treepack` command."""

import sys


def main() -> None:
    """Run the command line; the entry point of the installed script."""
    try:
        from treepack.scoring.commands import app
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("treepack"):
            raise
        sys.exit(f"error: the treepack command needs {error.name}: pip install 'treepack[score]'")
    app()
