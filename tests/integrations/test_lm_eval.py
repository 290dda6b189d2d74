"""lm-eval's own evaluation, of local tasks, with the model type ``prefixkit`` and with ``hf``."""

from __future__ import annotations

import json
from functools import partial

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import T5Config, T5ForConditionalGeneration

import prefixkit
from prefixkit.integrations.lm_eval import PrefixLM, main
from prefixkit.models import is_patched
from prefixkit.testing.application.command_line import process_arguments
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama

QUESTIONS = [
    ("two and two", ["four", "five", "a fish", "foul"], 0),
    ("three and four", ["six", "seven", "seven hundred", "eleven"], 1),
    ("ten less one", ["nine", "ten", "one", "nineteen"], 0),
    ("half of eight", ["two", "eighty", "four", "fourteen"], 2),
    ("six and six", ["twelve", "six", "sixty-six", "t"], 0),
    ("one and one", ["one", "two", "three", "two and two"], 1),
]
TEXTS = ["The quick brown fox jumps over the lazy dog, which sleeps on.", "Once more. " * 12, "x"]
TASKS = {
    "choice": """
        output_type: multiple_choice
        doc_to_text: "What is {{question}}?\\nAnswer:"
        doc_to_choice: "{{options}}"
        doc_to_target: "{{answer}}"
        fewshot_split: train
        metric_list: [{metric: acc}]
        """,
    "choice_behind_one_text": """
        output_type: multiple_choice
        doc_to_text: "What is {{question}}?\nAnswer:"
        doc_to_choice: "{{options}}"
        doc_to_target: "{{answer}}"
        fewshot_config: {sampler: first_n, split: train}
        metric_list: [{metric: acc}]
        """,
    "rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: byte_perplexity}]
        """,
    "written": """
        output_type: generate_until
        doc_to_text: "What is {{question}}?\\nAnswer:"
        doc_to_target: " {{options[answer]}}"
        fewshot_split: train
        generation_kwargs: {until: ["\\n\\n", "e"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match}]
        """,
    "sampled": """
        output_type: generate_until
        doc_to_text: "What is {{question}}?\\nAnswer:"
        doc_to_target: " {{options[answer]}}"
        generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: true, temperature: 0.9}
        repeats: 3
        metric_list: [{metric: exact_match}]
        """,
}


@pytest.fixture(scope="module", autouse=True)
def no_lists():
    """No list of the machine's packages and drivers, for which lm-eval runs a dozen programs after each evaluation, and
    none of its 14,000 tasks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The tasks' folder: YAML files over local JSON."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": question, "options": options, "answer": answer} for question, options, answer in QUESTIONS]
    for name, lines in {"test": rows[:4], "train": rows[2:], "texts": [{"text": text} for text in TEXTS]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, body in TASKS.items():
        files = {"test": "texts"} if name == "rolling" else {"test": "test", "train": "train"}
        data = "".join(f"    {split}: {folder / file}.jsonl\n" for split, file in files.items())
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  cache_dir: {folder}/cache\n  data_files:\n{data}"
        (folder / f"{name}.yaml").write_text(
            head + "test_split: test\n" + "\n".join(line.strip() for line in body.splitlines()) + "\n"
        )
    return folder


@pytest.fixture(scope="module")
def manager(tasks):
    return TaskManager(include_path=str(tasks), include_defaults=False)


@pytest.fixture
def models():
    """The same model as ``hf`` has it and as ``prefixkit`` does, made with the same options."""

    def made(**options):
        return [kind(tiny_llama(seed=3), tokenizer=byte_tokenizer(), **options) for kind in (HFLM, PrefixLM)]

    return made


def answers(model, task, manager, **options):
    """What the model has answered to each request of a task, before any metric."""
    found = simple_evaluate(
        model=model, tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0, **options
    )
    return [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


def assert_close(ours, theirs):
    """The same log-probability of each request, to 1e-4, and the same word on whether it is greedy."""
    one, other = ([answer for sample in resps for request in sample for answer in request] for resps in (ours, theirs))
    assert len(one) == len(other) > 0
    assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
    assert [total for total, _ in one] == pytest.approx([total for total, _ in other], abs=1e-4)


@pytest.mark.parametrize(("task", "shots"), [("choice", 3), ("choice_behind_one_text", 3)])
def test_scores_of_options_are_those_of_hf(models, manager, task, shots):
    hf, ours = models()
    theirs = answers(hf, task, manager, num_fewshot=shots)
    assert_close(answers(ours, task, manager, num_fewshot=shots), theirs)
    assert len(theirs) == 4 and all(len(requests) == 4 for requests in theirs)


def test_texts_longer_than_the_model_are_cut_as_hf_cuts_them(models, manager, caplog):
    hf, ours = models(max_length=48)
    ours.model.config.max_position_embeddings = 48
    with caplog.at_level("WARNING", "prefixkit"):
        found = answers(ours, "choice", manager, num_fewshot=3)
    assert not [record for record in caplog.records if record.name.startswith("prefixkit")]
    assert_close(found, answers(hf, "choice", manager, num_fewshot=3))


def test_common_examples_are_computed_once(models, manager):
    (_, ours) = models()
    answers(ours, "choice_behind_one_text", manager, num_fewshot=4)
    report = ours.session.report
    assert report.scored == 16
    assert report.tokens_computed < report.tokens_plain_batch / 8


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_texts_are_tokenized_as_hf_does(add_bos_token):
    texts = [("Is it?", " yes"), ("Is it?", " no"), ("Is it?  ", "no"), ("", "yes"), ("<|end|>Is it?", " yes")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(texts)]
    given = []
    for kind in (HFLM, PrefixLM):

        class Kept(kind):
            def _loglikelihood_tokens(self, requests, *_, **__):
                given.append([(key, list(context), list(own)) for key, context, own in requests])
                return [(0.0, True)] * len(requests)

        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<|end|>"})
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
        )
        model = Kept(tiny_llama(seed=3), tokenizer=tokenizer, add_bos_token=add_bos_token)
        model.loglikelihood(requests, disable_tqdm=True)
    assert given[0] == given[1]


def test_a_call_ends_after_so_many_distinct_tokens(models, manager, monkeypatch):
    hf, ours = models()
    calls, score = [], ours.session.score
    monkeypatch.setattr("prefixkit.integrations.lm_eval.TOKENS_PER_CALL", 200)
    monkeypatch.setattr(
        ours.session, "score", lambda prompts, own: (calls.append([len(each) for each in own]), score(prompts, own))[1]
    )
    assert_close(answers(ours, "choice", manager, num_fewshot=2), answers(hf, "choice", manager, num_fewshot=2))
    assert len(calls) == 3 and sum(sum(each) for each in calls) == 16
    assert sum(len(each) for each in calls) <= 6, "options of one question are continuations of one prompt"


@pytest.mark.parametrize("batch_size", [4, "auto"])
def test_rolling_windows_have_the_scores_of_hf(models, manager, batch_size):
    hf, ours = models(max_length=40, batch_size=batch_size, max_batch_size=8)
    if batch_size == "auto":
        hf = HFLM(hf.model, tokenizer=hf.tokenizer, max_length=40, batch_size=8)  # it would try sizes out
    theirs, found = (answers(model, "rolling", manager) for model in (hf, ours))
    assert len(theirs) == len(TEXTS)
    assert [one for (((one),),) in found] == pytest.approx([one for (((one),),) in theirs], abs=1e-4)


@pytest.mark.parametrize(("shots", "max_length"), [(0, 2048), (2, 60)])
def test_greedy_texts_are_those_of_hf(models, manager, shots, max_length):
    hf, ours = models(max_length=max_length, batch_size=4)
    theirs = answers(hf, "written", manager, num_fewshot=shots)
    assert answers(ours, "written", manager, num_fewshot=shots) == theirs
    assert len({text for ((text,),) in theirs}) > 1 and not any("e" in text for ((text,),) in theirs)


@pytest.mark.parametrize("token", [ord("a"), "a"], ids=["id", "text"])
def test_what_was_thought_is_left_out_as_hf_leaves_it_out(models, manager, token):
    hf, ours = models(think_end_token=token, batch_size=4)
    assert answers(ours, "written", manager, num_fewshot=1) == answers(hf, "written", manager, num_fewshot=1)


def test_the_repetition_penalty_of_the_model_applies_as_with_hf(models, manager):
    hf, ours = models(batch_size=4)
    plain = answers(ours, "written", manager)
    for lm in (hf, ours):
        lm.model.generation_config.repetition_penalty = 3.0
    penalised = answers(ours, "written", manager)
    assert penalised == answers(hf, "written", manager) != plain


def test_equal_requests_get_different_samples_by_the_seed_of_the_evaluation(models, manager):
    (_, ours) = models()
    first, again = (answers(ours, "sampled", manager, torch_random_seed=7) for _ in range(2))
    other = answers(ours, "sampled", manager, torch_random_seed=8)
    assert first == again != other
    assert all(len(set(texts)) == 3 for sample in first for texts in sample)


def test_in_autocast_scores_are_those_of_hf(models, manager):
    hf, ours = models(mixed_precision_dtype="bfloat16", softmax_dtype="float32")
    theirs, found = (answers(model, "choice", manager) for model in (hf, ours))
    exact = answers(models()[0], "choice", manager)

    def total(resps):
        return [answer[0] for sample in resps for request in sample for answer in request]

    worst = max(abs(one - other) for one, other in zip(total(theirs), total(exact), strict=True))
    assert worst > 0
    assert total(found) == pytest.approx(total(exact), abs=1.5 * worst)


def test_the_cache_of_lm_eval_has_every_answer(models, manager, tmp_path):
    (_, ours) = models()
    options = {"use_cache": str(tmp_path / "cache")}
    first = [answers(ours, task, manager, **options) for task in ("choice", "rolling", "written")]
    ours.session.close()  # nothing more is computed
    assert [answers(ours, task, manager, **options) for task in ("choice", "rolling", "written")] == first


def request(context, **options):
    return Instance(request_type="generate_until", doc={}, arguments=(context, options), idx=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4, which sessions do not have"),
        ({"typical_p": 0.9}, "typical_p=0.9, which sessions do not have"),
        ({"max_gen_toks": 2048}, "leaves no room for a context in the model's 2048 tokens"),
    ],
)
def test_generation_that_sessions_do_not_have_is_refused(models, options, message):
    (_, ours) = models()
    with pytest.raises(ValueError, match=message):
        ours.generate_until([request("a", until=["\n"], **options)], disable_tqdm=True)


