"""The public verbs on a tiny model: the unpatched model's tokens, whatever is sampled together, and clear refusals."""

import logging

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.api import make_engine
from prefixkit.generation.request import Request, SamplingParams
from prefixkit.generation.scheduler import KVBudgetTooSmall
from prefixkit.models import NotPatched
from tests.tiny import EOS, ByteTokenizer, tiny_llama

TOKENIZER = ByteTokenizer()
HEAD = "def solve(numbers):\n    '''Return the answer.'''\n"
PROMPTS = [HEAD + "    total = 0", HEAD + "    best = None", "while True:", HEAD, HEAD + "    total = 0"]


@pytest.fixture(scope="module")
def model():
    return prefixkit.patch(tiny_llama())


def tokens_of(result):
    return [(sample.prompt_index, sample.index, sample.tokens) for sample in result]


def stock_greedy(prompt, new=20):
    plain = tiny_llama()
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return out[0, ids.shape[1] :].tolist()


def test_greedy_tokens_are_those_of_the_unpatched_model(model):
    result = prefixkit.generate(model, TOKENIZER, PROMPTS, temperature=0, max_new_tokens=20)
    assert [sample.tokens for sample in result] == [stock_greedy(prompt) for prompt in PROMPTS]


def test_a_samples_logprobs_are_the_models_own(model):
    (sample,) = prefixkit.generate(model, TOKENIZER, PROMPTS[:1], temperature=0.7, top_k=5, max_new_tokens=8, seed=3)
    prompt = TOKENIZER(PROMPTS[0])["input_ids"]
    with torch.no_grad():
        logits = tiny_llama()(torch.tensor([prompt + sample.tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-4)


class TestSeeds:
    OPTIONS = {"n": 4, "temperature": 0.9, "top_p": 0.95, "max_new_tokens": 16, "seed": 11}

    def test_together_or_alone(self, model):
        together = prefixkit.generate(model, TOKENIZER, PROMPTS, **self.OPTIONS)
        for index, prompt in enumerate(PROMPTS):
            alone = prefixkit.generate(model, TOKENIZER, [prompt], **self.OPTIONS)
            assert [s.tokens for s in alone] == [s.tokens for s in together.of_prompt(index)]

    def test_in_another_order(self, model):
        together = prefixkit.generate(model, TOKENIZER, PROMPTS, **self.OPTIONS)
        backward = prefixkit.generate(model, TOKENIZER, PROMPTS[::-1], **self.OPTIONS)
        for index in range(len(PROMPTS)):
            other = backward.of_prompt(len(PROMPTS) - 1 - index)
            assert [s.tokens for s in other] == [s.tokens for s in together.of_prompt(index)]

    @pytest.mark.parametrize("page_size", [1, 5, 64, 128])
    def test_with_another_page_size(self, model, page_size):
        together = prefixkit.generate(model, TOKENIZER, PROMPTS, **self.OPTIONS)
        assert tokens_of(
            prefixkit.generate(model, TOKENIZER, PROMPTS, page_size=page_size, **self.OPTIONS)
        ) == tokens_of(together)

    def test_with_a_budget_that_makes_prompts_wait(self, model):
        together = prefixkit.generate(model, TOKENIZER, PROMPTS, **self.OPTIONS)
        bytes_per_token = 2 * 2 * 2 * 16 * 4
        budget = 160 * bytes_per_token
        assert together.report.kv_bytes_held_peak > budget
        tight = prefixkit.generate(model, TOKENIZER, PROMPTS, kv_budget=budget, **self.OPTIONS)
        assert tokens_of(tight) == tokens_of(together)
        assert tight.report.kv_bytes_held_peak <= budget
        assert tight.report.tokens_computed == together.report.tokens_computed

    def test_in_small_prefill_chunks(self, model):
        together = prefixkit.generate(model, TOKENIZER, PROMPTS, **self.OPTIONS)
        assert tokens_of(prefixkit.generate(model, TOKENIZER, PROMPTS, prefill_chunk=13, **self.OPTIONS)) == tokens_of(
            together
        )

    def test_asking_for_more_samples_changes_none(self, model):
        few = prefixkit.generate(model, TOKENIZER, PROMPTS[:1], **{**self.OPTIONS, "n": 2})
        many = prefixkit.generate(model, TOKENIZER, PROMPTS[:1], **{**self.OPTIONS, "n": 6})
        assert tokens_of(few) == tokens_of(many)[:2]

    def test_one_seed_per_prompt(self, model):
        options = {**self.OPTIONS, "seed": [1, 2]}
        both = prefixkit.generate(model, TOKENIZER, [PROMPTS[0], PROMPTS[0]], **options)
        second = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]], **{**options, "seed": 2})
        assert [s.tokens for s in both.of_prompt(1)] == [s.tokens for s in second]
        assert [s.tokens for s in both.of_prompt(0)] != [s.tokens for s in second]


