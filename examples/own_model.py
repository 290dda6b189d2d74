"""A model of your own, in torch alone: samples of prompts with a common prefix, over one tree, and by dense attention.

Run: python examples/own_model.py    (a small random model of bytes)
"""

import torch
from torch.nn import Embedding, Linear, Module, ModuleList
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import prefixkit

LAYERS, HEADS, KV_HEADS, DIM, SAMPLES, NEW = 2, 4, 2, 32, 3, 12
PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("cat that", "cow", "dog")]


class Model(Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = Embedding(256, HEADS * DIM), Embedding(512, HEADS * DIM)
        sizes = (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM  # of q, k and v together, and of the output
        self.layers = ModuleList(ModuleList(Linear(HEADS * DIM, size) for size in sizes) for _ in range(LAYERS))

    def forward(self, tokens, positions, step=None):
        x = self.embed(tokens) + self.place(positions)
        for layer, (qkv, out) in enumerate(self.layers):
            q, k, v = qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
            x = x + out(attention(step, layer, q, k, v).flatten(1))
        return 0.08 * rms_norm(x, x.shape[-1:]) @ self.embed.weight.T


def attention(step, layer, q, k, v):  # each [tokens, heads, DIM]
    if step is None:  # dense attention, over one sequence
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    prefixkit.append(step, layer, k, v)
    return prefixkit.attend(step, layer, q)[0]


@torch.inference_mode()
def main(arguments=None):
    torch.manual_seed(0)
    model, pool = Model(), prefixkit.kv_pool(LAYERS, KV_HEADS, DIM, num_pages=64, dtype=torch.float32, device="cpu")
    layers = prefixkit.TreeAttention(pool, HEADS)
    prompts = [list(prompt.encode()) for prompt in PROMPTS for _ in range(SAMPLES)]
    tree, samples = prefixkit.tree_from_tokens(pool, prompts)  # finds shared prefixes
    for _ in range(NEW):
        step = prefixkit.plan(layers, tree, samples)  # at first all tokens of the prompts, then those sampled last
        logits = model(step.tokens, step.positions, step)[step.last_rows]
        prefixkit.commit(step)
        tree.extend_each(samples, torch.multinomial(logits.softmax(-1), 1)[:, 0].numpy())
    for sample, row in zip(samples, logits, strict=True):
        tokens = torch.tensor(sample.tokens()[:-1])
        torch.testing.assert_close(row, model(tokens, torch.arange(len(tokens)))[-1], rtol=1e-4, atol=1e-4)
        print(bytes(sample.tokens().tolist()))
    print(f"equal to dense attention: True; {NEW} steps took {layers.planner.plans_made} plans")


if __name__ == "__main__":
    main()