def test_options_that_are_none_are_off_as_with_hf(models):
    hf, ours = models()
    for lm in (hf, ours):
        lm.model.generation_config.repetition_penalty = 3.0
    off = {"repetition_penalty": None, "typical_p": None, "until": ["e"], "max_gen_toks": 12}
    requests = [request("What is it?", **off), request("abc", **off)]
    assert ours.generate_until(requests, disable_tqdm=True) == hf.generate_until(requests, disable_tqdm=True)
    sampled = {"temperature": 1.0, "until": [], "max_gen_toks": 12}
    (one,), (other,), (default,) = (
        ours.generate_until([request("abc", **sampled, **more)], disable_tqdm=True)
        for more in ({"top_k": None}, {"top_k": 0}, {})
    )
    assert one == other != default


def test_a_text_may_have_a_length_with_its_context(models):
    (_, ours) = models()
    assert len(ours.tok_encode("abc")) == 3
    ours.generate_until([request("abc", until=[], max_length=8)], disable_tqdm=True)
    assert ours.session.report.new_tokens == 5


def test_an_empty_continuation_is_refused_by_name(models):
    (_, ours) = models()
    with pytest.raises(ValueError, match="a context of 1 tokens with a continuation of 0 cannot be scored"):
        ours._loglikelihood_tokens([(None, [1], [])])


