"""Build the API page from the docstrings of the public names: `python docs/build.py DIR` (needs pdoc)."""

import argparse
import os
from pathlib import Path

import pdoc

import treepack

# The trainer's home is named beside the package: it imports TRL, which the package itself never does.
MODULES = ("treepack", "!treepack.kernels", "!treepack.scoring", "treepack.scoring.trl_hooks")


def main(folder: Path) -> None:
    """Write index.html and a page a module to `folder`."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns when imported
    for name in treepack.__all__:  # names load on first use, and pdoc looks only at what is there
        getattr(treepack, name)
    pdoc.render.configure(
        docformat="google", search=True, show_source=False, footer_text=f"treepack {treepack.__version__}"
    )
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write the pages")
    main(parser.parse_args().folder)
