"""TRL's own trainers with completions from a session: what they train on is what was sampled."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import prefixkit
from prefixkit.integrations.trl import (
    Rollouts,
    SessionGRPOTrainer,
    SessionRLOOTrainer,
    session_rollouts,
)
from prefixkit.kv.kv_pool import KVPool
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama

PROMPTS = ["one and one is", "the sum of two and two is", "a b c"]
FILTERED = {"temperature": 0.8, "top_p": 0.9}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.2, "init_lora_weights": False}


def reward(completions, **_):
    """As many letters as there are, and a little for length: different for nearly all completions."""
    return [sum(letter.isalpha() for letter in text) + len(text) / 100 for text in completions]


class Seen(TrainerCallback):
    """What a trainer's update sees: gradients before it, and whether the session holds memory then."""

    def __init__(self):
        self.gradients, self.held, self.trainer = [], [], None

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        named = model.named_parameters()
        self.gradients.append({name: each.grad.clone() for name, each in named if each.grad is not None})
        session = getattr(self.trainer, "session", None)
        self.held.append(session is not None and session.store is not None)


@pytest.fixture
def made(tmp_path):
    """A trainer of some kind on a tiny model, three prompts with four completions each a step."""

    def make(kind=SessionGRPOTrainer, model=None, rollouts=None, seen=None, more=None, **config):
        settings = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 12,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 1,
            "learning_rate": 0.1,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "beta": 0.0,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            **config,
        }
        model = tiny_llama(initializer_range=0.2) if model is None else model
        own = {} if rollouts is None else {"rollouts": rollouts}
        trainer = kind(
            model=model,
            reward_funcs=reward,
            args=(RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig)(**settings),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=byte_tokenizer(),
            callbacks=[] if seen is None else [seen],
            **own,
            **(more or {}),
        )
        if seen is not None:
            seen.trainer = trainer
        return trainer

    return make


def batches_of(trainer):
    """The batches that a trainer computes its losses from, as it trains."""
    found, compute = [], trainer._compute_loss

    def compute_loss(model, inputs):
        found.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute(model, inputs)

    trainer._compute_loss = compute_loss
    trainer.train()
    return found


def log_probabilities(model, batch, temperature):
    """``[completions, tokens, vocab]`` float64: a plain forward over prompts and completions without padding."""
    rows = []
    for row in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        ids = torch.cat((prompt, batch["completion_ids"][row]))[None]
        rows.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature)
    return torch.stack(rows).log_softmax(-1)


def left_by_top_p(logps, top_p):
    """``[completions, tokens]`` the logarithm of what the fewest likeliest tokens hold that hold ``top_p``."""
    ordered = logps.exp().sort(-1, descending=True).values
    return (ordered * (ordered.cumsum(-1) - ordered < top_p)).sum(-1).log()


def expected_gradients(model, batch, advantages, sequence=False):
    """Of the loss "grpo" (or RLOO's) at the first step, with exact importance ratios by a plain forward."""
    model.zero_grad()
    logps = log_probabilities(model, batch, FILTERED["temperature"])
    own = logps.gather(-1, batch["completion_ids"][:, :, None])[..., 0]
    mask = batch["completion_mask"]
    sampled = (own - left_by_top_p(logps, FILTERED["top_p"])).detach()
    difference = (own.detach() - sampled) * mask
    if sequence:
        weights = advantages * difference.sum(1).exp()
        loss = -(weights * (own * mask).sum(1)).mean()
    else:
        loss = -((advantages[:, None] * difference.exp() * own * mask).sum(1) / mask.sum(1)).mean()
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def advantages_of(batch, sequence=False):
    """From the rewards of the decoded completions: less the mean of the group, over its deviation; or leave-one-out."""
    tokenizer, rewards = byte_tokenizer(), []
    for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
        rewards.append(tokenizer.decode(ids[mask.bool()], skip_special_tokens=True))
    rewards = torch.tensor(reward(rewards)).view(3, 4)
    if sequence:
        return (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3).flatten()
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def by_group(batch):
    """The batch in the order of its prompts, for TRL shuffles it."""
    order = sorted(range(12), key=lambda row: (batch["prompt_ids"][row].tolist(), row))
    return {name: value[order] if value.ndim and len(value) == 12 else value for name, value in batch.items()}


