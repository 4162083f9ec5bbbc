"""What `treepack inspect` finds: sharing as it is packed, and what breaks it, planted one by one."""

import numpy as np
import pytest
from hypothesis import given

from support.prompts import POLICY, WORDS, TextTokenizer, prompt_rows, rollouts_of, text_row
from support.traces import BUNDLED, trace_paths
from support.tries import tries
from treepack import pack_sequences
from treepack.scoring.inspect_causes import Divergences, find_divergences
from treepack.scoring.inspect_rows import SortedRows
from treepack.scoring.inspect_sharing import sharing
from treepack.scoring.inspect_text import load_tokenizer
from treepack.scoring.rollouts import read_rollouts
from treepack.scoring.rows import TreeRow

TOOLS = [f'{{"name": "{name}", "about": "{about} of a user"}}' for name, about in zip("abcde", "vwxyz")]


def sorted_rows(rows):
    rollouts = rollouts_of(rows)
    return SortedRows.sort(rollouts, np.arange(len(rollouts)))


def unique_tokens(rows):
    """Forwarded where each group is on a row of its own."""
    return sum(sharing(group).tokens for group in rows.by_group().values())


def divergences_of(prompt, *, with_text=True, **sizes) -> Divergences:
    tokenizer = TextTokenizer()
    rows = sorted_rows(prompt_rows(tokenizer, prompt, **sizes))
    return find_divergences(rows, tokenizer.decode if with_text else None)


# Sharing


