"""What goes wrong around a run, and what is said about it: servers, reward functions, processes that die."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest
import torch

from support.children import put_endlessly
from support.trl_rewards import infinite, one_too_few, raises
from support.trl_rollouts import running, toy_server
from support.trl_training import QueuedRollouts, save_policy, scoring_trainer
from treepack.scoring.child_channels import ChildQueue
from treepack.scoring.loopback_server import HttpError, LoopbackServer
from treepack.scoring.progress import GroupProgress
from treepack.scoring.queue import GroupedQueue, GroupShrunk
from treepack.scoring.train_demo_model import byte_tokenizer

SIZE = len(byte_tokenizer())
"""The served policy's vocabulary."""


class Answers(LoopbackServer):
    """Answers every request with `given`, raised where it is an error."""

    given = None

    def complete(self, payload):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def answering(given):
    return type("Answering", (Answers,), {"given": given})


def choice(token_ids, log_probs):
    return {"choices": [{"token_ids": token_ids, "logprobs": {"token_logprobs": log_probs}}]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (HttpError(500, "out of memory"), "ClientResponseError: 500, message='Internal Server Error'"),
        (HttpError(404, "no such model"), "ClientResponseError: 404"),
        ({"object": "error"}, "must answer with choices[0].token_ids and .logprobs.token_logprobs, got an answer that"),
        ([1, 2], "must answer with choices[0].token_ids"),
        ({"choices": [{"token_ids": [5], "logprobs": None}]}, "must answer with choices[0].token_ids"),
        (choice([5, 6], [None, -0.5]), "must be 2 finite numbers, one a token, got [None, -0.5]"),
        (choice([5, 6], [float("nan"), -0.5]), "must be 2 finite numbers, one a token, got [nan, -0.5]"),
        (choice([5, 6], [-0.5]), "must be 2 finite numbers, one a token, got [-0.5]"),
        (choice(["a"], [-0.5]), "must be a list of integers, got ['a']"),
        (choice([SIZE - 1, SIZE], [-0.5, -0.5]), f"must be in the policy's vocabulary, [0, {SIZE}), got [{SIZE}]"),
        (choice([7, -1], [-0.5, -0.5]), f"must be in the policy's vocabulary, [0, {SIZE}), got [-1]"),
    ],
)
def test_a_server_that_only_fails_ends_the_run_with_the_cause(given, message):
    with toy_server(answering(given)) as server, running(server.url, max_failures=5) as run:
        error = run.wait_for_error()
        assert message in str(error)
        count, rest = str(error).split(" ", 1)
        assert int(count) >= 5  # requests under way together fail together
        assert rest.startswith("generations failed in a row, the last: ")
        name, reported, trace = run.report.get(timeout=10)
        assert run.failed.is_set()
        assert (name, reported) == ("RolloutFailedError", str(error))
        assert "Traceback" in trace


@contextmanager
def web_page():
    """A server that answers everything with a page of HTML; gives its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>It works!</html>")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_of_another_kind():
    with web_page() as url, running(url, max_failures=2) as run:
        assert "ContentTypeError: 200, message='Attempt to decode JSON with unexpected mimetype: text/html'" in str(
            run.wait_for_error()
        )


def test_a_server_that_is_not_there():
    with running("http://127.0.0.1:9", max_failures=2) as run:
        assert "Cannot connect to host 127.0.0.1:9" in str(run.wait_for_error())


class Hangs(LoopbackServer):
    """Does not answer the prompt that was asked for first, as long as the test runs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.first = None
        self.released = threading.Event()

    def complete(self, payload):
        self.first = self.first or payload["prompt"]
        if payload["prompt"] == self.first:
            self.released.wait()
            raise HttpError(503, "too late")
        return super().complete(payload)


