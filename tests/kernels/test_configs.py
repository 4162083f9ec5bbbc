"""The launch configurations are a pure function of shapes, dtype and device, and say why they refuse."""

import pytest
import torch

from treepack.kernels.configs import Device, attention_config, split_columns

HOPPER = Device("sm_90", 232448)
DEVICES = [
    HOPPER,
    Device("sm_80", 166912),
    Device("sm_86", 101376),
    Device("sm_89", 101376),
    Device("sm_100", 232448),
    Device("sm_120", 101376),
    Device("gfx942", 65536),
]


@pytest.mark.parametrize(
    ("columns", "blocks"),
    {
        8: (16, 0),
        16: (16, 0),
        24: (32, 0),
        48: (32, 16),
        64: (64, 0),
        72: (64, 16),
        80: (64, 16),
        96: (64, 32),
        112: (128, 0),
        120: (128, 0),
        128: (128, 0),
        160: (128, 32),
        192: (128, 64),
        256: (256, 0),
    }.items(),
)
def test_columns_are_cut_without_waste_where_they_can_be(columns: int, blocks: tuple[int, int]) -> None:
    assert split_columns(columns) == blocks


@pytest.mark.parametrize(("group", "pack"), [(1, 1), (7, 7), (16, 16), (17, 10), (24, 8), (40, 8), (48, 16), (71, 8)])
def test_large_groups_are_cut_where_the_fewest_rows_stay_idle(group: int, pack: int) -> None:
    assert attention_config(64, 64, torch.bfloat16, group=group, device=DEVICES[0]).pack == pack


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_head_dim_and_ratio_has_tiles(device: Device, dtype: torch.dtype) -> None:
    for head_dim in range(8, 257, 8):
        for group in (1, 3, 6, 7, 8, 17, 128):
            config = attention_config(head_dim, 64, dtype, group=group, device=device)
            assert config.pack * config.chunks >= group > config.pack * (config.chunks - 1)
            for tile in (config.forward, config.query_grad, config.key_grad):
                assert tile.block_m >= config.pack
                assert tile.options["enable_fp_fusion"] is True


def test_the_devices_limit_chooses_the_tile() -> None:
    large, small = (
        attention_config(128, 128, torch.bfloat16, group=4, device=device)
        for device in (HOPPER, Device("sm_90", 101376))
    )
    assert large.forward != small.forward


def test_float32_products_are_ieee_unless_allowed() -> None:
    for allow, precision in ((False, "ieee"), (True, "tf32x3")):
        assert attention_config(64, 64, torch.float32, group=1, device=HOPPER, allow_tf32=allow).precision == precision


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (Device("sm_75", 65536), "sm_80 or later"),
        (Device("sm_80", 49152), "99 KiB"),
        (Device("gfx1100", 65536), "AMD gfx9"),
    ],
)
def test_devices_without_tiles_are_refused(device: Device, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        attention_config(64, 64, torch.bfloat16, group=1, device=device)


def test_what_no_kernel_takes_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="head_dim must be in 1..256 for the Triton kernels, got 264"):
        attention_config(264, 64, torch.bfloat16, group=1, device=HOPPER)
    with pytest.raises(NotImplementedError, match="value_dim must be in 1..256"):
        attention_config(64, 512, torch.bfloat16, group=1, device=HOPPER)
    with pytest.raises(TypeError, match="dtype must be float16, bfloat16 or float32"):
        attention_config(64, 64, torch.float64, group=1, device=HOPPER)
