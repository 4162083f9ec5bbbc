"""`treepack report`: what the page holds is what the run was, and it holds nothing that runs."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from support.hostile import COLUMN, FILE, PIECES, write_hostile
from support.prompts import TextTokenizer
from support.rollout_files import rollout_rows, write_rollouts
from treepack import pack_sequences
from treepack.scoring import html_report, html_report_trees, score_job
from treepack.scoring.commands import app
from treepack.scoring.display import make_display
from treepack.scoring.errors import OptionError, RolloutError
from treepack.scoring.html_report import write_report
from treepack.scoring.html_report_data import read_run
from treepack.scoring.html_report_trees import draw_trees
from treepack.scoring.rollouts import bundled_rollouts, read_rollouts
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions

TOTALS = ("samples", "raw_tokens", "tokens", "trained_tokens", "raw_pairs", "pairs")


def scored(out, rollouts=None, **options):
    with make_display(quiet=True) as display, pytest.MonkeyPatch.context() as patch:
        for plot in ("plot_tokens", "plot_rows", "plot_tree"):  # a second each
            patch.setattr(score_job, plot, lambda path, *args: None)
        return score_rollouts(ScoreOptions(rollouts=rollouts, scorer="none", out=out, **options), display)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A recorded score of the bundled rollouts, with groups dropped, and its report."""
    out = tmp_path_factory.mktemp("job")
    return out, scored(out, record=True, token_budget=2048, limit_groups=40)


