"""`treepack doctor --shape`: shapes as written, counts as computed by hand."""

import json

import pytest
from typer.testing import CliRunner

from support.forests import group, karied, positions_of
from treepack.scoring.commands import app
from treepack.scoring.errors import OptionError
from treepack.scoring.shape import examine_shape, parse_shape


@pytest.mark.parametrize(
    ("shape", "segments"),
    [
        ("7", [(0, 7)]),
        ("10+3x4", group(10, [4] * 3)),
        ("2x5+2x3, 4", [*group(5, [3, 3]) * 2, (0, 4)]),
        ("6+2x6+2x6", karied(2, 3, 6)),
        (" 3 + 2 x 1 ", group(3, [1, 1])),
    ],
)
def test_shapes(shape, segments):
    assert parse_shape(shape).tolist() == positions_of(segments).tolist()


@pytest.mark.parametrize("shape", ["", "x", "3+", "3x", "0x4", "4x0", "3*4", "-1", "1,,2", "1.5", "9999999999"])
def test_what_is_no_shape(shape):
    with pytest.raises(OptionError, match=r"--shape must be like .* got '"):
        parse_shape(shape)


def test_too_many_tokens_are_refused_before_any_work():
    with pytest.raises(OptionError, match="at most 4,194,304 tokens, got 7,000,001,000"):
        parse_shape("1000x1+7000000x1")


def test_counts_of_a_group():
    findings = examine_shape("1024+12x256")
    assert (findings.tokens, findings.raw_tokens, findings.sequences, findings.segments) == (4096, 15360, 12, 13)
    assert findings.visible_pairs == 1024 * 1025 // 2 + 12 * (256 * 1024 + 256 * 257 // 2)
    tile = 128 * 128
    cascade = findings.methods["cascade"]
    assert cascade.pairs == tile * (8 * 9 // 2 + 12 * 3 + 24 * 8)
    assert (cascade.calls, cascade.merged_rows, cascade.gathered_rows) == (2, 12 * 256, 0)
    assert cascade.waste == cascade.pairs / findings.visible_pairs
    gather = findings.methods["gather + varlen"]
    assert gather.pairs == tile * (36 + 12 * (9 + 10))
    assert (gather.calls, gather.merged_rows, gather.gathered_rows) == (1, 0, 1024 + 12 * 1280)
    assert findings.methods["unshared varlen"].pairs == tile * 12 * 10 * 11 // 2
    assert findings.methods["dense mask"].pairs == tile * 32 * 33 // 2
    assert 1 <= findings.methods["triton"].waste < 1.15
    assert findings.flash_path == "cascade"
    assert findings.backends == {"CPU": "cpu", "GPU": "triton"}


def test_the_command():
    result = CliRunner().invoke(app, ["doctor", "--shape", "1024+12x256"])
    assert result.exit_code == 0
    assert "1024+12x256: 4,096 tokens in 13 segments" in result.stdout
    assert 'backend="flash" takes the cascade' in result.stdout
    as_json = CliRunner().invoke(app, ["doctor", "--shape", "1024+12x256", "--json"])
    assert json.loads(as_json.stdout) == examine_shape("1024+12x256").to_dict()


def test_the_command_on_what_is_no_shape():
    result = CliRunner().invoke(app, ["doctor", "--shape", "many"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: --shape must be like")
    assert [line for line in result.stderr.splitlines()[:-1] if not line.startswith("[")] == []