def assert_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient.to(found[name].dtype), atol=tolerance, rtol=tolerance), name


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
def test_the_first_gradients_are_those_of_exact_importance_ratios(made, adapter):
    model = tiny_llama(initializer_range=0.2)
    if adapter:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**LORA | {"lora_dropout": 0.0}))
    plain, seen = copy.deepcopy(model), Seen()
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 100.0}
    trainer = made(model=model, seen=seen, loss_type="grpo", **FILTERED, **mode)
    batch = by_group(batches_of(trainer)[0])
    assert (batch["completion_mask"].sum(1) > 1).all()
    expected = expected_gradients(plain, batch, advantages_of(batch))
    assert_same(seen.gradients[0], expected)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    assert len(expected) == (12 if adapter else 21)


def test_so_are_those_of_rloo_for_whole_completions(made):
    model, seen = tiny_llama(initializer_range=0.2), Seen()
    plain = copy.deepcopy(model)
    trainer = made(SessionRLOOTrainer, model=model, seen=seen, **FILTERED)
    batch = by_group(batches_of(trainer)[0])
    assert_same(seen.gradients[0], expected_gradients(plain, batch, advantages_of(batch, True), sequence=True), 3e-5)


@pytest.mark.parametrize(("adapter", "release"), [(False, False), (True, True)], ids=["held", "lora, released"])
def test_no_kv_of_old_weights_is_used_over_10_steps(made, release, adapter):
    model = tiny_llama(initializer_range=0.2)
    if adapter:
        model = get_peft_model(model, LoraConfig(**LORA))
    trainer = made(model=model, rollouts=Rollouts(release_memory=release), max_steps=10, learning_rate=0.05)
    compute, worst, weights = trainer._compute_loss, [], []

    def compute_loss(model, inputs):
        model.eval()
        with torch.no_grad():
            own = log_probabilities(model, inputs, 1.0).gather(-1, inputs["completion_ids"][:, :, None])[..., 0]
        model.train()
        worst.append(float(((own - inputs["sampling_per_token_logps"]) * inputs["completion_mask"]).abs().max()))
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
        return compute(model, inputs)

    trainer._compute_loss = compute_loss
    trainer.train()
    assert len(worst) == 10 and max(worst) < 1e-3
    moved = [float((after - before).abs().max()) for before, after in itertools.pairwise(weights)]
    assert sum(most > 1e-3 for most in moved) > 4  # once in a while all rewards of the groups are equal


def test_the_samples_of_a_prompt_differ_and_those_of_a_later_step_too(made):
    trainer = made(max_steps=2, learning_rate=0.0)
    batches = batches_of(trainer)
    rows = [tuple(ids.tolist()) for batch in batches for ids in batch["completion_ids"]]
    assert len(set(rows)) == 24


def test_memory_is_given_back_before_the_update_unless_it_is_to_stay(made):
    for release in (True, False):
        seen = Seen()
        made(seen=seen, rollouts=Rollouts(release_memory=release), max_steps=2).train()
        assert seen.held == [not release] * 2


def test_between_the_turns_of_a_conversation_kv_stays(made):
    trainer = made()
    prompt = list(range(60, 90))
    ((first,), ((logprob, *_),)) = trainer._generate_single_turn([prompt], None, {}, 4)
    assert len(first) == 8 and logprob < 0
    trainer._generate_single_turn([[*prompt, *first, 65, 66]], None, {}, 4)
    assert trainer.session.report.prompt_tokens_found >= len(prompt) + 7
    trainer._generate(["a", "b"])
    assert trainer.session.store is None


def test_images_are_refused(made):
    with pytest.raises(ValueError, match="prompts have images, which sessions do not take"):
        made()._generate_single_turn([[1, 2]], [["an image"]], {}, 4)


def test_completions_of_several_steps_are_corrected_by_the_model_that_sampled_them(made):
    model = tiny_llama(initializer_range=0.2)
    plain = copy.deepcopy(model)
    mode = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 100.0}
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "gradient_accumulation_steps": 1}
    trainer = made(model=model, max_steps=3, **sizes, **FILTERED, **mode)
    batches = batches_of(trainer)
    assert len(batches) == 3
    for batch in batches:
        logps = log_probabilities(plain, batch, 0.8)
        own = logps.gather(-1, batch["completion_ids"][:, :, None])[..., 0]
        ratio = left_by_top_p(logps, 0.9).exp()
        there = batch["completion_mask"].bool()
        assert torch.allclose(batch["old_per_token_logps"][there].double(), own[there], atol=1e-5)
        weighed = batch["advantages"] / batch["advantages"][:, :1] * ratio[:, :1]
        assert torch.allclose(weighed[there].double(), ratio[there], atol=1e-4)