class Page(HTMLParser):
    """What an HTML parser finds: tags with their attributes, and the text of script blocks."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.in_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, text):
        if self.in_script:
            self.scripts[-1] += text


def page_of(folder, tmp_path, **options):
    out = tmp_path / "page.html"
    write_report(folder, out, **options)
    page = Page(out.read_text(encoding="utf-8"))
    return page, json.loads(page.scripts[0])


# What is read


def test_a_score_reads_back(job):
    out, report = job
    run = read_run(out, max_steps=100)
    assert [step.step for step in run.steps] == [step.step for step in report.steps]
    for name in TOTALS:
        assert [step.total(name) for step in run.steps] == [step.total(name) for step in report.steps]
    assert run.reasons() == report.not_trained
    assert run.reasons()["oversize"] > 0
    assert dict(run.summary)["packing ratio"] == f"{report.packing_ratio:.2f}"
    assert sum(len(row.rows) for row in run.rows) == report.total("samples")
    assert run.notes == []


def test_a_record_counts_as_its_score(job):
    """The record keeps tokens and places alone: the figures of the rows are counted again."""
    out, report = job
    run = read_run(out / "record", max_steps=100)
    for step, expected in zip(run.steps, report.steps, strict=True):
        for row, of_score in zip(step.rows, expected.rows, strict=True):
            for name in set(TOTALS) - {"trained_tokens", "tokens", "pairs"}:  # fillers are forwarded, not recorded
                assert getattr(row, name) == getattr(of_score, name)
            if of_score.samples:
                assert (row.tokens, row.pairs) == (of_score.tokens, of_score.pairs)
    assert sum(step.total("trained_tokens") for step in run.steps) == report.trained_tokens
    score = read_run(out, max_steps=100)
    planned = [i for i, step in enumerate(score.samples["step"]) if step is not None]
    for name in ("reward", "advantage", "reason", "micro_batch", "rank"):
        of_score = dict(zip(score.samples["uid"], score.samples[name]))
        assert {uid: of_score[uid] for uid in run.samples["uid"]} == dict(zip(run.samples["uid"], run.samples[name]))
    assert len(run.samples["uid"]) == len(planned)
    assert read_run(out, max_steps=100).samples.keys() <= {*run.samples, *score.samples}


def test_the_last_steps_of_a_record(job):
    out, report = job
    run = read_run(out / "record", max_steps=2)
    assert [step.step for step in run.steps] == [step.step for step in report.steps[-2:]]
    assert run.notes == [f"the last 2 of {len(report.steps)} recorded steps are shown (--max-steps)"]


def test_a_score_without_a_record_finds_its_rollouts(tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0], [0.5, 0.5]]))
    scored(tmp_path / "out", path, token_budget=100)
    assert sum(len(row.rows) for row in read_run(tmp_path / "out", max_steps=9).rows) == 4
    path.unlink()
    run = read_run(tmp_path / "out", max_steps=9)
    assert run.rows == []
    assert "no prefix trees" in run.notes[0]


def test_columns_that_only_some_steps_have(tmp_path):
    path = write_rollouts(tmp_path / "one.jsonl", rollout_rows([[1.0, 0.0]]))
    scored(tmp_path / "one", path, record=True, token_budget=100)
    rows = [
        {**row, "rewards/style": 0.5, "group_id": 9, "uid": 9 + i} for i, row in enumerate(rollout_rows([[1.0, 0.0]]))
    ]
    scored(tmp_path / "two", write_rollouts(tmp_path / "two.jsonl", rows), record=True, token_budget=100)
    step = tmp_path / "two" / "record" / "step-00000000.parquet"
    step.rename(tmp_path / "one" / "record" / "step-00000001.parquet")
    run = read_run(tmp_path / "one" / "record", max_steps=9)
    assert run.samples["rewards/style"] == [None, None, 0.5, 0.5]
    assert run.samples["reward"] == [1.0, 0.0, 1.5, 0.5]


@pytest.mark.parametrize(
    ("weights", "reward"), [({"style": 3.0}, [2.5, 1.5]), ([0.5, 2.0], [1.5, 1.0]), (None, [1.5, 0.5])]
)
def test_the_reward_of_a_record_is_weighted(tmp_path, weights, reward):
    rows = [{**row, "rewards/style": 0.5} for row in rollout_rows([[1.0, 0.0]])]
    scored(tmp_path, write_rollouts(tmp_path / "rollouts.jsonl", rows), record=True, token_budget=100)
    path = tmp_path / "record" / "step-00000000.parquet"
    table = pq.read_table(path)
    step = json.loads(table.schema.metadata[b"treepack.step"])
    step["settings"] |= {"reward_weights": weights, "share_prefixes": False}
    pq.write_table(table.replace_schema_metadata({b"treepack.step": json.dumps(step)}), path)
    run = read_run(tmp_path / "record", max_steps=9)
    assert run.samples["reward"] == reward
    assert run.steps[0].total("tokens") == run.steps[0].total("raw_tokens") == 40


def test_a_job_that_dropped_everything(tmp_path):
    scored(tmp_path / "out", write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0]])), token_budget=9)
    _, data = page_of(tmp_path / "out", tmp_path)
    assert data["steps"]["step"] == data["trees"] == []
    assert data["reasons"] == [["oversize", 2]]
    assert data["trained"] == 0


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(OptionError, match="must hold report.json and scored.parquet"):
        read_run(tmp_path, max_steps=1)
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "scored.parquet").write_text("")
    with pytest.raises(RolloutError, match="cannot be read"):
        read_run(tmp_path, max_steps=1)
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "step-00000000.parquet").write_text("")
    with pytest.raises(RolloutError, match="step-00000000.parquet"):
        read_run(tmp_path / "record", max_steps=1)


def test_a_replay_beside_the_record(tmp_path, job):
    out, _ = job
    record = tmp_path / "record"
    record.mkdir()
    (record / "step-00000000.parquet").write_bytes((out / "record" / "step-00000000.parquet").read_bytes())
    outcome = {"place": [0, 1], "reward": None, "advantage": 0.5, "reason": ""}
    difference = {
        "uid": 3,
        "group_id": 2,
        "recorded": outcome,
        "replayed": {**outcome, "place": None, "reason": "lost"},
    }
    (record / "replay.json").write_text(json.dumps({"step": 0, "samples": 10, "differences": [difference]}))
    run = read_run(record, max_steps=9)
    assert run.notes == ["step 0 was replayed: 1 of 10 samples differ"]
    assert run.differences["recorded place"] == ["micro-batch 0, rank 1"]
    assert run.differences["replayed reason"] == ["lost"]
    (record / "replay.json").write_text("[]")
    with pytest.raises(RolloutError, match="replay.json: cannot be read"):
        read_run(record, max_steps=9)


# The trees


def test_trees_are_the_packed_rows(job):
    out, report = job
    run = read_run(out, max_steps=100)
    trees, left_out = draw_trees(run.rows)
    assert left_out == ""
    rows = [row for step in report.steps for row in step.rows if row.samples]
    assert len(trees) == len(rows) == len(run.rows)
    for tree, row, placed in zip(trees, rows, run.rows):
        tokens, samples, parent, depth = (np.array(tree[name]) for name in ("tokens", "samples", "parent", "depth"))
        assert tokens.sum() == row.tokens
        assert (tokens * samples).sum() == row.raw_tokens
        assert samples[parent < 0].sum() == row.samples
        inner = parent >= 0
        assert (parent[inner] < np.flatnonzero(inner)).all()
        assert (depth[inner] == (depth + tokens)[parent[inner]]).all()
        below = np.bincount(parent[inner], weights=samples[inner], minlength=len(samples))
        assert (below <= samples).all()
        roots = np.flatnonzero(parent < 0)
        mean = np.average([tree["reward"][i] for i in roots], weights=samples[roots])
        assert mean == pytest.approx(placed.rewards.mean())


def test_the_largest_segments_are_kept_with_their_parents(job, monkeypatch):
    out, _ = job
    run = read_run(out, max_steps=100)
    whole = draw_trees(run.rows)[0]
    monkeypatch.setattr(html_report_trees, "MAX_NODES_OF_TREE", 10)
    monkeypatch.setattr(html_report_trees, "MAX_NODES", 45)
    trees, left_out = draw_trees(run.rows)
    sizes = [len(tree["parent"]) for tree in trees]
    assert 45 - 10 < sum(sizes) <= 45
    assert f"the last {len(trees)} of {len(run.rows)} rows are drawn" in left_out
    segments = sum(len(tree["parent"]) for tree in whole[-len(trees) :])
    assert f"{segments - sum(sizes)} of their {segments} segments" in left_out
    for tree, all_of_it in zip(trees, whole[-len(trees) :]):
        assert all(-1 <= parent < i for i, parent in enumerate(tree["parent"]))
        raw, all_raw = (np.multiply(one["tokens"], one["samples"]) for one in (tree, all_of_it))
        assert raw.max() == all_raw.max()
        assert len(raw) == min(len(all_raw), 10)


def test_segments_show_tokens_or_text(tmp_path):
    tokenizer = TextTokenizer()
    ids = tokenizer.encode("a b c d e f g h " * 30)
    rows = [
        {"input_ids": [*ids, i], "completion_mask": [0] * len(ids) + [1], "group_id": 0, "reward": 0.0} for i in (1, 2)
    ]
    scored(tmp_path / "out", write_rollouts(tmp_path / "rollouts.jsonl", rows), ranks=1, steps=1)
    run = read_run(tmp_path / "out", max_steps=1)
    (tree,), _ = draw_trees(run.rows)
    assert tree["text"][0].startswith("0 1 2 3 ")
    assert tree["text"][0].endswith(" ...")
    (tree,), _ = draw_trees(run.rows, tokenizer.decode)
    assert tree["text"][0].startswith("a b c d")
    assert tree["tokens"][0] == len(pack_sequences([ids])["input_ids"]) - 1  # forks one token early


# The page


def test_the_page_is_whole(job, tmp_path):
    out, report = job
    page, data = page_of(out, tmp_path)
    assert data["steps"]["raw_tokens"] == [step.total("raw_tokens") for step in report.steps]
    assert sum(count for _, count in data["reasons"]) + data["trained"] == len(data["samples"]["uid"])
    assert data["trained"] == report.trained_samples
    for histogram in (*data["rewards"], data["advantage"]):
        assert sum(histogram["counts"]) + histogram["missing"] == len(data["samples"]["uid"])
    assert max(data["rows"]["share"]) == 1
    assert len(data["trees"]) == len(read_run(out, max_steps=100).rows)
    assert not any("src" in attributes for tag, attributes in page.tags)
    links = {attributes["href"] for _, attributes in page.tags if "href" in attributes}
    assert {link for link in links if not link.startswith("#")} == {"data:,"}


def test_the_policy_allows_the_scripts_that_are_there(job, tmp_path):
    page, _ = page_of(job[0], tmp_path)
    (policy,) = [found["content"] for tag, found in page.tags if found.get("http-equiv") == "Content-Security-Policy"]
    tags = [tag for tag, _ in page.tags]
    assert tags.index("meta") < tags.index("script")
    allowed = re.search("script-src ([^;]*);", policy)[1].split()
    scripts = page.scripts[1:]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert allowed == [f"'sha256-{found}'" for found in hashes]
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_hostile_rollouts_stay_data(tmp_path):
    rollouts, tokenizer = write_hostile(tmp_path)
    scored(tmp_path / "<b>out", rollouts, record=True, ranks=2, steps=1, token_budget=4096)
    page, data = page_of(tmp_path / "<b>out", tmp_path, tokenizer=tokenizer)
    plain, _ = page_of(job_of_two(tmp_path), tmp_path)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert len(page.scripts) == len(plain.scripts) == 3
    assert data["title"] == "treepack score: <b>out"
    assert FILE in dict(data["summary"])["rollouts"]
    assert COLUMN in data["samples"]
    assert COLUMN in [histogram["name"] for histogram in data["rewards"]]
    assert any(PIECES[0] in text for tree in data["trees"] for text in tree["text"])
    assert f"{PIECES[0]} 0" in data["samples"]["rollout_id"]


def job_of_two(tmp_path):
    out = tmp_path / "two"
    scored(out, write_rollouts(tmp_path / "two.jsonl", rollout_rows([[1.0, 0.0]])))
    return out


def test_numbers_that_json_lacks(tmp_path):
    rows = rollout_rows([[None, 1.0], [None, None]])
    scored(tmp_path / "out", write_rollouts(tmp_path / "rollouts.npz", rows), token_budget=100)
    _, data = page_of(tmp_path / "out", tmp_path)
    assert data["rewards"][0]["missing"] == 3
    assert data["samples"]["reward"].count(None) == 3


def test_numbers_that_a_browser_or_rounding_would_lose(tmp_path):
    uids = [2**53 - 1, 2**60 + 1]
    rows = [{**row, "uid": uid} for row, uid in zip(rollout_rows([[1.5e-9, 2.5e-9]]), uids)]
    scored(tmp_path / "out", write_rollouts(tmp_path / "rollouts.jsonl", rows))
    _, data = page_of(tmp_path / "out", tmp_path)
    assert data["samples"]["uid"] == [uids[0], str(uids[1])]
    assert data["samples"]["reward"] == data["rewards"][0]["centers"] == [1.5e-9, 2.5e-9]


def test_many_samples_are_cut(job, tmp_path, monkeypatch):
    monkeypatch.setattr(html_report, "MAX_SAMPLES", 5)
    _, data = page_of(job[0], tmp_path)
    assert len(data["samples"]["uid"]) == 5
    assert any("the table of samples holds the last 5 of" in note for note in data["notes"])


def test_histograms():
    assert html_report._histogram("x", [None, float("nan")])["counts"] == []
    few = html_report._histogram("x", [1.0, 0.0, 1.0, None])
    assert (few["centers"], few["counts"], few["width"], few["missing"]) == ([0.0, 1.0], [1, 2], None, 1)
    many = html_report._histogram("x", np.r_[np.linspace(0, 1, 5000), 1e6].tolist())
    assert len(many["counts"]) == html_report.MAX_BINS
    assert sum(many["counts"]) == 5001


# The command


def run(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)])


def test_the_command(job, tmp_path):
    result = run(job[0], "--out", tmp_path / "page.html")
    assert result.exit_code == 0
    assert re.fullmatch(rf"written to {tmp_path}/page.html, \d\.\d MB\n", result.stdout)
    assert run(job[0] / "record", "--max-steps", 1).exit_code == 0
    assert (job[0] / "record" / "report.html").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none"], "none: must hold report.json and scored.parquet"),
        (["JOB", "--tokenizer", "none"], "none: no such tokenizer"),
        (["none", "--out", "none/page.html"], "--out none/page.html: cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(job, args, message):
    result = run(*(job[0] if arg == "JOB" else arg for arg in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert message in line


def test_without_plotly(job, tmp_path, monkeypatch):
    monkeypatch.setattr(html_report, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=re.escape("treepack report needs plotly: pip install 'treepack[report]'")):
        write_report(job[0], tmp_path / "page.html")


def test_the_bundled_rollouts_are_found_by_name(tmp_path):
    scored(tmp_path, limit_groups=1)
    run_data = read_run(tmp_path, max_steps=1)
    assert len(run_data.rows[0].rollouts) == len(read_rollouts(bundled_rollouts()))