@pytest.mark.parametrize("page_size", [1, 7, 16, 128])
def test_without_a_budget_all_samples_run_together(model, page_size):
    rng = np.random.default_rng(8)
    print("seed 8")
    head = rng.integers(0, 256, 100)
    prompts = [[*head[: rng.integers(50, 100)], *rng.integers(0, 256, rng.integers(1, 40))] for _ in range(12)]
    result = prefixkit.generate(
        model, TOKENIZER, prompts, n=3, max_new_tokens=9, stop_token_ids=(), page_size=page_size
    )
    assert result.report.steps == 9


class TestReport:
    def test_it_counts_what_was_shared(self, model):
        result = prefixkit.generate(model, TOKENIZER, PROMPTS, n=3, max_new_tokens=5, stop_token_ids=())
        report = result.report
        lengths = [len(TOKENIZER(prompt)["input_ids"]) for prompt in PROMPTS]
        head = len(TOKENIZER(HEAD)["input_ids"])
        assert report.tokens_plain_batch == sum(3 * (length + 4) for length in lengths)
        distinct = head + (lengths[0] - head) + (lengths[1] - head) + lengths[2]
        # "    " is shared by the two bodies as well.
        assert report.tokens_computed == distinct - 4 + 15 * 4
        assert (report.prompts, report.samples, report.new_tokens) == (5, 15, 75)
        assert report.kv_bytes_copied == 0
        assert report.kv_bytes_read < report.kv_bytes_read_unshared
        assert "tokens computed" in str(report)


class TestBeams:
    @pytest.mark.parametrize("num_beams", [2, 3, 5, 8])
    @pytest.mark.parametrize(
        "rules", [{}, {"length_penalty": 2.0}, {"early_stopping": True}, {"early_stopping": "never"}]
    )
    def test_sequences_and_scores_are_those_of_transformers(self, model, num_beams, rules):
        result = prefixkit.beam_search(
            model, TOKENIZER, PROMPTS[:3], num_beams=num_beams, num_return_sequences=2, max_new_tokens=12, **rules
        )
        assert result.report.kv_bytes_copied == 0
        plain = tiny_llama()
        for index, prompt in enumerate(PROMPTS[:3]):
            ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
            out = plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=num_beams,
                num_return_sequences=2,
                max_new_tokens=12,
                return_dict_in_generate=True,
                output_scores=True,
                **rules,
            )
            for sample, sequence, score in zip(
                result.of_prompt(index), out.sequences, out.sequences_scores, strict=True
            ):
                expected = [token for token in sequence[ids.shape[1] :].tolist() if token != plain.config.pad_token_id]
                assert sample.tokens == expected
                assert sample.score == pytest.approx(score.item(), abs=1e-4)


