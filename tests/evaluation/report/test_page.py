"""The page as a file: well-formed, alone, small, and safe whatever the texts are."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from prefixkit.evaluation.report import Facts, Group, Picture, Problem, Progress, render_page
from tests.evaluation.report.runs import HOSTILE, campaign, small

VOID = {"meta", "input", "link", "br", "img"}
SVG_VOID = {"rect", "path", "circle", "polyline", "polygon"}  # written as <rect/>


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps what is on the page."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.elements, self.texts = [], [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.elements.append((tag, attributes))
        self.attributes += [(tag, *pair) for pair in attributes]
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in SVG_VOID, tag
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.open, self.getpos())

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, attribute):
        return [value for _, name, value in self.attributes if name == attribute]


@pytest.fixture(scope="module")
def hostile():
    return render_page(campaign(40, 20, hostile=True))


def test_hostile_texts_are_texts(hostile):
    reader = Reader(hostile)
    assert reader.tags.count("style") == 1
    kinds = [dict(own).get("type") for tag, own in reader.elements if tag == "script"]
    assert sorted(map(str, kinds)) == ["None", "application/json", *["text/plain"] * 41]
    assert not {"img", "iframe", "object", "embed", "form", "base", "link", "textarea"} & set(reader.tags)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on") or name in {"src", "style"}]
    shown = "".join(text for tag, text in reader.texts if tag in {"code", "b"})
    for text in HOSTILE[:3] + HOSTILE[6:7] + HOSTILE[8:9] + HOSTILE[10:]:
        assert text in shown, text
    for escape in (r"\u0000", r"\u001b", r"\u007f", r"\u0085", r"\u202e", r"\u2066", r"\ud800", r"\ufeff\u200b\u2028"):
        assert escape in shown, escape
    assert "49" not in "".join(text for tag, text in reader.texts if tag == "code" and "7" in text and "{{" in text)


def test_no_hidden_character_is_in_the_file(hostile):
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]", hostile
    )
    hostile.encode("utf-8")
    assert max(map(len, hostile.splitlines())) < 60_000


def test_nothing_is_loaded_from_elsewhere(hostile):
    for page in (hostile, render_page(campaign(8, 10))):
        reader = Reader(page)
        assert all(value.startswith("#") for value in reader.all("href"))
        code = [text for tag, text in reader.texts if tag in {"style", "script"}]
        assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", re.sub(r"//.*", "", "".join(code)).lower())
        assert "xmlns" not in page


def test_the_policy_admits_the_pages_own_style_and_script_only(hostile):
    reader = Reader(hostile)
    policy = next(value for value in reader.all("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("style", "script"):
        text = [text for place, text in reader.texts if place == tag][-1]  # of scripts, the one that runs
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_ids_are_unique_and_links_lead_somewhere(hostile):
    for page in (hostile, render_page(campaign(8, 10)), render_page(small())):
        reader = Reader(page)
        ids = reader.all("id")
        assert len(ids) == len(set(ids))
        assert {value[1:] for value in reader.all("href")} <= set(ids)
        for labels in reader.all("aria-labelledby"):
            assert set(labels.split()) <= set(ids)


def test_headings_captions_and_titles():
    reader = Reader(render_page(campaign(8, 10)))
    assert reader.tags.count("h1") == 1 and reader.tags.count("h2") == 7
    assert reader.tags.count("table") == reader.tags.count("caption") == 6
    assert reader.tags.count("h2") == len(
        [name for tag, name, _ in reader.attributes if tag == "section" and name == "id"]
    )
    figures = [value for tag, name, value in reader.attributes if tag == "svg" and name == "role"]
    named = [name for tag, name, _ in reader.attributes if tag == "svg" and name in {"aria-label", "aria-labelledby"}]
    assert len(figures) == len(named) == 10  # pass@k, verdicts, a tree, two over time: each wide and narrow


def test_the_page_of_a_campaign_is_small():
    page = render_page(campaign())
    assert len(page.encode()) < 2_000_000
    assert Reader(page).tags.count("tr") > 164


def test_numbers_of_the_headline():
    words = " ".join(text for _, text in Reader(render_page(small(new_tokens=5000, seconds=2.0))).texts)
    for text in ("12.5%", "1 of 2", "1 not judged", "2,500", "5k tokens in 2.0 s", "95%: 0% to"):
        assert text in words, text


def test_problems_left_out_are_said():
    groups = (Group("T=1", ((5, 1), (0, 0), (5, 2))),)
    assert "1 problem without enough judged samples left out of the means." in render_page(small(groups=groups))


@pytest.mark.parametrize(
    "facts",
    [
        Facts(""),
        Facts("unjudged", problems=(Problem("a", {"unjudged": 4}),)),
        Facts("no samples", problems=(Problem("a", {}),)),
        Facts("one sample", problems=(Problem("a", {"passed": 1}),)),
        Facts("one problem", problems=(Problem("a", {"passed": 3, "failed": 7}),)),
        Facts("all solved", problems=tuple(Problem(str(n), {"passed": 9}) for n in range(30))),
        Facts("none solved", problems=tuple(Problem(str(n), {"failed": 9}) for n in range(30))),
        Facts("one moment", progress=((Progress(0, 0, 0),),)),
        Facts("a stop", progress=((Progress(0, 0, 0), Progress(0, 0, 0)), (Progress(5, 0, 0), Progress(5, 1, 1)))),
        Facts("no nodes", pictures=(Picture("empty", ()),)),
        Facts("one problem twice", problems=2 * (Problem("a", {"passed": 1}),)),
    ],
    ids=lambda facts: facts.title or "empty",
)
def test_runs_with_little_in_them_have_a_page(facts):
    reader = Reader(render_page(facts))
    ids = reader.all("id")
    assert len(ids) == len(set(ids))


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_texts_have_the_contrast_of_wcag_aa_and_lines_that_of_graphics():
    style = next(text for tag, text in Reader(render_page(small())).texts if tag == "style")
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        found = dict(re.findall(r"--([\w-]+): (#\w{6}|#\w{3});", scheme))
        colours = {name: c if len(c) == 7 else "#" + "".join(2 * one for one in c[1:]) for name, c in found.items()}

        def contrast(a, b, colours=colours):
            light, dark = sorted((luminance(colours[a]), luminance(colours[b])), reverse=True)
            return (light + 0.05) / (dark + 0.05)

        for text in ("ink", "soft", "link", *(f"s{n}" for n in range(8))):
            for paper in ("paper", "faint"):
                assert contrast(text, paper) >= 4.5, (text, paper)
        for level in ("l0", "l1", "l2", "gone", "gone-word", "come", "come-word", "mark"):
            assert contrast("ink", level) >= 4.5, level
        for graphic in ("passed", "failed", "timeout", "crashed", "invalid", "output"):
            assert contrast(graphic, "paper") >= 3, graphic
