"""``generate()`` of a patched model finds the tokens of earlier calls."""

from __future__ import annotations

import copy
import gc

import peft
import pytest
import torch

from prefixkit.models import TreeCache, patch, unpatch
from prefixkit.models.model_stores import stores_of
from prefixkit.testing.tiny import tiny_llama
from prefixkit.torch_private import without_memory

FEW_SHOT = torch.arange(5, 85)


def prompt(*tokens):
    return torch.cat((FEW_SHOT, torch.tensor(tokens)))[None]


@pytest.fixture
def model():
    return patch(tiny_llama(), tree_cache="always")


@pytest.fixture
def ran(model):
    """Tokens that went through the model, step by step."""
    greedy(model, torch.tensor([[3]]))  # the first call probes the model
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    return counts


def greedy(model, ids, **options):
    given = () if ids is None else (ids,)
    return model.generate(*given, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


def test_a_known_beginning_is_not_computed_again(model, ran):
    plain = tiny_llama()
    for tokens, new in (((1, 2, 3), 83), ((1, 2, 4), 1), ((1, 2, 4), 1), ((7,), 1)):
        ran.clear()
        found = greedy(model, prompt(*tokens), num_return_sequences=2, num_beams=2)
        assert torch.equal(found, greedy(plain, prompt(*tokens), num_return_sequences=2, num_beams=2))
        assert ran[0] == new


def test_what_was_generated_is_known_too(model, ran):
    turn = greedy(model, prompt(1))
    ran.clear()
    ids = torch.cat((turn, torch.tensor([[9, 9]])), 1)
    assert torch.equal(greedy(model, ids), greedy(tiny_llama(), ids))
    assert ran[0] == 3, "the last token that was generated, and the two new ones"


@pytest.mark.parametrize("mode", [without_memory, lambda: torch.device("meta")], ids=["fake tensors", "meta"])
def test_a_cache_that_is_collected_within_a_mode_of_torch_is_known_later(model, ran, mode):
    """The collector of garbage may run anywhere, while a model is made without memory as well."""
    held = greedy(model, prompt(1, 2, 3), return_dict_in_generate=True)
    with mode():
        del held
        gc.collect()
    ran.clear()
    greedy(model, prompt(1, 2, 4))
    assert ran[0] == 1


class Unreadable(torch.Tensor):
    def __tensor_flatten__(self):
        raise RuntimeError("the memory of this weight is gone")


def test_a_cache_of_a_model_that_cannot_be_read_gives_its_memory_back(model):
    held = greedy(model, prompt(1, 2, 3), return_dict_in_generate=True)
    assert stores_of(model).bytes > 0
    head, weight = model.lm_head._parameters, model.lm_head.weight
    head["weight"] = torch.nn.Parameter(weight.detach().as_subclass(Unreadable), requires_grad=False)
    del held
    gc.collect()
    head["weight"] = weight
    assert stores_of(model).bytes == 0
    assert torch.equal(greedy(model, prompt(1, 2, 3)), greedy(unpatch(copy.deepcopy(model)), prompt(1, 2, 3)))


def test_logits_of_all_tokens_are_computed_again(model, ran):
    greedy(model, prompt(1))
    ran.clear()
    with torch.no_grad():
        logits = model(prompt(1), past_key_values=TreeCache(model)).logits
        expected = tiny_llama()(prompt(1)).logits
    assert ran[0] == 81
    torch.testing.assert_close(logits, expected)


def test_kv_of_old_weights_is_not_used(model, ran):
    greedy(model, prompt(1))
    other = tiny_llama(1)
    model.load_state_dict(other.state_dict())
    ran.clear()
    assert torch.equal(greedy(model, prompt(1)), greedy(other, prompt(1)))
    assert ran[0] == 81


def test_after_writes_that_torch_does_not_count_a_second_patch_forgets(model, ran):
    greedy(model, prompt(1))
    other = tiny_llama(1)
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)
    patch(model, tree_cache="always")
    ran.clear()
    assert torch.equal(greedy(model, prompt(1)), greedy(other, prompt(1)))
    assert ran[0] == 81


def test_a_cache_from_before_a_second_patch_leaves_nothing_to_later_calls(model):
    """It goes after the patch, with KV of the weights from before it."""
    plain = tiny_llama(1)
    held = greedy(model, prompt(1), return_dict_in_generate=True)
    for parameter, value in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.data.copy_(value.data)
    patch(model, tree_cache="always")
    for _ in range(3):
        held = greedy(model, prompt(1), return_dict_in_generate=True)
        assert torch.equal(held.sequences, greedy(plain, prompt(1)))