class TestPrompts:
    def test_text_tokens_and_chat_are_one(self, model):
        options = {"temperature": 0, "max_new_tokens": 4}
        (text,) = prefixkit.generate(model, TOKENIZER, "<user>hi<assistant>", **options)
        ids = TOKENIZER("<user>hi<assistant>")["input_ids"]
        (listed,) = prefixkit.generate(model, TOKENIZER, [ids], **options)
        (array,) = prefixkit.generate(model, TOKENIZER, torch.tensor([ids]), **options)
        (chat,) = prefixkit.generate(model, TOKENIZER, [[{"role": "user", "content": "hi"}]], **options)
        assert text.tokens == listed.tokens == array.tokens == chat.tokens

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([], "at least one prompt"),
            ([""], "prompt 0 is an empty string"),
            (["a", []], "prompt 1 has no tokens"),
            ([[1, 2, 260]], "prompt 0: token 260 is outside the model's vocabulary of 260"),
            ([[1, -100]], "token -100 is outside"),
            (torch.tensor([[1, 2], [257, 3]]), "prompt 1 is padded on the left"),
            (torch.tensor([[1, 257], [2, 3]]), "prompt 0 is padded on the right"),
        ],
    )
    def test_values_that_cannot_be_prompts(self, model, prompts, message):
        with pytest.raises(ValueError, match=message):
            prefixkit.generate(model, TOKENIZER, prompts)

    @pytest.mark.parametrize("prompts", [[[1.5]], [[[1, 2]]], {"input_ids": [[1]], "attention_mask": [[1]]}])
    def test_types_that_cannot_be_prompts(self, model, prompts):
        with pytest.raises(TypeError, match="prompt"):
            prefixkit.generate(model, TOKENIZER, prompts)


class TestRefusals:
    def test_a_model_that_is_not_patched(self):
        with pytest.raises(NotPatched, match=r"prefixkit\.patch\(model\)"):
            prefixkit.generate(tiny_llama(), TOKENIZER, ["a"])

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"n": 0}, "n must be at least 1"),
            ({"top_p": 0.0}, "top_p"),
            ({"top_p": 1.1}, "top_p"),
            ({"seed": [1, 2]}, "seed"),
        ],
    )
    def test_parameters_out_of_range(self, model, option, message):
        with pytest.raises(ValueError, match=message):
            prefixkit.generate(model, TOKENIZER, ["a"], **option)

    def test_a_budget_too_small_for_one_sequence(self, model):
        with pytest.raises(KVBudgetTooSmall, match=r"prompt 0 needs KV for .* tokens .* MiB"):
            prefixkit.generate(model, TOKENIZER, [HEAD], max_new_tokens=64, kv_budget=2**14)

    @pytest.mark.parametrize("budget", [0, -5, 100])
    def test_a_budget_that_holds_no_page(self, model, budget):
        with pytest.raises(ValueError, match="holds no page"):
            prefixkit.generate(model, TOKENIZER, [HEAD], kv_budget=budget)

    @pytest.mark.parametrize("page_size", [0, 129])
    def test_a_page_size_out_of_range(self, model, page_size):
        with pytest.raises(ValueError, match="page_size must be"):
            prefixkit.generate(model, TOKENIZER, [HEAD], page_size=page_size)

    def test_sequences_beyond_the_models_positions_are_warned_of(self, model, caplog):
        with caplog.at_level(logging.WARNING, "prefixkit"):
            prefixkit.generate(model, TOKENIZER, [[1] * 2040], temperature=0, max_new_tokens=9, stop_token_ids=[EOS])
        assert "made for 2048 positions" in caplog.text


def test_stop_strings_end_the_text(model):
    plain = prefixkit.generate(model, TOKENIZER, PROMPTS, n=2, max_new_tokens=24, seed=1)
    letters = {sample.text[5] for sample in plain if len(sample.text) > 5}
    stop = sorted(letters)[0]
    cut = prefixkit.generate(model, TOKENIZER, PROMPTS, n=2, max_new_tokens=24, seed=1, stop=stop)
    for before, after in zip(plain, cut, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.tokens == before.tokens[: len(after.tokens)]


def test_without_graphs_nothing_is_compiled_and_the_log_says_so(caplog):
    requests = [Request(0, np.arange(3, 9), SamplingParams(max_new_tokens=2, temperature=0.0))]
    engine = make_engine(prefixkit.patch(tiny_llama()), requests, compiled=True)
    assert "layers run without torch.compile: there are no CUDA graphs" in caplog.text
    assert len(engine.run(requests)[0].tokens) == 2
