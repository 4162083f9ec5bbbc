"""The stand-in for a vLLM server: answers depend on the request alone, pauses hold, what it cannot do it refuses."""

import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.trl_rollouts import NAME, toy_server
from treepack.scoring.loopback_server import LoopbackWeightTransfer
from treepack.scoring.train_demo_model import byte_tokenizer, tiny_model


@pytest.fixture
def server():
    with toy_server(max_model_len=64) as running_server:
        yield running_server


def post(server, path="/v1/completions", **payload):
    request = urllib.request.Request(server.url + path, json.dumps(payload).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def ask(server, **options):
    return post(
        server, **{"model": NAME, "prompt": [8, 9, 10], "max_tokens": 5, "temperature": 1.0, "seed": 7, **options}
    )


def test_a_completion_depends_on_its_own_seed_alone(server):
    alone = [ask(server, seed=seed)["choices"][0] for seed in range(6)]
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(ask, server, seed=seed, prompt=[20, 21, 22], max_tokens=9) for seed in range(6)]
        together = [pool.submit(ask, server, seed=seed) for seed in range(6)]
        for one, future in zip(alone, together, strict=True):
            choice = future.result()["choices"][0]
            assert choice["token_ids"] == one["token_ids"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-5)
        assert all(len(future.result()["choices"][0]["token_ids"]) <= 9 for future in others)
    assert len({tuple(choice["token_ids"]) for choice in alone}) > 1


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"model": "other"}, 404, "the model other does not exist"),
        ({"top_p": 0.9}, 400, "top_p must be 1.0, got 0.9"),
        ({"n": 2}, 400, "n must be 1, got 2"),
        ({"temperature": 0}, 400, "temperature must be positive, got 0"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 62}, 400, "prompt and max_tokens must fit in 64, got 3 + 62"),
        ({"prompt": None}, 400, "TypeError"),
        ({"prompt": [10**6]}, 500, "IndexError"),
    ],
)
def test_what_it_cannot_do_it_refuses(server, options, status, message):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, **options)
    with caught.value as error:
        assert error.code == status
        assert message in json.loads(error.read())["error"]
    assert ask(server)["choices"], "and it goes on"


def test_other_paths_are_not_served(server):
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        post(server, "/v1/chat/completions")
    caught.value.close()


def test_a_pause_holds_requests_and_weights_change_meanwhile(server):
    before = ask(server)
    post(server, "/pause")
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(ask(server)), daemon=True)
    waiting.start()
    other = tiny_model(byte_tokenizer(), seed=5).state_dict()
    transfer = LoopbackWeightTransfer(server)
    transfer.pause()
    transfer.send_weights((name, value + 0.5 * torch.ones_like(value)) for name, value in other.items())
    waiting.join(0.5)
    assert not answers
    post(server, "/resume")
    waiting.join(30)
    assert answers[0] != before
