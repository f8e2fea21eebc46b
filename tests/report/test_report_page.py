"""A report shows what it is given, as text whatever it holds, in one file that Chromium opens.

In a browser: no error on the console, nothing from the network, pictures there, no page that is
wider than a phone, samples and steps to leaf through. About `common.report.page`,
`common.report.blocks`, `common.report.markdown` and `common.record.terminal`.
"""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.record.terminal import wrapped_table
from common.report.blocks import Completion, Picture, Sample, SampleBrowser, Section, Table
from common.report.page import anchors, html_page, run_facts, write_page

EVIL = "</script></pre><img src=x onerror=\"alert('1')\"><b>' & \x00\x1b[2J\u202e\ud800"
LINK = "[see](https://evil.example/x)"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def png(path: Path, width: int, height: int) -> Path:
    """A grey picture."""
    Image.new("L", (width, height), 128).save(path)
    return path


def every_block(folder: Path, text: str = "Plain") -> list[Any]:
    frames = {
        f"step {s}": [Completion("chosen", text, f"at {s}"), Completion(text, "my cat", text)]
        for s in (10, 20, 30)
    }
    first = {name: frames[name] for name in ("step 10", "step 20")}
    header = ["stage", "accuracy % [95% CI]", *(f"a long column {n}" for n in range(12))]
    cells = ["0.125 [0.1, 0.15]", *["1,234.5"] * 12]
    return [
        f"{text}\n\n- first\n- second",
        Section(
            "Results",
            [
                Table(header, [[text, *cells], ["DPO", *["\N{EN DASH}"] * 13]], text),
                Picture(png(folder / "wide.png", 600, 100), text),
                Section("Nested", [Picture(png(folder / "square.png", 60, 60))]),
            ],
        ),
        Section(f"More {text}", [text]),
        Section(
            "Samples",
            [
                SampleBrowser([Sample(text, frames), Sample("second", first)], text),
                SampleBrowser([Sample("third", {"": [Completion("empty", " ")]})]),
            ],
        ),
    ]


class Reader(HTMLParser):
    """Tags with their attributes, and the text outside of style and script."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag if tag in ("style", "script") else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self.inside else data


def test_what_a_model_wrote_is_text_wherever_it_stands(tmp_path: Path) -> None:
    plain = Reader(html_page("Plain", {"by": "Plain"}, every_block(tmp_path)))
    evil = Reader(html_page(EVIL, {"by": EVIL}, every_block(tmp_path, EVIL)))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    names = [set(attributes) for _, attributes in evil.tags]
    assert names == [set(attributes) for _, attributes in plain.tags]
    assert not any(name.startswith("on") for each in names for name in each)
    visible = EVIL.replace("\x00\x1b", "\ufffd" * 2).replace("\u202e\ud800", "\ufffd" * 2)
    assert evil.text.count(visible) >= plain.text.count("Plain") > 10
    for character in "\x00\x1b\u202e\ud800":
        assert character not in evil.text


WRITTEN = {
    "Persian": "می\u200cخواهم \u200fکتاب\u200cها",
    "Hindi": "क्\u200dष",
    "Khmer": "ភាសា\u200bខ្មែរ",
    "Japanese": "今日は\u3000晴れ",
    "French": "Vraiment\u202f? «\u00a0oui\u00a0»",
    "German": "Donau\u00addampf",
    "an emoji": "\U0001f469\u200d\U0001f467",
}
OBEYED = "\x00\x07\x1b\x7f\x9b\u202a\u202e\u2066\u2069\ud800\U000e0041"


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN.keys())
def test_words_keep_what_they_are_spelled_with(tmp_path: Path, text: str) -> None:
    browser = SampleBrowser([Sample(text, {"": [Completion("a", text)]})])
    html, markdown = write_page(tmp_path, text, [Table(["a"], [[text]]), browser], {})
    assert html.read_text().count(text) == 5  # the title is there twice
    assert text in markdown.read_text()
    assert wrapped_table([{"completion": text}], 80).splitlines()[-1] == text


@pytest.mark.parametrize("character", OBEYED)
def test_what_a_screen_would_obey_is_replaced(tmp_path: Path, character: str) -> None:
    browser = SampleBrowser([Sample(character, {"": [Completion("a", f"b{character}")]})])
    pages = write_page(tmp_path, "T", [Table(["a"], [[f"a{character}"]]), browser], {})
    shown = [page.read_text() for page in pages] + [wrapped_table([{"a": f"a{character}"}], 80)]
    assert all(character not in text and "\ufffd" in text for text in shown)


@pytest.mark.parametrize("text", ["", " ", "\u200b \u3000"])
def test_a_completion_that_shows_nothing_is_said_to_be_empty(tmp_path: Path, text: str) -> None:
    browser = SampleBrowser([Sample("A prompt", {"": [Completion("a", text)]})])
    html, markdown = write_page(tmp_path, "T", [browser], {})
    assert '<em class="empty">(empty)</em>' in html.read_text()
    assert "*(empty)*" in markdown.read_text()
    rows = [{"prompt": "a", "completion": text, "reward": 0.5}]
    assert wrapped_table(rows, 80).splitlines()[-1].split() == ["a", "(empty)", "0.5"]


def test_texts_of_a_model_become_no_links_and_obey_no_terminal(tmp_path: Path) -> None:
    table = Table([LINK, "b"], [[LINK, "\x1b[2J"]])
    browser = SampleBrowser([Sample(LINK, {"": [Completion("a", LINK)]})])
    html, text = write_page(tmp_path, "Title", [table, browser], {})
    assert "<a " not in html.read_text()
    assert html.read_text().count(LINK) == 4
    assert text.read_text().count("[see]\\(https") == 3  # the prompt is in a block of code
    assert "\x1b" not in text.read_text()


def test_markdown_lets_no_html_through(tmp_path: Path) -> None:
    _, path = write_page(tmp_path, EVIL, every_block(tmp_path, EVIL), {"by": EVIL})
    outside = re.sub(r"^```text\n.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"<\w|</", outside)
    assert outside.count("&lt;img") > 15


def in_page(*blocks: Any) -> str:
    """A page's HTML of some blocks, in one line."""
    (inside,) = re.findall(r"<main>(.*)</main>", html_page("T", {}, blocks), flags=re.DOTALL)
    return " ".join(re.sub(r">\s*\n\s*<", "><", inside).split())


