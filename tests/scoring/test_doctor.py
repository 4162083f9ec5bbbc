"""`treepack doctor`: it passes here, and it would not if attention were wrong."""

import json

import torch
from typer.testing import CliRunner

from treepack import tree_attention
from treepack.scoring import doctor
from treepack.scoring.commands import app


def test_passes_here():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    findings = json.loads(result.stdout)
    assert findings["ok"]
    assert findings["versions"]["torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    cpu = findings["devices"][0]
    assert (cpu["device"], cpu["backend"], cpu["ok"]) == ("cpu", "cpu", True)
    assert set(cpu["differences"]) == {"out", "dq", "dk", "dv"}
    assert all(0 <= difference <= doctor.TOLERANCE for difference in cpu["differences"].values())


def test_prints_a_table():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "transformers" in result.stdout
    assert "pass" in result.stdout


def test_fails_where_attention_is_wrong(monkeypatch):
    def plain_causal(q, k, v, *, position_ids):
        return tree_attention(q, k, v, position_ids=torch.arange(len(q)))

    monkeypatch.setattr(doctor, "tree_attention", plain_causal)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert result.stderr.splitlines()[-1:] == [
        "error: packed attention differs from separate attention on this machine"
    ]


def test_fails_on_nan_in_one_gradient(monkeypatch):
    def with_nan(q, k, v, *, position_ids):
        out = tree_attention(q, k, v, position_ids=position_ids)
        return out + (k * 0).sum() * float("nan") if k.requires_grad else out

    monkeypatch.setattr(doctor, "tree_attention", with_nan)
    assert not doctor.examine().ok


def test_a_backend_that_is_not_available_is_no_failure(monkeypatch):
    def unavailable(q, k, v, *, position_ids):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(doctor, "tree_attention", unavailable)
    findings = doctor.examine()
    assert findings.ok
    assert findings.devices[0].reason == "no such kernel"
    assert "not available" in CliRunner().invoke(app, ["doctor"]).stdout
