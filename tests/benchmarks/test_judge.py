"""The judge's benchmark: its programs come to the same in the judge as in plain processes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.judge import judged, list_schedule, plain, programs
from tests.evaluation.judge.judging import missing

EXPECTED = {
    "pass": "passed",
    "fail": "failed",
    "sleep": "timeout",
    "spin": "timeout",
    "threads": "passed",
    "flood": "output",
}


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_programs_of_each_fate_come_to_what_plain_processes_say() -> None:
    items = programs(6, seed=1)
    assert {fate for fate, _ in items} == set(EXPECTED)
    outcomes, seconds = judged([program for _, program in items], jobs=4)
    with ThreadPoolExecutor(6) as pool:
        plainly = [outcome for outcome, _ in pool.map(lambda item: plain(item[1]), items)]
    assert outcomes == [EXPECTED[fate] for fate, _ in items] == plainly
    assert seconds > 1


def test_a_list_schedule_gives_each_task_to_the_worker_that_is_free_first() -> None:
    assert list_schedule([3, 1, 1, 1, 2], 2) == 5
    assert list_schedule([1, 1, 1], 8) == 1