class Double(torch.nn.Module):
    """In the place of an activation function."""

    def forward(self, states):
        return 2 * states


def give_forward(layer):
    layer.mlp.forward = torch.zeros_like


def give_activation(layer):
    layer.mlp.act_fn = Double().eval()


CHANGES = {
    "a hook": lambda layer: layer.register_forward_hook(lambda module, args, out: out + 1),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:])),
    "a forward": give_forward,
    "a module without parameters": give_activation,
}


@pytest.mark.parametrize("change", CHANGES)
def test_kv_from_before_a_module_was_changed_is_not_used(model, change):
    plain, handles = tiny_llama(), []
    for one in (plain, model):
        greedy(one, prompt(1))
        handles.append(CHANGES[change](one.model.layers[0]))
    assert torch.equal(greedy(model, prompt(1)), greedy(plain, prompt(1)))
    if handles[0] is not None:
        for handle in handles:
            handle.remove()
        assert torch.equal(greedy(model, prompt(1)), greedy(plain, prompt(1)))


def test_a_cache_that_was_continued_by_another_adapter_leaves_nothing_to_later_calls():
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    plain = peft.get_peft_model(tiny_llama(), config, adapter_name="a")
    plain.add_adapter("b", config)
    plain.eval()
    found = []
    for model in (plain, patch(copy.deepcopy(plain), tree_cache="always")):
        model.set_adapter("a")
        out = greedy(model, input_ids=prompt(1), ids=None, return_dict_in_generate=True)
        longer = torch.cat((out.sequences, FEW_SHOT[None]), 1)
        model.set_adapter("b")
        greedy(model, input_ids=longer, ids=None, past_key_values=out.past_key_values)
        model.set_adapter("a")
        del out
        found.append(greedy(model, input_ids=longer, ids=None))
        with model.disable_adapter():
            greedy(model, input_ids=longer, ids=None)
        found.append(greedy(model, input_ids=longer.expand(2, -1), ids=None, adapter_names=["b", "__base__"]))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_a_cache_that_was_continued_in_another_dtype_leaves_nothing_to_later_calls(model):
    plain = tiny_llama()
    out = greedy(model, prompt(1), return_dict_in_generate=True)
    longer = torch.cat((out.sequences, FEW_SHOT[None]), 1)
    with torch.autocast("cpu", torch.bfloat16):
        greedy(model, longer, past_key_values=out.past_key_values)
    del out
    expected = {"return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (greedy(one, longer, **expected).logits for one in (model, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_prompts_that_part_one_token_after_another_do_not_run_out_of_pages(model):
    """What the cache knows of them lies on a page for each token."""
    plain, chosen = tiny_llama(), torch.Generator().manual_seed(2)

    def tokens(*shape):
        return torch.randint(5, 200, shape, generator=chosen)

    greedy(model, tokens(4, 200))
    base = tokens(1, 60)
    for length in range(1, 56):
        greedy(model, torch.cat((base[:, :length], tokens(1, 3)), 1))
    ids = torch.cat((torch.cat((base[:, :55], tokens(1, 145)), 1), tokens(3, 200)))
    assert torch.equal(greedy(model, ids), greedy(plain, ids))


def test_longer_calls_make_room(model):
    for length in (1, 40, 3, 90):
        ids = torch.randint(5, 200, (2, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(greedy(model, ids), greedy(tiny_llama(), ids))


def test_in_auto_mode_one_row_takes_the_tree_where_much_of_it_is_known():
    model, counts = patch(tiny_llama(), tree_cache="auto"), []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    greedy(model, prompt(1).expand(4, -1))
    counts.clear()
    assert torch.equal(greedy(model, prompt(2)), greedy(tiny_llama(), prompt(2)))
    assert counts[0] == 1
    counts.clear()
    greedy(model, torch.arange(100, 150)[None])
    assert counts[0] == 50


def test_memory_goes_with_the_patch(model):
    greedy(model, prompt(1))
    stores = stores_of(model)
    assert len(stores) == 1 and stores.bytes > 0
    unpatch(model)
    gc.collect()
    assert len(stores) == 0 and not stores.bytes


def test_a_model_that_trains_keeps_none(model):
    greedy(model, prompt(1))
    model.train()
    greedy(model, prompt(1))
    gc.collect()
    assert len(stores_of(model)) == 0
