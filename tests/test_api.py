"""The public verbs on a tiny model: the unpatched model's tokens, whatever is sampled together, and clear refusals."""

import logging

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import prefixkit
from prefixkit.api import make_engine
from prefixkit.engine.request import Request
from prefixkit.engine.scheduler import KVBudgetTooSmall
from prefixkit.models import NotPatched
from prefixkit.sampling.params import SamplingParams
from tests.tiny import EOS, ByteTokenizer, byte_tokenizer, tiny_llama

TOKENIZER = ByteTokenizer()
HEAD = "def solve(numbers):\n    '''Return the answer.'''\n"
PROMPTS = [HEAD + "    total = 0", HEAD + "    best = None", "while True:", HEAD, HEAD + "    total = 0"]


@pytest.fixture(scope="module")
def model():
    return prefixkit.patch(tiny_llama())


def tokens_of(result):
    return [(sample.prompt_index, sample.index, sample.tokens) for sample in result]


def occurrences(prompts):
    """For each prompt how many equal ones stand before it."""
    return [prompts[:index].count(prompt) for index, prompt in enumerate(prompts)]


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
        for index, (prompt, before) in enumerate(zip(PROMPTS, occurrences(PROMPTS), strict=True)):
            alone = prefixkit.generate(model, TOKENIZER, [prompt] * (before + 1), **self.OPTIONS)
            assert [s.tokens for s in alone.of_prompt(before)] == [s.tokens for s in together.of_prompt(index)]

    def test_in_another_order(self, model):
        together = prefixkit.generate(model, TOKENIZER, PROMPTS, **self.OPTIONS)
        backward = prefixkit.generate(model, TOKENIZER, PROMPTS[::-1], **self.OPTIONS)
        place = {key: i for i, key in enumerate(zip(PROMPTS[::-1], occurrences(PROMPTS[::-1]), strict=True))}
        for index, key in enumerate(zip(PROMPTS, occurrences(PROMPTS), strict=True)):
            other = backward.of_prompt(place[key])
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
        second = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]] * 2, **{**options, "seed": 2})
        assert [s.tokens for s in both.of_prompt(1)] == [s.tokens for s in second.of_prompt(1)]
        assert [s.tokens for s in both.of_prompt(0)] != [s.tokens for s in second.of_prompt(0)]

    def test_equal_prompts_draw_different_samples(self, model):
        twice = prefixkit.generate(model, TOKENIZER, [PROMPTS[0], PROMPTS[2], PROMPTS[0]], **self.OPTIONS)
        first, second = ([s.tokens for s in twice.of_prompt(index)] for index in (0, 2))
        assert not any(tokens in second for tokens in first)

    def test_the_first_of_equal_prompts_draws_what_it_would_alone(self, model):
        twice = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]] * 2, **self.OPTIONS)
        alone = prefixkit.generate(model, TOKENIZER, PROMPTS[0], **self.OPTIONS)
        assert [s.tokens for s in twice.of_prompt(0)] == [s.tokens for s in alone]

    def test_prompts_are_equal_by_their_tokens(self, model):
        ids = TOKENIZER(PROMPTS[0])["input_ids"]
        as_text = prefixkit.generate(model, TOKENIZER, [PROMPTS[0]] * 2, **self.OPTIONS)
        mixed = prefixkit.generate(model, TOKENIZER, [PROMPTS[0], np.array(ids)], **self.OPTIONS)
        assert tokens_of(mixed) == tokens_of(as_text)

    @pytest.mark.parametrize("seed", [np.int64(11), np.uint8(11), np.array(11), torch.tensor(11)])
    def test_any_integer_is_a_seed(self, model, seed):
        plain = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **self.OPTIONS)
        other = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **{**self.OPTIONS, "seed": seed})
        assert tokens_of(other) == tokens_of(plain)

    @pytest.mark.parametrize("seeds", [(3, 4), np.array([3, 4]), [np.int32(3), np.int64(4)], torch.tensor([3, 4])])
    def test_one_seed_per_prompt_in_any_sequence(self, model, seeds):
        plain = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **{**self.OPTIONS, "seed": [3, 4]})
        other = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], **{**self.OPTIONS, "seed": seeds})
        assert tokens_of(other) == tokens_of(plain)


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

    @pytest.mark.parametrize(
        "prompts",
        [
            [[256 + 1, 65, 66], [67, 68, 69]],
            [[65, 66, 67], [68, 69, 257]],
            [np.array([65, 66]), torch.tensor([67, 257])],
            [[257, 257, 65], [257, 66, 67]],
            np.array([[65, 257]]),
        ],
    )
    def test_token_ids_that_came_padded(self, model, prompts):
        message = r'prompt \d is padded on the (left|right) .*tokenizer\(texts\)\["input_ids"\]'
        with pytest.raises(ValueError, match=message):
            prefixkit.generate(model, TOKENIZER, prompts)

    @pytest.mark.parametrize("edge", ["eos_token_id", "bos_token_id", "unk_token_id"])
    def test_a_padding_token_with_another_role_may_stand_once_at_an_edge(self, model, edge):
        tokenizer = ByteTokenizer()
        setattr(tokenizer, edge, tokenizer.pad_token_id)
        options = {"max_new_tokens": 1}
        assert len(prefixkit.generate(model, tokenizer, [[257, 65, 66], [67, 68, 257]], **options)) == 2
        with pytest.raises(ValueError, match="prompt 1 is padded on the left"):
            prefixkit.generate(model, tokenizer, [[67, 68, 69], [257, 257, 66]], **options)

    @pytest.mark.parametrize(
        "prompts",
        [
            [[257, 65, 66]],  # alone
            [[257, 65, 66], [65, 66]],  # of two lengths
            [[65, 257, 66], [67, 68, 69]],  # within
            ["a", [257, 65]],  # beside text
        ],
    )
    def test_what_may_be_meant_is_not_taken_for_padding(self, model, prompts):
        assert len(prefixkit.generate(model, TOKENIZER, prompts, max_new_tokens=1)) == len(prompts)

    @pytest.mark.parametrize(
        "prompts",
        [
            BatchEncoding({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}),
            {"input_ids": torch.tensor([[1, 2]])},
            [BatchEncoding({"input_ids": [1, 2]})],
        ],
    )
    def test_what_a_tokenizer_returns_is_not_prompts_but_holds_them(self, model, prompts):
        with pytest.raises(TypeError, match=r'\["input_ids"\]'):
            prefixkit.generate(model, TOKENIZER, prompts)

    def test_messages_are_to_be_put_in_a_list(self, model):
        with pytest.raises(TypeError, match=r"prompt 0 is one chat message.*list of messages"):
            prefixkit.generate(model, TOKENIZER, [{"role": "user", "content": "hi"}])

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
            ({"seed": np.array([1, 2])}, "seed must be one integer or one per prompt, got 2 for 1 prompt"),
            ({"seed": -1}, "seed must be at least 0"),
            ({"kv_budget": "2 gigs"}, 'kv_budget: a size must look like "2GiB", .* got "2 gigs"'),
            ({"kv_budget": float("nan")}, "kv_budget"),
            ({"keep": False}, "keep=False drops every sample; pass on_sample"),
        ],
    )
    def test_parameters_out_of_range(self, model, option, message):
        with pytest.raises(ValueError, match=message):
            prefixkit.generate(model, TOKENIZER, ["a"], **option)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"seed": True}, "seed must be an integer, got bool"),
            ({"seed": 1.5}, "seed must be one integer or one per prompt, got float 1.5"),
            ({"seed": None}, "seed must be one integer or one per prompt, got NoneType None"),
            ({"seed": "7"}, "seed must be one integer or one per prompt, got str '7'"),
            ({"seed": [1.5]}, "seed must be an integer, got float"),
            ({"seed": np.array([1.5])}, "seed must be an integer, got float"),
            ({"seed": np.array([[1]])}, "seed must be an integer, got list"),
            ({"stop": 7}, "stop must be a tuple of strings, got 7"),
            ({"stop": b"END"}, "stop must be a tuple of strings"),
            ({"stop_token_ids": 7}, "stop_token_ids must be a tuple of token ids, got 7"),
            ({"kv_budget": True}, "kv_budget: .* got bool True"),
            ({"kv_budget": [1]}, "kv_budget: .* got list"),
        ],
    )
    def test_parameters_of_another_type(self, model, option, message):
        with pytest.raises(TypeError, match=message):
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