def test_a_group_that_never_completes_is_given_up_and_the_others_go_on():
    with toy_server(Hangs) as server:
        with running(server.url, request_timeout=1) as run:
            items = []
            while GroupShrunk(0, 0) not in items:
                items += run.take(1)
            items += run.take(8)
            assert run.metric_total("rollout/failed_generations_total") > 0
        server.released.set()
    sizes = Counter(item.group_id for item in items if not isinstance(item, GroupShrunk))
    assert 0 not in sizes
    assert list(sizes.values())[:-1] == [4] * (len(sizes) - 1)


def test_a_server_that_hangs_ends_the_run_within_its_timeout():
    with toy_server(Hangs) as server:
        start = time.monotonic()
        with running(server.url, request_timeout=1, max_failures=4) as run:
            error = run.wait_for_error()
        server.released.set()
    assert "gave no answer within request_timeout 1 s" in str(error)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward function 'raises' failed with ZeroDivisionError: the reward's own mistake"),
        (one_too_few, "reward function 'one_too_few' must return a reward for each of 4 completions, got 3"),
        (infinite, "reward function 'infinite' must return finite numbers, NaN or None, got [inf, inf, inf, inf]"),
    ],
)
def test_a_reward_function_that_fails_is_named(function, message):
    with toy_server() as server, running(server.url, reward_funcs=[function]) as run:
        assert str(run.wait_for_error()) == message


def test_a_full_queue_holds_generation_back_and_loses_nothing():
    with toy_server() as server, running(server.url, queue_maxsize=2, max_inflight_tasks=1) as run:
        time.sleep(1)
        asked = server.num_requests["/v1/completions"]
        rows = run.take(20)
        assert [row.uid for row in rows] == list(range(20))
        assert [row.group_id for row in rows] == [group for group in range(5) for _ in range(4)]
    assert asked < 120  # the queue, the groups that wait to be scored, and what was under way


def test_a_queue_full_of_stale_groups_is_cleared_and_fresh_ones_follow():
    with toy_server() as server, running(server.url, queue_maxsize=4, max_inflight_tasks=1) as run:
        while not run.rows.full():
            time.sleep(0.05)
        run.version.value = 10
        progress = GroupProgress()
        grouped = GroupedQueue(run.rows, model_version=lambda: 10, max_staleness=1, progress=progress)
        fresh = [grouped.get(timeout=60) for _ in range(8)]
    assert {row.model_version for row in fresh} == {10}
    assert Counter(row.group_id for row in fresh) == {fresh[0].group_id: 4, fresh[4].group_id: 4}
    stale = progress.num_dropped["stale"]
    assert grouped.dropped == {"stale": 4 * stale}
    assert stale >= 1
    assert progress.watermark == fresh[0].group_id == stale


def test_a_child_killed_in_the_middle_of_a_row_does_not_hang_the_reader():
    context = multiprocessing.get_context("spawn")
    items = ChildQueue(2, ctx=context)
    child = context.Process(target=put_endlessly, args=(items,), daemon=True)
    child.start()
    items.close_writing_end()
    assert len(items.get(timeout=60)) == 10_000_000
    time.sleep(0.2)  # the next item is in the pipe by now, in part
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with pytest.raises(queue.Empty):
        items.get(timeout=1)
    with pytest.raises(queue.Empty):
        items.get_nowait()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_step_without_a_signal_does_not_move_the_policy(policy, tmp_path):
    """Momentum and weight decay would, where gradients are zeros: groups 3 to 8 have equal rewards."""
    weights = []

    def keep(_scores):
        weights.append(trainer.model.get_input_embeddings().weight.detach().clone())

    worker = QueuedRollouts(30, rewards=lambda group, i: 1.0 if 3 <= group < 9 else float(i % 2))
    more = {"groups_per_step": 3, "max_steps": 5, "weight_decay": 0.1}
    trainer = scoring_trainer(policy, tmp_path, worker, on_rollouts_scored=[keep], more=more)
    trainer.train()
    moved = [not torch.equal(before, after) for before, after in pairwise(weights)]
    assert moved == [True, False, False, True]
    assert trainer.progress.num_trained == 15
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["frac_reward_zero_std"] for line in lines] == [0, 1, 1, 0, 0]
