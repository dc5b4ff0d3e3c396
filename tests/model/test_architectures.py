"""Every family gives the logits that transformers gives, however its rows are cut into calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from paged import Paged

from foretell.model.hub import resolve
from foretell.model.load import load_model

LENGTH = 40
TREE = (-1, 0, 0, 1, 1, 2, 3)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}
LOCAL_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "llama one query head per kv head": ("llama", {"num_key_value_heads": 4}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "llama yarn untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral window": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}),
    "gemma3 two ropes": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "rope_parameters": LOCAL_GLOBAL,
        },
    ),
    "gemma3 cap": ("gemma3_text", {"head_dim": 16, "final_logit_softcapping": 10.0}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 8}),
    "phi3 partial rotary": ("phi3", {"head_dim": 8, "partial_rotary_factor": 0.5}),
}


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def pair(request, save):
    """(our model, a prompt, transformers' logits for it)."""
    family, settings = FAMILIES[request.param]
    theirs, folder = save(family, **settings)
    ours = load_model(resolve(str(folder)), dtype="float32")
    tokens = torch.randint(0, 99, (LENGTH,))
    with torch.inference_mode():
        expected = theirs(tokens.unsqueeze(0)).logits[0]
    assert expected.std() > 0.1, "logits that hardly vary prove nothing"
    return ours, tokens, expected


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_logits_are_transformers_however_rows_are_cut(pair):
    model, tokens, expected = pair
    close(Paged(model).chunk(tokens, 0), expected)

    chunked = Paged(model)
    cuts = (0, 13, 14, 29, LENGTH)
    parts = [chunked.chunk(tokens[a:b], a) for a, b in pairwise(cuts)]
    close(torch.cat(parts), expected)

    single = Paged(model)
    parts = [single.tree(tokens[i : i + 1], (-1,), i) for i in range(LENGTH)]
    close(torch.cat(parts), expected)

    chains = Paged(model)
    parts = [chains.tree(tokens[i : i + 5], (-1, 0, 1, 2, 3), i) for i in range(0, LENGTH, 5)]
    close(torch.cat(parts), expected)


def test_a_tree_gives_what_each_of_its_paths_gives(pair):
    model, tokens, _ = pair
    nodes, prompt = torch.randint(0, 99, (len(TREE),)), tokens[:19]
    whole = Paged(model)
    whole.chunk(prompt, 0)
    logits = whole.tree(nodes, TREE, len(prompt))
    for leaf in range(len(TREE)):
        path = [leaf]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        alone = Paged(model)
        alone.chunk(prompt, 0)
        chain = alone.tree(nodes[path], range(-1, len(path) - 1), len(prompt))
        close(logits[path], chain)
