"""The attention and mask functions that `register_attention` installs: one plan a forward, and what they refuse."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from support.models import WINDOW, checkpoint_activations, sample_sequences, tiny_model
from treepack import TreePlan, pack_sequences, register_attention, tree_attention
from treepack.kernels import hf_attention

TOKENS = 6
POSITION_IDS = torch.tensor([[0, 1, 2, 1, 2, 0]])

register_attention()


@pytest.fixture
def packed() -> dict[str, Tensor]:
    return pack_sequences(sample_sequences())


@pytest.fixture
def plans_built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the constructors called, in order."""
    calls: list[str] = []

    def spy(name: str) -> Callable[..., TreePlan]:
        build = getattr(TreePlan, name)

        def record(*args: Tensor) -> TreePlan:
            calls.append(name)
            return build(*args)

        return record

    for name in ("from_position_ids", "from_cu_seqlens"):
        monkeypatch.setattr(hf_attention.TreePlan, name, spy(name))
    return calls


def logits(model: nn.Module, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=input_ids[None], position_ids=position_ids, use_cache=False, **kwargs).logits[0]


def attend(*, tokens: int = TOKENS, batch: int = 1, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """Call the registered function directly, as a layer does: 4 query heads, 2 key heads, head dim 8."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, TOKENS, 8), (batch, 2, tokens, 8), (batch, 2, tokens, 8))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    arguments = {"attention_mask": None, "position_ids": POSITION_IDS, "scaling": 0.3, "dropout": 0.0, **kwargs}
    module = arguments.pop("module", None) or tiny_model("llama").model.layers[0].self_attn
    return AttentionInterface()["treepack"](module, query, key, value, **arguments)[0]


class TestRegistration:
    @pytest.mark.parametrize("name", ["treepack", "tree_fa3"])
    def test_both_names_and_again(self, name: str) -> None:
        before = AttentionInterface()[name], AttentionMaskInterface()[name]
        register_attention()
        assert (AttentionInterface()[name], AttentionMaskInterface()[name]) == before

    def test_backend_and_determinism_reach_tree_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[dict[str, Any]] = []

        def spy(*args: Any, **options: Any) -> Tensor:
            seen.append(options)
            return tree_attention(*args, **options)

        monkeypatch.setattr("treepack.kernels.hf_attention.tree_attention", spy)
        try:
            register_attention(backend="reference", deterministic=True)
            in_float64 = attend()
        finally:
            register_attention()
        assert torch.allclose(in_float64, attend(), atol=1e-5)
        assert [(options["backend"], options["deterministic"]) for options in seen] == [
            ("reference", True),
            (None, False),
        ]

    def test_an_unknown_backend_is_refused(self) -> None:
        with pytest.raises(ValueError, match="backend must be None or one of triton, cpu, .*, got 'fast'"):
            register_attention(backend="fast")

    def test_options_reach_tree_attention(self) -> None:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, TOKENS, 8, generator=generator)[0].transpose(0, 1) for heads in (4, 2, 2))
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        expected = tree_attention(
            q, k, v, position_ids=POSITION_IDS, scale=0.3, sliding_window=2, softcap=1.5, sinks=sinks
        )
        actual = attend(sliding_window=2, softcap=1.5, s_aux=sinks)
        assert actual.shape == (1, TOKENS, 4, 8)
        # Some models reshape it with .view().
        assert actual.is_contiguous()
        assert torch.equal(actual[0], expected)


class TestOnePlanAForward:
    def test_layers_and_recomputation_share_it(self, packed: dict[str, Tensor], plans_built: list[str]) -> None:
        model = tiny_model("gemma2", attn_implementation="treepack").train()
        for use_reentrant in (False, True):
            plans_built.clear()
            checkpoint_activations(model, use_reentrant=use_reentrant)
            logits(model, packed["input_ids"], packed["position_ids"][None]).sum().backward()
            assert plans_built == ["from_position_ids"]

    def test_boundaries_have_their_own(self, packed: dict[str, Tensor], plans_built: list[str]) -> None:
        model = tiny_model("llama", attn_implementation="treepack")
        boundaries = {name: packed[name] for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k")}
        with torch.no_grad():
            for _ in range(2):
                logits(model, packed["input_ids"], packed["position_ids"][None], **boundaries)
        assert plans_built == ["from_cu_seqlens"]

    def test_several_models_at_once(self, packed: dict[str, Tensor], plans_built: list[str]) -> None:
        model, scorer = (tiny_model(name, attn_implementation="treepack") for name in ("llama", "qwen3"))
        other = pack_sequences(sample_sequences(seed=1))
        rows = [(row["input_ids"], row["position_ids"][None]) for row in (packed, other)]
        with torch.no_grad():
            for _ in range(2):
                logits(model, *rows[0]), logits(scorer, *rows[1])
        assert len(plans_built) == 2

    @pytest.mark.parametrize("name", ["position_ids", "tree_cu_seqlens_q", "tree_cu_seqlens_k"])
    def test_a_write_in_place_is_seen(self, name: str) -> None:
        """Two rows of equal length and number of segments, in one reused buffer."""
        keys = ("tree_cu_seqlens_q", "tree_cu_seqlens_k")
        first = {"position_ids": [[0, 1, 2, 3, 2, 3]], keys[0]: [0, 2, 4, 6], keys[1]: [0, 2, 6, 10]}
        second = {"position_ids": [[0, 1, 2, 1, 2, 3]], keys[0]: [0, 1, 3, 6], keys[1]: [0, 1, 4, 8]}
        if name == "tree_cu_seqlens_k":  # The same segments, hung elsewhere.
            second = {**first, keys[1]: [0, 2, 6, 8]}
        model = tiny_model("llama", attn_implementation="treepack")
        ids = sample_sequences()[0][:TOKENS]

        def run(tree: dict[str, Tensor]) -> Tensor:
            with torch.no_grad():
                return model(input_ids=ids[None], use_cache=False, **tree).logits

        used = ("position_ids",) if name == "position_ids" else keys
        buffers = {key: torch.tensor(first[key]) for key in used}
        fresh = {key: torch.tensor(second[key]) for key in used}
        expected = run(fresh)
        assert not torch.equal(run(buffers), expected)
        for key in used:
            if not torch.equal(buffers[key], fresh[key]):
                buffers[key].copy_(fresh[key])
        assert torch.equal(run(buffers), expected)

    def test_a_freed_tensor_is_forgotten(self) -> None:
        """New tensors often take the address, even the id, of the last ones."""
        model = tiny_model("llama", attn_implementation="treepack")
        ids = sample_sequences()[0][:TOKENS]
        trees = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3], [0, 1, 0, 1, 0, 1])
        alive = [torch.tensor([tree]) for tree in trees]
        with torch.no_grad():
            expected = [logits(model, ids, position_ids) for position_ids in alive]
            results = [logits(model, ids, torch.tensor([tree])) for _ in range(4) for tree in trees]
        assert not torch.equal(expected[0], expected[1])
        assert not torch.equal(expected[1], expected[2])
        assert all(torch.equal(result, expected[i % 3]) for i, result in enumerate(results))

    def test_inference_tensors(self, plans_built: list[str]) -> None:
        """They count no writes: their plan is kept while they hold what it was built from."""
        model = tiny_model("llama", attn_implementation="treepack")
        ids = sample_sequences()[0][:TOKENS]
        with torch.inference_mode():
            buffer = torch.tensor([[0, 1, 2, 3, 4, 5]])
            before = logits(model, ids, buffer)
            buffer.copy_(torch.tensor([[0, 1, 2, 1, 2, 3]]))
            after = logits(model, ids, buffer)
        assert len(plans_built) == 2
        with torch.no_grad():
            expected = logits(model, ids, torch.tensor([[0, 1, 2, 1, 2, 3]]))
        assert torch.equal(after, expected)
        assert not torch.equal(after, before)

    def test_threads(self, packed: dict[str, Tensor]) -> None:
        model = tiny_model("llama", attn_implementation="treepack")
        rows = [packed, pack_sequences(sample_sequences(seed=1)), pack_sequences(sample_sequences(seed=2))]

        def run(row: dict[str, Tensor]) -> Tensor:
            with torch.no_grad():
                return logits(model, row["input_ids"], row["position_ids"][None].clone())

        expected = [run(row) for row in rows]
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(run, rows * 4))
        assert all(torch.equal(result, expected[i % 3]) for i, result in enumerate(results))


class TestDtype:
    def test_autocast(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert attend().dtype == torch.bfloat16

    def test_float32_norms_over_bfloat16_projections(self) -> None:
        """PEFT keeps norms in float32: query and key arrive so, and o_proj wants bfloat16."""
        module = tiny_model("llama").to(torch.bfloat16).model.layers[0].self_attn
        assert attend(module=module).dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_kept(self, dtype: torch.dtype) -> None:
        assert attend(dtype=dtype).dtype == dtype


@pytest.mark.parametrize("tree", ["position_ids", "boundaries"])
def test_compiled_without_graph_break(tree: str, packed: dict[str, Tensor], plans_built: list[str]) -> None:
    model = tiny_model("mistral", attn_implementation="treepack", num_hidden_layers=2).model
    arguments = {
        "input_ids": packed["input_ids"][None],
        "position_ids": packed["position_ids"][None],
        "use_cache": False,
    }
    if tree == "boundaries":
        arguments |= {name: packed[name] for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(**arguments).last_hidden_state
    torch.testing.assert_close(compiled(**arguments).last_hidden_state, expected, rtol=0, atol=2e-5)
    plans_built.clear()
    compiled(**arguments)
    assert plans_built == ["from_position_ids" if tree == "position_ids" else "from_cu_seqlens"]


def test_boundaries_op() -> None:
    boundaries = torch.tensor([0, 2, 4, 6], dtype=torch.int32), torch.tensor([0, 2, 6, 8], dtype=torch.int32)
    torch.library.opcheck(hf_attention._plan_op, (*boundaries, TOKENS))
    with pytest.raises(ValueError, match="tree_cu_seqlens_q must end at the row's 7 tokens, got 6"):
        hf_attention._plan_op(*boundaries, TOKENS + 1)


class TestRefusals:
    """Nothing is silently ignored (unsloth#6871)."""

    @pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
    @pytest.mark.parametrize("shape", ["2d ones", "2d padding", "4d"])
    def test_attention_mask(self, name: str, shape: str, packed: dict[str, Tensor]) -> None:
        model = tiny_model(name, attn_implementation="treepack")
        tokens = len(packed["input_ids"])
        mask = torch.ones(1, 1, tokens, tokens) if shape == "4d" else torch.ones(1, tokens, dtype=torch.long)
        if shape == "2d padding":
            mask[0, -3:] = 0
        with pytest.raises(ValueError, match="attention_mask must be None for a tree-packed row, got one of shape"):
            logits(model, packed["input_ids"], packed["position_ids"][None], attention_mask=mask)

    def test_batch(self, packed: dict[str, Tensor]) -> None:
        model = tiny_model("llama", attn_implementation="treepack")
        with pytest.raises(ValueError, match=r"one packed row \(1, N\), got a batch of 2"):
            model(
                input_ids=packed["input_ids"].expand(2, -1),
                position_ids=packed["position_ids"].expand(2, -1),
                use_cache=False,
            )

    def test_cache(self) -> None:
        model = tiny_model("llama", attn_implementation="treepack")
        ids = sample_sequences()[0]
        cache = model(input_ids=ids[None, :-1], use_cache=True).past_key_values
        with pytest.raises(
            ValueError, match=f"keys must be as many as queries, got {len(ids)} and 1: .*use_cache=False"
        ):
            model(input_ids=ids[None, -1:], cache=cache)

    @pytest.mark.parametrize(("name", "option"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
    def test_dropout_in_training_alone(self, name: str, option: str, packed: dict[str, Tensor]) -> None:
        model = tiny_model(name, attn_implementation="treepack", **{option: 0.25})
        logits(model, packed["input_ids"], packed["position_ids"][None])
        with pytest.raises(NotImplementedError, match=r"dropout must be 0 in tree attention, got 0\.25"):
            logits(model.train(), packed["input_ids"], packed["position_ids"][None])

    @pytest.mark.parametrize("options", [{"is_causal": False}, {"use_bidirectional_attention": True}])
    def test_bidirectional_models(self, options: dict[str, bool], packed: dict[str, Tensor]) -> None:
        name = "llama" if "is_causal" in options else "gemma3_text"
        model = tiny_model(name, attn_implementation="treepack", **options)
        with pytest.raises(NotImplementedError, match="the mask must be causal|own mask function"):
            logits(model, packed["input_ids"], packed["position_ids"][None])

    def test_image_blocks_that_see_ahead(self, packed: dict[str, Tensor]) -> None:
        from transformers.masking_utils import create_causal_mask

        model = tiny_model("llama", attn_implementation="treepack")
        blocks = torch.full((1, TOKENS), -1)
        arguments = {
            "config": model.config,
            "inputs_embeds": torch.zeros(1, TOKENS, 64),
            "attention_mask": None,
            "cache": None,
            "position_ids": POSITION_IDS,
        }
        assert create_causal_mask(**arguments, block_sequence_ids=blocks) is None
        blocks[0, 1:3] = 0
        with pytest.raises(NotImplementedError, match="a token sees a later one"):
            create_causal_mask(**arguments, block_sequence_ids=blocks)

    @pytest.mark.parametrize(
        ("option", "value", "error", "message"),
        [
            ("is_causal", False, NotImplementedError, r"is_causal must be True .*LlamaAttention.*text_config"),
            ("position_bias", torch.zeros(1, 4, 6, 6), NotImplementedError, "position_bias must be None"),
            ("alibi", torch.zeros(4), NotImplementedError, "alibi must be None"),
            ("head_mask", torch.ones(4), NotImplementedError, "head_mask must be None"),
            ("layer_head_mask", torch.ones(4), NotImplementedError, "layer_head_mask must be None"),
            ("indices", torch.zeros(1, 6, 2), NotImplementedError, "indices must be None"),
            ("block_indices", torch.zeros(1, 6, 2), NotImplementedError, "block_indices must be None"),
            ("sinks", torch.zeros(4), NotImplementedError, "sinks must be None"),
            ("cu_seq_lens_q", torch.tensor([0, 6]), NotImplementedError, "cu_seq_lens_q must be None"),
            ("cu_seq_lens_k", torch.tensor([0, 6]), NotImplementedError, "cu_seq_lens_k must be None"),
            ("output_attentions", True, NotImplementedError, "output_attentions must be None"),
            ("dropout", 0.1, NotImplementedError, "dropout must be 0"),
            ("position_ids", None, ValueError, "must reach the attention layers, got neither"),
            ("position_ids", POSITION_IDS[None], ValueError, "position_ids must be"),
            ("position_ids", POSITION_IDS[:, :4], ValueError, "must cover the 6 tokens of q, got 4"),
            ("position_ids", POSITION_IDS + 1, ValueError, "position_ids must start at 0"),
            ("tree_cu_seqlens_q", torch.tensor([0, 6]), ValueError, "must be passed together"),
            ("tree_cu_seqlens_k", torch.tensor([0, 6]), ValueError, "must be passed together"),
        ],
    )
    def test_calls(self, option: str, value: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            attend(**{option: value})

    def test_falsy_options_are_none(self) -> None:
        assert torch.equal(attend(output_attentions=False, is_causal=True, head_mask=None), attend())

    def test_row_longer_than_its_boundaries(self) -> None:
        """pytorch#188933: a row that goes on after the last boundary is an error, never NaN."""
        boundary = torch.tensor([0, TOKENS - 2], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"must cover the {TOKENS} tokens of q, got {TOKENS - 2}"):
            attend(tree_cu_seqlens_q=boundary, tree_cu_seqlens_k=boundary)

    def test_model_that_keeps_position_ids_to_itself(self, packed: dict[str, Tensor]) -> None:
        """Loud with positions alone; right with TRL's boundaries, which every layer gets."""
        model = tiny_model("persimmon", attn_implementation="treepack")
        plain = tiny_model("persimmon")
        with pytest.raises(ValueError, match="pass the boundaries"):
            logits(model, packed["input_ids"], packed["position_ids"][None])
        boundaries = {name: packed[name] for name in ("tree_cu_seqlens_q", "tree_cu_seqlens_k")}
        with torch.no_grad():
            actual = logits(model, packed["input_ids"], packed["position_ids"][None], **boundaries)
            for i, ids in enumerate(sample_sequences()):
                path = packed["positions"][packed["offsets"][i] : packed["offsets"][i + 1]]
                expected = plain(input_ids=ids[None], use_cache=False).logits[0]
                torch.testing.assert_close(actual[path], expected, rtol=0, atol=2e-5)


def test_windows_are_shorter_than_the_sequences() -> None:
    assert min(len(ids) for ids in sample_sequences()) > WINDOW
