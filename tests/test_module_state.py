"""Which modules hold state that their functions change: few, each with the reason why nothing smaller can own it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "prefixkit"

# Tables of the whole process.  Each entry is made once, or by one operation of a dict, so threads need no lock beside
# those that the modules have.
TABLES = {
    ("attention/variants/registry.py", "_known"): "ops take keys of variants, as torch.library takes names of ops",
    ("attention/variants/registry.py", "_capturing"): "weak, likewise: tensors that variants capture go with them",
    ("functional/owners.py", "_owners"): "weak: whose KV a pool holds belongs to it, and it may be the caller's",
    ("ops/backend.py", "_registered"): "backends register themselves when they are imported",
    ("backends/torch/host_planner.py", "_alive"): "ops take handles of plans; weak: a plan belongs to its step",
    ("backends/cuda/device_planner.py", "_steps"): "weak, likewise: ops take a plan's tensors",
    ("backends/cuda/variants/variant_words.py", "_words_of"): "weak: what kernels read of a variant belongs to it",
    ("backends/cuda/variants/block_classes.py", "_functions"): "weak, likewise, for its kernels",
    ("models/facts.py", "_probed"): "weak: what was measured belongs to the model, which may be copied or pickled",
    ("models/facts.py", "_rotations"): "weak, likewise",
    ("models/facts.py", "_latest"): "weak, likewise: what was measured last, and of which state of the model",
    ("models/attention_class.py", "numbered_by_model"): "weak, likewise: the number of a module that does not store it",
    ("models/latents/latent_maps.py", "_known"): "weak: what was measured belongs to the module",
    ("models/tensor_parallel.py", "_known"): "weak: how a model's processes agree is not copied with it",
    ("models/variants/layer_scores.py", "_composed"): "weak: what layers make of a user's variant belongs to it",
    ("models/compile/made.py", "_made"): "weak, likewise",
    ("models/compile/part_exchange.py", "_known"): "weak: memory that two processes see is not copied with a model",
    ("models/compile/packed_weights.py", "_moves"): "a count under a lock: a runner asks whether anything has moved",
    ("models/weights/content.py", "_contents"): "weak, likewise",
    ("models/weights/state.py", "_readers"): "belongs to classes of modules, which are others'",
    ("session/grammars.py", "_compiled"): "weak: grammars are compiled for a tokenizer, which sessions and calls share",
    ("runners/capture.py", "_released"): "streams of captures that are gone: cuBLAS holds memory for each for good",
    ("torch_private.py", "missing"): "what this torch lacks, noted when it is looked up",
}
MUTATES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
MUTATES |= {"setdefault", "store", "update"}


def changed(path):
    """Names of a module's own variables that its functions rebind, or whose content they change."""
    tree = ast.parse(path.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in assigned for target in getattr(node, "targets", None) or [node.target]]
    own = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                yield from {getattr(node.value, "id", None)} & own
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in MUTATES:
                yield from {getattr(node.func.value, "id", None)} & own


def test_state_of_modules_is_what_this_table_says():
    found = {(str(path.relative_to(PACKAGE)), name) for path in PACKAGE.rglob("*.py") for name in changed(path)}
    assert found == set(TABLES)


@pytest.mark.parametrize(
    "text",
    [
        "last = None\ndef f():\n    global last\n    last = 1",
        "memo = {}\ndef f(key):\n    memo[key] = 1",
        "memo: dict = {}\ndef f(key):\n    return memo.setdefault(key, 1)",
        "said = set()\nclass A:\n    def f(self):\n        said.add(1)",
    ],
)
def test_such_state_is_found(tmp_path, text):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len(list(changed(path))) == 1
