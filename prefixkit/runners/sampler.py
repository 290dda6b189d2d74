"""Sampling on a device over static buffers, by the op ``sample``, which a CUDA graph can capture.

The host never waits for the device, and sampling allocates no device memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.gpu.staging import upload
from prefixkit.ops import library  # noqa: F401  defines the op
from prefixkit.ops.sampling_records import ACTIVE, MOST_VOCAB, RECORD_INTS, STEP, mask, records, words
from prefixkit.sampling.specification import Ids, SamplingBatch

_BLOCK = 128  # tokens that top_tokens ranks by their maximum first


class Sampler:
    """Parameters and state of up to ``rows`` sequences that are sampled together.

    Rows are inactive until :meth:`upload_params` gives them parameters.

    A row that holds NaN or +inf, or no finite logit, or whose scores leave float32, gets token -1 and log-probability
    NaN, where the specification raises an error; a row that may sample no token gets token -1 and log-probability -inf.

    Attributes:
        rows, vocab: Most rows, and the length of each.
        tokens: ``[rows]`` int64, the tokens sampled last; inactive rows keep theirs.
        logprobs: ``[rows]`` float32, the log-softmax of the untouched logits at the token.
        drawn: ``[rows, 2]`` float32, written on request: the logarithm of the probability with which the token was
            sampled, and the mass that the filters left.
        steps: ``[rows]`` int32 view, how many tokens a row has sampled: the counter of its random stream.  A step adds
            1.
        active: ``[rows]`` int32 view, 0 for rows that a step leaves unchanged; kernels may write it.
        seen: ``[rows, ceil(vocab / 32)]`` int32, bit ``t % 32`` of word ``t // 32`` says that the sequence holds token
            ``t``.  Written for every row, read where there is a repetition penalty.

    Raises:
        ValueError: a size below 1, or on a GPU a vocabulary above 2**20.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device | str) -> None:
        most = sys.maxsize if torch.device(device).type == "cpu" else MOST_VOCAB
        if rows < 1 or not 1 <= vocab <= most:
            raise ValueError(
                f"a sampler on {device} needs at least 1 row and 1 to {most} tokens, got {rows} rows of {vocab}; "
                "sample larger vocabularies on the CPU"
            )
        self.rows, self.vocab = rows, vocab
        self._records = torch.zeros(rows, RECORD_INTS, dtype=torch.int32, device=device)
        self.device = self._records.device
        self.steps, self.active = self._records[:, STEP], self._records[:, ACTIVE]
        self.seen = torch.zeros(rows, words(vocab), dtype=torch.int32, device=self.device)
        self.tokens = torch.full((rows,), -1, dtype=torch.int64, device=self.device)
        self.logprobs = torch.full((rows,), torch.nan, dtype=torch.float32, device=self.device)
        self.drawn = torch.full((rows, 2), torch.nan, dtype=torch.float32, device=self.device)

    def upload_params(self, rows: slice | Sequence[int] | Ids, batch: SamplingBatch) -> None:
        """Give rows their parameters, and make them active: one copy on the current stream, without a
        wait of the host.

        Args:
            rows: The rows, each once.
            batch: The sampling parameters of each of these rows.

        Raises:
            ValueError: a row does not exist, or the batch has another number of rows.
        """
        number = np.arange(self.rows)[rows] if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64).ravel()
        if len(number) != len(batch.params):
            raise ValueError(f"a batch of {len(batch.params)} rows cannot be loaded into {len(number)}")
        if len(number) and not (0 <= number.min() <= number.max() < self.rows and len(set(number)) == len(number)):
            raise ValueError(f"rows must be different and from 0 to {self.rows - 1}, got {number.tolist()}")
        penalised = [i for i, each in enumerate(batch.params) if each.repetition_penalty != 1]
        arrays: list[NDArray[np.signedinteger]] = [number, records(batch.params, batch.keys, batch.steps)]
        if penalised:
            arrays += [number[penalised], np.stack([mask(batch.histories[i], self.vocab) for i in penalised])]
        uploaded = upload(arrays, self.device)
        self._records.index_copy_(0, uploaded[0], uploaded[1])
        if penalised:
            self.seen.index_copy_(0, uploaded[2], uploaded[3])

    def select_rows(self, index: Tensor) -> None:
        """Move rows to the front: row ``i`` becomes a copy of row ``index[i]``; rows from n on become inactive.

        Args:
            index: ``[n]`` int64 on the device, n at most ``rows``; a row may be taken more than once.
        """
        count = len(index)
        if index.ndim != 1 or count > self.rows or index.dtype != torch.int64 or index.device != self.device:
            raise ValueError(
                f"index must be at most {self.rows} int64 row numbers on {self.device}, got {list(index.shape)} "
                f"{index.dtype} on {index.device}"
            )
        for state in (self._records, self.seen, self.tokens, self.logprobs):
            state[:count] = state.index_select(0, index)
        self.active[count:] = 0

    def sampled(self, rows: int, drawn: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens and log-probabilities of the first ``rows`` rows, and their :attr:`drawn` or None."""
        return self.tokens[:rows], self.logprobs[:rows], self.drawn[:rows] if drawn else None

    def state(self, rows: int) -> tuple[Tensor, Tensor]:
        """What :meth:`sample` reads and changes of the first ``rows`` rows: their records, and :attr:`seen`."""
        return self._records[:rows], self.seen[:rows]

    def sample(
        self, logits: Tensor, drawn: bool = False, allowed: Tensor | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Sample a token for every active row of ``n``, on the current stream; a CUDA graph can capture it.

        Args:
            logits: ``[n, vocab]`` float32, bfloat16 or float16; stride 1 over the vocabulary.
            drawn: Whether :attr:`drawn` is wanted.
            allowed: ``[n, ceil(vocab / 32)]`` int32 bits of the tokens that rows with a grammar may sample; None where
                no row has one.
            first: The first of the n rows, which follow each other.

        Returns:
            The rows of ``tokens`` and of ``logprobs``, always in the same buffers.

        Raises:
            ValueError, TypeError: the logits have the wrong shape or dtype.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab or logits.shape[0] > self.rows - first:
            raise ValueError(
                f"logits must have shape [at most {self.rows - first}, {self.vocab}], got {list(logits.shape)}; "
                "make a sampler for more rows, or for this vocabulary"
            )
        state = [one[first:] for one in (self._records, self.seen, self.tokens, self.logprobs)]
        torch.ops.prefixkit.sample(logits, *state, self.drawn[first:] if drawn else None, allowed)
        return state[2][: len(logits)], state[3][: len(logits)]


def top_tokens(logits: Tensor, count: int, best: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, best first, and their log-probabilities; a CUDA graph can capture it.

    Args:
        logits: ``[n, vocab]``, any float dtype.
        count: How many tokens; all tokens if the vocabulary has fewer.
        best: ``[n]`` float32, the log-probability of the likeliest token, which greedy rows have sampled.

    Returns:
        ``[n, count]`` int64 and float32.  In a row that holds NaN, a token whose logit is NaN comes first.
    """
    if not count:
        return logits.new_empty((len(logits), 0), dtype=torch.int64), best.new_empty((len(logits), 0))
    ids = _top_ids(logits, min(count, logits.shape[1]))  # in the logits' dtype: ranking 16 bits takes half the time
    scores = logits.gather(1, ids).float()
    return ids, (scores - scores[:, :1]) + best[:, None]


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """``[n, count]`` ids.  Only the blocks of ``_BLOCK`` tokens with the largest maxima, which contain them, are ranked
    token by token.
    """
    rows, vocab = logits.shape
    if vocab % _BLOCK or vocab < 2 * _BLOCK * count:
        return logits.topk(count).indices
    parts = logits.reshape(rows, -1, _BLOCK)
    block = parts.amax(2).topk(count).indices
    if logits.device.type == "cuda":
        some = parts.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))
    else:  # copies whole blocks
        first = torch.arange(0, rows * parts.shape[1], parts.shape[1], device=logits.device)
        some = parts.flatten(0, 1).index_select(0, (block + first[:, None]).flatten())
    index = some.view(rows, -1).topk(count).indices
    return block.gather(1, index // _BLOCK) * _BLOCK + index % _BLOCK
