"""Rewrite resources.csv, the table of registers, spills and shared memory that the gate compares with."""

import sys
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.aot import DEFAULT_CASES, SLOW_CASES, TABLE, compile_case, table_row

HEADER = "case,kernel,tile,registers,spilled bytes,shared bytes,products over needed ones"


def main() -> None:
    lines = [f"# triton {triton.__version__}", HEADER]
    for case in [*DEFAULT_CASES, *SLOW_CASES]:
        lines += [table_row(case, kernel, resources) for kernel, resources in sorted(compile_case(case).items())]
        print(lines[-1], flush=True)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
