"""The tiny models of `treepack train-demo`, made in memory: a byte tokenizer, a policy, a judge that knows one text."""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from treepack.scoring.trl_layout import qwen3_chat_template

_SPECIAL_TOKENS = ("<pad>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and Qwen3's special tokens and chat template, which TRL knows how to parse."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *sorted(_byte_tokens())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", padding_side="left"
    )
    fast.chat_template = qwen3_chat_template
    return fast


def tiny_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, attention: str = "sdpa") -> PreTrainedModel:
    """A Qwen3 of two layers, with random weights that follow from `seed`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def save_policy(folder: Path, *, seed: int) -> None:
    """Write a policy and its tokenizer where the trainer loads them from."""
    tokenizer = byte_tokenizer()
    tiny_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(count: int) -> Dataset:
    """Prompts for the policy: numbers."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": str(number)}] for number in range(count)]})


def make_judge(
    tokenizer: PreTrainedTokenizerFast, prompts: Dataset, text: str, *, seed: int, steps: int = 60
) -> tuple[PreTrainedModel, float]:
    """A model that has learned to answer every prompt with `text` over and over.

    Returns:
        The model, with tree attention, and the mean log-probability it gives to a token of such answers, in nats.
    """
    student = tiny_model(tokenizer, seed=seed)
    asked = [
        tokenizer.apply_chat_template(prompt, return_dict=False, add_generation_prompt=True)
        for prompt in prompts["prompt"]
    ]
    answer = tokenizer.encode(text * 2)
    length = min(map(len, asked)) + len(answer)
    ids_BN = torch.tensor([(prompt + answer)[:length] for prompt in asked])
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        batch_BN = ids_BN[torch.randint(len(ids_BN), (8,), generator=generator)]
        logits_BNV = student(input_ids=batch_BN, use_cache=False).logits
        loss = cross_entropy(logits_BNV[:, :-1].flatten(0, 1), batch_BN[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    judge = tiny_model(tokenizer, seed=seed, attention="treepack")
    judge.load_state_dict(student.state_dict())
    return judge, -float(loss.detach())


def _byte_tokens() -> list[str]:
    return pre_tokenizers.ByteLevel.alphabet()