def test_none_is_no_stop_string(model):
    plain = prefixkit.generate(model, TOKENIZER, PROMPTS[:2], max_new_tokens=8)
    assert list(prefixkit.generate(model, TOKENIZER, PROMPTS[:2], max_new_tokens=8, stop=None)) == list(plain)


class TestSpecialTokensInStopStrings:
    """Random weights draw the end token often enough; here it ends no sample by itself."""

    OPTIONS = {"n": 20, "max_new_tokens": 60, "temperature": 1.3, "seed": 2, "stop_token_ids": ()}

    @pytest.fixture(scope="class")
    @staticmethod
    def tokenizer():
        return byte_tokenizer()

    def ended_by(self, model, tokenizer, stop, end):
        """Samples with the stop string and without, of those that hold ``end``'s tokens."""
        plain = prefixkit.generate(model, tokenizer, "while True:", **self.OPTIONS)
        cut = prefixkit.generate(model, tokenizer, "while True:", stop=stop, **self.OPTIONS)
        pairs = [(before, after) for before, after in zip(plain, cut, strict=True) if EOS in before.tokens]
        assert pairs, "no sample draws the end token; take another seed"
        return pairs

    def test_one_that_is_a_special_token_ends_a_sample(self, model, tokenizer):
        for before, after in self.ended_by(model, tokenizer, "<|end|>", EOS):
            assert after.tokens == before.tokens[: before.tokens.index(EOS) + 1]
            assert after.finish_reason == "stop"
            assert after.text == tokenizer.decode(after.tokens, skip_special_tokens=True)

    def test_one_that_holds_a_special_token_is_found_across_it(self, model, tokenizer):
        for before, _ in self.ended_by(model, tokenizer, "<|end|>", EOS):
            at = before.tokens.index(EOS)
            raw = tokenizer.decode(before.tokens[: at + 2])
            if at and "\ufffd" not in raw:
                break
        begin = len(raw) - len("<|end|>") - 2
        stop = raw[begin:]
        after = prefixkit.generate(model, tokenizer, "while True:", stop=stop, **self.OPTIONS)[before.index]
        assert stop.startswith(raw[begin]) and "<|end|>" in stop
        assert (after.tokens, after.text) == (before.tokens[: at + 2], raw[:begin])
        assert after.finish_reason == "stop"

    def test_text_has_no_special_tokens(self, model, tokenizer):
        for sample in prefixkit.generate(model, tokenizer, "while True:", stop=["<|pad|>never"], **self.OPTIONS):
            assert "<|end|>" not in sample.text