def test_only_safe_links_and_the_small_markdown() -> None:
    def shown(text: str) -> str:
        return in_page(Table([], [], text)).split('<p class="caption">')[1].removesuffix("</p>")

    assert shown("`a<b` **bold** *em* 2 * 3 * 4 a_b_c &lt; ![x](y.png)\n# no heading") == (
        "<code>a&lt;b</code> <strong>bold</strong> <em>em</em> 2 * 3 * 4 a_b_c &amp;lt; "
        '!<a href="y.png">x</a> # no heading'
    )
    assert shown("[x](https://a.b/?q=1)") == '<a href="https://a.b/?q=1">x</a>'
    assert shown("[x](plots/curves.png)") == '<a href="plots/curves.png">x</a>'
    assert "<a" not in shown("[x](javascript:alert`1`)")
    assert "<a" not in shown("[x](data:text/html,1)")
    assert "<a" not in shown("[x](//evil.example/y)")
    assert "<a" not in shown("<https://evil.example> https://evil.example")
    assert in_page("one\ntwo\n\n1. a\n2. b\n   c") == (
        "<p>one two</p><ol><li>a</li><li>b c</li></ol>"
    )


def test_the_page_needs_no_other_file_and_is_reproducible(tmp_path: Path) -> None:
    blocks = every_block(tmp_path)
    written = write_page(tmp_path / "a", "Title", blocks, {"seed": "7"})
    assert [path.name for path in written] == ["report.html", "report.md"]
    again = write_page(tmp_path / "a", "Title", blocks, {"seed": "7"})
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    html = Reader(written[0].read_text())
    links = [
        a for _, attributes in html.tags for a in attributes.items() if a[0] in ("src", "href")
    ]
    assert links
    assert all(str(value).startswith(("#", "data:image/png;base64,")) for _, value in links)
    assert "url(" not in written[0].read_text()
    assert "@import" not in written[0].read_text()


def test_tables_align_numbers_and_mute_intervals() -> None:
    cells = ["0.5 [0.4, 0.6]", "\N{EN DASH}", "[-1.0, 2.5]", "< 0.0001", "+3"]
    html = html_page("T", {}, [Table(["a", "b"], [["x", cell] for cell in cells])])
    assert html.count('<td class="number">') == len(cells)
    assert '<td>x</td><td class="number">0.5 <span class="interval">[0.4, 0.6]</span></td>' in html
    assert '<th scope="col">a</th><th scope="col" class="number">b</th>' in html


