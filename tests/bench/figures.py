"""Every figure that was measured, against its bar.

    python -m tests.bench.figures [FOLDER]

prints the `figures.json` of every folder in `traces/`, or in FOLDER. It ends with status 1 if a bar is missed, and 2 if
a file is none of ours.
"""

import argparse
import sys
from pathlib import Path

from simulator.errors import SpecError
from tests.bench.result import print_figures, read_figures

TRACES = Path(__file__).parents[2] / "traces"


def main(folder: Path) -> int:
    """Print all figures below a folder; return the exit status."""
    paths = sorted(folder.glob("*/figures.json"))
    if not paths:
        print(f"no */figures.json in {folder}: nothing was measured yet", file=sys.stderr)
        return 2
    missed = 0
    for path in paths:
        try:
            figures = read_figures(path)
        except SpecError as error:
            print(error, file=sys.stderr)
            return 2
        print_figures(figures, title=path.parent.name)
        print()
        missed += sum(not figure.holds for figure in figures)
    print(f"bars that are missed: {missed}" if missed else "every bar is reached")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=TRACES, help="folder of measurements")
    sys.exit(main(parser.parse_args().folder))