@given(samples=tries())
def test_sharing_is_what_a_row_shares(samples):
    row = TreeRow()
    for sample in samples:
        row.add(sample)
    rows = [{**sample, "rollout_id": i} for i, sample in enumerate(samples)]
    found = sharing(sorted_rows(rows))
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert (found.rows, found.raw_tokens, found.tokens) == (len(samples), sum(lengths), row.num_tokens)
    assert (found.raw_pairs, found.pairs) == (sum(n * (n + 1) // 2 for n in lengths), row.load)
    by_group = sorted_rows(rows).by_group()
    assert list(by_group) == list(dict.fromkeys(sample["group_id"] for sample in samples))
    for group_id, group in by_group.items():
        sequences = [sample["input_ids"] for sample in samples if sample["group_id"] == group_id]
        assert sharing(group).tokens == len(pack_sequences(sequences)["input_ids"])


@given(samples=tries(min_samples=2))
def test_forks_are_where_branches_part(samples):
    rows = sorted_rows([{**sample, "rollout_id": i} for i, sample in enumerate(samples)])
    sequences = [tuple(rows.ids(at).tolist()) for at in range(len(rows))]
    assert sequences == sorted(tuple(sample["input_ids"].tolist()) for sample in samples)
    prefixes = {sequence[:depth] for sequence in sequences for depth in range(len(sequence))}
    branches = {p: {s[len(p)] for s in sequences if s[: len(p)] == p and len(s) > len(p)} for p in prefixes}
    forks = rows.forks()
    assert len(forks) == sum(len(tokens) - 1 for tokens in branches.values())
    for fork in forks:
        below = [{sequences[at][: fork.depth + 1] for at in branch} for branch in (fork.left, fork.right)]
        (left,), (right,) = below
        assert left[:-1] == right[:-1]
        assert left != right
        for prefix, branch in ((left, fork.left), (right, fork.right)):
            assert [at for at, s in enumerate(sequences) if s[: fork.depth + 1] == prefix] == list(branch)


@pytest.mark.parametrize("path", trace_paths(), ids=lambda path: path.stem)
def test_sharing_of_the_traces(path):
    unique = {  # of a plain trie of each group, from the traces' README; ours forks one token early
        "gsm8k_solutions": 790_610,
        "game24_samples": 246_924,
        "airline_conversations": 673_112,
        "airline_turns": 673_112,
    }
    rollouts = read_rollouts(path)
    rows = SortedRows.sort(rollouts, np.arange(len(rollouts)))
    tokens = unique_tokens(rows)
    if path.stem in unique:
        assert unique[path.stem] <= tokens <= unique[path.stem] + len(rollouts)
    assert sharing(rows).tokens <= tokens
    found = find_divergences(rows)
    # Real rollouts part where they were sampled, or where questions and simulated users differ: nothing is planted.
    planted = sum(cause.tokens for cause in found.causes if cause.kind != "text")
    assert planted < 1e-3 * tokens


# What breaks it


@pytest.mark.parametrize(
    ("prompt", "left", "right"),
    [
        (lambda group, row: f"Today is 2024-05-{10 + 4 * group + row}. {POLICY}", "2024-05-", "2024-05-"),
        (lambda group, row: f"It is {8 + row}:30 now. {POLICY}", ":30", ":30"),
        (
            lambda group, row: f"Date: {'Monday' if row % 2 else 'Friday'}, March {3 + group}, 2024. {POLICY}",
            "day",
            "day",
        ),
        (lambda group, row: f"Now {3 + row} Jun 2024. {POLICY}", "Jun 2024", "Jun 2024"),
    ],
)
def test_a_planted_date_is_named_first(prompt, left, right):
    first, *_ = divergences_of(prompt).causes
    assert first.kind == "date"
    assert left in first.example.left
    assert right in first.example.right
    assert first.example.left != first.example.right
    policy = len(TextTokenizer().encode(POLICY))
    assert first.tokens >= (policy - 10) * first.places
    assert first.places_within_groups > 0


def test_each_row_of_a_planted_date_repeats_the_prompt():
    found = divergences_of(lambda group, row: f"Today is 2024-05-{10 + 4 * group + row}. {POLICY}", groups=5, rows=4)
    (date,) = [cause for cause in found.causes if cause.kind == "date"]
    assert (date.places_within_groups, date.groups) == (5 * 3, 5)  # 20 dates, of which any digit may fork
    tokenizer = TextTokenizer()
    assert date.depth == len(tokenizer.encode("Today is 2024-05-"))
    assert date.tokens_within_groups == 15 * len(tokenizer.encode(f". {POLICY}\nquestion aaaaa\n"))
    between = (date.tokens - date.tokens_within_groups) / (date.places - 15)
    assert between == len(tokenizer.encode(f". {POLICY}\nquestion"))


@pytest.mark.parametrize(
    "path", [path for path in trace_paths() if path.stem in ("airline_turns", BUNDLED.stem)], ids=lambda path: path.stem
)
def test_a_date_planted_in_real_rollouts_is_named_first(path):
    """No tokenizer of theirs is at hand: the date is a run of tokens that says so."""
    rollouts = read_rollouts(path)
    trajectory = {key: number for number, key in enumerate(dict.fromkeys(rollouts.rollout_id.tolist()))}
    rows = []
    for row, (start, stop) in enumerate(zip(rollouts.offsets[:-1], rollouts.offsets[1:])):
        ids = rollouts.input_ids[start:stop].astype(np.int64)
        day = trajectory[rollouts.rollout_id[row].item()] % 28
        planted = np.concatenate([ids[:3], [60_000, 60_001, 60_100 + day, 60_002], ids[3:]])
        mask = np.concatenate(
            [rollouts.completion_mask[start:stop][:3], [0] * 4, rollouts.completion_mask[start:stop][3:]]
        )
        rows.append(
            {
                "input_ids": planted,
                "completion_mask": mask,
                "group_id": rollouts.group_id[row],
                "rollout_id": rollouts.rollout_id[row],
            }
        )

    def decode(ids):
        names = {
            60_000: " Date: ",
            60_001: "2024-05-",
            60_002: " .",
            **{60_100 + day: f"{day + 1:02d}" for day in range(28)},
        }
        return "".join(names.get(token, f" w{chr(97 + token % 26)}") for token in ids.tolist())

    planted = sorted_rows(rows)
    first = find_divergences(planted, decode).causes[0]
    assert (first.kind, first.depth) == ("date", 5)
    before, after = (unique_tokens(found) for found in (SortedRows.sort(rollouts, planted.order), planted))
    # Samples that happen to begin alike share a little more than the prompt.
    assert 0.8 * (after - before) < first.tokens_within_groups < 1.05 * (after - before)
    assert first.example.before.endswith(" Date: ")
    assert first.example.left.startswith("2024-05-")


@pytest.mark.parametrize(
    "name",
    [
        lambda group, row: f"user_{1000 + 37 * (4 * group + row)}",
        lambda group, row: f"{0x3F2A << 12 | 4099 * (4 * group + row):08x}-11aa",
    ],
)
def test_a_planted_id(name):
    first = divergences_of(lambda group, row: f"Session {name(group, row)} begins. {POLICY}").causes[0]
    assert first.kind == "id"
    assert first.places >= 18
    assert {first.example.left, first.example.right} <= {name(group, row) for group in range(5) for row in range(4)}


@pytest.mark.parametrize("separator", ["\n", ", "])
@pytest.mark.parametrize("with_text", [False, True])
def test_a_reordered_tool_list(separator, with_text):
    def prompt(group, row):
        order = np.random.default_rng(4 * group + row).permutation(len(TOOLS))
        return f"Tools: {separator.join(TOOLS[i] for i in order)}\n{POLICY}"

    first = divergences_of(prompt, with_text=with_text).causes[0]
    assert first.kind == "reordered"
    assert first.places > 10


def test_a_few_words_in_another_order():
    lists = ["\n- search\n- book\n- pay", "\n- book\n- search\n- pay"]
    first = divergences_of(lambda group, row: f"Tools:{lists[row % 2]}\n\n{POLICY}", groups=1).causes[0]
    assert first.kind == "reordered"
    assert (first.places, first.places_within_groups) == (1, 1)


def test_a_part_that_some_rows_lack():
    found = divergences_of(lambda group, row: f"You are an agent.{' Be kind.' if row % 2 else ''} {POLICY}", groups=1)
    (cause,) = found.causes
    assert cause.kind == "insertion"
    assert sorted((cause.example.left, cause.example.right)) == ["", " Be kind."]


def test_a_question_ahead_of_the_instructions():
    found = divergences_of(lambda group, row: f"Q: {'ABCDE'[group] * 9} so?\n{POLICY}")
    assert {cause.kind for cause in found.causes} == {"part"}
    assert sum(cause.places for cause in found.causes) == 4
    assert all(cause.places_within_groups == 0 for cause in found.causes)


def test_tokens_that_a_tokenizer_does_not_know_are_shown_as_such(tmp_path):
    """A model's vocabulary may be larger than its tokenizer's, which leaves such tokens out."""
    tokenizer = TextTokenizer()
    ids = tokenizer.encode("one two three")
    decode = load_tokenizer(tokenizer.save(tmp_path / "tokenizer.json"))
    assert decode(np.array(ids)) == "one two three"
    assert decode(np.array([7000, ids[0], 8, 9000, *ids[1:], 7000])) == "\ufffdone\ufffd\ufffd two three\ufffd"
    assert decode(np.array([], int)) == ""


def test_without_a_tokenizer_a_date_is_a_part_and_examples_are_ids():
    first = divergences_of(lambda group, row: f"It is {8 + row}:30 now. {POLICY}", with_text=False).causes[0]
    assert first.kind == "part"
    assert all(word.isdecimal() for word in f"{first.example.before} {first.example.left}".split())


def turns(tokenizer, again):
    """Two turns of each rollout, the second with its history as `again` writes it, of pieces."""
    rows = []
    for group in range(3):
        prompt = tokenizer.encode(f"{POLICY}\nquestion {'abc'[group] * 5}\n")
        for rollout in range(2):
            name = f" {'xyz'[rollout] * 4}"
            pieces = ["the", " unbeliev", "able", " answer", " is", " of", name, *(f" {word}" for word in WORDS)]
            more = tokenizer.encode(" tell me more")
            rows.append(text_row(prompt, tokenizer.ids(pieces), group_id=group, rollout_id=rollout + 2 * group))
            history = prompt + tokenizer.ids(again(pieces)) + more
            rows.append(text_row(history, tokenizer.encode(" well"), group_id=group, rollout_id=rollout + 2 * group))
    return sorted_rows(rows)


def test_retokenised_history():
    tokenizer = TextTokenizer()
    rows = turns(tokenizer, lambda pieces: [pieces[0], " un", "believable", *pieces[3:]])
    cause = find_divergences(rows, tokenizer.decode).causes[0]
    assert (cause.kind, cause.places, cause.places_within_groups, cause.groups) == ("retokenised", 3, 3, 3)
    assert cause.tokens == 6 * (4 + len(WORDS))  # of each rollout, sampled ones too
    assert find_divergences(rows).causes[0].kind == "history"


def test_a_history_that_lost_its_first_words():
    tokenizer = TextTokenizer()
    rows = turns(tokenizer, lambda pieces: pieces[3:])
    cause = find_divergences(rows, tokenizer.decode).causes[0]
    assert (cause.kind, cause.groups) == ("history", 3)


def test_a_kept_history_costs_nothing():
    tokenizer = TextTokenizer()
    found = find_divergences(turns(tokenizer, lambda pieces: pieces), tokenizer.decode)
    assert found.sampled == 3
    assert found.causes == ()
    assert found.free == 2  # between the three questions


def test_different_answers_are_what_a_group_is_for():
    found = divergences_of(lambda group, row: POLICY, groups=1, rows=6)
    assert found.causes == ()
    assert (found.sampled, found.free) == (5, 0)


def test_tokens_of_any_size():
    rows = [{"input_ids": [2**40, 5], "completion_mask": [1, 1]}, {"input_ids": [1, 2**40], "completion_mask": [1, 1]}]
    rows = sorted_rows([{**row, "group_id": 0, "rollout_id": i} for i, row in enumerate(rows)])
    assert rows.order.tolist() == [1, 0]
    assert find_divergences(rows).sampled == 1
