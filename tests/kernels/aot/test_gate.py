"""The compile gate: every shipped configuration compiles for its GPU into code without spills, with the matmul
instructions and the load pipeline it was chosen for. The table is compared where the same Triton made it.
"""

import pytest
import triton

from support.aot import (
    DEFAULT_CASES,
    SLOW_CASES,
    TABLE,
    TARGETS,
    Case,
    Resources,
    compile_case,
    needed_products,
    table_row,
)

# Bytes of local memory a thread may use, by (case, kernel), and why.
ALLOWED_SPILLS = {
    # wgmma needs 64 keys, whose dK and dV already fill 128 of 255 registers.
    ("sm_90 D256 bfloat16 G4 none", "key_kernel"): 120,
    ("sm_90 D256 bfloat16 G4 all", "key_kernel"): 232,
    # Sixteen heads a tile take more offsets. What is spilled is stored before the loop over queries and read after it.
    ("sm_90 D128 bfloat16 G16 all", "key_kernel"): 48,
    # The accumulator leaves tensor memory to be rescaled, 128 registers a thread.
    ("sm_100 D256 bfloat16 G4 all", "forward_kernel"): 304,
    ("sm_100 D256 bfloat16 G4 all", "query_kernel"): 184,
    # A few of 255 registers too many, with all options at once.
    ("sm_120 D256 bfloat16 G4 all", "key_kernel"): 8,
    ("sm_90 D256 float32 G4 all", "key_kernel"): 16,
    # ptxas 12.9 settles on 80 registers.
    ("sm_80 D128 float32 G4 all", "forward_kernel"): 16,
}


# Products that warps repeat, over those needed, by (architecture, head dim, kernel): one warpgroup (AMD: fewer waves)
# without repeats would spill the accumulators of so many columns.
ALLOWED_REPEATS = {
    ("sm_80", 192, "forward_kernel"): 1.6,
    ("sm_80", 256, "forward_kernel"): 1.5,
    ("sm_89", 256, "forward_kernel"): 1.5,
    ("sm_120", 256, "forward_kernel"): 1.5,
    ("sm_90", 192, "key_kernel"): 1.5,
    ("sm_90", 256, "key_kernel"): 1.5,
    ("gfx942", 256, "query_kernel"): 5 / 3,
    ("gfx942", 256, "key_kernel"): 1.5,
}

if triton.__version__.startswith("3.6."):  # Its ptxas 12.8 wants one pointer more.
    ALLOWED_SPILLS |= {
        ("sm_80 D128 bfloat16 G4 none", "forward_kernel"): 8,
        ("sm_80 D128 bfloat16 G4 all", "forward_kernel"): 8,
        ("sm_100 D128 bfloat16 G4 all", "forward_kernel"): 8,
        ("sm_90 D128 bfloat16 G40 all", "key_kernel"): 32,
    }


def recorded_rows() -> dict[tuple[str, str], str]:
    rows = TABLE.read_text().splitlines()
    return {tuple(row.split(",")[:2]): row for row in rows[2:]}


def check(case: Case) -> None:
    found = compile_case(case)
    problems = [
        f"{kernel} ({resources.tile}): {problem}"
        for kernel, resources in found.items()
        for problem in problems_of(case, kernel, resources)
    ]
    assert not problems, "\n".join([str(case), *problems])
    if TABLE.read_text().splitlines()[0] != f"# triton {triton.__version__}":
        return
    recorded = recorded_rows()
    for kernel, resources in found.items():
        row = table_row(case, kernel, resources)
        assert recorded.get((str(case), kernel)) == row, (
            f"resources.csv is out of date: python tests/kernels/aot/write_resources.py; now {row}"
        )


def problems_of(case: Case, kernel: str, resources: Resources) -> list[str]:
    count = resources.instructions
    target = TARGETS[case.arch]
    half = case.dtype.itemsize == 2
    problems = []
    if resources.spill > ALLOWED_SPILLS.get((str(case), kernel), 0):
        problems.append(f"{resources.spill} bytes spilled")
    if resources.shared > target.device.shared_memory:
        problems.append(f"{resources.shared} bytes of shared memory, the device has {target.device.shared_memory}")
    if not target.is_cuda:
        if half and not count["v_mfma"]:
            problems.append("no matrix instructions")
        return problems + repeated_products(case, kernel, resources)
    matmul = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(case.arch, "HMMA")
    if half and not count[matmul]:
        problems.append(f"no {matmul}")
    if case.tf32 and not count["HMMA"]:
        problems.append("no HMMA")
    if half and matmul == "HGMMA" and count["HMMA"]:
        problems.append("HMMA, which has half the rate of HGMMA")
    if resources.serialized:
        problems.append("serialised wgmma (ptxas C7515)")
    if half and not count["LDGSTS"] + count["UTMALDG"]:
        problems.append("no pipelined loads")
    return problems + repeated_products(case, kernel, resources)


def repeated_products(case: Case, kernel: str, resources: Resources) -> list[str]:
    """Warps that cover more than a tile's rows compute the same products."""
    if case.dtype.itemsize != 2:
        return []
    ratio = resources.products / needed_products(case, kernel, resources.tile)
    allowed = ALLOWED_REPEATS.get((case.arch, max(case.dims), kernel), 1)
    return [f"{ratio:.3g} times the products that the tile needs"] if ratio > allowed else []


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=str)
def test_default_configurations(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_other_configurations(case: Case) -> None:
    check(case)