def test_facts_come_from_the_run(tmp_path: Path) -> None:
    assert run_facts(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    environment = {"git_commit": "0123456789abcdef-dirty", "started": "2026-01-01 10:00 UTC"}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    assert run_facts(tmp_path) == {
        "seed": "0",
        "started": "2026-01-01 10:00 UTC",
        "commit": "0123456789-dirty",
    }


def test_markdown_has_the_same_content(tmp_path: Path) -> None:
    _, path = write_page(tmp_path, "Title", every_block(tmp_path), {"seed": "7"})
    text = path.read_text()
    assert text.startswith("# Title\n\nseed 7\n\nPlain\n\n- first\n- second\n\n## Results\n")
    assert "![Plain](wide.png)" in text
    assert "### Nested\n\n![](square.png)" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["step 20", "chosen", "Plain", "at 20"] in cells
    assert ["empty", "*(empty)*"] in cells


# A page around the report, which stays as it is: its own policy would refuse a script of the test.
# And a window of headless Chromium is never as narrow as a phone, but a frame in it is.
AROUND = """<!doctype html><body style="margin:0">
<iframe id="frame" src="report.html" style="border:0;width:{width}px;height:900px"></iframe>
<script>
window.addEventListener("load", () => {{
  const inside = document.getElementById("frame").contentWindow;
  const all = (selector) => [...inside.document.querySelectorAll(selector)];
  const seen = (selector) => all(selector).filter((e) => e.checkVisibility()).length;
  const [browser] = all(".browser");
  const before = [seen(".browser:first-of-type .sample"), seen(".browser:first-of-type .frame")];
  const shown = (selector) => browser.querySelector(".sample:not([hidden]) " + selector);
  const on = browser.querySelectorAll(".leaf button")[1];
  on.click();
  const second = shown("pre").textContent;
  on.click();
  shown("input").value = 0;
  shown("input").dispatchEvent(new inside.Event("input"));
  const root = inside.document.documentElement;
  document.title = "RESULT" + JSON.stringify({{
    overflow: root.scrollWidth - root.clientWidth,
    width: inside.innerWidth,
    cut: all(".scroll").filter((box) => box.scrollWidth > box.clientWidth).length,
    pictures: all("img").map((image) => image.naturalWidth),
    background: inside.getComputedStyle(inside.document.body).backgroundColor,
    before, second,
    moment: shown(".frame:not([hidden])").dataset.title,
    navigation: seen("nav a"),
  }}) + "END";
}});
</script>"""


def in_chromium(folder: Path, width: int, *, dark: bool) -> tuple[dict[str, Any], list[str]]:
    """Measurements of `report.html` at a width in pixels, and the lines of the console."""
    around = folder / "around.html"
    around.write_text(AROUND.format(width=width))
    command = [
        *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *("--enable-logging=stderr", "--allow-file-access-from-files"),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},900"),
        around.as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    result = re.search(r"<title>RESULT(.*?)END</title>", run.stdout)
    assert result, run.stdout[:500] + run.stderr[-2000:]
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(Reader(result.group(1)).text), console


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed here")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1300, True)])
def test_a_browser_shows_it(tmp_path: Path, width: int, dark: bool) -> None:
    write_page(tmp_path, EVIL, every_block(tmp_path, EVIL + "word" * 60), {"by": "long" * 60})
    page, console = in_chromium(tmp_path, width, dark=dark)
    assert console == []
    assert page["width"] == width
    assert page["overflow"] == 0
    assert page["pictures"] == [600, 60]
    assert page["background"] == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    assert page["navigation"] == (3 if width > 1000 else 0)
    assert page["before"] == [1, 1]  # one sample, at one step
    assert page["second"] == "second"
    assert page["moment"] == "step 10"


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed here")
def test_a_table_of_many_intervals_is_not_cut(tmp_path: Path) -> None:
    """Eight measures on a laptop's screen: their intervals are below the numbers."""
    headers = ["system", *("measure [95% CI]" for _ in range(8))]
    row = ["a system's long name", *["-10.0 [-12.3, -9.5]"] * 8]
    samples = every_block(tmp_path)[-1]
    write_page(tmp_path, "T", [Table(headers, [row] * 3), samples], {})
    page, _ = in_chromium(tmp_path, 1280, dark=False)
    assert page["cut"] == 0


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed here")
def test_the_console_is_heard(tmp_path: Path) -> None:
    """The control: a page with a script that is not its own, and one that fails."""
    html = html_page("T", {}, every_block(tmp_path)).replace("</main>", "<script>1</script></main>")
    (tmp_path / "report.html").write_text(html)
    _, console = in_chromium(tmp_path, 390, dark=False)
    assert len(console) == 1
    assert "Content Security Policy" in console[0]


def test_every_section_has_an_anchor_that_no_other_has():
    titles = ["a b", "a-b", "A b", "Ablation: \u6e29\u5ea6", "?", "!", "a-b-2"]
    slugs = anchors(titles)
    assert len(set(slugs.values())) == len(titles)
    assert slugs["a b"] == "a-b", "the first has its letters only"
    page = html_page("Title", {}, [Section(title, ["text"]) for title in titles])
    ids = re.findall(r'<section id="([^"]*)"', page)
    assert ids == list(slugs.values())
    assert re.findall(r'<a href="#([^"]*)"', page) == ids
