"""Every public name says what a caller must know: parameters, shapes, dtypes, units, errors and sources.

The rules are read from the sources, so that no integration needs its library.  Names are public where ``prefixkit`` and
``prefixkit.variants`` export them, and in modules that users import: integrations, functions for
models of one's own, the oracle, the judge.
"""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prefixkit"
WHOLE_MODULES = [
    *sorted((PACKAGE / "integrations").glob("[!_]*.py")),
    *sorted((PACKAGE / "functional").glob("[!_]*.py")),
    PACKAGE / "attention/reference.py",
    PACKAGE / "sampling/grammar.py",
    PACKAGE / "evaluation/judge/judge.py",
]
ARRAYS = re.compile(r"\b(Tensor|NDArray|ArrayLike)\b")
SHAPE = re.compile(r"\[[\w+*., -]*\]")
DTYPE = re.compile(r"float|int\d|\bint\b|integer|bool|complex|dtype|token ids|any type")
# Parameters whose name says that they are a quantity, and what their description then names.
UNITS = {
    re.compile(r"budget|bytes"): r"[Bb]ytes|GiB",
    re.compile(r"(page_size|prefill_chunk|window|max_new_tokens|max_length)$"): r"[Tt]okens?|positions",
    re.compile(r"seconds|timeout"): r"seconds|Seconds|wall time",
    re.compile(r"temperature$"): r"divi|logits|0",
}
# What comes from a paper names it, by author and year, with a section where it is one idea of several.
PAPERS = {
    **dict.fromkeys(("alibi", "draft_tree", "sigmoid", "soft_cap", "streaming", "streaming_llm", "variant"), False),
    **dict.fromkeys(("attention_sinks", "merge", "natten_1d", "natten_2d", "prefix_lm", "sliding_window"), True),
}
SOURCE = r"\bet al\. \d{4}"
# Classes whose methods are those of another library, which documents their parameters.
OVERRIDES = {"TreeCache", "PrefixLM"}


@dataclass(frozen=True)
class Public:
    """A public function, class, method or property."""

    name: str
    node: ast.FunctionDef | ast.ClassDef
    inside: ast.ClassDef | None = None

    @property
    def doc(self):
        """Its docstring; of a method without one, that of the protocol which its class names."""
        own = ast.get_docstring(self.node)
        if own is None and self.inside is not None:
            named = re.match(r"See ``(\w+)``", ast.get_docstring(self.inside) or "")
            protocol = NAMES.get(f"{named[1]}.{self.node.name}") if named else None
            own = protocol and protocol.doc
        return own or ""


def exported(path):
    """``(name, module)`` of what a file imports to export: ``from module import name as name``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefixkit"):
            for one in node.names:
                if one.asname == one.name and one.name != "variants":
                    yield one.name, node.module


def defined(module, name):
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    for found, further in exported(path) if path.name == "__init__.py" else ():
        if found == name:
            return defined(further, name)
    return imported(path, name)


def imported(path, name):
    """What a package imports from its modules without another name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and name in {one.name for one in node.names}:
            return defined(node.module, name)
    return None


def members(node):
    yield Public(node.name, node)
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            yield Public(f"{node.name}.{one.name}", one, node)


def public():
    nodes = [
        defined(module, name) for file in ("__init__", "variants") for name, module in exported(PACKAGE / f"{file}.py")
    ]
    for path in WHOLE_MODULES:
        nodes += [one for one in ast.parse(path.read_text()).body if not getattr(one, "name", "_").startswith("_")]
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from members(node)
        elif isinstance(node, ast.FunctionDef):
            yield Public(node.name, node)


NAMES = {}
for found in public():
    NAMES[found.name if found.name not in NAMES else f"{found.name} ({len(NAMES)})"] = found


def entries(doc):
    """Of each parameter or attribute that sections list, its descriptions."""
    found, names = defaultdict(str), ()
    inside = False
    for line in doc.splitlines():
        if re.fullmatch(r"(Args|Attributes):", line):
            inside, names = True, ()
        elif re.match(r"\S", line):
            inside = False
        elif inside and (head := re.match(r"    ([\w*, ]+?)(?: \([^)]*\))?: (.*)", line)):
            names = tuple(name.strip(" *") for name in head[1].split(","))
            text = head[2]
        else:
            text = line.strip()
        for name in names if inside else ():
            found[name] += f" {text}"
    return found


