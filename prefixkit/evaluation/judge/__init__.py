"""Runs candidate programs in a sandbox and decides which of them solve their problems."""

from prefixkit.evaluation.judge.judge import Judge, available
from prefixkit.evaluation.judge.judge_errors import BadTests, NoCompiler, NoSandbox
from prefixkit.evaluation.judge.keys import digest_of, key_of
from prefixkit.evaluation.judge.verdict import Outcome, Verdict

__all__ = ["BadTests", "Judge", "NoCompiler", "NoSandbox", "Outcome", "Verdict", "available", "digest_of", "key_of"]