class TestWithoutATokenizer:
    IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]

    def test_token_ids_are_sampled_without_text(self, model):
        options = {"n": 2, "max_new_tokens": 8, "seed": 3}
        events = []
        bare = prefixkit.generate(model, None, self.IDS, on_token=events.append, **options)
        assert tokens_of(bare) == tokens_of(prefixkit.generate(model, TOKENIZER, self.IDS, **options))
        assert {sample.text for sample in bare} == {event.text for event in events} == {""}

    def test_beams_are_searched_without_text(self, model):
        bare = prefixkit.beam_search(model, None, self.IDS[:2], num_beams=3, max_new_tokens=6)
        assert tokens_of(bare) == tokens_of(
            prefixkit.beam_search(model, TOKENIZER, self.IDS[:2], num_beams=3, max_new_tokens=6)
        )
        assert {sample.text for sample in bare} == {""}

    @pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "hi"}]])
    def test_text_is_refused(self, model, prompt):
        with pytest.raises(ValueError, match=r"prompt 1 is .*tokenizer is None; pass the model's tokenizer, or .* ids"):
            prefixkit.generate(model, None, [[1], prompt])

    def test_a_single_text_is_refused(self, model):
        with pytest.raises(ValueError, match=r"prompt 0 is text"):
            prefixkit.generate(model, None, "text")

    def test_stop_strings_are_refused(self, model):
        with pytest.raises(ValueError, match=r"stop strings .*END.* tokenizer is None; .*stop_token_ids"):
            prefixkit.generate(model, None, [[1]], stop="END")


class TestSamplesThatAreNotKept:
    def test_they_go_to_on_sample_and_the_report_counts_them(self, model):
        options = {"n": 3, "max_new_tokens": 8, "seed": 3}
        seen = []
        result = prefixkit.generate(model, TOKENIZER, PROMPTS, keep=False, on_sample=seen.append, **options)
        kept = prefixkit.generate(model, TOKENIZER, PROMPTS, **options)
        assert result.samples == ()
        assert sorted(seen, key=lambda sample: (sample.prompt_index, sample.index)) == list(kept)
        assert result.report.samples == 15
        assert result.report.new_tokens == kept.report.new_tokens


class TestBudgets:
    @pytest.mark.parametrize("budget", ["80KiB", "81920", np.int64(80 * 1024), 80.0 * 1024])
    def test_a_budget_as_people_write_it(self, model, budget):
        options = {"n": 4, "max_new_tokens": 16}
        bytes_ = prefixkit.generate(model, TOKENIZER, PROMPTS, kv_budget=80 * 1024, **options)
        written = prefixkit.generate(model, TOKENIZER, PROMPTS, kv_budget=budget, **options)
        assert written.report.kv_bytes_held_peak == bytes_.report.kv_bytes_held_peak <= 80 * 1024
        assert tokens_of(written) == tokens_of(bytes_)

    def test_of_a_beam_search(self, model):
        found = prefixkit.beam_search(model, TOKENIZER, PROMPTS[2], num_beams=2, max_new_tokens=4, kv_budget="1MiB")
        assert found.report.kv_bytes_held_peak <= 2**20


def test_without_graphs_nothing_is_compiled_and_the_log_says_so(caplog):
    requests = [Request(0, np.arange(3, 9), SamplingParams(max_new_tokens=2, temperature=0.0))]
    engine = make_engine(prefixkit.patch(tiny_llama()), requests, compiled=True)
    assert "layers run without torch.compile: there are no CUDA graphs" in caplog.text
    assert len(engine.run(requests)[0].tokens) == 2