def test_model_log_probabilities_leave_filters_out_of_the_correction(made):
    trainer = made(rollouts=Rollouts(logprobs="model"), **FILTERED)
    trainer.train()
    metrics = trainer.state.log_history[0]
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    exact = made(**FILTERED)
    exact.train()
    assert exact.state.log_history[0]["sampling/importance_sampling_ratio/max"] < 0.9


def test_in_autocast_and_with_checkpoints_completions_are_of_the_same_precision(made):
    for model in (
        tiny_llama(initializer_range=0.2),
        get_peft_model(tiny_llama(initializer_range=0.2), LoraConfig(**LORA)),
    ):
        trainer = made(model=model, bf16=True, gradient_checkpointing=True, max_steps=2)
        trainer.train()
        difference = trainer.state.log_history[0]["sampling/sampling_logp_difference/max"]
        assert 0 < difference < 0.2
        assert trainer.session._kind.spec.dtype == torch.bfloat16


@pytest.mark.parametrize("field", ["stop_strings", "eos_token_id"])
def test_stops_and_penalties_of_the_trainer_count(made, field):
    stops, model = [*"abcdefghijklm"], tiny_llama(initializer_range=0.2)
    model.generation_config.eos_token_id = [256, 999]  # the model lacks the second, which ends nothing
    given = {field: stops if field == "stop_strings" else byte_tokenizer().convert_tokens_to_ids(stops)}
    trainer = made(model=model, repetition_penalty=1.3, generation_kwargs=given, max_completion_length=40)
    (batch,) = batches_of(trainer)
    pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    texts = [byte_tokenizer().decode(ids[mask.bool()], skip_special_tokens=True) for ids, mask in pairs]
    assert sum(text[-1:] in stops for text in texts) > 3
    assert not any(letter in stops for text in texts for letter in text[:-1])


def test_a_rollout_function_samples_for_the_trainer_as_it_is(made):
    trainer = made(GRPOTrainer, more={"rollout_func": session_rollouts(Rollouts(release_memory=False))}, max_steps=2)
    prefixkit.patch(trainer.model)
    batches = batches_of(trainer)
    for batch in batches:
        rows = [tuple(ids.tolist()) for ids in batch["completion_ids"]]
        assert len(set(rows)) == 12
    assert batches[0]["sampling_per_token_logps"].shape == batches[0]["completion_ids"].shape


def test_a_rollout_function_that_raises_gives_its_memory_back(made):
    def pools():
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is KVPool]

    trainer = made(GRPOTrainer, more={"rollout_func": session_rollouts(Rollouts(kv_budget="8KiB"))})
    before = pools()  # of other tests
    with pytest.raises(prefixkit.KVBudgetTooSmall):
        trainer.train()
    assert {*map(id, pools())} <= {*map(id, before)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trainer: vars(trainer).update(is_fsdp_enabled=True), "FSDP shards the model over processes"),
        (lambda trainer: vars(trainer).update(is_deepspeed_enabled=True), "DeepSpeed shards the model over processes"),
        (lambda trainer: vars(trainer).update(_is_vlm=True), "the model takes images"),
        (lambda trainer: vars(trainer.model).update(_tp_size=2), "the model is split over 2 processes, which take the"),
    ],
)
def test_what_a_session_cannot_do_is_refused_by_name(made, change, message):
    class Other(GRPOTrainer):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            change(self)

    class OtherWithSession(SessionGRPOTrainer.__bases__[0], Other):
        pass

    with pytest.raises(ValueError, match=message):
        made(OtherWithSession)


def test_so_are_other_backends_and_generation_options(made):
    with pytest.raises(ValueError, match="use_transformers_continuous_batching=True asks for another backend"):
        made(use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match="SessionGRPOTrainer: use_vllm=True asks for another backend; leave it out"):
        made(use_vllm=True)  # before TRL looks for vLLM
    with pytest.raises(TypeError, match=r"rollouts must be Rollouts, got dict .*; pass Rollouts\(...\), or none"):
        made(rollouts={"kv_budget": "20GiB"})
    for name in ("no_repeat_ngram_size", "num_return_sequences"):
        with pytest.raises(ValueError, match=f"generation_kwargs set {name}=2, which sessions do not have"):
            made(generation_kwargs={name: 2})
    with pytest.raises(ValueError, match="logprobs must be 'sampled' or 'model', got 'none'"):
        Rollouts(logprobs="none")