def parameters(one):
    """``(name, annotation)`` of what a caller may give: arguments, or the fields of a dataclass."""
    node = one.node
    if isinstance(node, ast.ClassDef):
        init = next((own for own in node.body if getattr(own, "name", "") == "__init__"), None)
        if init is None:
            return [
                (own.target.id, ast.unparse(own.annotation))
                for own in node.body
                if isinstance(own, ast.AnnAssign) and not own.target.id.startswith("_")
            ]
        node = init
    spec = node.args
    given = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    first = 1 if (one.inside or node is not one.node) and not is_static(node) else 0
    return [(own.arg, ast.unparse(own.annotation) if own.annotation else "") for own in given[first:]]


def is_static(node):
    return any(getattr(one, "id", "") == "staticmethod" for one in node.decorator_list)


def raised(node):
    """Classes that a body raises by name."""
    bodies = [node]
    if isinstance(node, ast.ClassDef):
        bodies = [one for one in node.body if getattr(one, "name", "") in ("__init__", "__post_init__")]
    for body in bodies:
        for one in ast.walk(body):
            if isinstance(one, ast.Raise) and one.exc is not None:
                called = one.exc.func if isinstance(one.exc, ast.Call) else one.exc
                if isinstance(called, ast.Name) and called.id[0].isupper():
                    yield called.id


def whole(one):
    """A docstring with that of its class, and those that it takes descriptions from."""
    texts, wanted, seen = [one.doc], [one.name, *([one.inside.name] if one.inside else [])], set()
    while wanted:
        name = wanted.pop()
        for found in (NAMES.get(name), NAMES.get(f"Session.{name}"), NAMES.get(f"{name}.{one.node.name}")):
            if found is not None and found.name not in seen:
                seen.add(found.name)
                texts.append(found.doc)
                wanted += re.findall(r"\bAs for :\w+:`~?(?:\w+\.)*(\w+)`", found.doc)
                wanted += re.findall(r"\bSee ``(\w+)``", found.doc)
    return "\n".join(texts)


def of_another_library(one):
    return one.inside is not None and one.inside.name in OVERRIDES


def test_names_were_found():
    assert len(NAMES) > 100 and {"patch", "Session.generate", "streaming_llm", "merge"} <= NAMES.keys()


def failures(check):
    found = {name: wrong for name, one in NAMES.items() if (wrong := check(one))}
    assert not found, "\n".join(f"{name}: {wrong}" for name, wrong in found.items())


def test_each_has_a_docstring_that_begins_with_a_sentence():
    failures(lambda one: not re.match(r"[^\n]+[.:;)]", one.doc.replace("\n", " ")) and "no sentence")


def test_each_parameter_is_named():
    def unnamed(one):
        text = whole(one)
        return not of_another_library(one) and [
            name for name, _ in parameters(one) if not re.search(rf"\b{name}\b", text)
        ]

    failures(unnamed)


def test_arrays_have_a_shape_and_a_dtype():
    def vague(one):
        listed, wrong = entries(whole(one)), []
        if of_another_library(one):
            return wrong
        for name, annotation in parameters(one):
            if ARRAYS.search(annotation) and not re.search("Callable|list.Tensor", annotation):
                text = listed.get(name, whole(one))
                wrong += [
                    f"{name} has no {what}"
                    for what, form in (("shape", SHAPE), ("dtype", DTYPE))
                    if not form.search(text)
                ]
        return wrong

    failures(vague)


def test_what_returns_arrays_says_their_shape():
    def vague(one):
        returns = getattr(one.node, "returns", None)
        return (
            bool(returns is not None and ARRAYS.search(ast.unparse(returns)) and not SHAPE.search(one.doc))
            and "no shape"
        )

    failures(vague)


def test_quantities_have_a_unit():
    def vague(one):
        listed = entries(whole(one))
        return [
            name
            for name, _ in parameters(one)
            for quantity, unit in UNITS.items()
            if quantity.search(name) and not re.search(unit, listed.get(name, one.doc))
        ]

    failures(vague)


def test_errors_are_named():
    def unnamed(one):
        return sorted({name for name in raised(one.node) if not re.search(rf"\b{name}\b", whole(one))})

    failures(unnamed)


def test_what_comes_from_a_paper_names_it():
    for name, has_section in PAPERS.items():
        doc = " ".join(NAMES[name].doc.split())
        assert re.search(SOURCE + (r", \d\.\d" if has_section else ""), doc), name