def test_encoders_with_decoders_are_refused():
    config = T5Config(vocab_size=260, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="'seq2seq', and prefixkit runs decoders alone; use --model hf"):
        PrefixLM(model, tokenizer=byte_tokenizer())
    assert not is_patched(model)


def test_a_patched_model_keeps_its_patch():
    model = prefixkit.patch(tiny_llama(), variant=prefixkit.variants.sliding_window(8))
    scores = [
        lm._loglikelihood_tokens([(None, list(range(40)), [5, 6])])
        for lm in (PrefixLM(model, tokenizer=byte_tokenizer()), PrefixLM(tiny_llama(), tokenizer=byte_tokenizer()))
    ]
    assert scores[0] != scores[1]


def test_the_command_line_is_that_of_lm_eval_with_one_model_more(folders, tasks, tmp_path):
    command = ["lm_eval", "run", "--model", "prefixkit", "--device", "cpu"]
    command += ["--model_args", f"pretrained={folders['plain']},kv_budget=8MiB,dtype=float32"]
    command += ["--include_path", str(tasks), "--tasks", "choice", "--output_path", str(tmp_path), "--num_fewshot", "1"]
    with process_arguments(*command):
        main()
    (written,) = tmp_path.rglob("results_*.json")
    results = json.loads(written.read_text())
    assert results["config"]["model"] == "prefixkit" and "acc,none" in results["results"]["choice"]
