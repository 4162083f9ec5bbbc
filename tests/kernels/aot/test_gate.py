"""The compile gate: every shipped configuration compiles for its GPU into code without spills, with the matmul
instructions and the load pipeline it was chosen for. The table is compared where the same Triton made it.
"""

import pytest
import triton

from support.aot import DEFAULT_CASES, SLOW_CASES, TABLE, TARGETS, Case, Resources, compile_case, table_row

# Bytes of local memory a thread may use, by (case, kernel), and why.
ALLOWED_SPILLS = {
    # wgmma needs 64 keys, whose dK and dV already fill 128 of 255 registers.
    ("sm_90 D256 bfloat16 G4 none", "key_kernel"): 168,
    ("sm_90 D256 bfloat16 G4 all", "key_kernel"): 280,
    # A group in chunks keeps another loop's state.
    ("sm_90 D128 bfloat16 G40 all", "key_kernel"): 48,
    # The accumulator leaves tensor memory to be rescaled, 128 registers a thread.
    ("sm_100 D256 bfloat16 G4 all", "forward_kernel"): 296,
    ("sm_100 D256 bfloat16 G4 all", "query_kernel"): 184,
    # ptxas 12.9 settles on 80 registers.
    ("sm_80 D128 float32 G4 all", "forward_kernel"): 16,
}


if triton.__version__.startswith("3.6."):  # Its ptxas 12.8 wants one pointer more.
    ALLOWED_SPILLS |= {
        ("sm_80 D128 bfloat16 G4 none", "forward_kernel"): 8,
        ("sm_80 D128 bfloat16 G4 all", "forward_kernel"): 8,
        ("sm_100 D128 bfloat16 G4 all", "forward_kernel"): 8,
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
        return problems
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
    return problems


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=str)
def test_default_configurations(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_other_configurations(case: Case) -> None:
    check(case)
